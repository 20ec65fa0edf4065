"""How wrong a result may be: a budget derived from the dtype and the problem, not chosen.

Both errors below are against the fp64 recurrence from the same rounded operands, as relative L2 norms:

    budget = FACTOR · (error of the control + u + t)

The control is an independent computation in the same dtypes: the conventional seven-product backward in plain
torch, products of rounded operands accumulated in fp32 (fp64 for fp64), the worst of all chunk sizes. Its error is
what the dtype and the conditioning of this very problem make unavoidable for someone who rounds once per operand.
u is the unit roundoff of the result's dtype: rounding it to nearest moves its norm by at most u, and a control that
lands on the right side by luck does not shrink the budget below that. t is the smallest positive number of the
operands' dtype in every element: what decays under it may underflow to 0. Independent roundings add in quadrature, so
FACTOR = 3, the ratio of rms errors that accelerator operators are commonly accepted at, leaves room for nine where
the control has one: intermediates stored in 16 bits, products split in blocks.

A wrong formula does not fit: mistakes of mask, decay or state move a result by a good part of its norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rewy.problem import CHUNK_SIZES, Operands
from rewy.testing.oracle import Results, computed

FACTOR = 3.0


def error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ (absolute where nothing is expected); inf when it is not finite."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)} for {list(expected.shape)}")
    expected = expected.detach().cpu().double()
    distance = float((actual.detach().cpu().double() - expected).norm()) / _size(expected)
    return distance if math.isfinite(distance) else math.inf


def errors(actual: Results, expected: Results) -> dict[str, float]:
    """The error of every tensor; both sides must have the same ones."""
    if actual.keys() != expected.keys():
        raise ValueError(f"results differ: {sorted(actual)} for {sorted(expected)}")
    return {name: error(actual[name], expected[name]) for name in expected}


def budgets(
    x: Operands, do: Tensor, dht: Tensor | None, expected: Results, scale: float | None = None
) -> dict[str, float]:
    """What each tensor of `expected` may err by when it is computed from these operands, on any device."""
    controls = [
        computed(x, do, dht, scale, algebra="conventional", backend="reference", chunk_size=size)
        for size in CHUNK_SIZES
    ]
    operand = torch.finfo(x.q.dtype)
    smallest = operand.smallest_normal * operand.eps
    budget = {}
    for name, tensor in expected.items():
        budget[name] = FACTOR * max(error(control[name], tensor) for control in controls)
        if bool(tensor.any()):
            roundoff = torch.finfo(controls[0][name].dtype).eps / 2
            underflow = smallest * math.sqrt(tensor.numel()) / _size(tensor)
            budget[name] += FACTOR * (roundoff + underflow)
    return budget


def _size(expected: Tensor) -> float:
    return float(expected.norm()) or 1.0
