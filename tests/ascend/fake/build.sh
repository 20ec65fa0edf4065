#!/usr/bin/env bash
# Builds a fake CANN for one torch_npu: build.sh PYTHON OUTPUT_FOLDER (x86-64 Linux, g++). Its libraries compute on host
# memory; its compiler (cann/) builds kernels over the emulation. OUTPUT_FOLDER/env.sh is its set_env.sh.
set -euo pipefail
python=$1
out=$2
here=$(cd "$(dirname "$0")" && pwd)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
npu=$site/torch_npu
mkdir -p "$out"/{lib,opp,runtime,compiler/tikcpp,share/info/asc-devkit}
cd "$out"
ln -sfn lib lib64
ln -sfn "$here/cann" compiler/tikcpp/ascendc_kernel_cmake
ln -sfn "$here/cann/include" include
echo Version=9.1.0 >share/info/asc-devkit/version.info

flags=(-std=c++20 -O1 -fPIC -Wall -Wextra -I"$npu/include/third_party/acl/inc")
g++ "${flags[@]}" -c "$here/acl.cpp" -o acl.o

# What torch_npu links and acl.cpp does not define becomes a function that ends the process by name.
nm -D --undefined-only "$npu"/lib/libtorch_npu.so "$npu"/lib/libtensorpipe.so "$npu"/lib/libnpu_profiler.so \
    "$npu"/_C*.so | awk '$1 == "U" && $2 ~ /^(acl[A-Z]|acl(rt|op|mdl|sys)[A-Z]|rt[A-Z]|Msprof|Hccl)/ {print $2}' | sort -u >needed
nm --defined-only acl.o | awk '{print $3}' | sort -u >defined
{
    echo '#include <stdio.h>'
    echo '#include <stdlib.h>'
    echo '#define MISSING(name) void name(void) { fputs("fake acl: " #name " is not implemented\n", stderr); abort(); }'
    comm -23 needed defined | sed 's/.*/MISSING(&)/'
} >missing.c
gcc -O1 -fPIC -c missing.c -o missing.o

g++ -shared -o lib/libascendcl.so acl.o missing.o -lpthread
for name in hccl acl_op_compiler ge_runner graph acl_tdt_channel; do  # linked by name; every symbol is in ascendcl
    g++ -shared -o "lib/lib$name.so" -Wl,--no-as-needed -Llib -lascendcl -Wl,-rpath,'$ORIGIN'
done

g++ "${flags[@]}" -shared "$here/platform.cpp" -o lib/libplatform.so
g++ "${flags[@]}" -I"$here/cann/include" -c "$here/tiling_api.cpp" -o tiling_api.o
rm -f lib/libtiling_api.a
ar rcs lib/libtiling_api.a tiling_api.o

# The operator library computes with torch's own CPU operators.
g++ "${flags[@]}" -shared -isystem "$site/torch/include" "$here/opapi.cpp" -o lib/libopapi.so \
    -L"$site/torch/lib" -ltorch_cpu -lc10 -Wl,-rpath,"$site/torch/lib"

cat >env.sh <<EOF
export LD_LIBRARY_PATH=$out/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export ASCEND_HOME_PATH=$out ASCEND_OPP_PATH=$out/opp
EOF
