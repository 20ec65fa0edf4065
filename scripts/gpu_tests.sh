#!/usr/bin/env bash
# The GPU tests in one go, and a report of what ran where:
#
#     scripts/gpu_tests.sh OUT [pytest arguments]      # -k kernels, tests/cuda/test_step.py: a part of them
#
# First every kernel that the chosen tests launch is compiled, on all cores, into Triton's cache; then they run.
# OUT/report.md: machine, versions, commit, counts, failures; OUT/junit.xml: the same tests one by one; OUT/log.txt.
# From the environment:
#     LIMIT=1200      seconds for compiling and testing; what has been run by then is reported, and counts as failed
#     WORKERS=12      processes that test, at most as many as there are cores
#     MEMCHECK=1      then run small shapes under compute-sanitizer, in MEMCHECK_LIMIT (300) seconds; OUT/memcheck.txt
#     PYTHON=python3  the interpreter
#     COMMIT=...      the commit, where git cannot tell
# Exits 1 unless every test that could run here passed and the sanitizer, if asked, found nothing.
set -uo pipefail
[[ $# -ge 1 ]] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
commit=${COMMIT:-$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)}
limit=${LIMIT:-1200}
cores=$(nproc)
workers=${WORKERS:-12}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1  # as many processes as cores, of one thread each
rm -f "$out"/{report.md,junit.xml,log.txt,memcheck.txt,memcheck-tests.txt}

"$python" - "$commit" >"$out/report.md" <<'PY' || { cat "$out/report.md"; exit 1; }
import os, platform, sys
import torch, triton

if not torch.cuda.is_available():
    sys.exit("no CUDA device: these tests need one")
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("TRITON_INTERPRET=1 would run the kernels on the CPU: unset it")
print("# Tests on a GPU\n")
for i in range(torch.cuda.device_count()):
    card = torch.cuda.get_device_properties(i)
    print(f"- cuda:{i}: {card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB")
print(f"- torch {torch.__version__} (CUDA {torch.version.cuda}), Triton {triton.__version__}")
print(f"- Python {platform.python_version()} on {platform.platform()}")
print(f"- commit {sys.argv[1]}")
PY

where=(tests/cuda)
for argument in "$@"; do
    [[ -e ${argument%%::*} ]] && where=()
done
tests=("$python" -m pytest -p no:cacheprovider -m cuda "${where[@]}")
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
for ((i = 0; i < cores; i++)); do
    REWY_COMPILE_PART=$i/$cores timeout "$((limit / 2))" "${tests[@]}" -q -m "cuda and not slow" \
        --ignore tests/cuda/test_compile_offline.py "$@" >"$parts/$i" 2>&1 &
done
wait
compiled=$SECONDS
echo "compiled in $compiled s; $(tail -n 1 "$parts/0")" | tee "$out/log.txt"

failed=0
timeout -s INT -k 30 "$((limit - compiled))" "${tests[@]}" -n "$((workers < cores ? workers : cores))" \
    --junitxml="$out/junit.xml" "$@" 2>&1 | tee -a "$out/log.txt" || failed=1

memcheck=""
# One allocation per tensor, or the sanitizer would take a neighbour's memory in torch's pool for the tensor's.
sanitized() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${MEMCHECK_LIMIT:-300}" compute-sanitizer --tool memcheck \
        --error-exitcode 1 --log-file "$out/memcheck.txt" "$python" "$@" >"$out/memcheck-tests.txt" 2>&1
}
if [[ ${MEMCHECK:-0} == 1 ]]; then
    if ! command -v compute-sanitizer >/dev/null; then
        memcheck="not run, compute-sanitizer is not installed"
    elif ! sanitized -c 'import torch; torch.zeros(1, device="cuda")'; then
        memcheck="not run, compute-sanitizer does not work on this device: $(tail -n 1 "$out/memcheck.txt")"
    elif sanitized -m pytest -p no:cacheprovider -v -k through_the_public_function tests/cuda/test_public.py; then
        memcheck="no faults, $(tail -n 1 "$out/memcheck-tests.txt")"
    else
        failed=1
        memcheck="FAILED or out of time, see memcheck.txt; $(tail -n 1 "$out/memcheck-tests.txt")"
    fi
fi

"$python" - "$out" "$compiled" "$((SECONDS - compiled))" "$failed" "$memcheck" >>"$out/report.md" <<'PY'
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

out, compiled, tested, failed, memcheck = Path(sys.argv[1]), *sys.argv[2:]
print(f"- compiled in {compiled} s, tested in {tested} s")
if memcheck:
    print(f"- memcheck: {memcheck}")
if not (out / "junit.xml").exists():
    sys.exit(print("\n**The tests ended without results: see log.txt.**"))
counts: dict[str, Counter] = {}
stories, reasons, times = [], Counter(), []
for case in ElementTree.parse(out / "junit.xml").iter("testcase"):
    if case.get("name") is None:  # was running at the limit
        continue
    name = f"{case.get('classname')}::{case.get('name')}"
    found = {child.tag: child for child in case}
    result = next((tag for tag in ("error", "failure", "skipped") if tag in found), "passed")
    counts.setdefault(case.get("classname"), Counter())[result] += 1
    times.append((float(case.get("time") or 0), name))
    if result == "skipped":
        reasons[found[result].get("message")] += 1
    elif result != "passed":
        stories.append((name, (found[result].get("message") or "").strip()))
total = sum(counts.values(), Counter())
print("\n| file | passed | failed | error | skipped |\n| --- | ---: | ---: | ---: | ---: |")
for file, c in [*sorted(counts.items()), ("**all**", total)]:
    print(f"| {file} | {c['passed']} | {c['failure']} | {c['error']} | {c['skipped']} |")
verdict = "passed" if failed == "0" else "**FAILED, or stopped at the limit**"
print(f"\n{verdict}. Slowest: " + ", ".join(f"{name} {s:.0f} s" for s, name in sorted(times, reverse=True)[:5]))
if reasons:
    print("\nSkipped: " + "; ".join(f"{n} × {reason}" for reason, n in reasons.most_common()))
for name, message in stories:
    print(f"\n## {name}\n\n```\n{message[:1500]}\n```")
PY
cat "$out/report.md"
exit "$failed"
