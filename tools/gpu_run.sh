#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Builds, checks and times everything that needs a GPU, in one run on a machine with nvcc, torch and Triton; no Bazel, no
# network. `tools/gpu_run.sh [build|check|bench|idle]...`, by default all. Numbers go to stdout, one JSON object of the
# benchmark to $OUT/engine.json when OUT is set. WORKLOADS and ENGINES (names after --engine) choose what is timed.
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHONPATH="$PWD/python:$PWD/kernels:$PWD/cc/bindings:$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
workloads=${WORKLOADS:-tools/bench/workloads/h200.json}

engines() {
  local name
  for name in ${ENGINES:-tokenspeed}; do printf -- '--engine %s ' "$name"; done
}

run_part() {
  case $1 in
    build) PYTHON=$python tools/build_native.sh cc cpu cuda ;;
    check)
      "$python" kernels/tokenspeed_kernel/bench/gpu_check.py --no-build
      "$python" tools/bench/graph_check.py
      "$python" tools/bench/deterministic_check.py
      "$python" tools/bench/update_check.py
      for way in kernel direct; do
        "$python" tools/bench/tier.py --device cuda --model tools/bench/shapes/qwen3-0.6b --load-format dummy \
          --first-tokens 4096 --turn-tokens 300 --kvstore-io-backend "$way"
      done
      ;;
    bench)
      # shellcheck disable=SC2046
      "$python" tools/bench/engine.py "$workloads" $(engines) --json | tee "${OUT:-/tmp}/engine.json"
      ;;
    idle)
      "$python" tools/bench/idle.py --shape qwen3-8b --batch 1
      "$python" tools/bench/idle.py --shape qwen3-8b --batch 256
      "$python" tools/bench/idle.py --shape qwen3-0.6b --batch 1
      ;;
    *)
      echo "usage: tools/gpu_run.sh [build|check|bench|idle]..." >&2
      exit 2
      ;;
  esac
}

[ $# -gt 0 ] || set -- build check bench idle
for part; do run_part "$part"; done
