"""What compiling costs: kernels compiled ahead on all cores, and cold starts one after another.

`compile_ahead` fills the caches of the compilers, so that the measuring process only tunes. As a program this
module measures what it saves: the first forward and backward of every operator with empty caches, each in a
process of its own:

    python -m rewy.bench.cold configs/h200.yaml [CONTESTANT ...]
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rewy.bench.check import run
from rewy.bench.clock import clock_for
from rewy.bench.config import load
from rewy.bench.contestants import CONTESTANTS, first_line, split_label
from rewy.bench.workload import Case

Kind = tuple[str, Case]
"""A contestant and a case as small as compiling allows."""


def kind_of(name: str, case: Case) -> Kind:
    return name, CONTESTANTS[name].kind(case)


class ColdStarts:
    """Seconds of the first call by kind, where nothing had been compiled before it."""

    def __init__(self) -> None:
        self.seconds: dict[Kind, float | None] = {}

    def of(self, name: str, case: Case, seen_here: float | None) -> float | None:
        """The cold start known for this case, else the one just seen in this process."""
        kind = kind_of(name, case)
        if seen_here is not None:
            self.seconds.setdefault(kind, seen_here)
        return self.seconds.get(kind)

    def compile_ahead(
        self,
        asked: list[tuple[str, Case]],
        workers: int,
        deadline: float | None,
        say: Callable[[str], None],
    ) -> None:
        """Compiles what contestants need for cases in `workers` processes, which leaves no cold start to be seen."""
        self.seconds |= {kind_of(name, case): None for name, case in asked}
        start = time.monotonic()
        # Half of the time is for measuring.
        limit = None if deadline is None else max(0.0, (deadline - start) / 2)
        say(f"compiling for {len(asked)} cases in {workers} processes")
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(_in_process, "compile", (asked, i, workers), limit) for i in range(workers)]
            found = [job.result() for job in jobs]
        for line in sorted({line for failures in found for line in failures}):
            say(f"  {line}")
        say(f"  {time.monotonic() - start:.0f} s")


def _in_process(task: str, arguments: Any, limit: float | None, **environment: str) -> list[str]:
    """Lines that the task prints in a process of its own; the end of its story if that went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from rewy.bench import cold; cold._answer(cold._{task})"],
            input=pickle.dumps(arguments),
            capture_output=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return [f"{task}: stopped after {limit:.0f} s"]
    if done.returncode:
        story = done.stderr.decode().strip().splitlines() or [f"status {done.returncode}"]
        return [f"{task}: {story[-1]}"]
    return json.loads(done.stdout)


def _answer(task: Callable[..., list[str]]) -> None:
    """Does the task on standard input; its lines have standard output for themselves, whatever libraries print."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        json.dump(task(*pickle.load(sys.stdin.buffer)), answer)


def _compile(asked: list[tuple[str, Case]], mine: int, of: int) -> list[str]:
    """Every `of`-th thing that the cases need, in an order that all processes share."""
    seen: dict[str, int] = {}
    failures = []

    def is_mine(what: str) -> bool:
        return seen.setdefault(what, len(seen)) % of == mine

    for name, case in asked:
        adaptor = CONTESTANTS[name]
        try:
            if reason := adaptor.absent(case.device):
                raise RuntimeError(reason)
            adaptor.compile(case, is_mine)
        except Exception as e:  # the check in the measuring process meets it again, and says what it means
            failures.append(f"{name}, {case.operator.title}: {type(e).__name__}: {first_line(e)}")
    return failures


def _start(name: str, case: Case) -> list[str]:
    """One cold start."""
    adaptor, clock = CONTESTANTS[name], clock_for(case.device.type)
    if reason := adaptor.absent(case.device) or adaptor.declines(case):
        return [reason]
    inputs = case.inputs(seed=0)
    clock.wait()
    start = time.perf_counter()
    run(adaptor, case, "autograd", *inputs)
    clock.wait()
    return [f"{time.perf_counter() - start:.1f} s"]


def main(path: str, *contestants: str) -> None:
    """Prints a table of cold starts, of the configuration's contestants unless some are named."""
    config = load(Path(path))
    device = clock_for(config.device).device
    print("| operator | shape | contestant | first forward and backward |\n| --- | --- | --- | ---: |")
    for name in contestants or dict.fromkeys(map(split_label, config.contestants)):
        for operator in config.operators:
            case = Case.of(config, operator, config.shapes[0], device)
            with tempfile.TemporaryDirectory() as empty:
                caches = {f"{tool}_CACHE_DIR": f"{empty}/{tool}" for tool in ("TRITON", "TILELANG")}
                (found,) = _in_process("start", (name, case), None, **caches)
            print(f"| {case.operator.title} | {config.shapes[0].label} | {name} | {found} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
