"""The first call of a problem compiles its kernels side by side, once each, and fails as it would without."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rewy.backends.cuda import launch
from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.launch import Launch, recording, rehearsed
from rewy.backends.cuda.plan import Limits, plan
from rewy.problem import OPERATORS, Operands, Options, Problem, problem_of
from rewy.testing import Case, make

CASE = Case("kda", B=1, T=200, H=1, HV=2, K=128, V=128, chunk_size=64, dtype=torch.bfloat16)
OPTIONS = Options(0.3, 64, True, "rewy")


class Compiler:
    """Stands in for Triton and for the kernel it compiles. It cannot do K = 13."""

    arg_names, __name__ = ("x", "K"), "kernel"

    def __init__(self) -> None:
        self.compiled: list[tuple[str, int]] = []  # by which thread
        self.ran: list[int] = []
        self.together = threading.Barrier(1)  # of the threads that compile beside the main one

    def compile(self, asked: Launch) -> object:
        thread, K = threading.current_thread(), asked.args["K"]
        self.compiled.append((thread.name, K))
        if thread is not threading.main_thread():
            self.together.wait(timeout=10)
        if K == 13:
            raise ValueError("13 channels")

        class Compiled:
            run = None

            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda x, K: self.ran.append(K)

        return Compiled()

    def launch(self, *Ks: int) -> None:
        x = torch.empty(64, device="meta")
        for K in Ks:
            Launch(self, (1,), dict(x=x, K=K)).run()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """For launches on meta tensors, which count as a card's."""
    compiler = Compiler()
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_cores", lambda: 8)
    monkeypatch.setattr(launch, "bind", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Launch, "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(Launch, "compile", lambda self: compiler.compile(self))
    return compiler


def test_what_is_rehearsed_is_compiled_side_by_side_and_once(compiler: Compiler):
    compiler.launch(16)
    compiler.together = threading.Barrier(3)
    with rehearsed(lambda: compiler.launch(16, 32, 48, 32, 64)):
        compiler.launch(16, 32, 48, 32, 64, 80)
    assert compiler.ran == [16, 16, 32, 48, 32, 64, 80]
    _, *pool, last = compiler.compiled
    assert {K for _, K in pool} == {32, 48, 64} and len({*dict(pool)}) == len(pool) == 3
    assert last == ("MainThread", 80), "what was not rehearsed compiles when it is launched"


def test_what_does_not_compile_raises_at_its_launch(compiler: Compiler):
    def rehearsal() -> None:
        compiler.launch(16, 13, 32)
        raise RuntimeError("no more can be recorded")

    with rehearsed(rehearsal), pytest.raises(ValueError, match="13 channels"):
        compiler.launch(16, 13, 32)
    assert compiler.ran == [16]
    compiler.launch(32)
    assert Counter(K for _, K in compiler.compiled) == {16: 1, 32: 1, 13: 2}


def test_rehearses_only_where_a_kernel_is_missing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch):
    rehearsals: list[str] = []
    with rehearsed(lambda: rehearsals.append("recorded")), recording():
        compiler.launch(16)
    compiler.launch(16, 32)
    with rehearsed(lambda: rehearsals.append("all there")):
        compiler.launch(16, 32)
    with monkeypatch.context() as patched, rehearsed(lambda: rehearsals.append("captured")):
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        compiler.launch(48)
    compiler.launch(64)
    assert not rehearsals
    with rehearsed(lambda: rehearsals.append("missing")):
        compiler.launch(80, 96)
    assert rehearsals == ["missing"]


def test_an_interrupt_waits_for_no_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch):
    def interrupted(jobs: object) -> None:
        while not compiler.compiled:
            time.sleep(0.001)
        raise KeyboardInterrupt

    busy = compiler.together = threading.Barrier(2)
    with monkeypatch.context() as patched, rehearsed(lambda: compiler.launch(16, 32, 48)):
        patched.setattr(launch, "wait", interrupted)
        patched.setattr(launch, "_cores", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            compiler.launch(16)
    assert [K for _, K in compiler.compiled] == [16] and not compiler.ran
    compiler.together = threading.Barrier(1)
    with rehearsed(lambda: compiler.launch(48)):
        compiler.launch(48)
    assert [K for _, K in compiler.compiled] == [16, 48] and compiler.ran == [48]
    busy.wait(timeout=10)


@pytest.mark.parametrize("limits", [Limits(99 * 1024, (8, 0)), Limits(227 * 1024, (9, 0))], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_training_forward_compiles_for_its_backward(
    operator: str, limits: Limits, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[Launch] = []
    monkeypatch.setattr(Launch, "compile", lambda self: compiled.append(self) or SimpleNamespace(run=None))
    monkeypatch.setattr(Launch, "_run_compiled", Launch.compiled)

    def compiles(training: bool, dht: bool, **changes: object) -> tuple[int, int]:
        """In the forward and in the backward of a problem that is called for the first time."""
        x, _, _ = make(Case(**{**vars(CASE), "operator": operator, **changes}))
        x = Operands(*(None if t is None else t.to("meta") for t in x))
        problem, backend = problem_of(x, OPTIONS), CudaBackend(planned)
        before = len(compiled)
        o, ht, kept = backend.forward(problem, x, training)
        between = len(compiled)
        if training:
            backend.backward(problem, x, kept, o, ht if dht else None)
        return between - before, len(compiled) - between

    def planned(problem: Problem, _: Limits):
        return plan(problem, limits)

    both, none = compiles(training=True, dht=True)
    assert both >= 6 and none == 0
    assert len({asked.signature for asked in compiled}) == both
    assert compiles(training=True, dht=True) == (0, 0)
    assert compiles(training=True, dht=False) == (0, 1)  # its reverse pass alone
    launch._compiled.clear()
    outputs, _ = compiles(training=False, dht=False)
    assert 3 <= outputs < both
    assert compiles(training=True, dht=True) == (0, both - outputs)
    launch._compiled.clear()
    both, none = compiles(training=True, dht=False, initial_state=False)
    assert both >= 6 and none == 0


def training_step() -> tuple[list[torch.Tensor], list[int]]:
    """Results on the GPU, and how many kernels the main thread and others compiled in forward and backward."""
    threads: list[bool] = []
    compile_ = Launch.compile

    def noted(self: Launch) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return compile_(self)

    Launch.compile = noted
    try:
        x, do, dht = make(CASE)
        x = Operands(*(None if t is None else t.cuda() for t in x))
        problem, backend = problem_of(x, OPTIONS), CudaBackend()
        o, ht, kept = backend.forward(problem, x, True)
        forward = len(threads)
        grads = backend.backward(problem, x, kept, do.cuda(), dht.cuda())
    finally:
        Launch.compile = compile_
    counts = [sum(threads), forward - sum(threads), len(threads) - forward]
    return [t.cpu() for t in (o, ht, *grads) if t is not None], counts


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif("REWY_COMPILE_PART" in os.environ, reason="has a cache of its own")
def test_a_cold_start_computes_the_same(tmp_path: Path):
    here = Path(__file__)
    code = f"import sys, torch, {here.stem} as t; torch.save(t.training_step(), sys.argv[1])"
    paths = os.pathsep.join([str(here.parent), str(here.parents[2])])
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONPATH": paths}
    out = tmp_path / "results.pt"
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cold, (alone, beside, backward) = torch.load(out)
    assert alone == backward == 0 and beside > 5
    want, _ = training_step()
    assert len(cold) == len(want) == 8
    assert all(torch.equal(a, b) for a, b in zip(cold, want, strict=True))
