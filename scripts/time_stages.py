#!/usr/bin/env python3
"""Time every kernel of a forward and a backward on the CUDA device, one by one.

    scripts/time_stages.py kda                      # 1×32768 tokens, 32 heads, K = V = 128, bf16
    scripts/time_stages.py gated_delta_rule --T 4096 --algebra conventional

Medians by device events, without autograd; the order is that of the launches. Inputs: unit q and k,
g = logsigmoid(randn + 3), gates sigmoid(randn).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.backends.cuda import backend
from rewy.backends.cuda.launch import recording
from rewy.problem import OPERATORS, Gate, Operands, Options, describe


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


def report(title: str, run: Callable[[], object]) -> None:
    run()  # compiles
    print(f"{title:<20} {milliseconds(run):8.3f} ms")
    with recording() as launches:
        run()
    # In their order each finds its inputs computed by those before it.
    for launch in launches:
        print(f"  {launch.name:<18} {milliseconds(launch.run):8.3f} ms")


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
    report("forward", lambda: backend.forward(problem, x, training=True))
    report("backward", lambda: backend.backward(problem, x, kept, do, None))


if __name__ == "__main__":
    main()
