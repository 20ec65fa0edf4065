#!/usr/bin/env bash
# Builds the custom operators of the ascend backend with CANN and proves them on the NPU of this machine.
# Needs: ASCEND_HOME_PATH (source set_env.sh of CANN 9.1 or later), cmake, and torch_npu in the python3 of PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

missing() {
    echo "build_ascend.sh: $1" >&2
    exit 1
}
[[ -n ${ASCEND_HOME_PATH:-} ]] || missing "ASCEND_HOME_PATH is not set; source set_env.sh of CANN 9.1 or later"
[[ -d $ASCEND_HOME_PATH ]] || missing "ASCEND_HOME_PATH is $ASCEND_HOME_PATH, which is no folder"
command -v cmake >/dev/null || missing "cmake is not installed"
python3 -c 'import torch_npu' || missing "python3 does not import torch_npu"

cmake -S rewy/backends/ascend/csrc -B build/ascend_ops -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$(command -v python3)" \
    || missing "cmake did not configure; CANN 9.1 or later brings the ASC language that it needs"
cmake --build build/ascend_ops
cp build/ascend_ops/librewy_ascend.so rewy/backends/ascend/

REWY_ASCEND_OPS=auto exec python3 -m rewy verify --device npu
