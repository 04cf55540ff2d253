"""What several test modules share: paths, random heads, readers and the meaning of "equal" (docs: tolerances).

Weights are plain NumPy dictionaries under the checkpoint's own tensor names, so that one dictionary feeds the library
(`build_head`), the PyTorch reference (reference.py) and files on disk (`save_checkpoint`).
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16, which safetensors needs)
import numpy as np
from safetensors.numpy import load_file, save_file

from dspark_jax.config import DSparkConfig
from dspark_jax.drafting.confidence_head import ConfidenceHead
from dspark_jax.drafting.head import DSparkHead
from dspark_jax.head_kinds import head_kind

TESTS = pathlib.Path(__file__).parent
GOLDENS = TESTS / "goldens"
CHECKPOINTS = TESTS.parent / "checkpoints"
KINDS = ("vanilla", "gated", "rnn")
HEAD_GOLDENS = sorted(path.name for path in (GOLDENS / "heads").iterdir())

Weights = dict[str, np.ndarray]


def make_weights(
    kind: str | None = "vanilla",
    *,
    V: int = 37,
    Vd: int | None = None,
    H: int = 12,
    r: int = 6,
    seed: int = 0,
    confidence: str | None = "markov",
    reduced: bool | None = None,
) -> Weights:
    """Draw float32 weights whose base logits and biases are of like size (a few units), under DeepSpec's names.

    Args:
        kind: "vanilla", "gated", "rnn", or None for a plain parallel drafter.
        confidence: "markov" (reads [hidden ; e]), "hidden", or None for no confidence head.
        reduced: whether to add `d2t`, offsets of a random increasing table; None adds it where Vd < V.
    """
    rng = np.random.default_rng(seed)
    Vd = V if Vd is None else Vd

    def normal(*shape: int, std: float) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    weights = {"lm_head.weight": normal(Vd, H, std=2 / H**0.5)}
    if kind is not None:
        weights["markov_head.markov_w1.weight"] = normal(V, r, std=1.0)
        weights["markov_head.markov_w2.weight"] = normal(Vd, r, std=3 / r**0.5)
    if kind == "gated":
        weights["markov_head.gate_proj.weight"] = normal(r, H + r, std=2 / (H + r) ** 0.5)
        weights["markov_head.gate_proj.bias"] = normal(r, std=0.5)
    if kind == "rnn":
        weights["markov_head.joint_proj.weight"] = normal(3 * r, 2 * r + H, std=2 / (2 * r + H) ** 0.5)
        weights["markov_head.joint_proj.bias"] = normal(3 * r, std=0.5)
    if confidence is not None:
        width = H + r if confidence == "markov" else H
        weights["confidence_head.proj.weight"] = normal(1, width, std=2 / width**0.5)
        weights["confidence_head.proj.bias"] = normal(1, std=0.5)
    if reduced or (reduced is None and Vd < V):
        table = np.sort(rng.choice(V, Vd, replace=False))
        weights["d2t"] = (table - np.arange(Vd)).astype(np.int64)
    return weights


def config_for(weights: Weights, **fields: Any) -> DSparkConfig:
    """Return the config that fits the weights; `fields` overrides (block_size defaults to 16, V to w1's rows)."""
    Vd, H = weights["lm_head.weight"].shape
    w1 = weights.get("markov_head.markov_w1.weight")
    width = weights["confidence_head.proj.weight"].shape[1] if "confidence_head.proj.weight" in weights else 0
    kind = None if w1 is None else "vanilla"
    kind = "gated" if "markov_head.gate_proj.weight" in weights else kind
    kind = "rnn" if "markov_head.joint_proj.weight" in weights else kind
    facts: dict[str, Any] = {
        "vocab_size": Vd if w1 is None else w1.shape[0],
        "draft_vocab_size": Vd,
        "hidden_size": H,
        "block_size": 16,
        "mask_token_id": 0,
        "markov_rank": 0 if w1 is None else w1.shape[1],
        "markov_head_type": kind,
        "enable_confidence_head": width > 0,
        "confidence_head_with_markov": width > H,
    }
    return DSparkConfig(**(facts | fields))


def build_head(weights: Weights, dtype: Any = "float32", **fields: Any) -> DSparkHead:
    """Build the library's head from weights, cast to `dtype`."""
    config = config_for(weights, **fields)

    def get(name: str) -> Any:
        return jnp.asarray(weights[name], dtype)

    markov = None
    if config.markov_head_type is not None:
        kind = head_kind(config.markov_head_type)
        markov = kind.module(**{part.attribute: get(part.tensor) for part in kind.parameters})
    confidence = None
    if config.enable_confidence_head:
        bias = get("confidence_head.proj.bias")[0] if "confidence_head.proj.bias" in weights else None
        confidence = ConfidenceHead(get("confidence_head.proj.weight")[0], bias)
    table = None
    if "d2t" in weights:
        table = jnp.asarray(weights["d2t"] + np.arange(config.Vd), jnp.int32)
    return DSparkHead(config, get("lm_head.weight"), markov, confidence, table)


def make_head(
    kind: str | None = "vanilla",
    V: int = 37,
    Vd: int | None = None,
    H: int = 12,
    r: int = 6,
    dtype: Any = "float32",
    seed: int = 0,
    confidence: str | None = "markov",
    **fields: Any,
) -> DSparkHead:
    """Build a random head; `fields` go into its config (softcap, logit_scale, block_size, ...)."""
    if kind is None and confidence == "markov":
        confidence = "hidden"
    weights = make_weights(kind, V=V, Vd=Vd, H=H, r=r, seed=seed, confidence=confidence)
    return build_head(weights, dtype, **({"vocab_size": V} | fields))


def make_inputs(B: int, S: int, H: int, V: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw hidden [B, S, H] float32 and anchor_ids [B] int32."""
    rng = np.random.default_rng(seed + 1000)
    return rng.standard_normal((B, S, H)).astype(np.float32), rng.integers(0, V, B).astype(np.int32)


@jax.jit
def base_logits(head: DSparkHead, hidden: jax.Array) -> jax.Array:
    """Return the head's base logits [S, B, Vd] of hidden [B, S, H], in one program."""
    return head.base_logits(jnp.swapaxes(hidden, 0, 1))


def save_checkpoint(directory: pathlib.Path, weights: Weights, dtype: Any = "float32", **fields: Any) -> pathlib.Path:
    """Write config.json and model.safetensors in DeepSpec's layout."""
    config = config_for(weights, **fields)
    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        name: getattr(config, name)
        for name in config.__dataclass_fields__
        if getattr(config, name) is not None and name != "dtype"
    }
    raw |= {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "dtype": np.dtype(jnp.dtype(dtype)).name}
    if config.Vd == config.vocab_size:
        del raw["draft_vocab_size"]
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = {k: np.ascontiguousarray(v if k == "d2t" else v.astype(jnp.dtype(dtype))) for k, v in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def read(path: pathlib.Path) -> Weights:
    """Read a safetensors file as NumPy arrays (bfloat16 through ml_dtypes)."""
    return load_file(path)


def f32(x: Any) -> np.ndarray:
    """Return an array of any float dtype as float32 NumPy."""
    return np.asarray(x).astype(np.float32)


def bound(reference: Any, dtype: Any = "float32") -> float:
    """Return the allowed absolute error: 2e-6 of the largest logit in float32, 2 units in its last place in halves."""
    values = f32(reference)
    largest = float(np.abs(values[np.isfinite(values)]).max())
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return 2e-6 * largest
    return 2 * float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(largest))


def assert_logits(found: Any, reference: Any, dtype: Any = "float32", slack: float = 1.0) -> None:
    """Assert that two arrays of logits have equal -inf entries and agree within `bound` elsewhere."""
    found, reference = f32(found), f32(reference)
    assert found.shape == reference.shape
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.where(finite, 0, found), np.where(finite, 0, reference))
    error = np.abs(np.where(finite, found - np.where(finite, reference, 0), 0)).max()
    assert error <= slack * bound(reference, dtype), f"error {error:.3g}, allowed {slack * bound(reference, dtype):.3g}"


