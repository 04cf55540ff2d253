"""Compile jitted functions for an NVIDIA GPU on a machine that has none: the real XLA:GPU compiler, ahead of time.

Needs the packages of the gpu-compile extra, and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before jax is imported (importing
this module first sets it). Nothing runs on a GPU and nothing is tuned on one: tiles and GEMM back ends may differ
there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the compiler warns that it finds no driver

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TARGETS = pathlib.Path(__file__).parent / "targets"
H200 = TARGETS / "h200.txtpb"


def missing() -> str | None:
    """Say what is missing for compiling, or None."""
    for major in (12, 13):
        if importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None:
            return None
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") is not None:
                return None
    packages = "jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12"
    return f"the packages of the gpu-compile extra are not installed ({packages})"


def lowering(kind: str = "NVIDIA H200") -> contextlib.AbstractContextManager[Any]:
    """Return the context to lower in: newer JAX asks a mesh which GPU Pallas kernels are lowered for."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
    except ImportError:
        return contextlib.nullcontext()
    try:
        device = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
        return use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))
    except TypeError:  # JAX 0.10: abstract devices know no platform, and lowering needs none
        return contextlib.nullcontext()


class Target:
    """A GPU to compile for, described by a GpuTargetConfigProto in text form."""

    def __init__(self, path: pathlib.Path = H200) -> None:
        topology = topologies.get_topology_desc("target", "cuda", target_config=path.read_text(), topology="1x1x1")
        self.kind = topology.devices[0].device_kind
        self.sharding = SingleDeviceSharding(topology.devices[0])

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Return an abstract array on the target."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def place(self, tree: Any) -> Any:
        """Put a pytree of abstract arrays on the target."""
        return jax.tree.map(lambda leaf: self.array(leaf.shape, leaf.dtype), tree)

    def lowering(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context to lower in for this target."""
        return lowering(self.kind)
