"""Seeded cases, error budgets and the checks made of them; used by the tests, the benchmark and `rewy verify`."""

from rewy.testing.budgets import budgets, error, errors
from rewy.testing.cases import Case, make
from rewy.testing.oracle import arguments, computed, exact, leaves
from rewy.testing.poison import fenced, poisoned
from rewy.testing.verify import Row, verify

__all__ = [
    "Case",
    "Row",
    "arguments",
    "budgets",
    "computed",
    "error",
    "errors",
    "exact",
    "fenced",
    "leaves",
    "make",
    "poisoned",
    "verify",
]
