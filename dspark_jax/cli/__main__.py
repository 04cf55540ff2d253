"""`python -m dspark_jax.cli`: the command where its entry point is not installed."""

import sys

from . import main

sys.exit(main())
