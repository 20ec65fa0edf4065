"""How a contestant is sampled at the levels `backward` and `autograd`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rewy.bench.clock import Clock, lead_for
from rewy.bench.config import Timing
from rewy.bench.contestants import Contestant, gradients, leaves
from rewy.bench.results import Spread
from rewy.bench.workload import Case, nbytes
from rewy.problem import Gradients, Operands

MAX_CALLS = 30
"""More, of some 30 launches and marks each, would fill the device's launch queue of about 1024, and the host would wait
for it. Behind a lead it holds one sample at a time."""


@dataclass(frozen=True)
class Inputs:
    """Enough sets of operands that going round them leaves nothing useful in the last-level cache."""

    case: Case
    sets: list[Operands]
    grads: list[Tensor]

    @classmethod
    def of(cls, case: Case, clock: Clock, seed: int) -> Inputs:
        count = input_sets(case, clock)
        return cls(
            case,
            [case.operands(seed + 2 * i) for i in range(count)],
            [case.output_gradient(seed + 2 * i + 1) for i in range(count)],
        )


def input_sets(case: Case, clock: Clock) -> int:
    """Two, or as many as fill the last-level cache twice, up to eight."""
    return min(8, max(2, math.ceil(2 * clock.cache_bytes() / case.floor_bytes)))


class Sampler:
    """One contestant at one point: `sample(i)` runs it on input set i and leaves marks behind.

    With `lead_ms` its samples run behind a lead and show the device's time, and `sample_host` the host's.
    """

    def __init__(self, contestant: Contestant, inputs: Inputs, clock: Clock) -> None:
        self.contestant, self.inputs, self.clock = contestant, inputs, clock
        self.lead_ms = 0.0
        self.marks: list[tuple[Any, ...]] = []
        self.host_ms: list[float] = []

    def sample(self, i: int) -> None:
        marks, host_ms = self.issue(i, self.lead_ms)
        self.marks.append(marks)
        if not self.lead_ms:  # else a host that waits for the device has waited for the lead too
            self.host_ms.append(host_ms)

    def sample_host(self, i: int) -> None:
        """A sample for the host's time alone, which finds the device idle."""
        self.clock.wait()
        self.host_ms.append(self.issue(i)[1])

    def issue(self, i: int, lead_ms: float = 0.0) -> tuple[tuple[Any, ...], float]:
        """The marks of one sample, and the host's milliseconds for it."""
        i %= len(self.inputs.sets)
        arguments = self.arguments(i)
        if lead_ms:
            # Else the device would fall behind by a lead each time, until its launch queue is full.
            self.clock.wait()
            self.clock.lead(lead_ms)
        start = time.perf_counter()
        marks = self.run(i, *arguments)
        return marks, (time.perf_counter() - start) * 1e3

    def arguments(self, i: int) -> tuple[Any, ...]:
        """What a sample needs and does not count."""
        return ()

    def run(self, i: int, *arguments: Any) -> tuple[Any, ...]:
        """Runs the measured calls; the marks around the backward come last."""
        raise NotImplementedError

    def gradients(self) -> tuple[Gradients, int]:
        """Those of the first input set, and the peak bytes of the backward above its inputs and them."""
        raise NotImplementedError

    def saved(self) -> int | None:
        """Bytes that the forward keeps for the backward besides its inputs; None where there is no forward."""
        return None

    def spreads(self) -> tuple[Spread, Spread | None]:
        """(backward, forward if measured)."""
        between, marks = self.clock.between, self.marks
        backward = Spread.of([between(m[-2], m[-1]) for m in marks])
        forward = Spread.of([between(m[0], m[1]) for m in marks]) if len(marks[0]) == 3 else None
        return backward, forward

    def reset(self) -> None:
        self.marks.clear()
        self.host_ms.clear()


class BackwardSampler(Sampler):
    """The low-level backward from saved forward results, recomputation included."""

    def __init__(self, contestant: Contestant, inputs: Inputs, clock: Clock) -> None:
        super().__init__(contestant, inputs, clock)
        self.backwards = [contestant.prepare(inputs.case, x) for x in inputs.sets]

    def run(self, i: int, *arguments: Any) -> tuple[Any, ...]:
        start = self.clock.mark()
        self.backwards[i](self.inputs.grads[i], None)
        return start, self.clock.mark()

    def gradients(self) -> tuple[Gradients, int]:
        grads, peak = self.clock.peak(tuple, lambda: self.backwards[0](self.inputs.grads[0], None))
        return grads, max(0, peak - nbytes(grads))


class AutogradSampler(Sampler):
    """The public function and torch.autograd: gradients in the inputs' dtypes, group and gate sums included."""

    def arguments(self, i: int) -> tuple[Any, ...]:
        return (leaves(self.inputs.sets[i]),)

    def run(self, i: int, *arguments: Any) -> tuple[Any, ...]:
        (x,) = arguments
        start = self.clock.mark()
        o, _ = self.contestant.call(self.inputs.case, x, False)
        middle = self.clock.mark()
        gradients(x, o, None, self.inputs.grads[i], None)
        return start, middle, self.clock.mark()

    def gradients(self) -> tuple[Gradients, int]:
        def forward() -> tuple[Operands, Tensor]:
            (x,) = self.arguments(0)
            return x, self.contestant.call(self.inputs.case, x, False)[0]

        def backward(x: Operands, o: Tensor) -> Gradients:
            return gradients(x, o, None, self.inputs.grads[0], None)

        grads, peak = self.clock.peak(forward, backward)
        return grads, max(0, peak - nbytes(grads))

    def saved(self) -> int:
        (x,) = self.arguments(0)
        inputs = {t.untyped_storage().data_ptr() for t in x if t is not None}
        found: dict[int, int] = {}

        def seen(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return t

        with saved_tensors_hooks(seen, lambda t: t):
            # Held, or what comes later could lie at a place that is counted already.
            _held = self.contestant.call(self.inputs.case, x, False)
        return sum(size for place, size in found.items() if place not in inputs)


SAMPLERS: dict[str, Callable[[Contestant, Inputs, Clock], Sampler]] = {
    "backward": BackwardSampler,
    "autograd": AutogradSampler,
}


def calls_a_round(sampler: Sampler, timing: Timing, clock: Clock) -> int:
    """Warms up, measures what lead the contestant needs, and fits its share of a round to what one call takes."""
    for i in range(timing.warmup):
        sampler.sample(i)
    if timing.lead and clock.asynchronous:
        sampler.lead_ms = lead_for(clock, lambda: sampler.issue(0)[1])
        sampler.sample(0)  # a first lead may take longer
    clock.wait()
    start = time.perf_counter()
    sampler.sample(0)
    clock.wait()
    one = time.perf_counter() - start
    sampler.reset()
    return min(MAX_CALLS, max(1, round(timing.seconds / timing.rounds / one)))


def take_turns(samplers: dict[str, Sampler], calls: dict[str, int], timing: Timing, clock: Clock) -> None:
    """Samples everyone in rounds, another first each round, so that drift of the machine meets all alike."""
    names = list(samplers)
    for turn in range(timing.rounds):
        for name in names:
            sampler = samplers[name]
            for i in range(calls[name]):
                sampler.sample(turn * calls[name] + i)
            if sampler.lead_ms:
                sampler.sample_host(turn)
            clock.wait()
        names = names[1:] + names[:1]
