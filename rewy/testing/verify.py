"""Proves an installation: the four operators on a device, every output and gradient against the fp64 recurrence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rewy.dispatch import MADE_FOR, load, refusal
from rewy.problem import DTYPES, OPERATORS, Options, describe
from rewy.testing.budgets import budgets, errors
from rewy.testing.cases import Case, make
from rewy.testing.oracle import computed, exact, leaves

# What each case is there for, and the case; operator and dtype are filled in.
QUICK = {
    "several chunks and a tail": Case("", B=1, T=150, HV=2, K=32, V=48),
    "packed, one sequence empty, rows past the end": Case("", B=1, T=140, lengths=(65, 0, 64, 3)),
    "three value heads to a key head": Case("", T=64, H=1, HV=3, initial_state=False, gate="GM"),
    "hard resets": Case("", B=1, T=100, gate="GX1000"),
    "strong and no decay side by side": Case("", B=1, T=80, gate="GB25.8", dht=False),
    "one token": Case("", B=3, T=1, gate="GL1"),
}
# Heads that an NPU's custom operators take.
WIDE = {
    "heads of 64 and 128, a tail": Case("", B=1, T=150, H=1, HV=2, K=64, V=128),
    "heads of 128, packed, rows past the end": Case("", B=1, T=140, K=128, V=128, lengths=(65, 0, 64, 3)),
    "heads of 128, packed, offsets on the host": Case(
        "", B=1, T=140, K=128, V=128, lengths=(65, 0, 64, 3), host_offsets=True
    ),
    "heads of 64, hard resets": Case("", B=1, T=100, K=64, V=64, gate="GX1000"),
    "heads of 256": Case("", B=1, T=70, H=1, HV=1, K=256, V=256),
}
FULL = {
    f"heads of {K} and {V}, {gate}, chunks of {size}": Case(
        "", B=1, T=333, H=2, HV=4, K=K, V=V, gate=gate, chunk_size=size
    )
    for (K, V), size in (((64, 64), 32), ((128, 128), 64), ((100, 60), 64), ((256, 256), 64), ((48, 80), 16))
    for gate in ("GL10", "GQ", "G5", "G0")
}


@dataclass(frozen=True)
class Row:
    """One tensor of one case: how far it is from exact, relative to its norm, and how far it may be."""

    operator: str
    case: str
    tensor: str
    error: float
    budget: float
    ok: bool
    note: str = ""
    """Why there is no number: the call failed, or (`ok`) the backend does not take the case."""


def verify(device: torch.device | str = "cpu", backend: str | None = None, full: bool = False) -> list[Row]:
    """Runs every case in every dtype that the backend computes in; None is the backend made for the device.

    Raises ValueError when that backend cannot be used here at all, or takes no case. Inputs and exact results are made
    on the CPU.
    """
    kind = str(device).partition(":")[0]
    name = MADE_FOR.get(kind, "reference") if backend is None else backend
    reason = load(name).unusable()  # also registers the devices that a backend brings along
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot be verified on {device}: {reason}")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, got {device!r}: {error}") from None
    cases = QUICK | (FULL if full else {}) | (WIDE if name == "ascend" else {})
    dtypes = [dtype for dtype in DTYPES if dtype in load(name).dtypes]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: more threads would wait for each other
    try:
        rows = [
            row
            for operator in OPERATORS
            for title, case in cases.items()
            for dtype in dtypes
            for row in _rows(title, replace(case, operator=operator, dtype=dtype), device, name)
        ]
    finally:
        torch.set_num_threads(threads)
    if all(row.ok and row.note for row in rows):
        raise ValueError(f"backend {name!r} cannot be verified on {device}: {rows[0].note}")
    return rows


def _rows(title: str, case: Case, device: torch.device, backend: str) -> Iterator[Row]:
    x, do, dht = make(case)
    title = f"{title}, {str(case.dtype).removeprefix('torch.')}"
    problem = describe(x, Options(1.0, case.chunk_size, True, "rewy"))
    reason = refusal(load(backend), replace(problem, device=device))
    if reason is not None:
        yield Row(case.operator, title, "call", 0.0, 0.0, True, reason)
        return
    expected = exact(x, do, dht, case.scale)
    allowed = budgets(x, do, dht, expected, case.scale)
    try:
        actual = computed(
            leaves(x, device),
            do.to(device),
            None if dht is None else dht.to(device),
            case.scale,
            chunk_size=case.chunk_size,
            backend=backend,
        )
        found = errors(actual, expected)
    except Exception as failure:  # whatever a device throws is this case's result; the others still tell
        note = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
        yield Row(case.operator, title, "call", math.inf, 0.0, False, note)
        return
    for tensor, value in found.items():
        yield Row(case.operator, title, tensor, value, allowed[tensor], value <= allowed[tensor])
