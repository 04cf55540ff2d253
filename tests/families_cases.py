"""What the tests of families share."""

import re

from fixture_checkpoints import fixtures, read_file

V, VD, H, R, TAPS, MASK = (getattr(fixtures, name) for name in ("V", "VD", "H", "R", "TAPS", "MASK"))


def stored(path):
    """Read all shards of a fixture by hand."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= read_file(file)
    return tensors


def by_hand(name):
    """Rename a source tensor as each family spells it, written out again without the library's table."""
    for prefix in ("_orig_mod.", "model.", "logit_head."):
        name = name.removeprefix(prefix)
    for old, new in (
        ("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm."),
        ("midlayer.", "layers.0."),
        ("mtp.0.main_proj.", "fc."), ("mtp.0.main_norm.", "hidden_norm."), ("mtp.2.norm.", "norm."),
        ("mtp.2.hc_head_", "hc_head_"), ("mtp.2.markov_head.embed.", "markov_head.markov_w1."),
        ("mtp.2.markov_head.head.", "markov_head.markov_w2."), ("mtp.2.markov_head.", "markov_head."),
        ("mtp.2.confidence_head.", "confidence_head."), ("embed.weight", "embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
    ):  # fmt: skip
        if name.startswith(old):
            return new + name.removeprefix(old)
    return re.sub(r"^mtp\.(\d)\.", r"layers.\1.", name)
