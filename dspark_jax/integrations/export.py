"""Export of a drafting function: one serialised program, its weights, and a signature that a reader can check."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from safetensors.numpy import save_file

from .._version import __version__
from ..atomic_files import open_replacing, replacing, write_json
from ..checks import check_choice, check_int, invalid
from ..config import DraftConfig
from ..drafting.api import from_hidden
from ..drafting.inputs import check_head, check_steps, check_threshold, resolve_options
from ..optional import require
from ..types import DraftSampling
from .artifact import FORMAT, INPUTS, PROGRAM, SIGNATURE, WEIGHTS

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
OUTPUTS = (
    "tokens", "num_draft", "valid", "confidence_logits", "logits", "candidate_ids", "candidate_logits", "certified"
)  # fmt: skip


def export_draft_fn(
    head: Any,
    config: DraftConfig,
    path: str | os.PathLike[str],
    batch: tuple[int, int] | int = (1, 1024),
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> dict[str, Any]:
    """Write a drafting function that runs without this package's dependencies (artifact.load_exported reads it).

    The program is plain XLA for all `platforms`; it reads hidden [B, S, H] for any B within `batch`. Older versions of
    JAX write programs that newer ones read; the reverse is not promised.

    Args:
        head: a DSparkHead with an LM head; config: how to draft.
        path: directory, made if missing; its three files are replaced.
        batch: (least, most) requests, or one number.
        platforms: of "cpu", "cuda", "rocm", "tpu".

    Returns:
        The signature that was written.

    Raises:
        ValueError: bad options, or arrays that outgrow 32-bit offsets at the largest batch.
        ImportError: flatbuffers is missing.
    """
    if not isinstance(config, DraftConfig):
        raise invalid("config", type(config).__name__, "a DraftConfig")
    if config.batch_axes or config.vocab_axis is not None:
        raise invalid("config", "batch_axes or vocab_axis", "neither: an export is for one device")
    low, high = (batch, batch) if isinstance(batch, int) else tuple(batch)
    low = check_int("batch[0]", low, 1)
    high = check_int("batch[1]", high, low)
    for name in platforms:
        check_choice("platforms", name, PLATFORMS)
    S, H = config.num_speculative_tokens, check_head(head).config.hidden_size
    check_steps(head, S, "num_speculative_tokens")
    if S * high * head.config.Vd >= 2**31:
        raise invalid("batch", high, f"fewer than {2**31 // (S * head.config.Vd)} requests (32-bit offsets)")
    require("flatbuffers", "export", "exporting a draft")
    options = resolve_options(
        head,
        config.draft_topk,
        config.outputs,
        config.logits_dtype,
        "xla",
        markov_topk=config.draft_markov_topk,
    )
    threshold = check_threshold(head, config.min_confidence, has_hidden=True)
    sampled = config.draft_sample_method == "probabilistic"
    paths, structure = jax.tree_util.tree_flatten_with_path(head)
    names = [jax.tree_util.keystr(key, simple=True, separator=".") for key, _ in paths]
    leaves = [jnp.asarray(leaf) for _, leaf in paths]
    outputs: list[str] = []

    def draft(leaves: list[Any], hidden: Any, anchor: Any, *drawn: Any) -> tuple[Any, ...]:
        sampling = DraftSampling(*drawn) if drawn else None
        whole = jax.tree.unflatten(structure, leaves)
        block, _ = from_hidden(whole, hidden, anchor, sampling, None, threshold, options=options)
        outputs[:] = [name for name in OUTPUTS if getattr(block, name) is not None]
        return tuple(getattr(block, name) for name in outputs)

    size = low if low == high else export.symbolic_shape("b", constraints=[f"b >= {low}", f"b <= {high}"])[0]
    dtypes = (head.dtype, jnp.int32, jnp.float32, jnp.uint32, jnp.int32)
    inputs: dict[str, Any] = (
        dict(zip(INPUTS, dtypes, strict=True)) if sampled else dict(zip(INPUTS[:2], dtypes[:2], strict=True))
    )
    shapes = {name: (size, S, H) if name == "hidden" else (size,) for name in inputs}
    abstract = [jax.ShapeDtypeStruct(shapes[name], inputs[name]) for name in inputs]
    # Flat leaves and plain arrays: a module in the signature would drag its framework into every reader.
    program = export.export(jax.jit(lambda *args: draft(*args)), platforms=tuple(platforms))(leaves, *abstract)

    path = os.fspath(path)
    os.makedirs(path, exist_ok=True)
    signature = {
        "format": FORMAT,
        "versions": {"dspark_jax": __version__, "jax": jax.__version__},
        "calling_convention_version": program.calling_convention_version,
        "platforms": list(platforms),
        "batch": [low, high],
        "method": config.draft_sample_method,
        "topk": options.topk,
        "inputs": {
            name: {"shape": ["B", S, H] if name == "hidden" else ["B"], "dtype": str(jnp.dtype(inputs[name]))}
            for name in inputs
        },
        "outputs": list(outputs),
        "weights": [
            {"name": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
            for name, leaf in zip(names, leaves, strict=True)
        ],
    }
    with open_replacing(os.path.join(path, PROGRAM), "wb") as file:
        file.write(program.serialize())
    with replacing(os.path.join(path, WEIGHTS)) as beside:
        save_file({name: np.array(leaf) for name, leaf in zip(names, leaves, strict=True)}, beside)
    write_json(os.path.join(path, SIGNATURE), signature)
    return signature
