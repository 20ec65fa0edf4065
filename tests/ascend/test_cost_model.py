"""docs/ascend.md quotes the model as it is."""

from __future__ import annotations

from pathlib import Path

import cost_model


def test_document() -> None:
    document = Path(__file__).parents[2] / "docs" / "ascend.md"
    assert cost_model.table() in document.read_text()


def test_around_the_inverse() -> None:
    """Seven products against three, as docs/derivation.md counts them; both have Tᵀ dU in the reverse pass."""
    C, V = cost_model.C, cost_model.V
    shared = C * C * V
    assert cost_model.cycles(cost_model.CONVENTIONAL) * cost_model.MULTIPLY_ADDS + shared == 3670016
    assert cost_model.cycles(cost_model.REWY) * cost_model.MULTIPLY_ADDS + shared == 2097152
