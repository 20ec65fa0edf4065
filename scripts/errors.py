#!/usr/bin/env python3
"""Relative L2 errors of outputs and gradients against the fp64 recurrence, contestant by contestant.

    scripts/errors.py                                # rewy and fla, 1×512 and 1×4096, 32 heads, bf16, on cuda
    scripts/errors.py --device cpu --contestants rewy --T 100 --H 2 --operators kda

Inputs are those of `rewy bench`: unit q and k, gates drawn at random. The recurrence saves states for its gradients:
once those of 4096 tokens and 32 heads of 128 × 128 are 16 GiB, and it saves more than one a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from rewy.bench.check import run
from rewy.bench.config import Config
from rewy.bench.contestants import CONTESTANTS, first_line
from rewy.bench.workload import Case
from rewy.problem import OPERATORS
from rewy.testing import errors, exact


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=("rewy", "fla"))
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=tuple(OPERATORS))
    parser.add_argument("--T", nargs="+", type=int, default=(512, 4096))
    for name, size in dict(H=32, K=128, V=128, seed=0).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    config = Config(
        title="errors",
        device=args.device,
        dtype=args.dtype,
        levels=("autograd",),
        contestants=tuple(args.contestants),
        baseline=args.contestants[0],
        shapes=tuple(dict(T=T, H=args.H, K=args.K, V=args.V) for T in args.T),
    )
    for shape in config.shapes:
        for operator in args.operators:
            case = Case.of(config, operator, shape, device)
            x, do, dht = case.inputs(args.seed)
            expected = exact(x, do, dht, case.scale)
            del expected["ht"]
            for name in args.contestants:
                contestant = CONTESTANTS[name]
                outcome = contestant.absent(device) or contestant.declines(case)
                try:
                    if not outcome:
                        found = errors(run(contestant, case, "autograd", x, do, dht), expected)
                        outcome = "  ".join(f"{tensor} {error:.2e}" for tensor, error in found.items())
                except Exception as e:  # another package's; the others are still measured
                    outcome = f"{type(e).__name__}: {first_line(e)}"
                print(f"{case.operator.title:8} {shape.label:24} {name:8} {outcome}", flush=True)


if __name__ == "__main__":
    main()
