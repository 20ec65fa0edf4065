#!/usr/bin/env python3
"""Time every kernel of a forward and a backward on the CUDA device, one by one.

    scripts/time_stages.py kda                      # 1×32768 tokens, 32 heads, K = V = 128, bf16
    scripts/time_stages.py gated_delta_rule --T 4096 --algebra conventional

A table of what each moves and multiplies, and of its share of what a large copy and a large matrix product reach here.
Medians by device events, without autograd; launches of one kernel are added up. Inputs: unit q and k,
g = logsigmoid(randn + 3), gates sigmoid(randn); kernels for far-apart gates find none among them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.backends.cuda import backend
from rewy.backends.cuda.launch import Launch, recording
from rewy.bench.clock import ceilings, clock_for
from rewy.problem import OPERATORS, Gate, Operands, Options, Problem, describe


def operands(operator: str, B: int, T: int, H: int, K: int, V: int) -> Operands:
    op = OPERATORS[operator]

    def randn(*shape: int) -> Tensor:
        return torch.randn(B, T, H, *shape, device="cuda")

    def gate(kind: Gate, channels: int) -> Tensor:
        return randn(*[channels] * (kind is Gate.CHANNEL))

    q, k = (F.normalize(randn(K), dim=-1).bfloat16() for _ in range(2))
    g = None if op.decay is Gate.NONE else F.logsigmoid(gate(op.decay, K) + 3)
    erase = gate(op.erase, K).sigmoid().bfloat16()
    write = None if op.tied else gate(op.write, V).sigmoid().bfloat16()
    return Operands(q, k, randn(V).bfloat16(), g, erase, write, initial_state=None)


def milliseconds(run: Callable[[], object], repeats: int = 11) -> float:
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


# Products of matrices a chunk and head takes, in multiply-adds, from chunk rows C and channels K, V: those of the
# formulas, so that what a kernel computes twice or in several digits counts once.
PRODUCTS: dict[str, Callable[[int, int, int], int]] = {
    "pair_scores": lambda C, K, V: 2 * C * C * K + 2 * int(math.log2(C)) * C**3,
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


def report(title: str, problem: Problem, run: Callable[[], object], limits: dict[str, float]) -> None:
    run()  # compiles
    print(f"\n| {title} | ms | GB | TB/s | of copy | GFLOP | TFLOP/s | of matmul |\n| --- |" + " ---: |" * 7)
    with recording() as launches:
        run()
    rows: dict[str, list[float]] = {}
    # In their order each finds its inputs computed by those before it.
    for launch in launches:
        name = launch.name + (" (far gates)" if launch.args.get("FAR") else "")
        row = rows.setdefault(name, [0.0, 0.0, 0.0])
        for i, figure in enumerate(
            (milliseconds(launch.run), moved(launch) / 1e9, multiplied(launch, problem) / 1e9)
        ):
            row[i] += figure
    whole = [milliseconds(run), *(sum(row[i] for row in rows.values()) for i in (1, 2))]
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

    x = operands(args.operator, args.B, args.T, args.H, args.K, args.V)
    problem = describe(x, Options(args.K**-0.5, args.chunk_size, True, args.algebra))
    o, _, kept = backend.forward(problem, x, training=True)
    do = torch.randn_like(o)
    limits = ceilings(clock_for("cuda"), torch.bfloat16)
    report("forward", problem, lambda: backend.forward(problem, x, training=True), limits)
    report("backward", problem, lambda: backend.backward(problem, x, kept, do, None), limits)


if __name__ == "__main__":
    main()
