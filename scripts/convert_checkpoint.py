#!/usr/bin/env python3
"""Convert a DSpark checkpoint: the same as `dspark-jax convert`, for a checkout that is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from dspark_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
