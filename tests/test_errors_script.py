"""scripts/errors.py measures what the precision says, and goes on without who cannot take part."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
SIZE = ["--device", "cpu", "--T", "20", "--H", "1", "--K", "16", "--V", "16", "--contestants", "rewy", "fla"]


@pytest.mark.parametrize("dtype, least, most", [("float32", 1e-9, 1e-6), ("bfloat16", 1e-3, 1e-2)])
def test_a_line_for_every_contestant(dtype, least, most, capsys):
    path = Path(__file__).parents[1] / "scripts" / "errors.py"
    spec = importlib.util.spec_from_file_location("errors", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main([*SIZE, "--dtype", dtype, "--operators", "kda", "gdn2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["KDA", "KDA", "GDN2", "GDN2"]
    for line in lines[::2]:
        errors = dict(re.findall(r"(\w+) (\S+e-\d+)", line))
        assert {"o", "dq", "dk", "dv", "dg"} < {*errors}
        assert all(least < float(error) < most for error in errors.values())
    assert all("not on cpu" in line for line in lines[1::2])
