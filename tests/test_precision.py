"""In 16 bits the three products round no more than the seven."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from statistics import mean

import pytest
import torch

from rewy.problem import OPERATORS
from rewy.testing import Case, computed, errors, exact, make

SHAPES = (dict(T=64, K=64, V=64), dict(T=100, K=32, V=48))
DECAYS = ("G0", "GL10", "GL1", "GM", "GQ", "G5", "GX1000")
SEEDS = range(3)


@pytest.mark.parametrize("operator", OPERATORS)
def test_bf16_errs_no_more_than_the_conventional_backward(operator):
    """Mean relative error of all gradients over shapes, decays and seeds."""
    found = {algebra: defaultdict(list) for algebra in ("rewy", "conventional")}
    decays, seeds = (DECAYS[:1], range(8)) if operator == "delta_rule" else (DECAYS, SEEDS)
    for shape, gate, seed in product(SHAPES, decays, seeds):
        case = Case(operator, B=2, H=2, HV=4, dtype=torch.bfloat16, gate=gate, seed=seed, **shape)
        inputs = make(case)
        expected = exact(*inputs)
        for algebra, table in found.items():
            for name, value in errors(computed(*inputs, algebra=algebra), expected).items():
                table[name].append(value)
    gradients = [name for name in found["rewy"] if name.startswith("d")]
    ours, theirs = (mean(mean(table[name]) for name in gradients) for table in found.values())
    assert ours <= theirs
