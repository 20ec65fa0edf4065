"""scripts/time_stages.py: a row for every kernel of a call, and every launch counted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rewy.backends.cuda import backend
from rewy.backends.cuda.launch import recording
from rewy.bench.clock import HostClock, clock_for
from rewy.problem import Operands, Options, describe

LIMITS = {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "time_stages.py"
    spec = importlib.util.spec_from_file_location("time_stages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_for_every_kernel(
    script: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    clock = clock_for(device.type)
    drawn = script.operands("gated_delta_rule", 1, 20, 1, 16, 16, clock.device)
    x = Operands(*(None if t is None else t.float() for t in drawn))  # the interpreter has no bf16 everywhere
    problem = describe(x, Options(0.25, 16, True, "rewy"))

    def forward() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        return backend.forward(problem, x, training=True)

    o, ht, _ = forward()
    script.report("forward", problem, forward, LIMITS, clock)
    lines = capsys.readouterr().out.split("\n")
    rows = {
        cells[1].strip(): [*map(str.strip, cells[2:-1])] for line in lines[3:-1] if (cells := line.split("|"))
    }
    with recording() as launches:
        forward()
    assert [*rows] == [*dict.fromkeys(launch.name for launch in launches), "whole call"]
    assert all(len(row) == 7 and float(row[0]) > 0 for row in rows.values())
    assert all(map(torch.equal, forward()[:2], (o, ht)))  # what is timed computes as ever


def test_marks_lie_around_each_launch_in_a_call_that_runs(script: ModuleType) -> None:
    marks: list[int] = []

    class Counting(HostClock):
        def mark(self) -> int:
            marks.append(ran)
            return super().mark()

    class Launch:
        def run(self) -> None:
            nonlocal ran
            ran += 1

    ran = 0
    marking = script.Marking(Counting())
    for _ in range(3):
        marking.append(Launch())
    assert marks == [0, 1, 1, 2, 2, 3] and len(marking.marks) == 3


def test_passes_run_behind_a_lead(script: ModuleType) -> None:
    log: list[str] = []

    class Logging(HostClock):
        def wait(self) -> None:
            log.append("wait")

        def lead(self, ms: float) -> None:
            assert ms > 0
            log.append("lead")

    def marked() -> list[tuple[int, int]]:
        log.append("pass")
        return [(0, 2_000_000), (0, (log.count("pass") % 3) * 1_000_000)]

    assert script.milliseconds(marked, Logging(), passes=3) == [2.0, 1.0]
    assert log[-10:] == ["wait", "lead", "pass"] * 3 + ["wait"]
