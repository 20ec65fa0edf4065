"""Where chunks lie: dense sequences by arithmetic, packed ones by a table that is built on the device.

A chunk never crosses a sequence. Packed sequences of unknown lengths have at most T // C + N chunks, so
grids and buffers take that many and programs whose chunk has no rows leave at once: nothing waits for
the offsets to reach the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda.launch import Launch
from rewy.problem import Operands, Problem


@triton.jit
def chunk_rows(table, i_c, T, BT: tl.constexpr):
    """First token and number of rows of chunk `i_c`."""
    if table is None:
        NT = tl.maximum(tl.cdiv(T, BT), 1)
        i_n, i_t = i_c // NT, i_c % NT
        start = i_n.to(tl.int64) * T + i_t * BT
        rows = tl.minimum(T - i_t * BT, BT)
    else:
        start = tl.load(table + 2 * i_c).to(tl.int64)
        rows = tl.load(table + 2 * i_c + 1)
    return start, rows


@triton.jit
def sequence_chunks(cu_seqlens, first, i_p, T, BT: tl.constexpr, PARTS: tl.constexpr = 1):
    """First token, number of tokens and first chunk of part `i_p`, where every sequence has PARTS.

    They have as many chunks each, but for the last that has any; those after it are empty.
    """
    i_n = i_p // PARTS
    if cu_seqlens is None:
        bos = i_n.to(tl.int64) * T
        length = T
        i_c = i_n * tl.cdiv(T, BT)
    else:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
        i_c = tl.load(first + i_n)
    if PARTS > 1:
        count = tl.cdiv(length, BT)
        per_part = tl.cdiv(count, PARTS)
        before = tl.minimum(i_p % PARTS * per_part, count)
        length = tl.maximum(tl.minimum(length - before * BT, per_part * BT), 0)
        bos += before * BT
        i_c += before
    return bos, length, i_c


@triton.jit(do_not_specialize=["N", "NC"])
def list_chunks(
    # inputs and outputs
    cu_seqlens,
    first,
    table,
    # sizes
    N,
    NC,
    # meta
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    i_n = tl.program_id(0)
    o_n = tl.arange(0, BN)
    i_c = 0
    for i_m in range(0, i_n, BN):
        p_m = cu_seqlens + i_m + o_n
        m_m = i_m + o_n < i_n
        b_length = tl.load(p_m + 1, mask=m_m, other=0) - tl.load(p_m, mask=m_m, other=0)
        i_c += tl.sum(tl.cdiv(b_length.to(tl.int32), BT))
    if i_n < N:
        tl.store(first + i_n, i_c)
        bos = tl.load(cu_seqlens + i_n).to(tl.int32)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        end = i_c + tl.cdiv(eos - bos, BT)
    else:
        bos, eos, end = 0, 0, NC
    for i_m in range(i_c, end, BN):
        o_c = i_m + o_n
        b_start = bos + (o_c - i_c) * BT
        b_rows = tl.maximum(tl.minimum(eos - b_start, BT), 0)
        tl.store(table + 2 * o_c, b_start, mask=o_c < end)
        tl.store(table + 2 * o_c + 1, b_rows, mask=o_c < end)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a problem: `count` of them, `table` [count,2] of (first token, rows), `first` [N].

    A pass walks the chunks of a sequence in as many `parts`, side by side, each with a state of its own.
    """

    size: int
    count: int
    parts: int = 1
    cu_seqlens: Tensor | None = None
    first: Tensor | None = None
    table: Tensor | None = None


def chunks_of(problem: Problem, x: Operands) -> Chunks:
    C, N = problem.chunk_size, problem.N
    if x.cu_seqlens is None:
        return Chunks(C, chunk_count(problem))
    cu = x.cu_seqlens.contiguous()
    chunks = Chunks(
        C,
        chunk_count(problem),
        cu_seqlens=cu,
        first=torch.empty(N, dtype=torch.int32, device=cu.device),
        table=torch.empty(chunk_count(problem), 2, dtype=torch.int32, device=cu.device),
    )
    Launch(
        list_chunks,
        grid=(N + 1,),
        args=dict(
            cu_seqlens=cu,
            first=chunks.first,
            table=chunks.table,
            N=N,
            NC=chunks.count,
            BT=C,
            BN=128,
        ),
        num_warps=1,
    ).run()
    return chunks


def chunk_count(problem: Problem) -> int:
    """How many chunks there are, or can be at most where only the device knows the lengths; never 0."""
    if problem.varlen:
        return problem.T // problem.chunk_size + max(1, problem.N)
    return problem.B * max(1, triton.cdiv(problem.T, problem.chunk_size))
