"""Walks the grid: who is there, who is right, who fits; then measures those and keeps every finished point."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from rewy.bench import model, results
from rewy.bench.check import Oracle, Verdict, apart, check
from rewy.bench.check import run as run_once
from rewy.bench.clock import Clock, ceilings, clock_for, module_of, survived
from rewy.bench.cold import ColdStarts, Kind, kind_of
from rewy.bench.config import Config, ModelRun, Shape
from rewy.bench.contestants import CONTESTANTS, first_line, split_label, switches, versions
from rewy.bench.levels import SAMPLERS, Inputs, Sampler, calls_a_round, input_sets, take_turns
from rewy.bench.results import Row
from rewy.bench.workload import Case
from rewy.problem import Gradients

Say = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """One place of the grid and who meets there."""

    level: str
    operator: str
    where: Shape | ModelRun
    contestants: tuple[str, ...]

    @property
    def label(self) -> str:
        w = self.where
        return w.label if isinstance(w, Shape) else f"{w.size} {w.B}×{w.T}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.level, self.operator, self.label


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished` of `total` points, and why it stopped early if it did."""

    finished: int
    total: int
    stopped: str = ""


def plan(config: Config, alone: Sequence[str] = ()) -> list[Point]:
    """All points, or those of these operators alone, in the order of the file: what stands first is measured first."""
    points = []
    for shape in config.shapes:
        operators = [op for op in config.operators if op in (shape.operators or config.operators)]
        chosen = shape.contestants or config.contestants
        contestants = tuple(c for c in config.contestants if c in chosen)
        levels = [level for level in config.levels if level != "model"]
        points += [Point(level, op, shape, contestants) for op in operators for level in levels]
    if "model" in config.levels and config.model:
        points += [
            Point("model", op, run, config.contestants)
            for run in config.model.runs
            for op in config.operators
        ]
    return [p for p in points if p.operator in (alone or config.operators)]


