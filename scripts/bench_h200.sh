#!/usr/bin/env bash
# Measures a grid on the CUDA device of this machine within one sitting: compiles ahead on all cores, then times.
# Peers (fla, flash_qla) take part when they can be imported; what the limit cuts off, --resume goes on with.
# Use: scripts/bench_h200.sh OUTDIR [CONFIG] [SECONDS] [further options of rewy bench]
# From the environment: PYTHON, the interpreter (python3)
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:?give a folder for the results}
config=${2:-configs/h200.yaml}
limit=${3:-540}
workers=$(env -u OMP_NUM_THREADS nproc)  # which nproc takes for the answer

PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" -m rewy bench "$config" --out "$out" --time-limit "$limit" --workers "$workers" "${@:4}"
