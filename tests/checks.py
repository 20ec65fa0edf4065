"""What most tests here assert of a case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import opcheck

from rewy.problem import Operands
from rewy.testing import Case, budgets, computed, errors, exact, make

EXACT = 1e-10
"""Relative L2 error that a double precision result may have; a formula that is wrong anywhere has more."""

TIED = ["delta_rule", "gated_delta_rule", "kda"]
GATED = ["gated_delta_rule", "kda", "gdn2"]


def assert_exact(case: Case, **options: Any) -> None:
    """In fp64 every output and gradient is that of the recurrence."""
    x, do, dht = make(case)
    found = computed(x, do, dht, case.scale, chunk_size=case.chunk_size, **options)
    assert_close(found, exact(x, do, dht, case.scale), EXACT)


def assert_within_budget(case: Case, **options: Any) -> None:
    """In any dtype every output and gradient errs no more than its budget."""
    x, do, dht = make(case)
    expected = exact(x, do, dht, case.scale)
    found = computed(x, do, dht, case.scale, chunk_size=case.chunk_size, **options)
    allowed = budgets(x, do, dht, expected, case.scale)
    over = {name: (e, allowed[name]) for name, e in errors(found, expected).items() if not e <= allowed[name]}
    assert not over, over


def assert_close(actual: dict, expected: dict, tolerance: float) -> None:
    over = {name: e for name, e in errors(actual, expected).items() if not e <= tolerance}
    assert not over, over


def assert_operators_are_sound(x: Operands, do: Tensor, dht: Tensor | None, *options: Any) -> None:
    """Schemas, fake kernels and strides of the three operators, which take these options."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    ops = torch.ops.rewy
    opcheck(ops.forward.default, (*x, *options, True), test_utils=tests)
    opcheck(ops.forward.default, (*x, *options, False), test_utils=tests)
    _, _, kept = ops.forward(*x, *options, True)
    opcheck(ops.backward.default, (*x, *options, kept, do, dht), test_utils=tests)
    opcheck(ops.backward.default, (*x, *options, kept, do, None), test_utils=tests)
    opcheck(ops.step.default, (*x, *options), test_utils=tests)
