#!/usr/bin/env bash
# Builds the custom operators of the ascend backend with CANN and proves them, and the path without them, on the NPU of
# this machine. Needs: ASCEND_HOME_PATH (source set_env.sh of CANN 9.1 or later), cmake 3.19, a C++20 compiler, and
# torch_npu and rewy's own requirements in the python3 of PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

missing() {
    echo "build_ascend.sh: $1" >&2
    exit 1
}
# The version of CANN that is there: where 8.5 and later keep it, else where earlier ones do.
cann_version() {
    local file
    for file in "$ASCEND_HOME_PATH"/{share/info/asc-devkit,compiler}/version.info; do
        if [[ -f $file ]]; then
            sed -n "/^Version=/{s///p;q}" "$file"
            return
        fi
    done
}

[[ -n ${ASCEND_HOME_PATH:-} ]] || missing "ASCEND_HOME_PATH is not set; source set_env.sh of CANN 9.1 or later"
[[ -d $ASCEND_HOME_PATH ]] || missing "ASCEND_HOME_PATH is $ASCEND_HOME_PATH, which is no folder"
version=$(cann_version)
[[ -n $version ]] || missing "ASCEND_HOME_PATH is $ASCEND_HOME_PATH, where no version.info tells of a CANN toolkit"
printf '%s\n' 9.1 "$version" | sort --check=quiet --version-sort ||
    missing "the operators need CANN 9.1 or later, $ASCEND_HOME_PATH has $version"
command -v cmake >/dev/null || missing "cmake is not installed"
command -v python3 >/dev/null || missing "python3 is not installed"
python3 -c 'import torch_npu' || missing "python3 does not import torch_npu; pip install '.[ascend]'"
python3 -c 'import rewy.cli' || missing "python3 does not run rewy; pip install '.[ascend]'"

cmake -S rewy/backends/ascend/csrc -B build/ascend_ops -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$(command -v python3)" ||
    missing "cmake did not configure the operators with CANN $version; above it says what it lacks"
cmake --build build/ascend_ops --parallel || missing "CANN $version did not compile the operators; its errors are above"
cp build/ascend_ops/librewy_ascend.so rewy/backends/ascend/

echo "With the custom operators, where they are made for the case:"
REWY_ASCEND_OPS=require python3 -m rewy verify --device npu
echo "With torch_npu's operators alone:"
REWY_ASCEND_OPS=never python3 -m rewy verify --device npu
