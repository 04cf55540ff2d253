"""A second, independent reading of checkpoints and drafting with the head, in PyTorch: what `verify` compares with.

Nothing of the JAX side is used: files are read by safetensors for PyTorch, tensors found by what their names end in,
quantised weights decoded with PyTorch's own float8 types, and the head written out again from its equations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from ..json_files import MAX_LISTING, read_config, read_json
from ..optional import require

PURPOSE = "verifying against an independent reading of the source"
# Keys of a drafter's layers that a conversion keeps as they are.
LAYER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "attention_bias", "rope_theta", "layer_types", "sliding_window",
    "max_position_embeddings", "hidden_act", "hidden_activation", "attention_k_eq_v",
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class TorchSource:
    """A checkpoint as PyTorch sees it: `names`, `read(name)`, and the raw config."""

    def __init__(self, path: str) -> None:
        self.torch = require("torch", None, PURPOSE)
        self.safe_open = require("safetensors", None, PURPOSE).safe_open
        directory = path if os.path.isdir(path) else os.path.dirname(path)
        self.config: dict[str, Any] = read_config(directory)
        index = os.path.join(directory, "model.safetensors.index.json")
        self._file_of: dict[str, str] = {}
        if os.path.isdir(path) and os.path.exists(index):
            weight_map = read_json(index, MAX_LISTING)["weight_map"]
            self._file_of = {name: os.path.join(directory, shard) for name, shard in weight_map.items()}
        else:
            file_name = _single(path)
            with self.safe_open(file_name, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), file_name)

    @property
    def names(self) -> list[str]:
        """All tensor names."""
        return sorted(self._file_of)

    def read(self, name: str) -> Any:
        """Read one tensor as PyTorch does."""
        with self.safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def has(self, name: str) -> bool:
        """Say whether a tensor is named and its file is there."""
        return name in self._file_of and os.path.exists(self._file_of[name])

    def facts(self) -> dict[str, Any]:
        """Return what the source says a result's config.json must say; None where it says nothing.

        Read by key wherever it stands, from tensors' names and shapes, never through the package's own reading.
        """

        def get(*keys: str) -> Any:
            return next((v for key in keys if (v := find_key(self.config, key)) is not None), None)

        ids = get("dspark_target_layer_ids", "target_layer_ids")
        if ids is None:  # these count the embedding's output as number 0
            shifted = get("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
            ids = [i - 1 for i in shifted or []]
        facts = {
            "block_size": get("dspark_block_size", "block_size"),
            "mask_token_id": get("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
            "target_layer_ids": ids,
            "final_logit_softcapping": get("final_logit_softcapping") or None,
            "logit_scale": logit_factor(self.config),
            "sample_from_anchor": get("sample_from_anchor"),
            "enable_confidence_head": any("confidence_head." in name for name in self.names),
        }
        inside_target = any(re.match(r"(?:_orig_mod\.)?mtp\.\d+\.", name) for name in self.names)
        if not inside_target:  # else the layers' keys are the target's
            facts |= {key: get(key) for key in LAYER_KEYS}
            facts["rope_is_neox_style"] = get("rope_is_neox_style", "is_neox_style")
            facts["input_embedding_scale"] = get("input_embedding_scale", "embedding_multiplier")
            facts |= self._causality(get("is_causal", "causal", "dflash_query_causal"), get("layer_types"))
            numbers = {int(found[1]) for name in self.names if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", name))}
            facts["num_hidden_layers"] = len(numbers) or facts["num_hidden_layers"]
        return facts

    def _causality(self, stated: bool | None, types: list[str] | None) -> dict[str, Any]:
        """Return what a result must say of causality: one flag where all layers agree, else one for each layer."""
        if stated is not None:
            return {"causal": stated}
        flags, both_ways = find_key(self.config, "layer_causal"), find_key(self.config, "sliding_window_non_causal")
        if flags is None:
            ruled = both_ways is not None or {"speculators_model_type", "transformer_layer_config"} & set(self.config)
            if not ruled or not isinstance(types, list):
                return {}
            flags = [kind == "sliding_attention" and not both_ways for kind in types]
        if not isinstance(flags, list) or any(not isinstance(flag, bool) for flag in flags):
            return {"layer_causal": flags}  # no result can say this
        return {"causal": flags[0]} if len(set(flags)) == 1 else {"layer_causal": flags}

    def decode(self, names: list[str]) -> Any:
        """Read a tensor with, where a second name is given, its block scales; quantised ones become bfloat16."""
        torch, weight = self.torch, self.read(names[0])
        if len(names) == 1:
            return weight
        scale = torch.exp2(self.read(names[1]).view(torch.uint8).to(torch.float32) - 127)
        if weight.dtype == torch.float8_e4m3fn:
            wide = weight.to(torch.float32)
            side = next(b for b in (128, 32) if tuple(-(-n // b) for n in wide.shape) == tuple(scale.shape))
            grid = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)
            return (wide * grid[: wide.shape[0], : wide.shape[1]]).to(torch.bfloat16)
        bits = weight.view(torch.uint8).to(torch.int64)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)])
        wide = torch.empty(bits.shape[0], 2 * bits.shape[1])
        wide[:, 0::2], wide[:, 1::2] = table[bits % 16], table[bits // 16]
        return (wide * scale.repeat_interleave(32, 1)).to(torch.bfloat16)


def _single(path: str) -> str:
    if not os.path.isdir(path):
        return path
    found = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    return os.path.join(path, "model.safetensors" if "model.safetensors" in found else found[0])


def find_key(config: Any, key: str) -> Any:
    """Return the first non-null value of a key anywhere in a config."""
    if isinstance(config, dict):
        if config.get(key) is not None:
            return config[key]
        return next((value for inner in config.values() if (value := find_key(inner, key)) is not None), None)
    return None


def logit_factor(config: Any) -> float | None:
    """Return the factor on base logits under whichever of its names a config has, None without one."""
    divisor = find_key(config, "logits_scaling")
    inverse = 1 / divisor if isinstance(divisor, int | float) and divisor else None
    return find_key(config, "logit_scale") or find_key(config, "output_multiplier") or inverse


def _ending(names: Iterable[str], *endings: str) -> str | None:
    """Return the one name that is an ending, or ends in a dot and one, the first ending that occurs counting."""
    for ending in endings:
        found = [name for name in names if name == ending or name.endswith("." + ending)]
        if found:
            return sorted(found, key=len)[0]
    return None


class TorchHead:
    """The head in PyTorch, float32.

    Args:
        source: the checkpoint.
        target: the target's directory, for a missing LM head.
        rounded: maps a tensor to what the conversion stored (a change of dtype), before the float32 arithmetic.
    """

    def __init__(self, source: TorchSource, target: str | None, rounded: Callable[[Any], Any]) -> None:
        self.torch = torch = source.torch
        names = [name for name in source.names if "verifier" not in name]
        heads = [name for name in names if "markov_head" in name or "confidence_head" in name]

        def get(*endings: str) -> Any:
            name = _ending(heads, *endings)
            return None if name is None else rounded(source.read(name)).to(torch.float32)

        self.w1 = get("markov_head.markov_w1.weight", "markov_head.embed.weight")
        self.w2 = get("markov_head.markov_w2.weight", "markov_head.head.weight")
        self.gate = get("markov_head.gate_proj.weight"), get("markov_head.gate_proj.bias")
        self.joint = get("markov_head.joint_proj.weight"), get("markov_head.joint_proj.bias")
        weight = get("confidence_head.proj.weight", "confidence_head.weight")
        bias = get("confidence_head.proj.bias", "confidence_head.bias")
        self.confidence = None if weight is None else (weight[0], 0.0 if bias is None else bias[0])
        self.table = None
        if (name := _ending(names, "d2t")) is not None:
            offsets = source.read(name)
            self.table = offsets + torch.arange(offsets.shape[0])
        lm_head = _find_lm_head(source, names, target, self.table)
        self.lm_head = None if lm_head is None else rounded(lm_head).to(torch.float32)
        self.vocab_size = self.w1.shape[0] if self.w1 is not None else find_key(source.config, "vocab_size")
        self.cap = find_key(source.config, "final_logit_softcapping") or None
        self.scale = logit_factor(source.config) or 1.0

    def draft(self, hidden: Any, anchors: Any, base: Any = None) -> tuple[Any, Any, Any]:
        """Walk greedily: hidden [B, S, H], anchors [B] -> tokens [B, S], logits [B, S, Vd], confidence logits.

        Base logits [B, S, Vd] may be given in place of the LM head's.
        """
        torch = self.torch
        if base is None:
            assert self.lm_head is not None
            base = hidden @ self.lm_head.T * self.scale
            if self.cap is not None:
                base = self.cap * torch.tanh(base / self.cap)
        previous, state, tokens, logits, confidence = anchors, None, [], [], []
        for s in range(hidden.shape[1]):
            h, e, row = hidden[:, s], None, base[:, s]
            if self.w1 is not None:
                e = self.w1[previous]
                z, state = self._latent(h, e, state)
                row = row + z @ self.w2.T
            if self.confidence is not None:
                weight, bias = self.confidence
                inputs = h if weight.shape[0] == h.shape[1] else torch.cat([h, e], 1)
                confidence.append(inputs @ weight + bias)
            best = row[:, : self.vocab_size].argmax(1)
            previous = best if self.table is None else self.table[best]
            tokens.append(previous)
            logits.append(row)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1) if confidence else None

    def _latent(self, h: Any, e: Any, state: Any) -> tuple[Any, Any]:
        torch = self.torch
        if self.gate[0] is not None:
            return torch.sigmoid(torch.cat([h, e], 1) @ self.gate[0].T + self.gate[1]) * e, None
        if self.joint[0] is not None:
            state = torch.zeros_like(e) if state is None else state
            g, c, o = (torch.cat([state, e, h], 1) @ self.joint[0].T + self.joint[1]).chunk(3, 1)
            keep = torch.sigmoid(g)
            return torch.tanh(o), keep * state + (1 - keep) * torch.tanh(c)
        return e, None


def _find_lm_head(source: TorchSource, names: list[str], target: str | None, table: Any) -> Any:
    """Return the LM head [Vd, H]: the drafter's, that of the target in the same shards, or the given target's."""
    own = [name for name in names if re.fullmatch(r"(.*\.)?lm_head\.weight|mtp\.\d+\.head\.weight|head\.weight", name)]
    own = sorted(filter(source.has, own), key=lambda name: (not name.startswith("mtp."), len(name)))
    if own:
        return source.read(own[0])
    if target is None:
        return None
    there = TorchSource(target)
    name = _ending(there.names, "lm_head.weight", "head.weight", "embed_tokens.weight", "embed.weight")
    if name is None:
        raise ValueError(f"{target}: no LM head and no embedding")
    weight = there.read(name)
    return weight if table is None else weight[table]
