"""Record backbone hidden states for `dspark-jax draft`: one block behind each prompt, with the target's own anchor.

    python scripts/record_hidden.py checkpoints/dspark-vanilla checkpoints/recorded/vanilla.safetensors

Writes `hidden` [B, S, H] (the drafter's dtype), `anchor_ids` int32 [B] (the target's greedy token after the prompt) and
`position` int32 [B] (index of the first drafted token), for all prompts of the file, which must have one length.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dspark_jax.checkpoint.load import load_drafter, load_target

CHECKPOINTS = pathlib.Path(__file__).resolve().parent.parent / "checkpoints"


@jax.jit
def record(target, drafter, prompts):
    """Return hidden [B, S, H] and anchors [B] of the blocks behind prompts [B, N]."""
    B, N = prompts.shape
    start = jnp.zeros((B,), jnp.int32)
    taps = drafter.config.target_layer_ids
    hidden, features, _ = target.forward(prompts, start, target.make_cache(B, N), taps)
    anchor = jnp.argmax(target.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)
    cache = drafter.backbone.make_cache(B, N + drafter.config.block_size)
    cache = drafter.backbone.extend(cache, features, jnp.full((B,), N, jnp.int32))
    masks = jnp.full((B, drafter.config.block_size - 1), drafter.config.mask_token_id, jnp.int32)
    block, _ = drafter.backbone(cache, jnp.concatenate([anchor[:, None], masks], axis=1))
    return block[:, drafter.config.block_size - drafter.config.max_steps :], anchor


def main() -> None:
    """Read the prompts, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--target", default=str(CHECKPOINTS / "target"))
    parser.add_argument("--prompts", default=str(CHECKPOINTS / "prompts.jsonl"))
    args = parser.parse_args()
    lines = pathlib.Path(args.prompts).read_text(encoding="utf-8").splitlines()
    prompts = np.array([json.loads(line)["prompt_ids"] for line in lines], np.int32)
    hidden, anchor = record(load_target(args.target), load_drafter(args.checkpoint), prompts)
    position = np.full(len(prompts), prompts.shape[1] + 1, np.int32)
    tensors = {"hidden": np.asarray(hidden), "anchor_ids": np.asarray(anchor), "position": position}
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, args.output)
    print(f"{args.output}: hidden {tensors['hidden'].shape} {tensors['hidden'].dtype}")


if __name__ == "__main__":
    main()
