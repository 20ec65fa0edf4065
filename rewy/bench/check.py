"""No contestant is timed before its outputs and gradients agree with the fp64 recurrence on a small case."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from rewy.bench.clock import Clock, survived
from rewy.bench.contestants import CONTESTANTS, Contestant, first_line, gradients, leaves
from rewy.bench.workload import Case
from rewy.problem import Gradients, Operands
from rewy.testing import budgets, errors, exact


@dataclass(frozen=True)
class Verdict:
    """`seconds` of the first run; `bytes_per_token`, the most it allocated, for estimates at other sizes."""

    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    bytes_per_token: float = 0.0


@dataclass(frozen=True)
class Oracle:
    """A small case with its exact results and how far from them a contestant may be."""

    case: Case
    x: Operands
    do: Tensor
    dht: Tensor | None
    exact: dict[str, Tensor]
    budget: dict[str, float]

    @classmethod
    def of(cls, case: Case, seed: int) -> Oracle:
        case = case.small()
        x, do, dht = case.inputs(seed)
        at_home = (x, do, dht)
        if case.device.type == "npu":  # which has no fp64 to speak of
            moved = x._replace(**{name: t.cpu() for name, t in x._asdict().items() if t is not None})
            at_home = (moved, do.cpu(), None if dht is None else dht.cpu())
        expected = exact(*at_home, case.scale)
        if not case.initial_state:  # then nobody is asked for the final ones
            del expected["ht"]
        return cls(case, x, do, dht, expected, budgets(*at_home, expected, case.scale))


def check(name: str, level: str, oracle: Oracle, clock: Clock) -> Verdict:
    """Runs the contestant as `level` will, and compares every output and gradient."""

    def once() -> dict[str, Tensor]:
        return run(CONTESTANTS[name], oracle.case, level, oracle.x, oracle.do, oracle.dht)

    try:
        start = time.perf_counter()
        results = once()
        clock.wait()
        seconds = time.perf_counter() - start
        found = errors(results, oracle.exact)
        _, peak = clock.peak(tuple, once)
    except Exception as e:  # whatever a contestant throws is a finding about it, not the end of the run
        survived(clock, e, name)
        return Verdict("failed", f"{type(e).__name__}: {first_line(e)[:200]}")
    over = [
        f"{name} {found[name]:.1e} > {limit:.1e}"
        for name, limit in oracle.budget.items()
        if not found[name] <= limit
    ]
    if over:
        return Verdict("wrong", "relative error " + ", ".join(over), found, seconds)
    return Verdict("ok", "", found, seconds, peak / oracle.case.tokens)


def run(
    contestant: Contestant, case: Case, level: str, x: Operands, do: Tensor, dht: Tensor | None
) -> dict[str, Tensor]:
    """Outputs through the public call; gradients through autograd, or from the low-level backward."""
    traced = leaves(x)
    o, ht = contestant.call(case, traced, case.initial_state)
    if level == "backward":
        grads = contestant.prepare(case, x)(do, dht)
    else:
        grads = gradients(traced, o, ht, do, dht)
    found = {"o": o.detach()} | named(grads, case)
    if case.initial_state and ht is not None:  # else whoever returns final states does so unasked
        found["ht"] = ht.detach()
    return found


def named(grads: Gradients, case: Case) -> dict[str, Tensor]:
    """Gradients as budgets and tables call them."""
    names = {"erase": "dbeta" if case.operator.tied else "derase", "initial_state": "dh0"}
    found = grads._asdict().items()
    return {names.get(name, f"d{name}"): t.detach() for name, t in found if t is not None}


def apart(grads: Gradients, others: Gradients, oracle: Oracle) -> str:
    """Where two contestants differ by more than both may err, at a size that has no oracle; else nothing."""
    ours, theirs = (named(g, oracle.case) for g in (grads, others))
    distances = {
        name: float((ours[name].float() - t.float()).norm() / t.float().norm())
        for name, t in theirs.items()
        if name in ours
    }
    over = [
        f"{name} {distance:.1e}"
        for name, distance in distances.items()
        if not distance <= 2 * oracle.budget[name]
    ]
    return ", ".join(over)
