"""The benchmark harness on a CPU: who is timed, who is not and why, and what is left on disk."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from rewy.bench import harness, report, results, tables
from rewy.bench.check import Oracle, check
from rewy.bench.clock import LONGEST_LEAD, DeviceClock, HostClock
from rewy.bench.cold import ColdStarts
from rewy.bench.config import Config, ModelGrid, ModelRun, Timing
from rewy.bench.contestants import CONTESTANTS, Rewy, leaves
from rewy.bench.levels import Inputs, Sampler, calls_a_round, take_turns
from rewy.bench.results import FILE, Row, Spread
from rewy.bench.workload import Case, nbytes
from rewy.problem import Options, describe

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "title": "small",
    "device": "cpu",
    "dtype": "float32",
    "levels": ["backward", "autograd"],
    "operators": ["gated_delta_rule"],
    "contestants": ["rewy", "rewy-conventional"],
    "baseline": "rewy-conventional",
    "shapes": [{"B": 1, "T": 100, "H": 1, "K": 16, "V": 16}],
    "timing": {"warmup": 1, "rounds": 3, "seconds": 0.01},
}


def config(**changes: Any) -> Config:
    return Config.model_validate(SMALL | changes)


def run(path: Path, config: Config, **how: Any) -> tuple[harness.Outcome, list[Row]]:
    outcome = harness.run(config, path, command="test", say=lambda line: None, **how)
    return outcome, results.load(path).rows


@dataclass(frozen=True)
class Wrong(Rewy):
    """Forgets a twentieth of dk."""

    def prepare(self, case: Any, x: Any) -> Any:
        backward = super().prepare(case, x)

        def wrong(do: Any, dht: Any) -> Any:
            grads = backward(do, dht)
            return grads._replace(k=0.95 * grads.k)

        return wrong


@dataclass(frozen=True)
class Slow(Rewy):
    def prepare(self, case: Any, x: Any) -> Any:
        backward = super().prepare(case, x)

        def slow(do: Any, dht: Any) -> Any:
            time.sleep(1000)
            return backward(do, dht)

        return slow


@dataclass(frozen=True)
class Picky(Rewy):
    def declines(self, case: Any) -> str | None:
        return f"takes no {case.operator.title}"


@dataclass(frozen=True)
class Raising(Rewy):
    def prepare(self, case: Any, x: Any) -> Any:
        raise RuntimeError("no such kernel\nand a long story")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTESTANTS, "wrong", Wrong())
    monkeypatch.setitem(CONTESTANTS, "slow", Slow())
    monkeypatch.setitem(CONTESTANTS, "raising", Raising())
    monkeypatch.setitem(CONTESTANTS, "picky", Picky())


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Whoever sleeps sets the clock forward instead, each time by 2 % longer: no other work here lasts as long."""
    slept: list[float] = []
    seconds = time.perf_counter
    monkeypatch.setattr(time, "sleep", lambda s: slept.append(s * (1 + len(slept) / 50)))
    monkeypatch.setattr(time, "perf_counter", lambda: seconds() + sum(slept))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(time.perf_counter() * 1e9))
    return slept


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test looks at what is measured here; the others need not wait for it."""
    found = {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}
    monkeypatch.setattr(harness, "ceilings", lambda clock, dtype: found)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> results.Results:
    """One small run that several tests read."""
    path = tmp_path_factory.mktemp("small") / FILE
    both = config(operators=["delta_rule", "gated_delta_rule", "kda", "gdn2"], levels=["autograd"])
    harness.run(both, path, command="test", say=lambda line: None)
    return results.load(path)


def test_every_row_has_its_figures(measured: results.Results) -> None:
    assert [row.status for row in measured.rows] == ["ok"] * 8
    for row in measured.rows:
        assert row.time and row.forward and row.time.q1 <= row.time.median <= row.time.q3
        assert row.time.n >= 3
        assert row.workspace and row.workspace > 0
        assert row.cold_s and row.floor_bytes and row.floor_flops
        assert 0 < max(row.errors.values()) < 1e-5
        assert all(0 < share < 1.5 for share in tables.shares(row, measured))
    assert measured.header["schema"] == results.SCHEMA
    assert {"machine", "versions", "commit", "command", "config"} <= measured.header.keys()
    assert 1e8 < measured.header["ceilings"]["copy_bytes_per_s"] < 1e13
    assert 1e8 < measured.header["ceilings"]["matmul_flops_per_s"] < 1e16


def test_a_commit_that_is_named_comes_before_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWY_COMMIT", "0123456789ab")
    assert results.commit() == "0123456789ab"
    monkeypatch.setenv("REWY_COMMIT", "")
    assert re.fullmatch(r"[0-9a-f]{12,}(-dirty)?|unknown", results.commit())


@pytest.mark.usefixtures("planted", "sleeps")
def test_a_wrong_contestant_is_not_timed_and_a_slow_one_ranks_last(tmp_path: Path) -> None:
    names = ["rewy", "wrong", "slow", "raising", "rewy-conventional", "fla", "picky"]
    _, rows = run(tmp_path / FILE, config(contestants=names, levels=["backward"]))
    found = {row.contestant: row for row in rows}
    assert found["wrong"].status == "wrong" and found["wrong"].time is None
    assert "relative error dk 5.0e-02 > " in found["wrong"].reason
    assert found["raising"].status == "failed"
    assert found["raising"].reason == "RuntimeError: no such kernel"
    assert found["fla"].status == "absent" and "runs on cuda and npu, not on cpu" in found["fla"].reason
    assert (found["picky"].status, found["picky"].reason) == ("declined", "takes no GDN")
    timed = {name: row.time.median for name, row in found.items() if row.time}
    assert max(timed, key=lambda name: timed[name]) == "slow" and timed["slow"] >= 1_000_000
    assert set(timed) == {"rewy", "slow", "rewy-conventional"}
    page = tables.report([results.load(tmp_path / FILE)])
    assert "- wrong: wrong (everywhere): relative error dk" in page
    assert "| GDN | 1×100 H1 K16 |" in page


def test_a_contestant_that_tunes_meets_the_real_size_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []

    class Tuning(Rewy):
        tunes = True

        def call(self, case: Any, x: Any, final_state: bool) -> Any:
            met.append(case.T)
            return super().call(case, x, final_state)

    monkeypatch.setitem(CONTESTANTS, "tuning", Tuning())
    shapes = [{"T": T, "H": 1, "K": 16, "V": 16} for T in (300, 400)]
    _, rows = run(tmp_path / FILE, config(contestants=["tuning"], baseline="tuning", shapes=shapes))
    assert [row.status for row in rows] == ["ok"] * 4
    assert met[0] == 300 and min(met) == 176
    assert met.index(400) > met.index(176)  # one kind of case, tuned once


def test_gradients_that_differ_at_the_timed_size_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateWrong(Wrong):
        """Right where it is checked."""

        def prepare(self, case: Any, x: Any) -> Any:
            return super().prepare(case, x) if case.T > 176 else Rewy.prepare(self, case, x)

    monkeypatch.setitem(CONTESTANTS, "late", LateWrong())
    shapes = [{"T": T, "H": 1, "K": 16, "V": 16} for T in (100, 300)]
    names = ["rewy", "rewy-conventional", "late"]
    _, rows = run(tmp_path / FILE, config(contestants=names, shapes=shapes))
    assert all(row.status == "ok" and row.time for row in rows)
    told = "at this size, relative distance from rewy dk 5.0e-02"
    assert {(row.contestant, row.level, row.shape, row.reason) for row in rows if row.reason} == {
        ("late", "backward", "1×300 H1 K16", told)
    }
    assert f"- late: ok (GDN 1×300 H1 K16): {told}" in tables.report([results.load(tmp_path / FILE)])


@pytest.mark.usefixtures("planted")
def test_the_same_contestant_twice_takes_the_same_time(tmp_path: Path, sleeps: list[float]) -> None:
    """Though the machine slows down all the while: everyone is first as often as last."""
    timing = {"warmup": 1, "rounds": 4, "seconds": 0.01}
    twice = config(contestants=["slow", "slow#2"], baseline="slow", levels=["backward"], timing=timing)
    _, rows = run(tmp_path / FILE, twice)
    assert [row.time.n for row in rows if row.time] == [4, 4]
    assert sleeps[-1] / sleeps[-8] > 1.1
    assert tables.speedup(rows[1], rows[0]) == pytest.approx(1, abs=0.005)


def test_what_the_forward_keeps_is_counted(tmp_path: Path) -> None:
    shape = {"T": 70, "H": 2, "K": 16, "V": 16}
    names = ["rewy", "rewy-kept"]
    _, rows = run(tmp_path / FILE, config(contestants=names, baseline="rewy", shapes=[shape], chunk_size=64))
    found = {(row.level, row.contestant): row.saved for row in rows}
    assert found["backward", "rewy"] is None
    chunks, heads, C, K, V, width = 2, 2, 64, 16, 16, 4
    states = chunks * heads * width * (K * V + C * V)
    assert found["autograd", "rewy-kept"] - found["autograd", "rewy"] >= states


@pytest.mark.parametrize("operator", ["delta_rule", "gated_delta_rule", "kda", "gdn2"])
@pytest.mark.parametrize("packed", [False, True])
def test_adaptors_agree_with_the_recurrence_at_both_levels(operator: str, packed: bool) -> None:
    size = {"lengths": [60, 43]} if packed else {"B": 2, "T": 70}
    shape = size | {"H": 1, "HV": 2, "K": 16, "V": 24}
    chosen = config(shapes=[shape], chunk_size=32, initial_state=True)
    case = Case.of(chosen, operator, chosen.shapes[0], CPU)
    oracle = Oracle.of(case, seed=0)
    assert "dh0" in oracle.exact
    for name in ("rewy", "rewy-conventional", "reference-autograd"):
        for level in ("backward", "autograd"):
            verdict = check(name, level, oracle, HostClock())
            assert (verdict.status, verdict.reason) == ("ok", "")
            assert verdict.bytes_per_token > 0


@pytest.mark.parametrize("operator", ["delta_rule", "gated_delta_rule", "kda", "gdn2"])
def test_a_case_knows_its_problem_and_its_bytes(operator: str) -> None:
    chosen = config(shapes=[{"lengths": [60, 43], "H": 1, "HV": 2, "K": 16, "V": 24}], initial_state=True)
    case = Case.of(chosen, operator, chosen.shapes[0], CPU)
    x, do = case.operands(seed=1), case.output_gradient(seed=2)
    options = Options(case.scale, 64, True, "rewy")
    assert case.problem(options) == describe(x, options)
    assert case.floor_bytes == 2 * nbytes(x._replace(cu_seqlens=None, cu_seqlens_cpu=None)) + do.nbytes
    assert torch.equal(case.operands(1).q, x.q) and not torch.equal(case.operands(3).q, x.q)
    assert (leaves(x).q.requires_grad, leaves(x).cu_seqlens) == (True, x.cu_seqlens)


def test_flops_count_chunks_of_every_sequence() -> None:
    chosen = config(shapes=[{"lengths": [60, 70], "H": 1, "K": 16, "V": 16}])
    case = Case.of(chosen, "kda", chosen.shapes[0], CPU)
    one = 2 * (8 * 64 * 16 * 16 + 10 * 64 * 64 * 16)
    assert case.floor_flops == 3 * one  # 60 tokens are one chunk, 70 are two


def test_what_does_not_fit_is_skipped_with_the_estimate(tmp_path: Path) -> None:
    class Crowded(HostClock):
        def free(self) -> int:
            return 3 * 400 * 464  # three times the 464 bytes a token that the smaller case must move

        def cache_bytes(self) -> int:
            return 0

    huge = {"B": 4096, "T": 4096, "H": 2, "K": 16, "V": 16}
    middle = {"B": 1, "T": 400, "H": 1, "K": 16, "V": 16}
    chosen = config(shapes=[huge, middle], levels=["autograd"])
    crowded = harness.Harness(chosen, Crowded(), ColdStarts())
    rows = [row for point in harness.plan(chosen) for row in crowded.measure(point)]
    assert [row.status for row in rows] == ["skipped"] * 4
    assert [row.reason for row in rows[:2]] == ["inputs need about 29.00 GiB, 0.5 MiB are free"] * 2
    assert all(re.fullmatch(r"needs about \d\.\d MiB, 0\.5 MiB are free", row.reason) for row in rows[2:])


def test_out_of_memory_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Rewy):
        def call(self, case: Any, x: Any, final_state: bool) -> Any:
            if case.T > 200:
                raise torch.OutOfMemoryError("tried to allocate too much")
            return super().call(case, x, final_state)

    monkeypatch.setitem(CONTESTANTS, "full", Full())
    shape = {"T": 300, "H": 1, "K": 16, "V": 16}
    _, rows = run(
        tmp_path / FILE,
        config(contestants=["full", "rewy"], baseline="rewy", shapes=[shape], levels=["autograd"]),
    )
    assert [row.status for row in rows] == ["skipped", "ok"]
    assert rows[0].reason == "out of memory: tried to allocate too much"


@pytest.mark.usefixtures("planted")
def test_a_broken_device_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: HostClock) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patched:
        patched.setattr(HostClock, "wait", wait)
        outcome, rows = run(tmp_path / FILE, config(contestants=["raising", "rewy"], baseline="rewy"))
    assert (
        outcome.stopped == "stopped by RuntimeError: raising broke the device: RuntimeError: no such kernel"
    )
    assert (outcome.finished, rows) == (0, [])


class Interrupting:
    """Stands in for `Harness.measure`: a KeyboardInterrupt at the given call."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.original = harness.Harness.measure

    def __call__(self, this: harness.Harness, point: harness.Point) -> list[Row]:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.original(this, point)


