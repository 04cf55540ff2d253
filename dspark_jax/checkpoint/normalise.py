"""The config of any family as one flat DeepSpec dict, checked against the tensors' shapes.

Where the config is silent the tensors decide (Markov type, confidence flags, draft vocabulary); where both speak and
disagree the error names both. All problems of a checkpoint are collected before one error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import invalid

NESTED = ("dspark_config", "dflash_config")

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
CONFIDENCE, LM_HEAD, D2T, T2D = "confidence_head.proj.weight", "lm_head.weight", "d2t", "t2d"

Shapes = Mapping[str, tuple[int, ...]]


def flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the nested DSpark objects merged into the top level and without nulls.

    Every other key stays, the backbone's geometry included. A key given twice with different values is an error.
    """
    flat = {key: value for key, value in raw.items() if value is not None and key not in NESTED}
    for outer in NESTED:
        nested = raw.get(outer) or {}
        if not isinstance(nested, Mapping):
            raise invalid(outer, nested, "an object")
        for key, value in nested.items():
            if value is None:
                continue
            if key in flat and flat[key] != value:
                raise invalid(key, flat[key], f"the value {value!r} that {outer} has, or the key in one place only")
            flat[key] = value
    return flat


def resolve(flat: dict[str, Any], shapes: Shapes) -> list[str]:
    """Complete `flat` from the head tensors' shapes, in place; return one sentence per contradiction."""
    problems: list[str] = []
    _resolve_markov(flat, shapes, problems)
    _resolve_confidence(flat, shapes, problems)
    _resolve_draft_vocab(flat, shapes, problems)
    if not problems:
        _check_shapes(flat, shapes, problems)
    return problems


def _resolve_markov(flat: dict[str, Any], shapes: Shapes, problems: list[str]) -> None:
    present = sorted(name for name in shapes if name.startswith("markov_head."))
    rank = flat.get("markov_rank")
    if not present:
        if rank not in (None, 0):
            problems.append(f"markov_rank: config says {rank!r}, but the checkpoint holds no markov_head tensors")
        flat["markov_rank"] = 0 if rank is None else rank
        flat.pop("markov_head_type", None)
        return
    if missing := [name for name in (W1, W2) if name not in shapes]:
        problems.append(f"{', '.join(missing)}: missing, though the checkpoint holds {', '.join(present)}")
        return
    if len(shapes[W1]) != 2:
        problems.append(f"{W1}: found shape {list(shapes[W1])}, expected [V, r]")
        return
    if rank is None:
        flat["markov_rank"] = shapes[W1][1]
    elif rank != shapes[W1][1]:
        problems.append(f"markov_rank: config says {rank!r}, {W1} has shape {list(shapes[W1])}")
    groups = {"gated": GATE, "rnn": JOINT}
    found = [kind for kind, stem in groups.items() if any(name.startswith(stem + ".") for name in present)]
    kind = flat.get("markov_head_type")
    kind = "vanilla" if kind == "classical" else kind  # TorchSpec's word
    if len(found) == 2:
        problems.append(f"markov_head_type: the checkpoint holds both {GATE} and {JOINT}")
    elif kind is None:
        kind = found[0] if found else "vanilla"
    elif found and kind != found[0]:
        problems.append(f"markov_head_type: config says {kind!r}, but the checkpoint holds {groups[found[0]]}")
    if kind in groups and (lost := [n for s in (".weight", ".bias") if (n := groups[kind] + s) not in shapes]):
        problems.append(f"{', '.join(lost)}: missing, though markov_head_type is {kind!r}")
    flat["markov_head_type"] = kind


def _resolve_confidence(flat: dict[str, Any], shapes: Shapes, problems: list[str]) -> None:
    present = sorted(name for name in shapes if name.startswith("confidence_head."))
    flag = flat.get("enable_confidence_head")
    if not present:
        if flag is True:
            problems.append(
                "enable_confidence_head: config says True, but the checkpoint holds no confidence_head tensors"
            )
        if flag is not True and flat.get("confidence_head_with_markov") is not True:
            flat["enable_confidence_head"] = False if flag is None else flag
        return
    if CONFIDENCE not in shapes:
        problems.append(f"{CONFIDENCE}: missing, though the checkpoint holds {', '.join(present)}")
        return
    if flag is False:
        problems.append(f"enable_confidence_head: config says False, but the checkpoint holds {', '.join(present)}")
    flat["enable_confidence_head"] = True if flag is None else flag
    H, rank, shape = flat.get("hidden_size"), flat.get("markov_rank", 0), shapes[CONFIDENCE]
    if not isinstance(H, int) or not isinstance(rank, int):
        return  # the config's own check reports it
    widths = {H + rank: rank > 0, H: False} if rank else {H: False}
    if len(shape) != 2 or shape[0] != 1 or shape[1] not in widths:
        problems.append(
            f"{CONFIDENCE}: found shape {list(shape)}, expected [1, {H + rank}] or [1, {H}] "
            f"(hidden_size {H}, markov_rank {rank})"
        )
        return
    with_markov = flat.get("confidence_head_with_markov")
    if with_markov is None:
        flat["confidence_head_with_markov"] = widths[shape[1]]
    elif with_markov != widths[shape[1]]:
        problems.append(
            f"confidence_head_with_markov: config says {with_markov!r}, {CONFIDENCE} has shape {list(shape)}"
        )


def _resolve_draft_vocab(flat: dict[str, Any], shapes: Shapes, problems: list[str]) -> None:
    """Rows of lm_head, rows of markov_w2 and the length of d2t are the draft vocabulary, and must agree."""
    found = {name: shapes[name][0] for name in (D2T, LM_HEAD, W2) if shapes.get(name)}
    stated = flat.get("draft_vocab_size")
    if stated is not None:
        found = {"draft_vocab_size in the config": stated, **found}
    if len(set(found.values())) > 1:
        problems.append("draft vocabulary: " + ", ".join(f"{name} says {size!r}" for name, size in found.items()))
    elif found and stated is None:
        flat["draft_vocab_size"] = next(iter(found.values()))
    V, Vd = flat.get("vocab_size"), flat.get("draft_vocab_size")
    if isinstance(V, int) and isinstance(Vd, int) and Vd < V and D2T not in shapes:
        problems.append(f"d2t: missing, though the draft vocabulary {Vd} is smaller than vocab_size {V}")


def _check_shapes(flat: Mapping[str, Any], shapes: Shapes, problems: list[str]) -> None:
    from .families import HEAD_SHAPES

    V, H, r = flat.get("vocab_size"), flat.get("hidden_size"), flat.get("markov_rank", 0)
    if not all(isinstance(value, int) for value in (V, H, r)):
        return
    assert isinstance(V, int)
    assert isinstance(H, int)
    with_markov = flat.get("confidence_head_with_markov") is True
    sizes = {
        "V": V,
        "Vd": flat.get("draft_vocab_size", V),
        "H": H,
        "r": r,
        "H+r": H + r,
        "3r": 3 * r,
        "2r+H": 2 * r + H,
    }
    sizes |= {"1": 1, "C": H + r if with_markov else H}
    for name, symbols in HEAD_SHAPES.items():
        expected = tuple(sizes[symbol] for symbol in symbols)
        if name in shapes and shapes[name] != expected:
            problems.append(
                f"{name}: found shape {list(shapes[name])}, "
                f"expected {list(expected)} = [{', '.join(symbols)}] from the config"
            )
