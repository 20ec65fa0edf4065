"""The offline compile check itself: it compiles for three architectures, and its faults are found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_offline.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compile_offline", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def run(*arguments: str, interpret: str = "0") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), "--jobs", "1", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_compiles_without_a_gpu():
    found = run("--only", "recurrent_step gated_delta_rule bfloat16 128x128 C64 rewy")
    assert found.returncode == 0, found.stderr
    *reports, summary = found.stdout.splitlines()
    assert [line.split()[:2] for line in reports] == [[f"sm_{a}", "recurrent_step"] for a in (80, 90, 100)]
    assert summary.startswith("3 kernels compiled") and summary.endswith("0 with faults")


def test_refuses_what_it_cannot_do():
    assert "'no_such_kernel'" in run("--arch", "90", "--only", "no_such_kernel").stderr
    refused = run("--only", "recurrent_step", interpret="1")
    assert refused.returncode == 2 and "TRITON_INTERPRET=1" in refused.stderr


def test_faults(script):
    fine = script.Report(90, "kernel", "kda bfloat16 128x128", "4w 2s", registers=255, shared=227 * 1024)
    assert fine.faults == []
    assert "shared memory" in replace(fine, shared=227 * 1024 + 1).faults[0]
    assert "shared memory" in replace(fine, arch=80).faults[0]
    assert "tensor memory" in replace(fine, arch=100, tensor_memory=544).faults[0]
    assert replace(fine, stack=8).faults == ["spills 8 bytes"]
    assert replace(fine, stack=8, source="kda float32 64x64").faults == []
    assert replace(fine, error="CompilationError: no").faults == ["CompilationError: no"]


def test_every_operator_is_examined(script):
    sources = {source.split()[0] for source, _ in script.shipped(90).values()}
    assert sources == {*script.OPERATORS, "prologues"}
