#!/usr/bin/env bash
# The rungs of docs/ascend.md: the ascend backend on this machine without an NPU (x86-64 Linux, python3, g++).
# a to c: installs torch_npu into .venv-ascend, builds a fake CANN and, with it and a copy of the sources, does what the
# owner of a card does: scripts/build_ascend.sh. Kernels then run over the emulation, under ASan and UBSan.
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

python=$(environment .venv-ascend torch==2.13.0 torch_npu==2.13.0 numpy cmake pytest pytest-xdist) || {
    echo "SKIPPED: torch 2.13.0 and torch_npu 2.13.0 cannot be installed here; no rung of the ladder ran"
    exit 77
}
"$python" -m pip install --quiet -e ".[bench]"

bash tests/ascend/fake/build.sh "$python" "$PWD/build/ascend"
source build/ascend/env.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The owner's checkout; what loads the sanitized library needs a python that has the sanitizer loaded first.
owner=$PWD/build/ascend/owner
rm -rf "$owner" && mkdir -p "$owner/bin" && cp -r rewy scripts pyproject.toml "$owner"
cat >"$owner/bin/python3" <<END
#!/usr/bin/env bash
if [[ \$1 == -m && \${REWY_ASCEND_OPS:-} != never ]]; then
    export ASAN_OPTIONS=detect_leaks=0
    export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
fi
exec "$python" "\$@"
END
chmod +x "$owner/bin/python3"
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=all"
PATH="$owner/bin:${python%/*}:$PATH" CXXFLAGS="-g $sanitizers" FAKE_BISHENG_FLAGS="$sanitizers" bash "$owner/scripts/build_ascend.sh"
export REWY_ASCEND_TEST_LIBRARY=$owner/rewy/backends/ascend/librewy_ascend.so

if triton=$(environment .venv-ascend-triton triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11 numpy); then
    export REWY_ASCEND_TRITON_PYTHON=$triton
    if ! command -v mlir-opt-19 >/dev/null && [[ ${CI:-} == true && $EUID == 0 ]]; then
        { apt-get update && apt-get install --yes --no-install-recommends mlir-19-tools llvm-19; } >/dev/null ||
            echo "SKIPPED: mlir-19-tools and llvm-19 cannot be installed here; rung d compiles the kernel only"
    fi
else
    echo "SKIPPED: triton-ascend 3.2.0 and ascendnpu-ir 1.2.0 cannot be installed here; rung d did not run"
fi

failed=0
tests() {
    "$@" || [[ $? == 5 ]] || failed=1 # 5: no test was asked for
}
tests "$owner/bin/python3" -m pytest -rs -n 2 tests/ascend/test_ops.py "$@"
tests "$python" -m pytest -rs -n 2 --dist loadfile tests/ascend --ignore=tests/ascend/test_ops.py "$@"
exit $failed
