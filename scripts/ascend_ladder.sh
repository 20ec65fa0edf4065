#!/usr/bin/env bash
# The rungs of docs/ascend.md: the ascend backend on this machine without an NPU (x86-64 Linux, python3, g++).
# a to c: installs torch_npu into .venv-ascend, builds the fake runtime and the custom operators over the emulation.
# d: installs triton-ascend and the vendor's compiler into .venv-ascend-triton, and MLIR 19 (Debian's packages) where CI
# runs this as root. Then runs tests/ascend. What is in those folders is used again. Exits with 77 where torch_npu
# cannot be had; says which rung was skipped, and why.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    echo "ascend_ladder.sh: the torch_npu wheel and the fake libraries are for x86-64 Linux, this is $(uname -sm)" >&2
    exit 1
fi

# The environment of that name with pip's arguments installed; prints its python.
environment() {
    local python=$PWD/$1/bin/python
    if [[ ! -x $python ]]; then
        python3 -m venv "$1"
        "$python" -m pip install --quiet --upgrade pip
    fi
    "$python" -m pip install --quiet "${@:2}" >&2 && echo "$python"
}

python=$(environment .venv-ascend torch==2.13.0 torch_npu==2.13.0 numpy pytest pytest-xdist) || {
    echo "SKIPPED: torch 2.13.0 and torch_npu 2.13.0 cannot be installed here; no rung of the ladder ran"
    exit 77
}
"$python" -m pip install --quiet -e ".[bench]"

bash tests/ascend/fake/build.sh "$python" "$PWD/build/ascend"
bash tests/ascend/fake/build_ops.sh "$python" "$PWD/build/ascend"

if triton=$(environment .venv-ascend-triton triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11 numpy); then
    export REWY_ASCEND_TRITON_PYTHON=$triton
    if ! command -v mlir-opt-19 >/dev/null && [[ ${CI:-} == true && $EUID == 0 ]]; then
        { apt-get update && apt-get install --yes --no-install-recommends mlir-19-tools llvm-19; } >/dev/null ||
            echo "SKIPPED: mlir-19-tools and llvm-19 cannot be installed here; rung d compiles the kernel only"
    fi
else
    echo "SKIPPED: triton-ascend 3.2.0 and ascendnpu-ir 1.2.0 cannot be installed here; rung d did not run"
fi

source build/ascend/env.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export REWY_ASCEND_TEST_LIBRARY=$PWD/build/ascend/librewy_ascend.so
exec "$python" -m pytest -rs -n 2 --dist loadfile tests/ascend "$@"