def test_an_interrupted_run_keeps_finished_points_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE
    stop = Interrupting(at=2)
    with monkeypatch.context() as patched:
        patched.setattr(harness.Harness, "measure", lambda this, point: stop(this, point))
        outcome, rows = run(path, config())
    assert (outcome.finished, outcome.total, outcome.stopped) == (1, 2, "interrupted")
    assert [row.level for row in rows] == ["backward"] * 2
    kept = path.read_text()
    half = replace(rows[0], level="autograd", status="skipped")
    results.append(path, [half])
    with path.open("a") as file:
        file.write('{"kind": "row", "level": "auto')  # what an abrupt end leaves of a point
    with pytest.raises(ValueError, match=r"results\.jsonl:5: cut off here"):
        results.load(path)
    outcome, rows = run(path, config(), resume=True)
    assert (outcome.finished, outcome.stopped) == (2, "")
    assert [row.level for row in rows] == ["backward"] * 2 + ["autograd"] * 2
    assert [row.status for row in rows] == ["ok"] * 4
    assert path.read_text().startswith(kept)
    assert run(path, config(), resume=True)[1] == rows


def test_a_time_limit_stops_between_points(tmp_path: Path) -> None:
    outcome, rows = run(tmp_path / FILE, config(), deadline=time.monotonic() - 1)
    assert (outcome.finished, outcome.stopped, rows) == (0, "time limit reached", [])


