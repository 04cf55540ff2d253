#!/usr/bin/env bash
# Sets up an environment and runs the tests in it: the fast ones (about 8 minutes on two cores); with --sampled also one in
# sixteen of the slow ones, as CI does; with --all everything, the statistics of hundreds of thousands of requests included.
# Other arguments go to pytest: scripts/test.sh tests/checkpoint
set -euo pipefail
cd "$(dirname "$0")/.."
slow=()
case "${1:-}" in
  --all) slow=(--sample-slow 1); shift ;;
  --sampled) slow=(--sample-slow 16); shift ;;
esac
source scripts/setup.sh
venv=${VENV:-.venv-test}
make_venv "$venv" "${EXTRAS:-test}"
run() { "$venv/bin/python" -m pytest -n "${WORKERS:-2}" "$@"; }
run --dist loadfile -m "not slow" "$@"
if [ ${#slow[@]} -gt 0 ]; then
  # Optimised code: these run long enough for it to pay.
  FAST_COMPILES=0 run --dist load -m slow "${slow[@]}" "$@"
fi
