#!/usr/bin/env bash
# Sets up an environment and runs the main job on the bundled checkpoints: recorded hidden states -> drafted text.
# --real: fetches SmolLM2-135M-Instruct (89 MB, once) and lets its bundled drafter speed up an answer.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
make_venv "${VENV:-.venv-demo}" cli
draft() {
  echo
  echo "\$ dspark-jax draft $*"
  "${VENV:-.venv-demo}/bin/dspark-jax" draft "$@"
}

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
case "${1:-}" in
  "") ;;
  --real)
    model=$("${VENV:-.venv-demo}/bin/python" scripts/fetch_smollm2.py) || exit 1
    set -- generate checkpoints/smollm2/drafter --target "$model" --chat --dtype float32 --max-new-tokens 64 \
      --prompt "${2:-What is the capital of Canada?}"
    echo "\$ dspark-jax $*"
    exec "${VENV:-.venv-demo}/bin/dspark-jax" "$@"
    ;;
  *)
    echo "usage: bash scripts/demo.sh [--real [PROMPT]]" >&2
    exit 2
    ;;
esac
draft checkpoints/dspark-vanilla --hidden checkpoints/recorded/vanilla.safetensors
echo
echo "Top-k drafts correct k candidates of each row alone. (They save time where V is large: see docs/gpu.md; here V = 4096.)"
draft checkpoints/dspark-vanilla --hidden checkpoints/recorded/vanilla.safetensors --draft-topk 256
draft checkpoints/dspark-rnn --hidden checkpoints/recorded/rnn.safetensors --draft-topk 1024 --temperature 0.7 --seed 1
