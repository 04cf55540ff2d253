"""Geometry of a stack of transformer layers: BackboneConfig, which the drafter's backbone and the target share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..checks import check_bool, check_choice, check_float, check_int, invalid

STYLES = ("qwen3", "gemma4")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
MAX_LAYERS, MAX_HEADS = 4096, 65536  # what a config may claim: the largest models have some hundreds of either
ROPE_TYPES = ("default", "linear", "proportional", "llama3")
LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Shapes and variants of the layers, independent of the checkpoint family they came from.

    Attributes:
        vocab_size: V, rows of the token embedding.
        hidden_size, intermediate_size, num_layers: H, the MLP's width, L.
        num_heads, num_kv_heads, head_dim: attention geometry; num_kv_heads divides num_heads.
        style: "qwen3" (norms before attention and MLP) or "gemma4" (sandwich norms, layer_scalar, normed values,
            embeddings scaled by sqrt(H), attention scale 1).
        activation: of the gated MLP.
        rms_norm_eps: epsilon of every RMS norm.
        attention_bias: whether q, k, v and o have biases; qkv_bias: whether q, k and v have (Qwen2).
        qk_norm: whether queries and keys are normed per head (Qwen3, Gemma4).
        key_is_value: values are the key projection's output (no v_proj).
        rope_theta, rope_type, rope_factor, partial_rotary_factor: rotary base; "linear" divides the frequencies by
            rope_factor; "proportional" rotates only the fastest partial_rotary_factor of the frequency pairs; "llama3"
            divides those of long wavelengths (see rope.rope_frequencies).
        rope_llama3: low_freq_factor, high_freq_factor and original_max_position_embeddings of "llama3"; else empty.
        rope_interleaved: pairs are (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
        windows: sliding window of each layer (a key at distance >= window is hidden), None for full attention.
        layer_causal: for each layer, whether a block's token sees only earlier tokens of the block. Drafters are
            bidirectional by default.
        input_embedding_scale: factor on token embeddings; None for the style's own.
        max_position_embeddings: the most positions the checkpoint allows; None where unknown.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    style: str = "qwen3"
    activation: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = True
    key_is_value: bool = False
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_llama3: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    windows: tuple[int | None, ...] = ()
    layer_causal: tuple[bool, ...] = ()
    input_embedding_scale: float | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        """Check every field; the errors name the field, the value found and what was expected."""
        put = partial(object.__setattr__, self)
        check_int("num_layers", self.num_layers, 1, MAX_LAYERS)
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_int(name, getattr(self, name), 1, MAX_HEADS)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in sizes:
            put(name, check_int(name, getattr(self, name), 1))
        put("head_dim", check_int("head_dim", self.head_dim, 2))
        if self.head_dim % 2:
            raise invalid("head_dim", self.head_dim, "an even number (rotary pairs)")
        if self.num_heads % self.num_kv_heads:
            raise invalid("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        check_choice("style", self.style, STYLES)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("rope_type", self.rope_type, ROPE_TYPES)
        for name in ("rms_norm_eps", "rope_theta", "rope_factor", "partial_rotary_factor"):
            put(name, check_float(name, getattr(self, name), above=0, expected="a number > 0"))
        if self.partial_rotary_factor > 1:
            raise invalid("partial_rotary_factor", self.partial_rotary_factor, "a number in (0, 1]")
        if self.partial_rotary_factor != 1 and self.rope_type != "proportional":
            raise invalid("partial_rotary_factor", self.partial_rotary_factor, f"1 with rope_type {self.rope_type!r}")
        if len(self.rope_llama3) != (len(LLAMA3) if self.rope_type == "llama3" else 0):
            raise invalid("rope_llama3", list(self.rope_llama3), f"{', '.join(LLAMA3)} with rope_type 'llama3' alone")
        pairs = zip(LLAMA3, self.rope_llama3, strict=self.rope_type == "llama3")
        put("rope_llama3", tuple(check_float(n, v, above=0, expected="a number > 0") for n, v in pairs))
        if self.rope_llama3 and self.rope_llama3[0] >= self.rope_llama3[1]:
            raise invalid("low_freq_factor", self.rope_llama3[0], f"less than high_freq_factor {self.rope_llama3[1]}")
        for name in ("attention_bias", "qkv_bias", "qk_norm", "key_is_value", "rope_interleaved"):
            check_bool(name, getattr(self, name))
        windows = tuple(self.windows) or (None,) * self.num_layers
        if len(windows) != self.num_layers:
            raise invalid("windows", list(windows), f"one entry for each of {self.num_layers} layers")
        put("windows", tuple(w if w is None else check_int("windows", w, 1) for w in windows))
        causal = tuple(self.layer_causal) or (False,) * self.num_layers
        if len(causal) != self.num_layers:
            raise invalid("layer_causal", list(causal), f"one entry for each of {self.num_layers} layers")
        put("layer_causal", tuple(check_bool("layer_causal", flag) for flag in causal))
        if self.input_embedding_scale is not None:
            scale = check_float("input_embedding_scale", self.input_embedding_scale, above=0, expected="a number > 0")
            put("input_embedding_scale", scale)
            if self.style == "gemma4" and not math.isclose(scale, self.hidden_size**0.5, rel_tol=1e-3):
                raise invalid("input_embedding_scale", scale, "none or sqrt(hidden_size), which gemma4 layers apply")
        if self.max_position_embeddings is not None:
            put("max_position_embeddings", check_int("max_position_embeddings", self.max_position_embeddings, 1))

    @property
    def attention_scale(self) -> float:
        """Factor on the products of queries and keys."""
        return 1.0 if self.style == "gemma4" else self.head_dim**-0.5

    @property
    def embed_scale(self) -> float:
        """Factor on token embeddings."""
        if self.input_embedding_scale is not None and self.style != "gemma4":
            return self.input_embedding_scale
        return self.hidden_size**0.5 if self.style == "gemma4" else 1.0

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any], *, causal: bool | None = None, **variant: Any) -> BackboneConfig:
        """Read the geometry from a flat config (what checkpoint/family/read_config.py makes of any config.json).

        Args:
            flat: canonical keys.
            causal: True for a target; None reads a drafter's own flag, which is absent (bidirectional) in most.
            variant: fields that the architecture fixes (qk_norm=False, say).

        Raises:
            ValueError: a field is missing or out of range, or the model has parts that are not implemented here.
        """

        def get(key: str, default: Any = None) -> Any:
            return default if flat.get(key) is None else flat[key]

        gemma = _is_gemma4(flat)
        for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_experts", "num_kv_shared_layers"):
            if gemma and get(name):
                raise invalid(name, get(name), "none: experts, per-layer inputs and shared keys are not supported")
        key_is_value = gemma and check_bool("attention_k_eq_v", get("attention_k_eq_v", False))
        heads = check_int("num_attention_heads", _required(get, "num_attention_heads"), 1)
        head_dim = get("global_head_dim" if gemma else "head_dim", get("head_dim"))
        hidden = check_int("hidden_size", _required(get, "hidden_size"), 1)
        layers = check_int("num_hidden_layers", _required(get, "num_hidden_layers"), 1, MAX_LAYERS)
        windows = _read_windows(get, layers)
        fields = dict(
            vocab_size=_required(get, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(get, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=get("num_global_key_value_heads" if key_is_value else "num_key_value_heads", heads),
            head_dim=hidden // heads if head_dim is None else head_dim,
            style="gemma4" if gemma else "qwen3",
            activation=get("hidden_activation", get("hidden_act", "gelu_pytorch_tanh" if gemma else "silu")),
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            attention_bias=get("attention_bias", False),
            key_is_value=key_is_value,
            rope_interleaved=not check_bool("rope_is_neox_style", get("rope_is_neox_style", True)),
            windows=windows,
            layer_causal=_read_causal(flat, windows) if causal is None else (causal,) * layers,
            input_embedding_scale=get("input_embedding_scale"),
            max_position_embeddings=get("max_position_embeddings"),
            **_read_rope(flat, gemma),
        )
        return cls(**(fields | variant))


def _required(get: Any, key: str) -> Any:
    value = get(key)
    if value is None:
        raise invalid(key, None, "a value in config.json")
    return value


def _is_gemma4(flat: Mapping[str, Any]) -> bool:
    names = [flat.get("model_type"), *_names(flat.get("architectures"))]
    return any(str(name).lower().startswith("gemma4") for name in names)


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_windows(get: Any, layers: int) -> tuple[int | None, ...]:
    types, window = get("layer_types"), get("sliding_window")
    if types is None:
        first = get("max_window_layers", 0) if get("use_sliding_window", False) and window else layers
        return tuple(window if n >= first else None for n in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise invalid("layer_types", types, f"a list of {layers} names")
    for name in types:
        check_choice("layer_types", name, ("full_attention", "sliding_attention"))
    if "sliding_attention" in types and window is None:
        raise invalid("sliding_window", None, "a size, since layer_types names sliding_attention")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _read_causal(flat: Mapping[str, Any], windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Read one flag a layer: layer_causal, else causal for all, else speculators' rule of sliding layers."""
    layers, stated = flat.get("layer_causal"), flat.get("causal")
    if stated is not None:
        check_bool("causal", stated)
    if layers is not None:
        if not isinstance(layers, list | tuple) or len(layers) != len(windows):
            raise invalid("layer_causal", layers, f"a list of {len(windows)} booleans")
        layers = [check_bool("layer_causal", flag) for flag in layers]
        if stated is not None and any(flag is not stated for flag in layers):
            raise invalid("causal", stated, f"what layer_causal says ({list(layers)}), or the fact in one place only")
        return tuple(layers)
    if stated is not None:
        return (stated,) * len(windows)
    # The training code of speculators: full layers are bidirectional; sliding ones are causal unless the flag is true.
    non_causal = flat.get("sliding_window_non_causal")
    if non_causal is None:
        return (False,) * len(windows)
    check_bool("sliding_window_non_causal", non_causal)
    return tuple(window is not None and not non_causal for window in windows)