def test_parts_measured_apart_join_into_what_one_run_gives(tmp_path: Path) -> None:
    both = config(operators=("gated_delta_rule", "kda"), levels=("autograd",))
    for operator in both.operators:
        outcome, rows = run(tmp_path / operator / FILE, both, alone=(operator,))
        assert (outcome.finished, outcome.total) == (1, 1)
        assert {row.operator for row in rows} == {operator}
    parts = [results.load(tmp_path / operator) for operator in both.operators]
    whole = tmp_path / "whole" / FILE
    results.join(parts, whole)
    assert results.load(whole).rows == parts[0].rows + parts[1].rows
    results.join(parts[::-1], tmp_path / "reversed" / FILE)  # the order is the configuration's
    assert results.load(tmp_path / "reversed").rows == results.load(whole).rows
    outcome, _ = run(whole, both, resume=True)
    assert (outcome.finished, outcome.total) == (2, 2)
    with pytest.raises(FileExistsError):
        results.join(parts, whole)
    with pytest.raises(ValueError, match="a point stands in two of the parts"):
        results.join([parts[0], parts[0]], tmp_path / "twice" / FILE)
    run(tmp_path / "other" / FILE, config(operators=("kda",)), deadline=time.monotonic() - 1)
    with pytest.raises(ValueError, match=r"are of different runs: config: .*operators was"):
        results.join([parts[0], results.load(tmp_path / "other")], tmp_path / "mixed" / FILE)
    assert not (tmp_path / "twice").exists() and not (tmp_path / "mixed").exists()


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    path = tmp_path / FILE
    run(path, config(), deadline=time.monotonic() - 1)
    with pytest.raises(ValueError, match=r"made with another config: seed was 0, is 1"):
        run(path, config(seed=1), resume=True)
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["versions"]["torch"] = "0.0"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(ValueError, match=r"another versions: torch was '0\.0', is "):
        run(path, config(), resume=True)


