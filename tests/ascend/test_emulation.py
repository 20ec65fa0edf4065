"""The Ascend C emulation computes what the documentation says and reports every planted fault."""

from __future__ import annotations

import re
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


def test_every_call_names_its_page() -> None:
    """What the kernels call is defined below a page of the documentation that has its name."""
    source = (gxx.EMULATION / "kernel_operator.h").read_text().split("namespace AscendC {")[1]
    pages = "".join(re.findall(r"// doc: (?:.*\n)(?:\s*//.*\n)*", source))
    defined = set(
        re.findall(r"^(?:inline \w+|void|REWY_BINARY\(|    \w+|class|struct) ?(\w+)[(,;\s]", source, re.M)
    )
    kernels = "".join(
        (gxx.CSRC / name).read_text() for name in ("core.h", "chunk_gradient.h", "state_pass.h")
    )
    called = {name for name in re.findall(r"\b([A-Z]\w+)(?:<[\w:, ]*>)?\(", kernels) if name in defined}
    called |= {name for name in re.findall(r"\.([A-Z]\w+)\(", kernels) if name in defined}
    assert len(called) >= 25
    assert not {name for name in called if name not in pages}