def _read_rope(flat: Mapping[str, Any], gemma: bool) -> dict[str, Any]:
    parameters = rope_parameters(flat)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    found: dict[str, Any] = {"rope_type": check_choice("rope_type", kind, ROPE_TYPES)}
    if (theta := read_rope_theta(flat)) is not None:
        found["rope_theta"] = theta
    if found["rope_type"] != "default" and parameters.get("factor") is not None:
        found["rope_factor"] = parameters["factor"]
    if kind == "llama3":
        absent = [name for name in ("factor", *LLAMA3) if parameters.get(name) is None]
        if absent:
            raise invalid(absent[0], None, "a value in rope_parameters (rope_scaling) of rope_type 'llama3'")
        found["rope_llama3"] = tuple(parameters[name] for name in LLAMA3)
    # Only Gemma4's layers rotate partially; elsewhere the key is a leftover of the target's config.
    if gemma and parameters.get("partial_rotary_factor") is not None:
        found["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return found


def rope_parameters(flat: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return rope_parameters (of full attention, where they are per layer type) or rope_scaling; {} without either."""
    for key in ("rope_parameters", "rope_scaling"):
        parameters = flat.get(key) or {}
        if not isinstance(parameters, Mapping):
            raise invalid(key, parameters, "an object")
        if isinstance(parameters.get("full_attention"), Mapping):
            parameters = parameters["full_attention"]
        if parameters:
            return parameters
    return {}


def read_rope_theta(flat: Mapping[str, Any]) -> float | None:
    """Read the rotary base from `rope_theta` or `rope_parameters` (flat or per layer type); a conflict is an error."""
    nested, outer = rope_parameters(flat).get("rope_theta"), flat.get("rope_theta")
    if nested is not None and outer is not None and nested != outer:
        raise invalid(
            "rope_theta", outer, f"the value {nested!r} that rope_parameters has, or the key in one place only"
        )
    value = outer if nested is None else nested
    return (
        None if value is None else check_float("rope_theta", value, above=0, expected="a number > 0 that float32 holds")
    )
