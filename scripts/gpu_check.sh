#!/usr/bin/env bash
# Check the kernels on the GPU at hand, time them and profile them, in under 4 minutes; leaves one JSON file.
#
#     scripts/gpu_check.sh [gpu_check.json]
#
# Runs from a bare checkout, without installing: it needs python3 with jax (CUDA), flax, numpy, safetensors and pytest;
# PyTorch is timed too where it is there. Exit code 0 means that all tests marked gpu passed: then the card and the date
# may be entered into VERIFIED in dspark_jax/kernels/dispatch.py.
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu_check.json}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2 PYTHONUNBUFFERED=1

if ! "$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' 2>"$work/error"; then
    echo "gpu_check: JAX finds no GPU here" >&2
    tail -n 1 "$work/error" >&2
    exit 2
fi

timeout 120 "$python" -m pytest tests/kernels/test_gpu.py -m gpu -q -o filterwarnings=default -p no:cacheprovider \
    --junitxml="$work/tests.xml"
tests=$?
timeout 100 "$python" scripts/bench_draft.py --batch 64 --rounds 15 --seconds 20 --profile --no-compile \
    --json "$work/bench.json"
bench=$?

"$python" - "$work" "$out" "$tests" "$bench" <<'PY'
import datetime
import json
import pathlib
import sys
import xml.etree.ElementTree as tree

import jax

work, out, tests, bench = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
results = []
if (work / "tests.xml").exists():
    for case in tree.parse(work / "tests.xml").iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
        result = {"name": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": "passed"}
        if bad:
            result |= {"outcome": bad[0].tag, "message": (bad[0].get("message") or "")[:400]}
        results.append(result)
passed = tests == 0 and bool(results) and all(r["outcome"] == "passed" for r in results)
report = {
    "card": jax.devices()[0].device_kind,
    "date": datetime.date.today().isoformat(),
    "jax": jax.__version__,
    "passed": passed,
    "tests": results,
    "tests_exit": tests,
    "bench_exit": bench,
    "bench": json.loads((work / "bench.json").read_text()) if (work / "bench.json").exists() else None,
}
pathlib.Path(out).write_text(json.dumps(report, indent=1) + "\n")
print(f"{out}: {report['card']}, {'passed' if passed else 'FAILED'}")
sys.exit(0 if passed else 1)
PY
