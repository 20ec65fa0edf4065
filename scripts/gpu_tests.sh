#!/usr/bin/env bash
# The GPU tests in one go, and a report of what ran where:
#
#     scripts/gpu_tests.sh OUT [pytest arguments]
#
# OUT/report.txt: machine, versions, commit and the results; OUT/junit.xml: the same tests one by one;
# OUT/memcheck.txt: small shapes under compute-sanitizer, where that is installed.
# PYTHON names the interpreter (python3), COMMIT the commit where git cannot tell.
# Exits 1 unless every test that could run here passed and the sanitizer found nothing.
set -uo pipefail
[[ $# -ge 1 ]] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
commit=${COMMIT:-$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)}
report=$out/report.txt

"$python" - "$commit" >"$report" <<'PY' || { cat "$report"; exit 1; }
import os, platform, sys
import torch, triton

if not torch.cuda.is_available():
    sys.exit("no CUDA device: these tests need one")
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("TRITON_INTERPRET=1 would run the kernels on the CPU: unset it")
print(f"commit    {sys.argv[1]}")
print(f"python    {platform.python_version()} on {platform.platform()}")
print(f"torch     {torch.__version__} (CUDA {torch.version.cuda})")
print(f"triton    {triton.__version__}")
for i in range(torch.cuda.device_count()):
    card = torch.cuda.get_device_properties(i)
    print(f"cuda:{i}    {card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB")
PY

echo >>"$report"
failed=0
"$python" -m pytest -m cuda --junitxml="$out/junit.xml" "$@" 2>&1 | tee -a "$report" || failed=1

# One allocation per tensor, or the sanitizer would take a neighbour's memory in torch's pool for the tensor's.
memcheck() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        --log-file "$out/memcheck.txt" "$python" "$@" >"$out/memcheck-tests.txt" 2>&1
}
if ! command -v compute-sanitizer >/dev/null; then
    verdict="not run, compute-sanitizer is not installed"
elif ! memcheck -c 'import torch; torch.zeros(1, device="cuda")'; then
    verdict="not run, compute-sanitizer does not work on this device: $(tail -n 1 "$out/memcheck.txt")"
elif memcheck -m pytest -q -m "cuda and not slow" -k parity tests/cuda; then
    verdict="no faults, $(tail -n 1 "$out/memcheck-tests.txt")"
else
    failed=1
    verdict="FAILED, see memcheck.txt and memcheck-tests.txt"
fi
printf '\nmemcheck: %s\n' "$verdict" | tee -a "$report"
exit "$failed"
