"""Sweep k on the bundled checkpoint, or on others: `dspark-jax sweep` with this repository's files as defaults.

python scripts/sweep_topk.py                                          # bundled drafter, k = 4 .. 2048 and off
python scripts/sweep_topk.py DRAFTER --target DIR --prompts FILE.jsonl --draft-topk 16,64,off
"""

import pathlib
import sys

from dspark_jax.cli import main

CHECKPOINTS = pathlib.Path(__file__).resolve().parent.parent / "checkpoints"
DEFAULTS = {"--target": CHECKPOINTS / "target", "--prompts": CHECKPOINTS / "prompts.jsonl"}


def with_defaults(arguments: list[str]) -> list[str]:
    """Return the command's arguments, completed with the bundled checkpoint, target and prompts."""
    first = [] if arguments and not arguments[0].startswith("-") else [str(CHECKPOINTS / "dspark-vanilla")]
    given = {argument.split("=")[0] for argument in arguments}
    missing = [part for name, path in DEFAULTS.items() if name not in given for part in (name, str(path))]
    return ["sweep", *first, *arguments, *missing]


if __name__ == "__main__":
    sys.exit(main(with_defaults(sys.argv[1:])))
