#!/usr/bin/env python3
"""Time every kernel of a forward and a backward on the CUDA device, each where it stands in the call.

    scripts/time_stages.py kda                      # 1×32768 tokens, 32 heads, K = V = 128, bf16
    scripts/time_stages.py gated_delta_rule --T 4096 --algebra conventional

A table of what each moves and multiplies, and of its share of what a large copy and a large matrix product reach here.
Medians by device events, without autograd; launches of one kernel are added up. In every pass the whole call runs, an
event before and after each launch, while the device still has other work: no launch waits for the host, and each meets
the caches and memory that it meets in any call. Between launches events take a little, and some of torch's operators
run: the whole call is timed apart, with an event at either end. Inputs: unit q and k,
g = logsigmoid(randn + 3), gates sigmoid(randn); kernels for far-apart gates find none among them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.backends.cuda import backend
from rewy.backends.cuda.launch import Launch, recorded_by, recording
from rewy.bench.clock import Clock, ceilings, clock_for, lead_for
from rewy.problem import OPERATORS, Gate, Operands, Options, Problem, describe

Marks = list[tuple[Any, Any]]


def operands(operator: str, B: int, T: int, H: int, K: int, V: int, device: torch.device) -> Operands:
    op = OPERATORS[operator]

    def randn(*shape: int) -> Tensor:
        return torch.randn(B, T, H, *shape, device=device)

    def gate(kind: Gate, channels: int) -> Tensor:
        return randn(*[channels] * (kind is Gate.CHANNEL))

    q, k = (F.normalize(randn(K), dim=-1).bfloat16() for _ in range(2))
    g = None if op.decay is Gate.NONE else F.logsigmoid(gate(op.decay, K) + 3)
    erase = gate(op.erase, K).sigmoid().bfloat16()
    write = None if op.tied else gate(op.write, V).sigmoid().bfloat16()
    return Operands(q, k, randn(V).bfloat16(), g, erase, write, initial_state=None)


class Marking:
    """Runs the launches that it is given, a mark before and after each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: Marks = []

    def append(self, launch: Launch) -> None:
        start = self.clock.mark()
        with recorded_by(None):
            launch.run()
        self.marks.append((start, self.clock.mark()))


def of_launches(run: Callable[[], object], clock: Clock) -> list[float]:
    """Milliseconds of every launch of a call, in their order."""

    def marked() -> Marks:
        marking = Marking(clock)
        with recorded_by(marking):
            run()
        return marking.marks

    return milliseconds(marked, clock)


def of_call(run: Callable[[], object], clock: Clock) -> float:
    """Milliseconds of a call as its users make it, replayed."""

    def marked() -> Marks:
        start = clock.mark()
        run()
        return [(start, clock.mark())]

    return milliseconds(marked, clock)[0]


def milliseconds(marked: Callable[[], Marks], clock: Clock, passes: int = 11) -> list[float]:
    """Between each two marks that belong together; medians of passes behind a lead, so that no mark shows the host."""

    def host_ms() -> float:
        start = time.perf_counter()
        marked()
        return (time.perf_counter() - start) * 1e3

    for _ in range(2):
        marked()
    lead_ms = lead_for(clock, host_ms)
    found = []
    for _ in range(passes):
        clock.wait()
        clock.lead(lead_ms)
        found.append(marked())
    clock.wait()
    return [median(clock.between(*pair) for pair in pairs) for pairs in zip(*found, strict=True)]


# Products of matrices a chunk and head takes, in multiply-adds, from chunk rows C and channels K, V: those of the
# formulas, so that what a kernel computes twice or in several digits counts once.
PRODUCTS: dict[str, Callable[[int, int, int], int]] = {
    # A and L; then blocks of the inverse joined, from single rows up
    "pair_scores": lambda C, K, V: 2 * C * C * K + C * (C * C - 1) // 3,
    "states": lambda C, K, V: 2 * C * K * V + C * C * V,
    "outputs": lambda C, K, V: 3 * C * K * V + 2 * C * C * V,
    "reverse": lambda C, K, V: 3 * C * K * V + 2 * C * C * V,
    "score_gradients": lambda C, K, V: 2 * C * C * V,
    "keys": lambda C, K, V: 3 * C * K * V + 4 * C * C * K,
    "chunks": lambda C, K, V: 3 * C * K * V + 4 * C * C * K + 2 * C * C * V,
}
# What a kernel writes for far gates alone.
UNUSED = {"channel_chunks": ("dA", "dL", "diagonal")}
KINDS = {
    "forward_pass": "states",
    "state_forward": "states",
    "reverse_pass": "reverse",
    "state_reverse": "reverse",
    "row_chunks": "chunks",
    "channel_chunks": "chunks",
    "key_gradients": "keys",
}