def older(path: Path) -> None:
    """Takes from a results file what its header would not have said before there were leads."""
    head, *rows = path.read_text().splitlines(keepends=True)
    header = json.loads(head)
    del header["config"]["timing"]["lead"]
    path.write_text("".join([json.dumps(header) + "\n", *rows]))


def test_results_from_before_there_were_leads_had_none(tmp_path: Path) -> None:
    path = tmp_path / "old" / FILE
    without = config(levels=["autograd"], timing=SMALL["timing"] | {"lead": False})
    _, rows = run(path, without)
    older(path)
    old = results.load(path)
    assert old.rows == rows and old.header["config"]["timing"]["lead"] is False
    with pytest.raises(ValueError, match=r"config: timing was .*'lead': False.*, is .*'lead': True"):
        run(path, config(levels=["autograd"]), resume=True)
    assert run(path, without, resume=True)[1] == rows  # the same method
    tables.report([old])

    run(tmp_path / "new" / FILE, config(levels=["autograd"]))
    new = results.load(tmp_path / "new")
    assert "lead" not in tables.compare(old, new)  # a CPU has none
    there, then = (
        replace(r, header=r.header | {"config": r.header["config"] | {"device": "cuda"}}) for r in (new, old)
    )
    said = "B was timed behind a lead (levels backward and autograd), A was not"
    assert said in tables.compare(then, there)
    assert "A was timed behind a lead" in tables.compare(there, then)
    assert all("was timed behind" not in tables.compare(r, r) for r in (then, there))
    assert tables.machine_note([then]).endswith(" Timed without a lead.")
    assert tables.machine_note([there]).endswith(" Timed behind a lead.")
    with pytest.raises(ValueError, match=r"are of different runs: config: timing was"):
        results.join([old, new], tmp_path / "mixed" / FILE)


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / FILE
    run(path, config(), deadline=time.monotonic() - 1)
    with pytest.raises(FileExistsError):
        run(path, config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h | {"schema": 99}, r"has schema version 99; this version of rewy reads 1"),
        (lambda h: h | {"kind": "row"}, r":1: not a results file"),
        (lambda h: [h], r":1: not a JSON object"),
    ],
)
def test_foreign_files_are_refused(
    measured: results.Results, tmp_path: Path, change: Any, message: str
) -> None:
    (tmp_path / FILE).write_text(json.dumps(change(measured.header)) + "\n")
    with pytest.raises(ValueError, match=message):
        results.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not JSON"),
        ('{"kind": "row", "level": "backward"}', r":2: .*missing 4 required"),
        ('{"kind": "row", "level": "a", "operator": "b", "shape": "c", "contestant": "d", "status": "fine"}',
         r":2: status must be one of ok, wrong, absent, declined, skipped, failed, got 'fine'"),
        ('{"kind": "column"}', r":2: not a row"),
    ],
)  # fmt: skip
def test_broken_rows_are_named(measured: results.Results, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(measured.header) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        results.load(tmp_path)


def test_rows_survive_the_file(measured: results.Results, tmp_path: Path) -> None:
    path = tmp_path / FILE
    results.create(path, measured.header)
    results.append(path, measured.rows)
    assert results.load(path).rows == measured.rows


def test_host_memory_is_the_allocators() -> None:
    def call(a: torch.Tensor) -> torch.Tensor:
        b = a + 1  # 4 MB
        c = b * 2  # 4 MB more, the peak
        del b
        return c.sum()

    _, peak = HostClock().peak(lambda: (torch.zeros(1 << 20),), call)
    assert 8 << 20 <= peak < (8 << 20) + 4096


class FakeDevice:
    """What torch.cuda and torch.npu have in common, computed on the host."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, later: FakeDevice.Event) -> float:
            assert FakeDevice.waited
            return (later.at - self.at) * 1e3

    waited = True

    def synchronize(self) -> None:
        FakeDevice.waited = True

    def memory_allocated(self) -> int:
        return 1 << 20

    def max_memory_allocated(self) -> int:
        return 3 << 20

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 26  # a lead reads a buffer of a 64th

    def get_device_properties(self, device: torch.device) -> object:
        return object()

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


@pytest.mark.parametrize("lead", [True, False])
def test_the_device_clock_measures_through_events(monkeypatch: pytest.MonkeyPatch, lead: bool) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: FakeDevice())
    chosen = config(timing=SMALL["timing"] | {"lead": lead})
    rows = [
        row
        for point in harness.plan(chosen)
        for row in harness.Harness(chosen, DeviceClock(CPU), ColdStarts()).measure(point)
    ]
    assert [row.status for row in rows] == ["ok"] * 4
    grads = 4 * 100 * (3 * 16 + 2)
    for row in rows:
        assert row.time and row.host_ms
        assert lead or row.host_ms >= 0.9 * row.time.q1  # with a lead they are of different samples
        assert row.workspace == (2 << 20) - grads


def test_a_lead_reads_as_long_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a millisecond a read, here: what is calibrated is asked for, rounded up, without a wait."""
    reads: list[int] = []
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    monkeypatch.setattr(torch.Tensor, "sum", lambda self: reads.append(self.nbytes))
    monkeypatch.setattr(time, "perf_counter", lambda: len(reads) / 1e3)
    clock = DeviceClock(CPU)
    assert not reads
    clock.lead(0)
    calibrating = len(reads)
    assert {*reads} == {1 << 20} and calibrating > 0
    monkeypatch.setattr(device, "synchronize", lambda: pytest.fail("a lead waited"), raising=False)
    clock.lead(2.5)
    assert len(reads) == calibrating + 3
    clock.lead(0)
    assert len(reads) == calibrating + 3


class Beside(HostClock):
    """A device that works beside the host, on a time of our own: a mark is when the device gets there."""

    asynchronous = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free_at = 0.0  # milliseconds, of the host and of the device
        self.log: list[Any] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now / 1e3)

    def work(self, ms: float) -> None:
        self.free_at = max(self.free_at, self.now) + ms

    def mark(self) -> Any:
        self.log.append("mark")
        self.work(0)
        return self.free_at

    def between(self, start: Any, stop: Any) -> float:
        return float(stop - start)

    def wait(self) -> None:
        self.log.append("wait")
        self.now = max(self.now, self.free_at)

    def lead(self, ms: float) -> None:
        self.log.append(ms)
        self.now += 0.1  # which nobody counts
        self.work(ms)


