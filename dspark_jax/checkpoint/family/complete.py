"""A flat config against the tensors' shapes: silence is filled from the tensors, contradictions are listed.

Presence is decided by the tensors, never by the config. Where both speak and disagree, the sentence names both.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from ... import head_kinds
from ...head_kinds import all_kinds, evaluate, head_kind
from ...transformer.geometry import BackboneConfig
from .arithmetic import check_refused
from .names import CONFIDENCE, D2T, EMBEDDING, LM_HEAD, W1, W2, head_shapes, is_head

Shapes = Mapping[str, tuple[int, ...]]
Flat = dict[str, Any]


def resolve_head(flat: Flat, shapes: Shapes) -> list[str]:
    """Complete `flat` from the head tensors' shapes, in place; return one sentence per contradiction."""
    problems: list[str] = []
    _resolve_markov(flat, shapes, problems)
    _resolve_confidence(flat, shapes, problems)
    sure = not problems  # else the sizes below would report the same contradiction once for each tensor
    _resolve_draft_vocab(flat, shapes, problems)
    if sure:
        patterns = {re.escape(name): symbols for name, symbols in head_shapes().items()}
        _check(shapes, patterns, _head_sizes(flat), problems)
    return problems


def _resolve_markov(flat: Flat, shapes: Shapes, problems: list[str]) -> None:
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
    stems = {
        kind.name: " and ".join({part.tensor.rpartition(".")[0]: None for part in kind.own}) for kind in all_kinds()
    }
    found = [kind.name for kind in all_kinds() if any(part.tensor in shapes for part in kind.own)]
    kind = flat.get("markov_head_type")
    if len(found) > 1:
        problems.append(f"markov_head_type: the checkpoint holds both {' and '.join(stems[name] for name in found)}")
    elif kind is None:
        kind = found[0] if found else next(kind.name for kind in all_kinds() if not kind.own)
    elif found and kind != found[0]:
        problems.append(f"markov_head_type: config says {kind!r}, but the checkpoint holds {stems[found[0]]}")
    own = head_kind(kind).own if kind in head_kinds.names() else ()  # the config's own check reports another
    if lost := [part.tensor for part in own if part.tensor not in shapes]:
        problems.append(f"{', '.join(lost)}: missing, though markov_head_type is {kind!r}")
    flat["markov_head_type"] = kind


def _resolve_confidence(flat: Flat, shapes: Shapes, problems: list[str]) -> None:
    present = sorted(name for name in shapes if name.startswith("confidence_head."))
    flag = flat.get("enable_confidence_head")
    if not present:
        if flag is True:
            problems.append("enable_confidence_head: config says True, but there are no confidence_head tensors")
        flat["enable_confidence_head"] = False if flag is None else flag
        # Without the head its input needs no name; a head of rank 0 that is said to read markov_w1 is still refused.
        if flat["markov_rank"] != 0 and flag is not True:
            flat.pop("confidence_head_with_markov", None)
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
    widths = {H: False, H + rank: rank > 0}
    if len(shape) != 2 or shape[0] != 1 or shape[1] not in widths:
        problems.append(
            f"{CONFIDENCE}: found shape {list(shape)}, expected [1, {H + rank}] or [1, {H}] "
            f"(hidden_size {H}, markov_rank {rank})"
        )
        return
    with_markov = flat.get("confidence_head_with_markov")
    if with_markov is None:
        flat["confidence_head_with_markov"] = widths[shape[1]]
    elif with_markov != widths[shape[1]] and rank:
        problems.append(
            f"confidence_head_with_markov: config says {with_markov!r}, {CONFIDENCE} has shape {list(shape)}"
        )


def _resolve_draft_vocab(flat: Flat, shapes: Shapes, problems: list[str]) -> None:
    """Rows of lm_head, rows of markov_w2 and the length of d2t are the draft vocabulary, and must agree."""
    found = {name: shapes[name][0] for name in (D2T, LM_HEAD, W2) if shapes.get(name)}
    stated = flat.get("draft_vocab_size")
    if stated is not None:
        found = {"draft_vocab_size in the config": stated, **found}
    if len(set(map(repr, found.values()))) > 1:
        problems.append("draft vocabulary: " + ", ".join(f"{name} says {size!r}" for name, size in found.items()))
    elif found and stated is None:
        flat["draft_vocab_size"] = next(iter(found.values()))
    V, Vd = flat.get("vocab_size"), flat.get("draft_vocab_size")
    if isinstance(V, int) and isinstance(Vd, int) and Vd < V and D2T not in shapes:
        problems.append(f"d2t: missing, though the draft vocabulary {Vd} is smaller than vocab_size {V}")


def _head_sizes(flat: Flat) -> dict[str, int]:
    V, H, r = (flat.get(key) for key in ("vocab_size", "hidden_size", "markov_rank"))
    if not all(isinstance(value, int) for value in (V, H, r)):
        return {}  # the config's own check reports it
    assert isinstance(V, int)
    assert isinstance(H, int)
    assert isinstance(r, int)
    inputs = H + r if flat.get("confidence_head_with_markov") is True else H
    sizes = {"V": V, "H": H, "r": r, "C": inputs}
    if isinstance(Vd := flat.get("draft_vocab_size", V), int):
        sizes["Vd"] = Vd
    for text in {text for shape in head_shapes().values() for text in shape}:
        with contextlib.suppress(KeyError):  # a size that the config's own check reports
            sizes[text] = evaluate(text, sizes)
    return sizes


