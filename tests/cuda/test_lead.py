"""The benchmark's clock on a device: behind a lead, marks show what the device does and not when the host comes."""

from __future__ import annotations

import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from rewy.bench.clock import clock_for
from rewy.bench.config import Timing
from rewy.bench.levels import Inputs, Sampler, calls_a_round, take_turns

pytestmark = pytest.mark.cuda
SLEEP = 2.0  # ms
TRIES = 5  # other tests may run on the device, and have a part of its time


class Sleepy(Sampler):
    """Sleeps before a tiny kernel, once for the forward and once for the backward."""

    def run(self, i: int, *arguments: Any) -> tuple[Any, ...]:
        marks = [self.clock.mark()]
        for _ in range(2):
            time.sleep(SLEEP / 1e3)
            self.inputs.sets[i].add_(1)
            marks.append(self.clock.mark())
        return tuple(marks)


def sampled(lead: bool) -> Sleepy:
    clock = clock_for("cuda")
    x = torch.zeros(16, device="cuda")
    sampler = Sleepy(SimpleNamespace(), Inputs(None, [x], [x]), clock)
    timing = Timing(rounds=3, seconds=0.1, lead=lead)
    calls = {"sleepy": calls_a_round(sampler, timing, clock)}
    take_turns({"sleepy": sampler}, calls, timing, clock)
    return sampler


def test_with_a_lead_a_slow_host_shows_in_its_own_column() -> None:
    tries = [sampled(lead=True) for _ in range(TRIES)]
    assert min(max(spread.median for spread in sampler.spreads()) for sampler in tries) < SLEEP / 8
    assert 2 * SLEEP <= min(median(sampler.host_ms) for sampler in tries) < 4 * SLEEP


def test_without_a_lead_it_shows_between_marks() -> None:
    sampler = sampled(lead=False)
    assert all(spread.median >= 0.99 * SLEEP for spread in sampler.spreads())
    assert median(sampler.host_ms) >= 2 * SLEEP


def test_a_lead_takes_as_long_as_it_says_and_the_host_does_not_wait() -> None:
    found = []
    for _ in range(TRIES):
        clock = clock_for("cuda")
        clock.lead(0)
        clock.wait()
        start, begun = clock.mark(), time.perf_counter()
        clock.lead(20)
        stop, host_ms = clock.mark(), (time.perf_counter() - begun) * 1e3
        clock.wait()
        found.append((clock.between(start, stop), host_ms))
    assert any(0.8 * 20 < ms < 1.5 * 20 and host_ms < 10 for ms, host_ms in found), found


def test_a_lead_leaves_workspace_as_it_is() -> None:
    clock = clock_for("cuda")

    def workspace() -> int:
        return clock.peak(tuple, lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))[1]

    before = workspace()
    clock.lead(1)
    assert workspace() == before >= 1 << 20