class Launching(Sampler):
    """Keeps the host for `host` ms in the forward and again in the backward, the device for 0.25 ms in each."""

    host, waits = 1.0, False

    def arguments(self, i: int) -> tuple[Any, ...]:
        self.clock.log.append("arguments")
        return ()

    def run(self, i: int, *arguments: Any) -> tuple[Any, ...]:
        marks = [self.clock.mark()]
        for _ in range(2):
            if self.waits:
                self.clock.wait()
            self.clock.now += self.host
            self.clock.work(0.25)
            marks.append(self.clock.mark())
        return tuple(marks)


def sampled(sampler: Sampler, **timing: Any) -> tuple[float, float, float]:
    """(forward, backward, host) as a point has them."""
    chosen = Timing(seconds=0.1, rounds=4, **timing)
    calls = {"it": calls_a_round(sampler, chosen, sampler.clock)}
    take_turns({"it": sampler}, calls, chosen, sampler.clock)
    backward, forward = sampler.spreads()
    assert forward is not None and backward.n == forward.n == 4 * calls["it"]
    return forward.median, backward.median, harness.median(sampler.host_ms)


NO_INPUTS = Inputs(None, [None, None], [None, None])  # type: ignore[arg-type, list-item]


def test_behind_a_lead_marks_show_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Launching(Rewy(), NO_INPUTS, Beside(monkeypatch))
    assert sampled(sampler) == pytest.approx((0.25, 0.25, 2.0))
    assert sampler.lead_ms == pytest.approx(1.5 * 2.0)
    log = sampler.clock.log
    leads = [i for i, entry in enumerate(log) if isinstance(entry, float)]
    assert len(leads) > 4
    for i in leads:
        assert log[i] == sampler.lead_ms
        assert log[i - 2 : i] == ["arguments", "wait"] and log[i + 1] == "mark"