def moved(launch: Launch) -> int:
    """Bytes of all tensors of a launch: what has to come and go at least, were each met once."""
    if launch.args.get("FAR"):
        return 0
    args = {name: arg for name, arg in launch.args.items() if name not in UNUSED.get(launch.name, ())}
    tensors = {id(t): t for arg in args.values() if isinstance(t := getattr(arg, "base", arg), Tensor)}
    return sum(t.nbytes for t in tensors.values())


def multiplied(launch: Launch, problem: Problem) -> int:
    """Floating-point operations of the products in a launch."""
    kind = KINDS.get(launch.name, launch.name)
    if kind == "states" and launch.args.get("o") is not None:
        kind = "outputs"
    if kind not in PRODUCTS or launch.args.get("FAR"):
        return 0
    C, K, V = problem.chunk_size, problem.K, problem.V
    sizes = dict(Ti=C * C, dA=C * C, ds=K * V)  # of [chunks,heads,...]
    name = next(name for name in sizes if launch.args.get(name) is not None)
    chunks = getattr(launch.args[name], "base", launch.args[name]).numel() // sizes[name]
    return 2 * chunks * PRODUCTS[kind](C, K, V)


def report(
    title: str, problem: Problem, run: Callable[[], object], limits: dict[str, float], clock: Clock
) -> None:
    run()  # compiles
    print(f"\n| {title} | ms | GB | TB/s | of copy | GFLOP | TFLOP/s | of matmul |\n| --- |" + " ---: |" * 7)
    with recording() as launches:
        run()
    names = [launch.name + " (far gates)" * bool(launch.args.get("FAR")) for launch in launches]
    figures = [(moved(launch) / 1e9, multiplied(launch, problem) / 1e9) for launch in launches]
    del launches  # and what they hold, which a call frees on its way
    rows: dict[str, list[float]] = {}
    for name, ms, amounts in zip(names, of_launches(run, clock), figures, strict=True):
        row = rows.setdefault(name, [0.0, 0.0, 0.0])
        for i, figure in enumerate((ms, *amounts)):
            row[i] += figure
    whole = [of_call(run, clock), *(sum(row[i] for row in rows.values()) for i in (1, 2))]
    for name, (ms, gb, gflop) in (rows | {"whole call": whole}).items():
        copy, matmul = (
            gb / ms * 1e12 / limits["copy_bytes_per_s"],
            gflop / ms * 1e12 / limits["matmul_flops_per_s"],
        )
        figures = (
            f"{ms:.3f}",
            f"{gb:.2f}",
            f"{gb / ms:.2f}",
            f"{copy:.0%}",
            f"{gflop:.1f}",
            f"{gflop / ms:.0f}",
        )
        print("|", " | ".join((name, *figures, f"{matmul:.0%}")), "|")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("--algebra", choices=("rewy", "conventional"), default="rewy")
    for name, size in dict(B=1, T=32768, H=32, K=128, V=128).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--chunk-size", type=int, default=64)
    args = parser.parse_args()
    reason = backend.unusable()
    if reason is not None:
        parser.error(reason)

    clock = clock_for("cuda")
    x = operands(args.operator, args.B, args.T, args.H, args.K, args.V, clock.device)
    problem = describe(x, Options(args.K**-0.5, args.chunk_size, True, args.algebra))
    o, _, kept = backend.forward(problem, x, training=True)
    do = torch.randn_like(o)
    limits = ceilings(clock, torch.bfloat16)
    report("forward", problem, lambda: backend.forward(problem, x, training=True), limits, clock)
    report("backward", problem, lambda: backend.backward(problem, x, kept, do, None), limits, clock)


if __name__ == "__main__":
    main()
