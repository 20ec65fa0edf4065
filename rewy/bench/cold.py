"""Cold starts: what the first forward and backward of an operator take before anything is compiled or tuned.

`compile_ahead` spends them in parallel processes, one for each contestant and kind of case, so that the measuring
process finds compiled kernels in the shared cache. What such a process picks while its neighbours load the
machine is not kept: the measuring process tunes again, alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import torch

from rewy.bench.check import inputs_of, run
from rewy.bench.clock import clock_for
from rewy.bench.config import Config, Shape
from rewy.bench.contestants import CONTESTANTS, Rewy, split_label
from rewy.bench.workload import Case

if TYPE_CHECKING:
    from rewy.bench.harness import Point

Key = tuple[str, Case]


class ColdStarts:
    """Seconds by contestant and kind of case; the first figure stays."""

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}

    def of(self, name: str, case: Case, seen_here: float | None) -> float | None:
        """The cold start known for this case, else the one just seen in this process."""
        key = name, CONTESTANTS[name].kind(case)
        if seen_here is not None:
            self.seconds.setdefault(key, seen_here)
        return self.seconds.get(key)

    def compile_ahead(
        self,
        config: Config,
        device: torch.device,
        points: list[Point],
        workers: int,
        deadline: float | None,
        say: Callable[[str], None],
    ) -> None:
        """Runs every kind of case that compiles something once, in processes of their own."""
        tasks: dict[Key, tuple[str, str, Shape]] = {}
        for point in points:
            if not isinstance(point.where, Shape):
                continue
            case = Case.of(config, point.operator, point.where, device)
            for contestant in point.contestants:
                name = split_label(contestant)
                adaptor = CONTESTANTS[name]
                plain_torch = isinstance(adaptor, Rewy) and adaptor.backend == "reference"
                if not plain_torch and adaptor.absent(case.device) is None and adaptor.declines(case) is None:
                    tasks.setdefault((name, adaptor.kind(case)), (name, point.operator, point.where))
        say(f"compiling {len(tasks)} kinds of case in {workers} processes")
        if deadline is not None:  # half of the time is for measuring
            deadline = (time.monotonic() + deadline) / 2
        pool = ThreadPoolExecutor(workers)
        try:
            jobs = {pool.submit(_in_process, config, *task, deadline): key for key, task in tasks.items()}
            for job in as_completed(jobs):
                name, case = jobs[job]
                seconds = job.result()
                if seconds is not None:
                    self.seconds[name, case] = seconds
                outcome = "no result" if seconds is None else f"{seconds:.1f} s"
                say(f"  {name}, {case.operator.title} H{case.H}/{case.HV} K{case.K} V{case.V}: {outcome}")
        finally:
            pool.shutdown(cancel_futures=True)


def _in_process(
    config: Config, name: str, operator: str, shape: Shape, deadline: float | None
) -> float | None:
    """Seconds of the cold start; None when it failed, which the check in the measuring process will explain."""
    own = {"shapes": [shape.model_dump(mode="json", exclude={"operators", "contestants"})]}
    task = {"name": name, "operator": operator, "config": config.model_dump(mode="json") | own}
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rewy.bench.cold"],
            input=json.dumps(task),
            env=os.environ | {"FLA_CACHE_RESULTS": "0"},
            capture_output=True,
            text=True,
            timeout=left,
        )
        return float(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def main() -> None:
    """One cold start, described on standard input; its seconds on standard output."""
    task = json.load(sys.stdin)
    config = Config.model_validate(task["config"])
    clock = clock_for(config.device)
    adaptor = CONTESTANTS[task["name"]]
    case = adaptor.kind(Case.of(config, task["operator"], config.shapes[0], clock.device))
    reason = adaptor.absent(case.device) or adaptor.declines(case)
    if reason:
        raise SystemExit(f"{task['name']}: {reason}")
    x, do, dht = inputs_of(case, config.seed)
    clock.wait()
    start = time.perf_counter()
    for level in config.levels:
        run(adaptor, case, level, x, do, dht)
    clock.wait()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
