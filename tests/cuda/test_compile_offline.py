"""The offline compile check itself: it compiles for three architectures, and its faults are found."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rewy.backends.cuda.plan import GLUON, HOPPER, Limits, plan
from rewy.problem import OPERATORS

if GLUON:
    from rewy.backends.cuda import hopper, hopper_channels, hopper_rows

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
    assert "['no_such_kernel']" in run("--arch", "90", "--only", "no_such_kernel").stderr
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
    assert replace(fine, stack=80, kernel="forward_pass").faults == []
    assert replace(fine, stack=88, kernel="forward_pass").faults == ["spills 88 bytes"]
    assert replace(fine, error="CompilationError: no").faults == ["CompilationError: no"]


def test_every_operator_is_examined(script):
    sources = {source.split()[0] for source, _ in script.shipped(90).values()}
    assert sources == {*script.OPERATORS, "prologues"}


@pytest.mark.skipif(not GLUON, reason="no Gluon kernels for this Triton")
def test_the_sequential_passes_take_the_shared_memory_they_plan_with(script):
    """Of each pass of every operator, at the depth that ships; gdn2's reverse pass is kda's."""
    sought = [
        f"{way}_pass {op} bfloat16 128x128 C64 rewy" for op in OPERATORS for way in ("forward", "reverse")
    ]
    found = run("--arch", "90", "--only", *sought)
    assert found.returncode == 0, found.stdout
    reports = found.stdout.splitlines()[:-1]
    taken = [re.search(r"(\S+) regs .* (\S+) KiB", line)[2] for line in reports]
    planned = []
    for op in OPERATORS:
        problem, _ = script.Case(op, torch.bfloat16, 128, 128).problem()
        chosen = plan(problem, Limits(script.SHARED_KIB[90] * 1024, HOPPER))
        planned.append(hopper.forward_shared(problem, chosen.outputs.stages, output=True, keep=False))
        planned.append(hopper.forward_shared(problem, chosen.states.stages, output=False, keep=True))
        if op != "gdn2":
            planned.append(hopper.reverse_shared(problem, chosen.reverse.stages))
    assert len(planned) == len(taken)
    for bytes_planned, kib_taken in zip(planned, taken, strict=True):
        assert 0 <= bytes_planned / 1024 - float(kib_taken) <= 0.5, reports


@pytest.mark.skipif(not GLUON, reason="no Gluon kernels for this Triton")
def test_gradients_by_rows_take_the_shared_memory_they_plan_with(script):
    """Whatever the value channels, the dtype and how heads are grouped."""
    found = run("--arch", "90", "--only", "row_chunks gated_delta_rule")
    assert found.returncode == 0, found.stdout
    reports = found.stdout.splitlines()[:-1]
    assert {*re.findall(r"\d+x\d+", found.stdout)} == {"128x128", "128x64", "128x256", "64x64"}
    assert all(any(kind in line for line in reports) for kind in ("float16", "grouped", "packed"))
    for line in reports:
        K, V, kib = (float(x) for x in re.search(r" (\d+)x(\d+) .* (\S+) KiB", line).groups())
        problem, _ = script.Case("gated_delta_rule", torch.bfloat16, int(K), int(V)).problem()
        assert 0 <= hopper_rows.shared(problem) / 1024 - kib <= 0.5, line


@pytest.mark.skipif(not GLUON, reason="no Gluon kernels for this Triton")
def test_two_programs_by_channel_fit_a_multiprocessor(script):
    """Of whatever shape, and with few registers spilled where values come in one tile."""
    found = run("--arch", "90", "--only", "channel_chunks gdn2")
    assert found.returncode == 0, found.stdout
    reports = found.stdout.splitlines()[:-1]
    assert {*re.findall(r"\d+x\d+", found.stdout)} == {"128x128", "128x256", "64x64"}
    for line in reports:
        stack, kib = (float(x) for x in re.search(r" (\d+) B stack +(\S+) KiB", line).groups())
        assert kib * 1024 <= hopper_channels.SHARED and (stack <= 48 or "128x256" in line), line
    assert 2 * (hopper_channels.SHARED + 1024) <= 228 * 1024  # of each program the card keeps a KiB


def test_operands_overwritten_in_flight(script):
    """Two groups in flight: the older may be waited for alone."""
    product = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R{0}, gdesc[UR4], R24, gsb0 ; /* 0x00 */\n"
    write = "/*0020*/ @!P1 IMAD.MOV.U32 R{0}, RZ, RZ, 0x3f803f80 ; /* 0x00 */\n"
    wait = "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x{0} ; /* 0x00 */\n"
    both = product.format(152) + product.format(160)
    assert script.overwritten(product.format(152) + write.format(153)) == 1
    assert script.overwritten(both + write.format(156)) == 0
    assert script.overwritten(both + wait.format(1) + write.format(153)) == 0
    assert script.overwritten(both + wait.format(1) + write.format(160)) == 1
    assert script.overwritten(both + wait.format(0) + write.format(160)) == 0
    assert script.overwritten(product.format(152) + "/*0040*/ LDSM.16.M88.4 R150, [R2] ; /* 0x00 */\n") == 1
