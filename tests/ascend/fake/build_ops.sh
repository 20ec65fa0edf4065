#!/usr/bin/env bash
# Builds the custom operators of the ascend backend for the fake: host code as it is, kernels and their launches over
# the emulation.
# build_ops.sh PYTHON FOLDER_OF_build.sh [g++ flags]
set -euo pipefail
python=$1
out=$2
shift 2
tests=$(cd "$(dirname "$0")/.." && pwd)
csrc=$tests/../../rewy/backends/ascend/csrc
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
npu=$site/torch_npu

common=(-std=c++20 -g -fPIC -Wall -Wextra -I"$csrc" "$@")
sed -E -f "$tests/emulation/launch.sed" "$csrc/launch.asc" >"$out/launch.cpp"
g++ "${common[@]}" -O2 -I"$tests/emulation" -c "$out/launch.cpp" -o "$out/launch.o" &
g++ "${common[@]}" -O0 -DCURRENT_VERSION=V2R13 -isystem "$site/torch/include" -isystem "$site/torch/include/torch/csrc/api/include" \
    -isystem "$npu/include" -isystem "$npu/include/third_party/acl/inc" -c "$csrc/ops.cpp" -o "$out/ops.o"
wait $!
g++ -shared "$@" -o "$out/librewy_ascend.so" "$out/ops.o" "$out/launch.o" -L"$site/torch/lib" -ltorch_cpu -lc10 -ltorch \
    -L"$npu/lib" -ltorch_npu -L"$out/lib" -lascendcl -Wl,--allow-shlib-undefined -lpthread
