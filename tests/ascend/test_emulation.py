"""The Ascend C emulation computes what the documentation says and reports every planted fault."""

from __future__ import annotations

from pathlib import Path

import gxx
import pytest

pytestmark = [pytest.mark.slow, gxx.needed]


def names() -> list[str]:
    """PASSES(name) and REPORTS(name, ...) of checks.cpp."""
    lines = (gxx.EMULATION / "checks.cpp").read_text().splitlines()
    cases = (line for line in lines if line.startswith(("PASSES(", "REPORTS(")))
    return [line.split("(")[1].split(")")[0].split(",")[0] for line in cases]


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gxx.build("checks.cpp", tmp_path_factory.mktemp("emulation"))


def test_the_list_is_complete(checks: Path) -> None:
    assert sorted(gxx.output(checks).split()) == sorted(names())


@pytest.mark.parametrize("name", names())
def test_emulation(checks: Path, name: str) -> None:
    gxx.output(checks, name)
