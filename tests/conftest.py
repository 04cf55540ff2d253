"""Shared settings of the tests: CPU unless the caller chose a platform; fixtures for the bundled reference files."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No axis is added and no dtype widened but where the code says so, in the tests and in the programs that they start.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Most of the time of the fast tests is LLVM compiling programs that run once; XLA's own passes, which decide about
# memory, aliasing and kernels, are not touched. scripts/test.sh switches this off for the slow tests.
if os.environ.get("FAST_COMPILES", "1") == "1":
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
        ]
    )

import pathlib
import zlib

import pytest
import type_checks

type_checks.install()

from helpers import CHECKPOINTS, GOLDENS  # noqa: E402, of the package, which is hooked first


@pytest.fixture(scope="session")
def goldens() -> pathlib.Path:
    """The folder of reference outputs."""
    return GOLDENS


@pytest.fixture(scope="session")
def checkpoints() -> pathlib.Path:
    """The folder of bundled trained checkpoints."""
    return CHECKPOINTS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --sample-slow N, which keeps every N-th of the slow tests: the same ones each time, by their names."""
    parser.addoption("--sample-slow", type=int, default=1, metavar="N", help="run one in N of the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests that --sample-slow leaves out."""
    share = config.getoption("--sample-slow")
    left_out = [item for item in items if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % share]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