def run(
    config: Config,
    path: Path,
    *,
    command: str,
    say: Say,
    progress: Callable[[int], None] = lambda finished: None,
    resume: bool = False,
    deadline: float | None = None,
    workers: int = 0,
    alone: Sequence[str] = (),
) -> Outcome:
    """Measures what `path` does not hold yet. `deadline` is a time.monotonic() after which no point starts.

    With operators to measure `alone`, only their points count; the others are left for another run.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    clock = clock_for(config.device)
    points = plan(config, alone)
    for contestant in config.contestants:  # those who are there set their switches, which the header records
        CONTESTANTS[split_label(contestant)].absent(clock.device)
    if resume and path.exists():
        done = _reopen(config, path, say)
    else:
        done = set()
        limits = ceilings(clock, getattr(torch, config.dtype))
        results.create(path, results.header(config, limits, versions(), switches(), command))
    left = [p for p in points if any((*p.key, c) not in done for c in p.contestants)]
    finished = len(points) - len(left)
    cold = ColdStarts()
    progress(finished)
    try:
        if workers:
            cold.compile_ahead(_to_compile(config, left, clock.device), workers, deadline, say)
        harness = Harness(config, clock, cold)
        gc.collect()
        gc.freeze()  # modules and kernels stay: looking through them at every point takes longer than measuring it
        for point in left:
            if deadline is not None and time.monotonic() > deadline:
                return Outcome(finished, len(points), "time limit reached")
            rows = harness.measure(point)
            results.append(path, rows)
            finished += 1
            progress(finished)
            say(f"[{finished}/{len(points)}] {' · '.join(point.key)}: {_summary(rows)}")
    except KeyboardInterrupt:
        return Outcome(finished, len(points), "interrupted")
    except Exception as e:  # the finished points are on disk; tables can still be made of them
        say(traceback.format_exc())
        return Outcome(finished, len(points), f"stopped by {type(e).__name__}: {first_line(e)}")
    return Outcome(finished, len(points))


def _reopen(config: Config, path: Path, say: Say) -> set[tuple[str, str, str, str]]:
    """What an earlier run left, if it was this run: same configuration, device, versions and commit."""
    if results.drop_cut_line(path):
        say(f"{path}: dropped a last line that was cut off")
    old = results.load(path)
    now = results.header(config, {}, versions(), switches(), command="")
    if difference := results.difference(old.header, now):
        raise ValueError(f"--resume: {path} was made with another {difference}")
    return {row.key for row in old.rows}


def outlook(config: Config, alone: Sequence[str] = ()) -> list[tuple[Point, str, str]]:
    """(point, contestant, why it will not be measured or "") for every contestant, without running any."""
    if config.device != "cpu":
        module_of(config.device)
    found = []
    for point in plan(config, alone):
        case = _case(config, point, torch.device(config.device))
        for contestant in point.contestants:
            found.append((point, contestant, _refusal(split_label(contestant), case) or ""))
    return found


def _refusal(name: str, case: Case) -> str | None:
    adaptor = CONTESTANTS[name]
    return adaptor.absent(case.device) or adaptor.declines(case)


def _to_compile(config: Config, points: list[Point], device: torch.device) -> list[tuple[str, Case]]:
    """Contestants and cases that compile what the points need, each once and in their order."""
    found: dict[tuple[str, Case], None] = {}
    for point in points:
        case = _case(config, point, device)
        for name in dict.fromkeys(map(split_label, point.contestants)):
            if _refusal(name, case) is None:
                found |= dict.fromkeys((name, needed) for needed in CONTESTANTS[name].to_compile(case))
    return list(found)


def _case(config: Config, point: Point, device: torch.device) -> Case:
    if isinstance(point.where, Shape):
        return Case.of(config, point.operator, point.where, device)
    return model.case_of(point.operator, point.where, getattr(torch, config.dtype), device)


class Harness:
    """Measures points; remembers what it learned about each contestant."""

    def __init__(self, config: Config, clock: Clock, cold: ColdStarts) -> None:
        self.config, self.clock, self.cold = config, clock, cold
        self.oracles: dict[Case, Oracle] = {}
        self.verdicts: dict[tuple[str, str, Case], Verdict] = {}
        self.tuned: set[Kind] = set()

    def measure(self, point: Point) -> list[Row]:
        """A row for every contestant of the point, in their order."""
        case = _case(self.config, point, self.clock.device)
        rows = {c: self._admit(point, case, c) for c in point.contestants}
        ready = [c for c, row in rows.items() if row.status == "ok"]
        if isinstance(point.where, Shape):
            rows |= self._time_operator(point.level, case, {c: rows[c] for c in ready})
        else:
            rows |= {c: self._time_model(case, point.where, rows[c]) for c in ready}
        return [rows[c] for c in point.contestants]

    def _admit(self, point: Point, case: Case, contestant: str) -> Row:
        """A row that says ok, or why this contestant is not timed here."""
        name = split_label(contestant)
        row = Row(*point.key, contestant, "ok")
        if reason := CONTESTANTS[name].absent(case.device):
            return replace(row, status="absent", reason=reason)
        if reason := CONTESTANTS[name].declines(case):
            return replace(row, status="declined", reason=reason)
        level = "backward" if point.level == "backward" else "autograd"
        seconds = self._tune(name, level, case)
        verdict = self._verdict(name, level, case)
        cold_s = self.cold.of(name, case, seconds or verdict.seconds)
        return replace(
            row, status=verdict.status, reason=verdict.reason, errors=verdict.errors, cold_s=cold_s
        )

    def _tune(self, name: str, level: str, case: Case) -> float | None:
        """Lets a contestant that tunes meet the real size first, and returns the seconds this took.

        Tuned on the small case of the check, it would go on with picks that suit no real one.
        """
        adaptor = CONTESTANTS[name]
        key = kind_of(name, case)
        if not adaptor.tunes or key in self.tuned:
            return None
        self.tuned.add(key)
        try:
            start = time.perf_counter()
            run_once(adaptor, case, level, *case.inputs(self.config.seed))
            self.clock.wait()
            return time.perf_counter() - start
        except Exception as e:  # the check meets the same failure, or the point does not fit and is skipped
            survived(self.clock, e, name)
            return None

    def _verdict(self, name: str, level: str, case: Case) -> Verdict:
        small = case.small()
        if small not in self.oracles:
            self.oracles[small] = Oracle.of(case, self.config.seed)
        key = name, level, small
        if key not in self.verdicts:
            self.verdicts[key] = check(name, level, self.oracles[small], self.clock)
        return self.verdicts[key]

    def _time_operator(self, level: str, case: Case, rows: dict[str, Row]) -> dict[str, Row]:
        if self.config.timing.lead:
            self.clock.lead(0)  # allocates, before anyone asks what is free
        sets = input_sets(case, self.clock)
        needed, free = sets * case.floor_bytes, self.clock.free()
        if needed > free:
            return {c: _skipped(row, "inputs need", needed, free) for c, row in rows.items()}
        inputs = Inputs.of(case, self.clock, self.config.seed)
        samplers: dict[str, Sampler] = {}
        calls: dict[str, int] = {}
        first: tuple[str, Gradients] | None = None
        grads: Gradients | None = None
        for c, row in rows.items():
            name = split_label(c)
            each = self._verdict(name, level, case).bytes_per_token * case.tokens
            needed, free = int(each * (sets if level == "backward" else 1)), self.clock.free()
            if needed > free:
                rows[c] = _skipped(row, "needs", needed, free)
                continue
            try:
                sampler = SAMPLERS[level](CONTESTANTS[name], inputs, self.clock)
                calls[c] = calls_a_round(sampler, self.config.timing, self.clock)
                grads, workspace = sampler.gradients()
                first = first or (c, grads)
                reason = apart(grads, first[1], self.oracles[case.small()])
                reason = f"at this size, relative distance from {first[0]} {reason}" if reason else ""
                rows[c] = replace(row, workspace=workspace, saved=sampler.saved(), reason=reason)
                samplers[c] = sampler
            except Exception as e:  # one contestant's failure is a finding about it; the others go on
                survived(self.clock, e, c)
                rows[c] = _failed(row, e)
        first = grads = None  # what is timed has the memory to itself
        take_turns(samplers, calls, self.config.timing, self.clock)
        for c, sampler in samplers.items():
            backward, forward = sampler.spreads()
            rows[c] = replace(
                rows[c],
                time=backward,
                forward=forward,
                host_ms=self._host(median(sampler.host_ms)),
                floor_bytes=case.floor_bytes,
                floor_flops=case.floor_flops,
            )
        return rows

    def _time_model(self, case: Case, run: ModelRun, row: Row) -> Row:
        grid = self.config.model
        assert grid is not None
        name = split_label(row.contestant)
        needed = model.estimate(case, run, grid, self._verdict(name, "autograd", case).bytes_per_token)
        free = self.clock.free()
        if needed > free:
            return _skipped(row, "needs", needed, free)
        try:
            trainer = model.Trainer(CONTESTANTS[name], case, run, grid, self.clock, self.config.seed)
            step, host_ms, figures = model.measure(trainer, grid)
        except Exception as e:
            survived(self.clock, e, row.contestant)
            return _failed(row, e)
        return replace(row, time=step, host_ms=self._host(host_ms), model=figures)

    def _host(self, ms: float) -> float | None:
        return ms if self.clock.asynchronous else None


def _skipped(row: Row, what: str, needed: int, free: int) -> Row:
    reason = f"{what} about {results.readable(needed)}, {results.readable(free)} are free"
    return replace(row, status="skipped", reason=reason)


def _failed(row: Row, e: Exception) -> Row:
    if isinstance(e, torch.OutOfMemoryError):
        return replace(row, status="skipped", reason=f"out of memory: {first_line(e)[:200]}")
    return replace(row, status="failed", reason=f"{type(e).__name__}: {first_line(e)[:200]}")


def _summary(rows: list[Row]) -> str:
    parts = (
        f"{row.contestant} {row.time.median:.3g} ms" if row.time else f"{row.contestant} {row.status}"
        for row in rows
    )
    return ", ".join(parts)
