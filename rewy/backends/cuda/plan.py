"""How every kernel is launched: pure functions from a problem and a device's limits to tiles.

Nothing is tuned at run time. The tiles below were measured on Hopper; a device with less shared memory, or
inputs of 32 bits, gets smaller ones. Kernels in Gluon are for Hopper alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib.util import find_spec

import torch
import triton

from rewy.backends.cuda.chunks import chunk_count
from rewy.problem import Algebra, Gate, Problem

HOPPER = (9, 0)

RUN = ((3, 6), (3, 7))
"""Versions of Triton under which the tests have run on a GPU."""
FAMILIAR = tuple(map(int, triton.__version__.split(".")[:2])) in RUN
# Gluon is experimental and changes with Triton: its kernels are for versions under which they have run.
GLUON = FAMILIAR and find_spec("triton.experimental.gluon") is not None

# Chunks of all heads: S, U, dS and dR of so many take 0.75 GiB at K = V = 128. Shorter spans take less, but each has
# the host launch all kernels once more.
SPAN = 8192


@dataclass(frozen=True)
class Limits:
    """Of a device: shared memory a program may use in bytes, compute capability, and multiprocessors."""

    shared: int
    capability: tuple[int, int]
    processors: int = 132


@dataclass(frozen=True)
class Tiles:
    """Channels of k and v per tile, warps per program, stages of its load pipeline, registers a thread may take."""

    BK: int
    BV: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Pipeline:
    """Of a sequential pass in `hopper`: chunks whose operands have a place in shared memory."""

    stages: int


@dataclass(frozen=True)
class Plan:
    """The tiles of every kernel.

    `sequential` is for any pass over a sequence, and what `outputs`, `states` and `reverse` are where `hopper` does
    not serve. `programs`: of `hopper_rows`, that compute the gradients of all chunks; 0 where it does not.
    `chunks_on_hopper`: by channel, chunks have their gradients from `hopper_channels`, but those of keys where gates
    cannot be centred. `scores` and `keys` are for the rest.
    `parts`: of a sequence, that are walked side by side (`segments`, for K up to 128); `chain` is for their states.
    `spans`: of a sequence, that a backward takes one after the other (module `spans`); `stretches`: of a span, that its
    pass for S and U walks side by side.
    """

    gates: Tiles
    pairs: Tiles
    sequential: Tiles
    outputs: Tiles | Pipeline
    states: Tiles | Pipeline
    reverse: Tiles | Pipeline
    scores: Tiles
    keys: Tiles
    chain: Tiles
    programs: int = 0
    chunks_on_hopper: bool = False
    parts: int = 1
    spans: int = 1
    stretches: int = 1

    @property
    def in_pieces(self) -> bool:
        """Whether a training step goes by spans or stretches."""
        return self.spans * self.stretches > 1

    def portable(self) -> Plan:
        """The same with every kernel in plain Triton; whether parts would pay is not known for it."""
        plain = self.sequential
        return replace(
            self,
            outputs=plain,
            states=plain,
            reverse=plain,
            programs=0,
            chunks_on_hopper=False,
            parts=1,
            stretches=1,
        )


def plan(problem: Problem, limits: Limits) -> Plan:
    # A length that is being traced has no hash.
    return _remembered(problem, limits) if type(problem.T) is int else _chosen(problem, limits)


def _chosen(problem: Problem, limits: Limits) -> Plan:
    wide = problem.dtype is torch.float32
    K, V = padded(problem)
    # A sequential pass keeps K x BV numbers in registers: narrow slices also give more programs.
    BV = min(V, 16 if wide else 32)
    sequential = Tiles(K, BV, warps=8 if K > 128 else 4, stages=_stages(problem, K, BV, limits))
    pairs = Tiles(min(K, 32 if wide else 64), 0, warps=4, stages=1)
    scores = Tiles(0, min(V, 32 if wide else 64), warps=4, stages=1)
    keys = Tiles(min(K, 32 if wide else 64), min(V, 32 if wide else 64), warps=4, stages=1)
    if wide:
        # A product in fp32 is unrolled, its operands in registers: half as much a thread compiles in half the time.
        # Without a limit of its own ptxas 12.8 has been seen to take 32 registers and to spill kilobytes.
        sequential, pairs, scores, keys = (
            replace(tiles, warps=8, registers=255) for tiles in (sequential, pairs, scores, keys)
        )
    # Two M in shared memory where they fit, and what a product takes.
    chain = Tiles(K, 16, warps=8 if K > 64 else 4, stages=3 if limits.shared >= 8 * K * (K + 16) else 2)
    if limits.capability == HOPPER and not wide:
        pairs = _pairs(problem, K, pairs)
        if 128 <= problem.V <= 256:
            keys = _plain_keys(problem, keys)
            # By channel a tile of values has two of U.
            scores = (
                replace(scores, registers=168) if problem.operator.by_channel else replace(scores, BV=128)
            )
        if sequential.stages == 1 and K > 128:
            # Triton 3.6 and this form read past the end of narrower tiles.
            sequential = replace(sequential, BV=min(V, 64))
    chosen = Plan(
        gates=Tiles(min(K, 64), 0, warps=4, stages=1),
        pairs=pairs,
        sequential=sequential,
        outputs=sequential,
        states=sequential,
        reverse=sequential,
        scores=scores,
        keys=keys,
        chain=chain,
        spans=_spans(problem),
    )
    return _on_hopper(chosen, problem, limits) if _fits_hopper(problem, limits) else chosen


_remembered = lru_cache(maxsize=256)(_chosen)


def _in_spans(problem: Problem) -> bool:
    """Whether module `spans` takes it: a sequence alone in its batch, whose S and U are formed again."""
    p = problem
    return p.N == 1 and not p.varlen and p.recompute and p.algebra is Algebra.REWY


def _spans(problem: Problem) -> int:
    """As many as have no more than `SPAN` chunks of all heads."""
    return triton.cdiv(chunk_count(problem) * problem.HV, SPAN) if _in_spans(problem) else 1


def _stretches(problem: Problem, spans: int, limits: Limits) -> int:
    """Two where there are multiprocessors for both, and each is a walk of some 64 chunks at least."""
    p = problem
    programs, span = p.HV * p.V // 64, chunk_count(p) // spans
    return 2 if _in_spans(p) and 2 * programs <= limits.processors and span >= 2 * 64 else 1


def _pairs(problem: Problem, K: int, pairs: Tiles) -> Tiles:
    """168 registers for three programs on a multiprocessor, or as many as two have.

    At K = 128 and chunks of 64 nothing is spilled then but for far-apart gates. By channel products of bf16 are in
    tf32, so that 32 channels are as wide as 64 elsewhere.
    """
    op = problem.operator
    if not op.by_channel:
        return replace(pairs, BK=min(K, 128), registers=168)
    if op.erase is Gate.CHANNEL or problem.dtype is torch.float16:
        return replace(pairs, registers=255)
    return replace(pairs, BK=32, registers=168)


def _plain_keys(problem: Problem, keys: Tiles) -> Tiles:
    """Two tiles of values in flight where registers allow, and three programs on a multiprocessor."""
    if problem.operator.erase is Gate.CHANNEL:
        return keys
    capped = problem.operator.decay is not Gate.CHANNEL and problem.V == 128
    return replace(keys, stages=2, registers=168 if capped else None)


def _fits_hopper(problem: Problem, limits: Limits) -> bool:
    """Whether `hopper`, `hopper_rows` and `hopper_channels` can compute a problem on a device."""
    p = problem
    rows = chunk_count(p) * p.HV * max(4 * p.chunk_size, p.K)
    return (
        limits.capability == HOPPER
        and GLUON
        and p.dtype.itemsize == 2
        and p.chunk_size == 64
        and p.K in (64, 128)
        and p.V % 64 == 0
        and 0 < p.V <= 256
        # the copy engine counts in 32 bits, and from 1
        and 0 < p.B * p.T < 2**31
        and rows < 2**31
    )


def _parts(problem: Problem, limits: Limits) -> int:
    """Enough for every multiprocessor to walk one, none shorter than 64 chunks.

    With states between them, passes over parts are thrice the work: fewer than four do not pay.
    """
    p = problem
    programs, shortest = max(1, p.N * p.HV * p.V // 64), max(1, p.N) * 64 * p.chunk_size
    parts = 1
    while 2 * parts * programs <= limits.processors and 2 * parts * shortest <= p.B * p.T:
        parts *= 2
    return parts if parts >= 4 and p.K <= 128 else 1


def _programs(problem: Problem, limits: Limits) -> int:
    """One a multiprocessor for gates with one number a row, of which one erases and writes.

    A program has all value heads of a key head in turn, so grouped heads want several such groups for each.
    """
    p = problem
    even = p.group == 1 or chunk_count(p) * p.H >= 4 * limits.processors
    return limits.processors if p.operator.tied and not p.operator.by_channel and even else 0


def _on_hopper(plan: Plan, problem: Problem, limits: Limits) -> Plan:
    """Passes as deep as shared memory allows, up to four chunks: a fifth gains nothing."""
    from rewy.backends.cuda import hopper, hopper_channels, hopper_rows  # need Gluon

    def pipeline(shared: Callable[[Problem, int], int]) -> Tiles | Pipeline:
        depths = (stages for stages in (4, 3, 2) if shared(problem, stages) <= limits.shared)
        return next(map(Pipeline, depths), plan.sequential)

    parts, channel = _parts(problem, limits), problem.operator.by_channel
    return replace(
        plan,
        parts=parts,
        spans=1 if parts > 1 else plan.spans,
        stretches=1 if parts > 1 else _stretches(problem, plan.spans, limits),
        outputs=pipeline(partial(hopper.forward_shared, output=True, keep=not problem.recompute)),
        states=pipeline(partial(hopper.forward_shared, output=False, keep=True)),
        reverse=pipeline(hopper.reverse_shared),
        programs=_programs(problem, limits) if hopper_rows.shared(problem) <= limits.shared else 0,
        chunks_on_hopper=channel and problem.V in (64, 128, 256) and limits.shared >= hopper_channels.SHARED,
    )


def padded(problem: Problem) -> tuple[int, int]:
    """K and V as the kernels see them: powers of two, of which tiles are parts.

    In 16 bits they are at least 64. Triton 3.6 miscompiles such tiles of 32 channels for Hopper's matrix unit (wrong
    values, reads past shared memory), so narrow heads are masked rather than tiled narrowly.
    """
    least = 16 if problem.dtype is torch.float32 else 64
    K, V = (max(least, triton.next_power_of_2(d)) for d in (problem.K, problem.V))
    return K, V


def _stages(problem: Problem, K: int, BV: int, limits: Limits) -> int:
    """As many chunks in flight as fit: keys, scores and values of each, and the operands made on the way."""
    C, bytes_each = problem.chunk_size, problem.dtype.itemsize
    key_tiles = 3 if problem.operator.by_channel else 2
    chunk = (key_tiles * C * K + 2 * C * C + C * BV) * bytes_each
    made = (K * BV + 2 * C * BV) * bytes_each
    return 1 if problem.dtype is torch.float32 else max(1, min(3, (limits.shared - made) // chunk))


@cache
def limits_of(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits(shared=99 * 1024, capability=(8, 0))
    index = torch.cuda.current_device() if device.index is None else device.index
    card = triton.runtime.driver.active.utils.get_device_properties(index)
    capability = torch.cuda.get_device_capability(index)
    return Limits(card["max_shared_mem"], capability, card["multiprocessor_count"])
