#!/usr/bin/env bash
# Sets up an environment and runs the tests in it: the fast ones (about 5 minutes on two cores), or all with --all, which
# adds the statistics of hundreds of thousands of requests. Other arguments go to pytest: scripts/test.sh tests/checkpoint/test_load.py
set -euo pipefail
cd "$(dirname "$0")/.."
all=0
if [ "${1:-}" = --all ]; then
  all=1
  shift
fi
source scripts/setup.sh
venv=${VENV:-.venv-test}
make_venv "$venv" "${EXTRAS:-test}"
run() { "$venv/bin/python" -m pytest -n "${WORKERS:-2}" "$@"; }
run --dist loadfile -m "not slow" "$@"
if [ "$all" = 1 ]; then
  FAST_COMPILES=0 run --dist load -m slow "$@"
fi
