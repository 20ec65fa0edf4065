#!/usr/bin/env python3
"""Compile the CUDA backend's kernels for cards that are not here and check what they ask of them.

    scripts/compile_offline.py                     # sm_80, sm_90 and sm_100, everything the plans ship
    scripts/compile_offline.py --arch 90 --only key_gradients

The backend runs on meta tensors while its launches are recorded, so a kernel's signature and
configuration are those of a real call. Every compiled kernel is then read back: registers, stack (which
in these kernels is spilled registers), shared memory against the card's limit, its matrix instruction, and
on Hopper whether operands of one in flight are overwritten. Exits 1 when a kernel does not compile, needs
more shared or tensor memory than the card has, has such operands, or spills in bf16 or fp16 on Hopper more
than `SPILLS` allows.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rewy.backends.cuda import prologue
from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.launch import Launch, recording
from rewy.backends.cuda.plan import Limits, plan
from rewy.problem import OPERATORS, Gate, Operands, Options, Problem, problem_of

TENSOR_MEMORY = 512  # columns, on sm_100
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Bytes a kernel may spill in 16 bits on Hopper, with Triton 3.6 and 3.7; others have been seen to spill 168 more.
# `forward_pass`: addresses that only a sequence's last, partial chunk uses. `pair_scores`: by channel, for far-apart
# gates, chunks of 32 and where K is no power of two. `channel_chunks`: between two tiles of values, where V is 256.
# `row_chunks`: addresses that are used once a chunk, where heads are grouped. `key_gradients`, `wy_gradients`: by
# channel, for rare chunks and for comparison. `state_forward`, `state_reverse`: by channel at K = 256, where narrower
# tiles read past their end.
SPILLS = {
    "forward_pass": 80,
    "channel_chunks": 288,
    "row_chunks": 24,
    "pair_scores": 400,
    "score_gradients": 96,
    "key_gradients": 2344,
    "state_forward": 200,
    "state_reverse": 128,
    "reverse_pass": 32,
    "wy_gradients": 592,
}
# What multiplies tiles on the tensor cores, newest first.
MATRIX = ("tcgen05.mma", "wgmma", "mma.sync")


@dataclass(frozen=True)
class Case:
    operator: str
    dtype: torch.dtype
    K: int
    V: int
    chunk_size: int = 64
    varlen: bool = False
    algebra: str = "rewy"
    T: int = 4096
    H: int = 32
    HV: int = 32
    parts: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        extra = [f"C{self.chunk_size}"] + ["packed"] * self.varlen + ["grouped"] * (self.HV != self.H)
        extra += [f"{self.parts} parts"] * (self.parts > 1)
        return f"{self.operator} {dtype} {self.K}x{self.V} {' '.join(extra)} {self.algebra}"

    def problem(self) -> tuple[Problem, Operands]:
        """The problem on tensors without memory."""
        op = OPERATORS[self.operator]
        N = 4 if self.varlen else 1

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        def gate(kind: Gate, channels: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return empty(1, self.T, self.HV, *[channels] * (kind is Gate.CHANNEL), dtype=dtype)

        x = Operands(
            q=empty(1, self.T, self.H, self.K),
            k=empty(1, self.T, self.H, self.K),
            v=empty(1, self.T, self.HV, self.V),
            g=None if op.decay is Gate.NONE else gate(op.decay, self.K, torch.float32),
            erase=gate(op.erase, self.K),
            write=None if op.tied else gate(op.write, self.V),
            initial_state=empty(N, self.HV, self.K, self.V, dtype=torch.float32),
            cu_seqlens=empty(N + 1, dtype=torch.int64) if self.varlen else None,
        )
        return problem_of(x, Options(self.K**-0.5, self.chunk_size, True, self.algebra)), x


def cases() -> Iterator[Case]:
    """Every operator, and around the common size the dtypes, head sizes and layouts that change a kernel."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for op in OPERATORS:
        yield Case(op, bf16, 128, 128)
        yield Case(op, bf16, 128, 128, algebra="conventional")
        for K, V in (64, 64), (100, 80), (128, 256), (256, 256), (256, 512):
            yield Case(op, bf16, K, V)
        yield Case(op, fp16, 128, 128)
        yield Case(op, fp32, 128, 128)
        yield Case(op, fp32, 64, 64)
        yield Case(op, bf16, 128, 128, chunk_size=16)
        yield Case(op, bf16, 128, 128, chunk_size=32)
        yield Case(op, bf16, 128, 128, varlen=True, H=8)
        if not OPERATORS[op].by_channel:
            for K, V in (128, 128), (128, 64), (64, 64):
                yield Case(op, bf16, K, V, H=8, T=8192)
        for K, V in (128, 128), (64, 64), (100, 80):
            yield Case(op, bf16, K, V, parts=8)
        yield Case(op, bf16, 128, 128, varlen=True, H=8, parts=8)


def attention(case: Case, limits: Limits) -> None:
    """Forward, backward and decoding of one case, where the backend takes it."""
    backend = CudaBackend(planner=lambda problem, _: replace(plan(problem, limits), parts=case.parts))
    problem, x = case.problem()
    if backend.supports(problem)[0]:
        o, final_state, kept = backend.forward(problem, x, training=True)
        backend.backward(problem, x, kept, o, final_state)
        backend.step(problem, x)