def test_without_a_lead_marks_show_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Launching(Rewy(), NO_INPUTS, Beside(monkeypatch))
    assert sampled(sampler, lead=False) == pytest.approx((1.0, 1.0, 2.0))
    assert not any(isinstance(entry, float) for entry in sampler.clock.log)


def test_who_waits_for_the_device_gets_no_help_from_a_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Launching(Rewy(), NO_INPUTS, Beside(monkeypatch))
    sampler.waits = True
    forward, backward, host = sampled(sampler)
    assert (forward, backward) == pytest.approx((1.25, 1.25))
    assert host == pytest.approx(2.25)  # and its host is not said to have taken the lead's time


def test_a_lead_stays_within_the_launch_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Launching(Rewy(), NO_INPUTS, Beside(monkeypatch))
    sampler.host = 1000.0
    sampled(sampler)
    assert sampler.lead_ms == LONGEST_LEAD


def test_the_host_clock_has_no_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Beside(monkeypatch)
    clock.asynchronous = False
    sampler = Launching(Rewy(), NO_INPUTS, clock)
    sampled(sampler)
    assert sampler.lead_ms == 0 and not any(isinstance(entry, float) for entry in clock.log)


def test_a_lead_allocates_before_memory_is_counted() -> None:
    asked: list[str] = []

    class Asked(HostClock):
        def lead(self, ms: float) -> None:
            asked.append("lead")

        def free(self) -> int:
            asked.append("free")
            return super().free()

    for lead, first in ((True, "lead"), (False, "free")):
        asked.clear()
        chosen = config(levels=["autograd"], timing=SMALL["timing"] | {"lead": lead})
        harness.Harness(chosen, Asked(), ColdStarts()).measure(harness.plan(chosen)[0])
        assert asked[0] == first and ("lead" in asked) is lead


def test_spread_of_one_and_of_many() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)


def row(contestant: str, ms: float | None, operator: str = "kda", shape: str = "1×64 H1 K16") -> Row:
    status = "ok" if ms else "declined"
    time = Spread(ms, ms, ms, 1) if ms else None
    return Row("backward", operator, shape, contestant, status, "" if ms else "too small", time)


def test_tables_compute_speedups_and_geometric_means(measured: results.Results) -> None:
    rows = [
        row("rewy-conventional", 8.0), row("rewy", 2.0),
        row("rewy-conventional", 9.0, shape="b"), row("rewy", 9.0, shape="b"),
        row("rewy-conventional", 9.0, shape="c"), row("rewy", None, shape="c"),
    ]  # fmt: skip
    table = tables.time_table([replace(measured, rows=rows)], "backward")
    assert table.splitlines() == [
        "| operator | shape | rewy-conventional (baseline) | rewy |",
        "| --- | --- | ---: | ---: |",
        "| KDA | 1×64 H1 K16 | 8.00 ms | 2.00 ms (4.00×) |",
        "| KDA | b | 9.00 ms | 9.00 ms (1.00×) |",
        "| KDA | c | 9.00 ms | declined |",
        "| KDA | **geometric mean** |  | **2.00×** |",
    ]
    assert tables.reasons([replace(measured, rows=rows)], "backward") == "- rewy: declined (KDA c): too small"
    assert tables.factor_table([replace(measured, rows=rows)], "backward").splitlines() == [
        "| operator | contestant | shapes | geometric mean | least | most |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| KDA | rewy | 2 | **2.00×** | 1.00× (b) | 4.00× (1×64 H1 K16) |",
    ]


def test_compare_shows_both_and_what_only_one_has(measured: results.Results) -> None:
    a = replace(measured, rows=[row("rewy", 4.0), row("rewy", 3.0, shape="b")])
    b = replace(measured, rows=[row("rewy", 2.0), row("rewy", 3.0, operator="gdn2")])
    text = tables.compare(a, b)
    assert "| backward | KDA | 1×64 H1 K16 | rewy | 4.00 (4.00–4.00) | 2.00 (2.00–2.00) | 2.00× |" in text
    assert "Only in A:\n- backward · kda · b · rewy" in text
    assert "Only in B:\n- backward · gdn2 · 1×64 H1 K16 · rewy" in text


