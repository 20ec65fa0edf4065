"""Few heads: every sequence in parts, whose sequential passes run side by side.

A pass has one program for each head and slice of values, and its length is the sequence's. But what a part does to
the state it begins with is affine, M S + N: N is its final state from none, M its final state from the identity
without values. Two short passes give both, a third kernel chains them to the states between parts, and the
passes proper then begin with those. The reverse pass has M^T in place of M. Nothing is approximated. The forward leaves
M and the states between parts to the backward.

    S_(j+1) = M_j S_j + N_j          dS_j = M_j^T dS_(j+1) + dN_j

Parts begin where chunks begin, so every chunk keeps its number, and with it all that is stored by chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda import state
from rewy.backends.cuda.chunks import Chunks
from rewy.backends.cuda.gates import Gated
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.plan import Plan
from rewy.problem import Algebra, Operands, Problem


@triton.jit
def chain_parts(
    # inputs and outputs
    M,
    N,
    s0,
    s,
    end,
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
    if REVERSE:
        o_m = o_k[None, :] * K + o_k[:, None]
    else:
        o_m = o_k[:, None] * K + o_k[None, :]
    for j in range(0, PARTS):
        i_p = i_n * PARTS + (PARTS - 1 - j if REVERSE else j)
        i_ph = i_p.to(tl.int64) * HV + i_hv
        tl.store(s + i_ph * K * V + o_s, b_s, mask=m_s)
        b_M = tl.load(M + i_ph * K * K + o_m, mask=m_k[:, None] & m_k[None, :], other=0.0)
        b_N = tl.load(N + i_ph * K * V + o_s, mask=m_s, other=0.0)
        b_s = tl.dot(b_M, b_s, b_N, input_precision=PRECISION)
    if end is not None:
        tl.store(end + i_nh.to(tl.int64) * K * V + o_s, b_s, mask=m_s)


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
    """As `state.outputs`, and to keep for the ReWY backward the tensors of `kept_like`."""
    p, chunks = problem, replace(chunks, parts=tiles.parts)
    M = transitions(p, gated, Ti, chunks, tiles)
    ht = x.v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32)
    begin = starts(p, x, gated, Ti, M, ht, chunks, tiles)
    x = x._replace(initial_state=begin)
    o, ht, states = state.outputs(p, x, gated, A, Ti, chunks, tiles.outputs, keep, ht)
    return o, ht, [*states, M, begin] if p.algebra is Algebra.REWY else states


def kept_like(problem: Problem, x: Operands, tiles: Plan) -> list[Tensor]:
    """Room for M of every part, [N·parts,HV,K,K], and the states that parts begin with, [N·parts,HV,K,V]."""
    p = problem
    return [x.q.new_empty(p.N * tiles.parts, p.HV, p.K, D, dtype=torch.float32) for D in (p.K, p.V)]


def both(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, dht: Tensor | None,
    kept: list[Tensor], chunks: Chunks, tiles: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """S, U of `state.states` unless they were kept, and dS+, dR, dh0 of `state.reverse`, in its units."""
    p, chunks = problem, replace(chunks, parts=tiles.parts)
    *states, M, begin = kept
    h0 = x.initial_state
    dh0 = None if h0 is None else h0.new_empty(h0.shape, dtype=torch.float32)
    x = x._replace(initial_state=begin)
    s, u = states or state.states(p, x, gated, Ti, chunks, tiles.states)
    x = x._replace(initial_state=None)
    dN = state.start_gradient(p, gated, A, Ti, do, chunks, tiles.reverse)
    ends = chained(p, M, dN, dht, dh0, tiles, reverse=True)
    ds, dr, _ = state.reverse(p, x, gated, A, Ti, do, ends, chunks, tiles.reverse)
    return s, u, ds, dr, dh0


def transitions(problem: Problem, gated: Gated, Ti: Tensor, chunks: Chunks, tiles: Plan) -> Tensor:
    """M of every part, [N·parts,HV,K,K]."""
    return state.final(replace(problem, V=problem.K), None, gated, Ti, chunks, tiles.states)


def starts(
    problem: Problem, x: Operands, gated: Gated, Ti: Tensor, M: Tensor, ht: Tensor,
    chunks: Chunks, tiles: Plan,
) -> Tensor:  # fmt: skip
    """The states that parts begin with, [N·parts,HV,K,V], and into `ht` the final ones."""
    N = state.final(problem, x._replace(initial_state=None), gated, Ti, chunks, tiles.states)
    return chained(problem, M, N, x.initial_state, ht, tiles)


def chained(
    problem: Problem, M: Tensor, N: Tensor, s0: Tensor | None, end: Tensor | None, tiles: Plan,
    reverse: bool = False,
) -> Tensor:  # fmt: skip
    """The state before every part, in the order of the walk, and into `end`, if there is one, that after the last."""
    p, by = problem, tiles.chain
    s = N.new_empty(N.shape)
    Launch(
        chain_parts,
        grid=(p.N * p.HV * triton.cdiv(p.V, by.BV),),
        args=dict(
            M=M, N=N, s0=s0, s=s, end=end, HV=p.HV, K=p.K, V=p.V, PARTS=tiles.parts, REVERSE=reverse,
            # tf32 in three parts is as exact as fp32 to 1e-6, and on tensor cores
            PRECISION="ieee" if p.dtype is torch.float32 else "tf32x3",
            BK=by.BK, BV=by.BV,
        ),
        num_warps=by.warps,
        num_stages=by.stages,
    ).run()  # fmt: skip
    return s