def _check(shapes: Shapes, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], problems: list[str]) -> None:
    """Compare shapes with a table of symbolic ones; a symbol without a size is not compared."""
    if not sizes:
        return
    patterns = [(re.compile(pattern), symbols) for pattern, symbols in table.items()]
    for name, shape in shapes.items():
        symbols = next((symbols for regex, symbols in patterns if regex.fullmatch(name)), None)
        if symbols is None:
            continue
        expected = [1 if symbol == "1" else sizes.get(symbol) for symbol in symbols]
        if len(shape) != len(expected) or any(e not in (None, n) for n, e in zip(shape, expected, strict=True)):
            known = ", ".join(s if e is None else str(e) for s, e in zip(symbols, expected, strict=True))
            problems.append(
                f"{name}: found shape {list(shape)}, expected [{known}] = [{', '.join(symbols)}] from the config"
            )


def check_backbone(
    flat: Flat, shapes: Shapes, table: Mapping[str, tuple[str, ...]], geometry: BackboneConfig | str
) -> list[str]:
    """Return one sentence per missing or misshapen backbone tensor and per contradiction with the config.

    A checkpoint without any backbone tensor but the embedding is a head alone, and complete as such.
    """
    backbone = {name: shape for name, shape in shapes.items() if not is_head(name)}
    layers: dict[int, set[str]] = {}
    for name in backbone:
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(match[1]), set()).add(match[2])
    if not set(backbone) - {EMBEDDING}:
        return []
    problems = [
        f"{name}: missing" for name in ("fc.weight", "hidden_norm.weight", "norm.weight") if name not in backbone
    ]
    count = flat.get("num_hidden_layers")
    if sorted(layers) != list(range(len(layers))) or (isinstance(count, int) and count != len(layers)):
        problems.append(f"num_hidden_layers: config says {count!r}, the tensors are of layers {sorted(layers)}")
    parts = set().union(*layers.values()) | _required_parts(flat, set().union(*layers.values()))
    for number, present in sorted(layers.items()):
        problems += [f"layers.{number}.{part}: missing" for part in sorted(parts - present)]
    _check(backbone, table, _backbone_sizes(flat, geometry), problems)
    if flat.get("log_snr_conditioning") is True and not any(name.startswith("log_snr_embed.") for name in backbone):
        problems.append("log_snr_embed: missing, though log_snr_conditioning is true")
    if "fc.weight" in backbone and not flat.get("target_layer_ids"):
        problems.append("target_layer_ids: missing in the config, though fc.weight reads target layers")
    return problems


def _required_parts(flat: Flat, present: set[str]) -> set[str]:
    """Return the parts that every plain attention layer has, given that it is one."""
    if not any(part.startswith("self_attn.q_proj") for part in present):
        return set()
    ends = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    kind = str(flat.get("model_type"))
    if kind.startswith(("qwen3", "gemma4")):
        ends += ["self_attn.q_norm", "self_attn.k_norm"]
    if kind.startswith("gemma4"):
        ends += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    attention = "qko" if flat.get("attention_k_eq_v") is True else "qkvo"
    ends += [f"self_attn.{letter}_proj" for letter in attention]
    parts = {f"{end}.weight" for end in ends}
    if kind.startswith("gemma4"):
        parts.add("layer_scalar")
    if flat.get("attention_bias") is True:
        parts |= {f"self_attn.{letter}_proj.bias" for letter in attention}
    return parts


def read_geometry(flat: Mapping[str, Any]) -> BackboneConfig | str:
    """Return the geometry of the layers, or why there is none that this package can build."""
    try:
        check_refused(flat)
        return BackboneConfig.from_flat(flat)
    except ValueError as error:
        return str(error)
    except (TypeError, AttributeError) as error:  # a config from anywhere may hold any type anywhere
        return f"config.json: a value of the wrong type ({error})"


def _backbone_sizes(flat: Flat, geometry: BackboneConfig | str) -> dict[str, int]:
    sizes = {name: flat[key] for name, key in _SIZE_KEYS.items() if isinstance(flat.get(key), int)}
    taps, width = flat.get("target_layer_ids"), flat.get("target_hidden_size", flat.get("hidden_size"))
    if isinstance(taps, list | tuple) and taps and isinstance(width, int):
        sizes["T*Ht"] = len(taps) * width
    if "q_lora_rank" in flat:
        G, o, nh, hd = (sizes.get(name) for name in ("G", "o", "nh", "hd"))
        if nh and hd and G and o:
            sizes |= {"Q": nh * hd, "Q/G": nh * hd // G, "G*o": G * o}
        return sizes
    if isinstance(geometry, str):
        return sizes  # a backbone that has no counterpart here; reported where one is built
    nh, nkv, hd = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    return sizes | {"Q": nh * hd, "K": nkv * hd, "hd": hd}


_SIZE_KEYS = {
    "V": "vocab_size", "H": "hidden_size", "I": "intermediate_size", "nh": "num_attention_heads", "hd": "head_dim",
    "q": "q_lora_rank", "G": "o_groups", "o": "o_lora_rank", "m": "moe_intermediate_size", "E": "n_routed_experts",
}  # fmt: skip
