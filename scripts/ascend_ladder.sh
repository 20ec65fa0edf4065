#!/usr/bin/env bash
# Rungs a to c of docs/ascend.md: the ascend backend on this machine without an NPU (x86-64 Linux, python3, g++).
# Installs torch_npu into .venv-ascend, builds the fake runtime, the custom operators over the emulation, and runs
# tests/ascend there. What is in those folders is used again. Exits with 77 where torch_npu cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    echo "ascend_ladder.sh: the torch_npu wheel and the fake libraries are for x86-64 Linux, this is $(uname -sm)" >&2
    exit 1
fi

python=$PWD/.venv-ascend/bin/python
if [[ ! -x $python ]]; then
    python3 -m venv .venv-ascend
    "$python" -m pip install --quiet --upgrade pip
fi
"$python" -m pip install --quiet torch==2.13.0 torch_npu==2.13.0 numpy pytest || {
    echo "SKIPPED: torch 2.13.0 and torch_npu 2.13.0 cannot be installed here; rungs a to c of the ladder did not run"
    exit 77
}
"$python" -m pip install --quiet -e ".[bench]"

bash tests/ascend/fake/build.sh "$python" "$PWD/build/ascend"
bash tests/ascend/fake/build_ops.sh "$python" "$PWD/build/ascend"

source build/ascend/env.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export REWY_ASCEND_TEST_LIBRARY=$PWD/build/ascend/librewy_ascend.so
exec "$python" -m pytest tests/ascend "$@"