def test_csv_has_a_line_a_row(measured: results.Results) -> None:
    lines = tables.to_csv(measured).splitlines()
    assert len(lines) == 9
    first = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert first["contestant"] == "rewy" and float(first["ms"]) > 0 and 0 < float(first["copy_share"]) < 1.5


def test_plots_are_pictures(measured: results.Results, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    many = [replace(r, shape=s) for s in (measured.rows[0].shape, "b", "c") for r in measured.rows]
    for rows in (measured.rows, many):
        written = report.draw([replace(measured, rows=rows)], folder)
        assert [p.name for p in written] == ["autograd.png"]
        assert written[0].read_bytes().startswith(b"\x89PNG")


def test_markers_are_filled_and_kept(measured: results.Results) -> None:
    found = {"small": measured}
    text = "before\n<!-- rewy:report small autograd -->\nold\n<!-- /rewy:report -->\nafter\n"
    filled = report.rebuilt(text, found, "README.md")
    assert tables.time_table([measured], "autograd") in filled
    assert filled.startswith("before\n<!-- rewy:report small autograd -->\n") and filled.endswith(
        "-->\nafter\n"
    )
    assert report.rebuilt(filled, found, "README.md") == filled
    assert tables.machine_note([measured]) in report.rebuilt(
        text.replace(" autograd", ""), found, "README.md"
    )
    for view in tables.VIEWS:
        report.rebuilt(text.replace("autograd -->", f"autograd {view} -->"), found, "README.md")


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("big autograd", r"README\.md:2: unknown result set 'big'; known: small"),
        ("small forward", r"README\.md:2: unknown level 'forward'; known: backward, autograd, model"),
        ("small autograd colour", r"README\.md:2: unknown view 'colour'; known: time, factors"),
        (
            "small autograd time now",
            r"README\.md:2: a marker reads SETS \[LEVEL \[VIEW\]\], got 'small autog",
        ),
    ],
)
def test_bad_markers_are_named(measured: results.Results, marker: str, message: str) -> None:
    text = f"\n<!-- rewy:report {marker} -->\n<!-- /rewy:report -->\n"
    with pytest.raises(ValueError, match=message):
        report.rebuilt(text, {"small": measured}, "README.md")


def test_an_open_marker_is_named(measured: results.Results) -> None:
    with pytest.raises(ValueError, match=r"README\.md:1: the block has no <!-- /rewy:report -->"):
        report.rebuilt("<!-- rewy:report small autograd -->\n", {"small": measured}, "README.md")


def test_model_level_trains_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rewy.bench import model

    monkeypatch.setitem(model.SIZES, "30M", model.Layout(layers=2, heads=1))
    grid = ModelGrid(runs=(ModelRun(size="30M", B=2, T=96),), steps=4, warmup=1, vocabulary=256)
    chosen = config(levels=["model"], operators=["gdn2"], shapes=[], model=grid.model_dump())
    _, rows = run(tmp_path / FILE, chosen)
    assert [row.status for row in rows] == ["ok", "ok"], rows
    ours, base = (row.model for row in rows)
    assert ours and base
    assert ours.parameters == base.parameters > 256 * 128
    assert 0 < ours.operator_share < 1
    assert ours.peak_bytes > 12 * ours.parameters
    assert len(ours.losses) == 5 and ours.losses[-1] < ours.losses[0]
    assert ours.losses == pytest.approx(base.losses, abs=1e-4)
    page = tables.report([results.load(tmp_path / FILE)])
    assert "| GDN2 | 30M 2×96 | rewy-conventional |" in page and "tokens/s" in page


@pytest.mark.parametrize("size", ["30M", "130M", "370M", "1.3B"])
def test_model_sizes_are_what_they_are_called(size: str) -> None:
    from rewy.bench import model
    from rewy.problem import OPERATORS

    stated = float(size[:-1]) * (1e9 if size.endswith("B") else 1e6)
    with torch.device("meta"):
        decoder = model.Decoder(OPERATORS["gated_delta_rule"], model.SIZES[size], 32768, lambda x: x.v)
    assert sum(p.numel() for p in decoder.parameters()) == pytest.approx(stated, rel=0.08)


