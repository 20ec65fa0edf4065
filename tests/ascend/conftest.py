"""The known gaps as strict expected failures."""

from __future__ import annotations

import pytest
from gaps import known_gaps


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gaps = known_gaps()
    for item in items:
        reason = gaps.get(f"{item.path.name}::{item.name}")
        if reason is not None:
            item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
