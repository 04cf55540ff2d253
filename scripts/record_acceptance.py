"""Record what calibration is fitted on: confidence logits of drafted blocks and how far the target accepted them.

Decodes the prompts speculatively and writes OUT-fit.npz and OUT-heldout.npz: the first half of the prompts is for
fitting, the second half, from other files, for measuring. `dspark-jax calibrate` reads both.

    python scripts/record_acceptance.py checkpoints/target checkpoints/dspark-gated records/gated --temperature 1
    dspark-jax calibrate records/gated-fit.npz checkpoints/dspark-gated --held-out records/gated-heldout.npz
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from dspark_jax.checkpoint.load import load_drafter, load_target
from dspark_jax.confidence.records import Records
from dspark_jax.decoding.generate import generate
from dspark_jax.drafting.drafter import Drafter
from dspark_jax.json_files import read_json_lines
from dspark_jax.transformer.target import Target
from dspark_jax.types import DraftSampling


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    samples: int,
    max_new_tokens: int,
    seed: int = 0,
) -> Records:
    """Decode every prompt `samples` times with different seeds, at temperature 0 once; return all of its blocks."""
    batch = [prompt for prompt in prompts for _ in range(samples if temperature > 0 else 1)]
    sampling = None
    if temperature > 0:
        seeds = seed + np.arange(len(batch))
        sampling = DraftSampling(np.full(len(batch), temperature), seeds, np.zeros(len(batch), int))
    out = generate(target, drafter, batch, sampling=sampling, max_new_tokens=max_new_tokens)
    if out.confidence_logits is None:
        raise ValueError("drafter: found no confidence head, expected one to record")
    took = out.active & (out.committed > 0)
    return Records.of(out.confidence_logits[took], out.num_accepted[took], out.num_draft[took])


def main() -> int:
    """Record both halves and say what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="directory of the target")
    parser.add_argument("drafter", help="directory of the drafter")
    parser.add_argument("out", type=pathlib.Path, help="prefix of the two files")
    parser.add_argument("--prompts", default="checkpoints/prompts.jsonl", help="JSON lines with prompt_ids")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=16, help="decodings of each prompt, with different seeds")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = [line["prompt_ids"] for _, line in read_json_lines(args.prompts)]
    target, drafter = load_target(args.target, dtype="float32"), load_drafter(args.drafter, dtype="float32")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    half = len(prompts) // 2
    for name, part, seed in (("fit", prompts[:half], args.seed), ("heldout", prompts[half:], args.seed + 2**16)):
        begin = time.perf_counter()
        records = record(
            target, drafter, part, temperature=args.temperature, samples=args.samples,
            max_new_tokens=args.max_new_tokens, seed=seed,
        )  # fmt: skip
        path = f"{args.out}-{name}.npz"
        records.save(path)
        blocks, accepted = len(records.num_accepted), records.num_accepted.mean()
        took = time.perf_counter() - begin
        print(
            f"{path}: {blocks} blocks, {accepted:.2f} of {records.num_draft.mean():.2f} drafts accepted, {took:.0f} s"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
