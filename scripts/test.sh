#!/usr/bin/env bash
# Sets up an environment and runs the tests in it; arguments go to pytest (scripts/test.sh -m "not slow").
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
make_venv "${VENV:-.venv-test}" "${EXTRAS:-test}"
exec "${VENV:-.venv-test}/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile "$@"