def prologues() -> None:
    """The prologues as the layers call them."""
    for dtype in (torch.bfloat16, torch.float32):
        for D in (64, 100, 128, 256):
            x = torch.empty(1, 4096, 32, D, dtype=dtype, device="meta")
            prologue.l2norm_backward(x, prologue.l2norm_forward(x))
        for shape, lower_bound in itertools.product(((1, 4096, 32), (1, 4096, 32, 128)), (None, -5.0)):
            x = torch.empty(shape, dtype=dtype, device="meta")
            weights = torch.empty(32, device="meta"), torch.empty(x.shape[2:].numel(), device="meta")
            dg = prologue.gate_forward(x, *weights, lower_bound)
            prologue.gate_backward(x, *weights, lower_bound, dg)
        x = torch.empty(1, 4096, 32, dtype=dtype, device="meta")
        prologue.sigmoid_backward(x, prologue.sigmoid_forward(x))


def shipped(arch: int) -> dict[tuple[Any, ...], tuple[str, Launch]]:
    """Every kernel the backend would compile on a card, once, with the first case that asks for it."""
    limits = Limits(SHARED_KIB[arch] * 1024, capability=divmod(arch, 10))
    calls: dict[str, Callable[[], None]] = {str(case): partial(attention, case, limits) for case in cases()}
    found: dict[tuple[Any, ...], tuple[str, Launch]] = {}
    for source, call in (calls | {"prologues": prologues}).items():
        with recording() as launches:
            call()
        for launch in launches:
            found.setdefault(launch.signature, (source, launch))
    return found


class Card:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps compiled kernels by device: one per architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Report:
    arch: int
    kernel: str
    source: str
    configuration: str
    registers: int = 0
    stack: int = 0
    shared: int = 0
    tensor_memory: int = 0
    matrix: str = "-"
    overwritten: int = 0
    error: str = ""

    @property
    def faults(self) -> list[str]:
        found = [self.error] if self.error else []
        limit = SHARED_KIB[self.arch] * 1024
        if self.shared > limit:
            found.append(f"needs {self.shared} bytes of shared memory, the card has {limit}")
        if self.tensor_memory > TENSOR_MEMORY:
            found.append(f"needs {self.tensor_memory} columns of tensor memory, the card has {TENSOR_MEMORY}")
        if self.stack > SPILLS.get(self.kernel, 0) and self.arch == 90 and "float32" not in self.source:
            found.append(f"spills {self.stack} bytes")
        if self.overwritten:
            found.append(f"{self.overwritten} instructions write operands of a matrix instruction in flight")
        return found

    def __str__(self) -> str:
        return (
            f"sm_{self.arch:<4} {self.kernel:<17} {self.source:<46} {self.configuration:<32} "
            f"{self.registers:>3} regs {self.stack:>5} B stack {self.shared / 1024:>6.1f} KiB  "
            f"{self.matrix:<12} {'; '.join(self.faults)}"
        ).rstrip()


def reason(error: BaseException) -> str:
    """The first cause in one line; Triton wraps it in the source it was compiling, down to a caret."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def examine(arch: int, source: str, launch: Launch) -> Report:
    driver.set_active(Card(arch))
    tiles = " ".join(
        f"{name}{size}" for name, size in launch.args.items() if re.fullmatch("B[A-Z]|STAGES", name)
    )
    seen = Report(arch, launch.name, source, f"{launch.num_warps}w {launch.num_stages}s {tiles}")
    try:
        compiled = launch.compile()
    except Exception as error:  # whatever the compiler throws is the finding
        return replace(seen, error=reason(error))
    matrix = next((m for m in MATRIX if m in compiled.asm["ptx"]), "-")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        asked = ["--dump-resource-usage", *["--dump-sass"] * (matrix == "wgmma")]
        dump = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, *asked, cubin.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = dict(re.findall(r"(REG|STACK):(\d+)", dump))
    return replace(
        seen,
        registers=int(found["REG"]),
        stack=int(found["STACK"]),
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        matrix=matrix,
        overwritten=overwritten(dump),
    )


def overwritten(sass: str) -> int:
    """Instructions that write a register while a matrix instruction in flight may still read it, on Hopper.

    wgmma takes its left operand from registers, and asynchronously. ptxas 12.8 has been seen to set some of them after
    the first instruction that reads them, where a left operand was a constant.
    """
    groups: list[set[int]] = []  # left operands of the groups in flight, the last one open
    found, group = 0, set()
    for line in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass):
        line = re.sub(r"^@!?U?P\d+\s+", "", line)
        name, _, operands = line.partition(" ")
        if name.startswith("HGMMA"):
            if left := re.match(r"\s*R\d+, R(\d+), gdesc", operands):
                group |= set(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in operands:
                groups.append(group)
                group = set()
        elif waited := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", line):
            groups = groups[len(groups) - int(waited[1]) :] if int(waited[1]) else []
        elif (written := re.match(r"\s*R(\d+)\b", operands)) and not name.startswith(("ST", "RED")):
            wide = 4 if re.search(r"\.128|LDSM.*\.4", name) else 2 if ".64" in name else 1
            registers = set(range(int(written[1]), int(written[1]) + wide))
            found += any(registers & busy for busy in (*groups, group))
    return found


# Launches hold meta tensors and kernels, which do not pickle: workers are forked and told an index.
jobs: list[tuple[int, str, Launch]] = []


def _examine(job: int) -> Report:
    return examine(*jobs[job])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=sorted(SHARED_KIB))
    parser.add_argument(
        "--only",
        metavar="TEXT",
        nargs="+",
        default=[""],
        help="kernels and cases whose name holds one of these",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (one per core)")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET=1 replaces the compiler: unset it")

    for arch in options.arch:
        for source, launch in shipped(arch).values():
            if any(text in f"{launch.name} {source}" for text in options.only):
                jobs.append((arch, source, launch))
    if not jobs:
        parser.error(f"no kernel or case holds any of {options.only}")
    faults = 0
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for report in pool.imap(_examine, range(len(jobs))):
            print(report, flush=True)
            faults += bool(report.faults)
    print(f"{len(jobs)} kernels compiled with Triton {triton.__version__}, {faults} with faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