def test_compiling_ahead_leaves_no_cold_start_to_be_seen(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = harness.run(
        config(levels=["autograd"], contestants=["rewy", "rewy#2", "fla"], baseline="rewy"),
        tmp_path / FILE, command="test", say=said.append, workers=2,
    )  # fmt: skip
    assert outcome.finished == 1
    assert said[0] == "compiling for 1 cases in 2 processes"  # once for both labels, not for who is absent
    assert re.fullmatch(r"  \d+ s", said[1])
    assert [row.cold_s for row in results.load(tmp_path / FILE).rows] == [None] * 3


def test_the_checks_sizes_are_compiled_ahead_too() -> None:
    shapes = [{"B": 4, "T": T, "H": 1, "K": 16, "V": 16} for T in (300, 400)]
    chosen = config(contestants=["rewy", "rewy#2", "fla"], baseline="rewy", shapes=shapes)
    points = harness.plan(chosen)
    asked = harness._to_compile(chosen, points, CPU)
    assert [(name, case.B, case.T) for name, case in asked] == [
        ("rewy", 4, 300), ("rewy", 2, 176), ("rewy", 4, 400),
    ]  # fmt: skip
    case = Case.of(chosen, "kda", chosen.shapes[0], CPU)
    assert [needed.B for needed in CONTESTANTS["fla"].to_compile(case)] == [4, 2]


def test_a_task_in_a_process_of_its_own_may_print() -> None:
    code = """
import os
from rewy.bench import cold
def task(a, b):
    print("from Python", flush=True)
    os.system("echo from a compiler")
    return [a, b]
cold._answer(task)
"""
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(("x", "y")), capture_output=True)
    assert json.loads(done.stdout) == ["x", "y"]
    assert done.stderr.split(b"\n")[:2] == [b"from Python", b"from a compiler"]


def test_the_h200_script_compiles_on_all_cores() -> None:
    script = Path(__file__).parents[1] / "scripts" / "bench_h200.sh"

    def said(*command: str, **environment: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        return subprocess.check_output(command, env=inherited | environment, text=True)

    command = said("bash", str(script), "out", PYTHON="echo", OMP_NUM_THREADS="1")
    assert command.endswith(f"--time-limit 540 --workers {said('nproc')}")


def test_the_first_cold_start_stays() -> None:
    chosen, cold = config(), ColdStarts()
    case = Case.of(chosen, "gated_delta_rule", chosen.shapes[0], CPU)
    assert cold.of("rewy", case, None) is None
    assert cold.of("rewy", case, 2.0) == cold.of("rewy", case, 1.0) == 2.0


def test_compiling_ahead_says_what_went_wrong() -> None:
    case = Case.of(config(), "gated_delta_rule", config().shapes[0], CPU)
    said: list[str] = []
    ColdStarts().compile_ahead([("fla", case), ("rewy", case)], 2, None, said.append)
    assert said[1:-1] == ["  fla, GDN: RuntimeError: runs on cuda and npu, not on cpu"]
    ColdStarts().compile_ahead([("rewy", case)], 1, time.monotonic(), said.append)
    assert said[-2] == "  compile: stopped after 0 s"


def test_tuned_kernels_are_compiled_in_parts_and_not_run() -> None:
    triton = pytest.importorskip("triton")
    from rewy.bench.contestants import compiling_only

    compiled: list[tuple[int, dict[str, Any]]] = []

    class Kernel:
        arg_names = ("x", "BLOCK")

        @staticmethod
        def fn(x: int, BLOCK: int) -> None: ...  # Triton looks for a function, and its name

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            assert warmup and (args, grid) == ((5,), (1,))
            compiled.append((options.pop("BLOCK"), options))
            if options["num_warps"] == 4:
                raise RuntimeError("out of registers")

    sizes = [16, 32, 64]
    configs = [triton.Config({"BLOCK": size}, num_warps=warps) for size in sizes for warps in (4, 8)]
    tuner = triton.autotune(configs, key=[])(Kernel())
    tune = type(tuner).run
    for part in range(4):
        met: dict[str, int] = {}
        with compiling_only(lambda what, part=part, met=met: met.setdefault(what, len(met)) % 4 == part):
            tuner[(1,)](5)
        assert len(met) == 6
    assert type(tuner).run is tune
    assert sorted((size, options["num_warps"]) for size, options in compiled) == [
        (size, warps) for size in sizes for warps in (4, 8)
    ]


def test_of_kernels_tuned_before_the_pick_alone_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from rewy.bench.contestants import compiling_only

    compiled: list[int] = []

    class Kernel:
        arg_names = ("x", "BLOCK")

        @staticmethod
        def fn(x: int, BLOCK: int) -> None: ...

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            compiled.append(options["BLOCK"])

    configs = [triton.Config({"BLOCK": size}) for size in (16, 32, 64)]
    tuner = triton.autotune(configs, key=["x"])(Kernel())

    def on_disk(key: Any, given: Any, tune: Any) -> bool:
        if key != (5,):
            tune()
        tuner.cache[key] = given[1]
        return True

    monkeypatch.setattr(tuner, "cache_results", True)
    monkeypatch.setattr(tuner, "check_disk_cache", on_disk)
    with compiling_only(lambda what: True):
        tuner[(1,)](5)
        assert (compiled, tuner.cache) == ([32], {})
        tuner[(1,)](6)
    assert (compiled, tuner.cache) == ([32, 16, 32, 64], {})
