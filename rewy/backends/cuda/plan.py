"""How every kernel is launched: pure functions from a problem and a device's limits to tiles.

Nothing is tuned at run time. The tiles below were measured on Hopper; a device with less shared memory, or
inputs of 32 bits, gets smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from rewy.problem import Gate, Problem


@dataclass(frozen=True)
class Limits:
    """Of a device: shared memory a program may use in bytes, and compute capability."""

    shared: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Tiles:
    """Channels of k and v per tile, warps per program, stages of its load pipeline."""

    BK: int
    BV: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """The tiles of every kernel."""

    gates: Tiles
    pairs: Tiles
    state: Tiles
    reverse: Tiles
    gradients: Tiles


def plan(problem: Problem, limits: Limits) -> Plan:
    wide = problem.dtype is torch.float32
    K, V = padded(problem)
    # A sequential pass keeps K x BV numbers in registers: narrow slices also give more programs.
    BV = min(V, 16 if wide else 32)
    sequential = Tiles(K, BV, warps=8 if K > 128 else 4, stages=_stages(problem, K, BV, limits))
    return Plan(
        gates=Tiles(min(K, 64), 0, warps=4, stages=1),
        pairs=Tiles(min(K, 32 if wide else 64), 0, warps=4, stages=1),
        state=sequential,
        reverse=sequential,
        gradients=Tiles(min(K, 64), min(V, 32 if wide else 128), warps=8 if wide else 4, stages=1),
    )


def padded(problem: Problem) -> tuple[int, int]:
    """K and V as the kernels see them: powers of two, of which tiles are parts.

    In 16 bits they are at least 64. Triton 3.6 miscompiles tiles of 32 channels for Hopper's matrix unit (wrong
    values, reads past shared memory), so narrow heads are masked rather than tiled narrowly.
    """
    least = 16 if problem.dtype is torch.float32 else 64
    K, V = (max(least, triton.next_power_of_2(d)) for d in (problem.K, problem.V))
    return K, V


def _stages(problem: Problem, K: int, BV: int, limits: Limits) -> int:
    """As many chunks in flight as fit: keys, scores and values of each, and the operands made on the way."""
    C, bytes_each = problem.chunk_size, problem.dtype.itemsize
    key_tiles = 3 if Gate.CHANNEL in (problem.operator.decay, problem.operator.erase) else 2
    chunk = (key_tiles * C * K + 2 * C * C + C * BV) * bytes_each
    made = (K * BV + 2 * C * BV) * bytes_each
    return 1 if problem.dtype is torch.float32 else max(1, min(3, (limits.shared - made) // chunk))


@cache
def limits_of(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits(shared=99 * 1024, capability=(8, 0))
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Limits(shared, torch.cuda.get_device_capability(index))
