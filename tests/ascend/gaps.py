"""known_gaps.txt."""

from __future__ import annotations

from pathlib import Path


def known_gaps() -> dict[str, str]:
    """file::test → why it fails."""
    lines = (Path(__file__).parent / "known_gaps.txt").read_text().splitlines()
    rows = (line.partition(" | ") for line in lines if not line.startswith("#"))
    return {test: reason for test, _, reason in rows}
