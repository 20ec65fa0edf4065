"""Rung d: the gradient of a chunk as a Triton kernel, through triton-ascend to linalg; from there to this CPU, against
the fp64 recurrence, and through the vendor's compiler for an Ascend 950DT up to its closed last step. No NPU."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewy.algebra import backend as algebra
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.chunked import Chunks, attention, solve_rewy, state_pass
from rewy.algebra.rewy import reverse
from rewy.backends.ascend import fused
from rewy.problem import OPERATORS, Algebra, Gate, Gradients, Operands, Problem
from rewy.testing import Case, budgets, computed, errors, exact, make

FORM = Path(__file__).parent / "triton_form"
PYTHON = os.environ.get("REWY_ASCEND_TRITON_PYTHON", "")
TOOLS = ("mlir-opt-19", "mlir-translate-19", "llc-19", "gcc")
UNIFIED_BUFFER = 248 * 1024 * 8  # bits
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = (64, 128)
PROGRAMS = 3

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="triton-ascend has an environment of its own: scripts/ascend_ladder.sh"
)
needs_mlir = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)} (Debian: mlir-19-tools, llvm-19)"
)

TO_LLVM = [
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-unknown-ops=true",
    "--buffer-deallocation-pipeline",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the kernel in linalg."""
    folder = tmp_path_factory.mktemp("linalg")
    subprocess.run([PYTHON, FORM / "lower.py", folder], check=True, timeout=300)
    return folder


# ---- through the vendor's compiler ------------------------------------------------------------------------------


def compiled(source: Path, target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """bishengir-compile-a5 with the stand-in for what it calls last."""
    site = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    command = [f"{site}/ascendnpuir/bin/bishengir-compile-a5", str(source), f"--target={target}"]
    command += ["--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true"]
    command += ["--enable-print-memory-allocated-size", "-o", str(folder / "kernel")]
    environment = os.environ | {"PATH": f"{FORM}:{os.environ['PATH']}", "REWY_HIVM": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize(
    ("gates", "dtype", "size"),
    list(itertools.product(("scalar", "channel_decay", "channel_gates"), DTYPES, SIZES)),
)
def test_vendor_compiler_accepts(gates: str, dtype: str, size: int, lowered: Path, tmp_path: Path) -> None:
    """It fits the unified buffer and comes out as a cube part and a vector part that wait for each other."""
    run = compiled(lowered / f"{gates}_{dtype}_{size}_{size}.mlir", "Ascend950DT_9595", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    used = [int(bits) for bits in re.findall(r"UB size = (\d+) bits", run.stdout + run.stderr)]
    assert used and max(used) <= UNIFIED_BUFFER
    hivm = (tmp_path / "hivm.mlir").read_text()
    for part in ("chunk_gradient_mix_aic", "chunk_gradient_mix_aiv", "sync_block_set", "sync_block_wait"):
        assert part in hivm


def test_vendor_compiler_refuses_what_does_not_fit(lowered: Path, tmp_path: Path) -> None:
    run = compiled(lowered / "oversized.mlir", "Ascend950DT_9595", tmp_path)
    assert run.returncode != 0
    assert "ub overflow" in run.stdout + run.stderr
    assert not (tmp_path / "hivm.mlir").exists()


# ---- on this CPU ------------------------------------------------------------------------------------------------


class Kernel:
    """One instance of the kernel as a shared library, called like the custom operator."""

    def __init__(self, source: Path, folder: Path) -> None:
        mlir, llvm, obj, library = (folder / f"kernel.{ending}" for ending in ("mlir", "ll", "o", "so"))
        run = subprocess.check_call
        run(["mlir-opt-19", source, "--allow-unregistered-dialect", *TO_LLVM, "-o", mlir])
        run(["mlir-translate-19", "--mlir-to-llvmir", mlir, "-o", llvm])
        run(["llc-19", "-O2", "-filetype=obj", "-relocation-model=pic", llvm, "-o", obj])
        run(["gcc", "-O2", "-fPIC", "-shared", obj, FORM / "runtime.c", "-o", library, "-lm", "-Wl,-z,defs"])
        self.function = ctypes.CDLL(str(library)).chunk_gradient

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, w: Tensor | None, G: Tensor, do: Tensor, U: Tensor,
        dR: Tensor, S: Tensor, dS: Tensor, far: Tensor | None, masks: Tensor, scale: float, shared: bool, gram: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert far is None or not far.any(), "the Triton form takes one pass over the pairs"
        assert shared and not gram, "the Triton form leaves dq and dk in fp32, and is no conventional form"
        N = q.shape[0]
        # What nothing writes stays NaN.
        dq, dk = (torch.full(q.shape, torch.nan) for _ in range(2))
        dv = torch.full_like(v, torch.nan)
        db, dG, remaining = (torch.full_like(t, torch.nan) for t in (b, G, G))
        dw = torch.zeros(0) if w is None else torch.full_like(w, torch.nan)
        workspace = torch.zeros(16, dtype=torch.int8)
        operands = (q, k, v, b, torch.zeros(0) if w is None else w, G, do, U, dR, S, dS)
        results = (dq, dk, dv, db, dw, dG, remaining)
        memory = [part for t in (workspace, workspace, *operands, *results) for part in _memref(t)]
        for program in range(PROGRAMS):
            grid = map(ctypes.c_int32, (PROGRAMS, 1, 1, program, 0, 0))
            self.function(*memory, ctypes.c_int32(N), ctypes.c_float(scale), *grid)
        return results


def _memref(t: Tensor) -> list[object]:
    assert t.is_contiguous()
    base = ctypes.c_void_p(t.data_ptr())
    return [base, base, ctypes.c_int64(0), ctypes.c_int64(t.numel()), ctypes.c_int64(1)]


@needs_mlir
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_parity(
    operator: str, dtype: str, size: int, lowered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the public function, the gradient of the chunks being the kernel's."""
    row = OPERATORS[operator]
    gates = "scalar" if row.decay is not Gate.CHANNEL else "channel_decay" if row.tied else "channel_gates"
    kernel = Kernel(lowered / f"{gates}_{dtype}_{size}_{size}.mlir", tmp_path)
    calls = 0

    def backward(
        problem: Problem,
        x: Operands,
        kept: list[Tensor],
        do: Tensor,
        dht: Tensor | None,
        arithmetic: Arithmetic,
    ) -> Gradients:
        nonlocal calls
        calls += 1
        c = Chunks.of(problem, x, arithmetic)
        S, U, _ = state_pass(c, c.initial(x), solve_rewy(c, kept[0]))
        back, dR = reverse(c, attention(c, c.pairs()), kept[0], do, dht)
        return fused.gradients(c, x, S, U, back, dR)

    monkeypatch.setattr(torch.ops.rewy_ascend, "chunk_gradient", kernel, raising=False)
    monkeypatch.setitem(algebra.BACKWARDS, Algebra.REWY, backward)
    case = Case(operator, B=1, T=150, H=1, HV=2, K=size, V=size, dtype=DTYPES[dtype])
    x, do, dht = make(case)
    found = computed(x, do, dht, backend="reference")
    assert calls == 1
    expected = exact(x, do, dht)
    allowed = budgets(x, do, dht, expected)
    wrong = {
        name: (e, allowed[name]) for name, e in errors(found, expected).items() if not e <= allowed[name]
    }
    assert not wrong