def margin(rows: Any) -> np.ndarray:
    """Return the gap between the best and the second-best value of each row (last axis), inf for rows of one."""
    rows = np.asarray(rows, np.float64)
    if rows.shape[-1] == 1:
        return np.full(rows.shape[:-1], np.inf)
    two = np.sort(rows, axis=-1)[..., -2:]
    return two[..., 1] - two[..., 0]


def assert_tokens(found: Any, reference: Any, gaps: Any, allowed: float) -> None:
    """Assert equal tokens [B, S] up to each request's first step whose margin [B, S] is within `allowed`.

    After such a step the walks may differ, so nothing later is compared; a comparison of nothing at all fails.
    """
    found, reference, gaps = np.asarray(found), np.asarray(reference), np.asarray(gaps)
    assert found.shape == reference.shape == gaps.shape
    clear = np.logical_and.accumulate(gaps > allowed, axis=1)
    assert clear.any(), "no step has a clear margin: the test compares nothing"
    np.testing.assert_array_equal(np.where(clear, found, -1), np.where(clear, reference, -1))


def bigram_weights(table: Any, H: int = 2) -> Weights:
    """Return weights of a vanilla head whose bias of token j after token i is table[i, j]: w1 = I, w2 = table.T."""
    table = np.asarray(table, np.float32)
    V, Vd = table.shape
    return {
        "lm_head.weight": np.zeros((Vd, H), np.float32),
        "markov_head.markov_w1.weight": np.eye(V, dtype=np.float32),
        "markov_head.markov_w2.weight": np.ascontiguousarray(table.T),
    }


def softmax(x: Any) -> np.ndarray:
    """Return the softmax over the last axis in float64; -inf gives 0."""
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
