"""Few heads: every sequence in parts, whose sequential passes run side by side.

A pass has one program for each head and slice of values, and its length is the sequence's. But what a part does to
the state it begins with is affine, M S + N: N is its final state from none, M its final state from the identity
without values. Two short passes give both, a third kernel chains them to the states between parts, and the
passes proper then begin with those. The reverse pass has M^T in place of M. Nothing is approximated.

    S_(j+1) = M_j S_j + N_j          dS_j = M_j^T dS_(j+1) + dN_j

Parts begin where chunks begin, so every chunk keeps its number, and with it all that is stored by chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda import state
from rewy.backends.cuda.chunks import Chunks
from rewy.backends.cuda.gates import Gated
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.plan import Plan
from rewy.problem import Operands, Problem


@triton.jit
def chain_parts(
    # inputs and outputs
    M,
    N,
    s0,
    s,
    # sizes
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    # meta
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = tl.program_id(0) // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_s = m_k[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    if s0 is None:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_s = tl.load(s0 + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)
    for j in range(0, PARTS):
        if REVERSE:
            i_p = i_n * PARTS + PARTS - 1 - j
        else:
            i_p = i_n * PARTS + j
        i_p = i_p.to(tl.int64) * HV + i_hv
        tl.store(s + i_p * K * V + o_s, b_s, mask=m_s)
        if REVERSE:
            o_m = o_k[None, :] * K + o_k[:, None]
        else:
            o_m = o_k[:, None] * K + o_k[None, :]
        b_M = tl.load(M + i_p * K * K + o_m, mask=m_k[:, None] & m_k[None, :], other=0.0)
        b_N = tl.load(N + i_p * K * V + o_s, mask=m_s, other=0.0)
        b_s = tl.dot(b_M, b_s, b_N, input_precision=PRECISION)


class Parts(NamedTuple):
    """A problem whose sequences are the parts of another's, and where they lie."""

    problem: Problem
    chunks: Chunks
    per_sequence: int
    M: Tensor  # [N·per_sequence,HV,K,K]
    starts: Tensor  # [N·per_sequence,HV,K,V]


def parts(problem: Problem, x: Operands, gated: Gated, Ti: Tensor, chunks: Chunks, tiles: Plan) -> Parts:
    """Sequences cut into `tiles.parts` of as many chunks each, and the states that the parts begin with."""
    p, n, C, device = problem, tiles.parts, chunks.size, x.q.device
    if chunks.cu_seqlens is None:
        bos = torch.arange(0, p.N * p.T, p.T, device=device)
        length = torch.full_like(bos, p.T)
        first = torch.arange(p.N, device=device) * triton.cdiv(p.T, C)
    else:
        bos, length, first = chunks.cu_seqlens[:-1], chunks.cu_seqlens.diff(), chunks.first
        assert first is not None
    count = (length + C - 1) // C
    before = torch.arange(n, device=device) * ((count + n - 1) // n)[:, None]  # chunks before a part, [N,n]
    before = before.minimum(count[:, None])
    cu = (bos[:, None] + (before * C).minimum(length[:, None])).flatten()
    cu = torch.cat([cu, (bos + length)[-1:]])
    where = (first[:, None] + before).flatten().to(torch.int32)
    q = replace(p, B=1, T=p.B * p.T, N=p.N * n, varlen=True)
    c = replace(chunks, cu_seqlens=cu, first=where)

    def final(problem: Problem, x: Operands) -> Tensor:
        return state.final(problem, x, gated, Ti, c, tiles.states)

    eye = torch.eye(p.K, device=device).expand(q.N, p.HV, p.K, p.K).contiguous()
    none = x.v.new_zeros(1, q.T, p.HV, p.K)
    without = x._replace(v=none, write=None if x.write is None else none, initial_state=eye)
    M, N = final(replace(q, V=p.K), without), final(q, x._replace(initial_state=None))
    return Parts(q, c, n, M, chained(p, n, M, N, x.initial_state))


def chained(
    problem: Problem, count: int, M: Tensor, N: Tensor, s0: Tensor | None, reverse: bool = False
) -> Tensor:
    """The states that parts begin with, [N·count,HV,K,V], from the first's; in reverse, the gradients at their ends."""
    p = problem
    out = torch.empty_like(N)
    BV = max(16, min(64, triton.next_power_of_2(p.V)))
    Launch(
        chain_parts,
        grid=(p.N * p.HV * triton.cdiv(p.V, BV),),
        args=dict(
            M=M, N=N, s0=s0, s=out, HV=p.HV, K=p.K, V=p.V, PARTS=count, REVERSE=reverse,
            # tf32 in three parts is as exact as fp32 to 1e-6, and on tensor cores
            PRECISION="ieee" if p.dtype is torch.float32 else "tf32x3",
            BK=max(16, triton.next_power_of_2(p.K)), BV=BV,
        ),
        num_warps=8,
        num_stages=1,
    ).run()  # fmt: skip
    return out


def outputs(
    problem: Problem,
    x: Operands,
    gated: Gated,
    A: Tensor,
    Ti: Tensor,
    chunks: Chunks,
    tiles: Plan,
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As `state.outputs`."""
    cut = parts(problem, x, gated, Ti, chunks, tiles)
    inner = x._replace(initial_state=cut.starts)
    o, ht, kept = state.outputs(cut.problem, inner, gated, A, Ti, cut.chunks, tiles.outputs, keep)
    return o, ht.unflatten(0, (-1, cut.per_sequence))[:, -1].contiguous(), kept


def both(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, dht: Tensor | None,
    kept: list[Tensor], chunks: Chunks, tiles: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """S, U of `state.states` unless they were kept, and dS+, dR, dh0 of `state.reverse`."""
    cut = parts(problem, x, gated, Ti, chunks, tiles)
    inner = x._replace(initial_state=cut.starts)
    s, u = kept or state.states(cut.problem, inner, gated, Ti, cut.chunks, tiles.states)

    def reverse(dht: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        ds, dr, dh0 = state.reverse(cut.problem, inner, gated, A, Ti, do, dht, cut.chunks, tiles.reverse)
        assert dh0 is not None
        return ds, dr, dh0

    dN = reverse(None)[2]
    ds, dr, dstarts = reverse(chained(problem, cut.per_sequence, cut.M, dN, dht, reverse=True))
    if x.initial_state is None:
        return s, u, ds, dr, None
    dh0 = dstarts.unflatten(0, (-1, cut.per_sequence))[:, 0]
    return s, u, ds, dr, dh0.to(x.initial_state.dtype, memory_format=torch.contiguous_format)
