"""What the gates do to q and k, once per call, so that the sequential passes meet no exponential.

    G = cumsum of g in the chunk      X = b k e^G      K~ = k e^(Gl - G)      Q~ = scale q e^G

Gates with one number per token scale whole rows: the passes then read q and k themselves and four numbers
a row. A gate per channel has its products written out. The passes read these and e^Gl, never G. Where
`far` is set, some gate of a chunk is too far from its middle row for pairs of rows to be centred on that.

A chunk's buffers have all C rows: past the end of a sequence g counts as 0 and q, k as zero, so the last
row always holds Gl and no row needs a mask later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda.chunks import Chunks, chunk_rows
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.plan import Tiles
from rewy.problem import Gate, Operands, Problem

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x as `tl.exp` computes it on a GPU, without the instructions that keep results under 1e-38 from being 0."""
    return tl.exp2(x * LOG2_E)


# How many times one number is stored for the copy engine: what it brings begins at multiples of 128 bytes.
LANES = tl.constexpr(32)

# e^-110 is 0 in fp32. Flooring the gate there changes no result, and a token that forgets everything
# leaves the digits of its neighbours' cumulative sums alone.
FLOOR = tl.constexpr(-110.0)

# Channels that share a verdict on how far apart a chunk's gates are.
FAR_CHANNELS = tl.constexpr(64)


@triton.jit
def row_of(b_x, i: tl.constexpr, BT: tl.constexpr):
    """A tile's row i; a sum of all g would differ from the last sum by its rounding."""
    return tl.sum(tl.where((tl.arange(0, BT) == i)[:, None], b_x, 0.0), 0)


@triton.jit(do_not_specialize=["T"])
def row_gates(
    # inputs and outputs
    g,
    b,
    G,
    f,
    e,
    table,
    # sizes
    scale,
    T,
    HV,
    # meta
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    NH = tl.cdiv(HV, BH)
    i_c, i_b = tl.program_id(0) // NH, tl.program_id(0) % NH
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    o_t = tl.arange(0, BT)
    o_h = i_b * BH + tl.arange(0, BH)
    o_g = (start + o_t)[:, None] * HV + o_h[None, :]
    m_g = (o_t < rows)[:, None] & (o_h < HV)[None, :]

    b_b = tl.load(b + o_g, mask=m_g, other=0.0).to(tl.float32)
    if g is None:
        b_g = tl.zeros([BT, BH], dtype=tl.float32)
    else:
        b_g = tl.maximum(tl.load(g + o_g, mask=m_g, other=0.0).to(tl.float32), FLOOR)
    # in fp64, so that rows without decay between them keep the same sum once it is rounded
    b_G = tl.cumsum(b_g.to(tl.float64), 0)
    b_r = (row_of(b_G, BT - 1, BT)[None, :] - b_G).to(tl.float32)
    b_G = b_G.to(tl.float32)
    b_Gl = row_of(b_G, BT - 1, BT)

    i_ch = (i_c.to(tl.int64) * HV + o_h)[None, :]
    p_f = f + i_ch * 4 * BT + o_t[:, None]
    m_f = (o_h < HV)[None, :]
    tl.store(G + i_ch * BT + o_t[:, None], b_G, mask=m_f)
    tl.store(p_f, b_b, mask=m_f)
    tl.store(p_f + BT, b_b * exp(b_G), mask=m_f)
    tl.store(p_f + 2 * BT, exp(b_r), mask=m_f)
    tl.store(p_f + 3 * BT, scale * exp(b_G), mask=m_f)
    if e is not None:
        o_e = tl.arange(0, LANES)[:, None]
        tl.store(e + i_ch * LANES + o_e, exp(b_Gl)[None, :], mask=m_f)


@triton.jit(do_not_specialize=["T"])
def channel_gates(
    # inputs and outputs
    q,
    k,
    g,
    b,
    G,
    f,
    e,
    far,
    x,
    kt,
    qt,
    table,
    # sizes
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    # meta
    LIMIT: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    CHANNEL_ERASE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    tl.static_assert(
        BK == FAR_CHANNELS or BK >= K, "a tile of gates has one verdict on how far apart they are"
    )
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_ch = tl.program_id(0) // NK
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    o_h = (start + o_t) * HV + i_hv
    m_t = o_t < rows
    m_tk = m_t[:, None] & (o_k < K)[None, :]

    p_qk = ((start + o_t) * H + i_h)[:, None] * K + o_k[None, :]
    b_q = tl.load(q + p_qk, mask=m_tk, other=0.0).to(tl.float32)
    b_k = tl.load(k + p_qk, mask=m_tk, other=0.0).to(tl.float32)
    if CHANNEL_ERASE:
        b_b = tl.load(b + o_h[:, None] * K + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    else:
        b_b = tl.load(b + o_h, mask=m_t, other=0.0).to(tl.float32)[:, None]
    if CHANNEL_DECAY:
        b_g = tl.load(g + o_h[:, None] * K + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    else:
        b_g = tl.zeros([BT, BK], dtype=tl.float32)
        if g is not None:
            b_g += tl.load(g + o_h, mask=m_t, other=0.0).to(tl.float32)[:, None]
    b_g = tl.maximum(b_g, FLOOR)
    b_G = tl.cumsum(b_g, 0)
    b_Gl = row_of(b_G, BT - 1, BT)
    b_eG = exp(b_G)

    o_ck = i_ch.to(tl.int64) * BT * K + o_t[:, None] * K + o_k[None, :]
    m_ck = (o_k < K)[None, :]
    tl.store(G + o_ck, b_G, mask=m_ck)
    if e is not None:
        tl.store(e + i_ch.to(tl.int64) * K + o_k, exp(b_Gl), mask=o_k < K)
    if f is not None:
        first = i_k * BT + o_t < BT  # i_k == 0, which Triton 3.9's interpreter takes as no mask of a block
        tl.store(f + i_ch.to(tl.int64) * BT + o_t, tl.sum(b_b, 1), mask=first)
    tl.store(x + o_ck, (b_b * b_k * b_eG).to(x.dtype.element_ty), mask=m_ck)
    tl.store(kt + o_ck, (b_k * exp(b_Gl[None, :] - b_G)).to(x.dtype.element_ty), mask=m_ck)
    tl.store(qt + o_ck, (scale * b_q * b_eG).to(x.dtype.element_ty), mask=m_ck)

    # G never grows: its first and last rows are the furthest from its middle one. The first and the middle one are
    # read back, for to sum the whole tile for a row takes longer.
    tl.debug_barrier()
    p_G = G + i_ch.to(tl.int64) * BT * K + o_k
    b_c = tl.load(p_G + BT // 2 * K, mask=o_k < K, other=0.0)
    b_d = tl.maximum(tl.load(p_G, mask=o_k < K, other=0.0) - b_c, b_c - b_Gl)
    tl.store(far + i_ch.to(tl.int64) * tl.cdiv(K, FAR_CHANNELS) + i_k, (tl.max(b_d, 0) > LIMIT).to(tl.int32))


class Gated(NamedTuple):
    """What the later stages read of q, k and their gates; G, f and e in fp32, far in int32.

    Rows: G [NC,HV,C], f [NC,HV,4,C] of (b, b e^G, e^(Gl - G), scale e^G), e [NC,HV,32] of e^Gl, and x, kt are
    k itself, qt is q.
    Channels: G [NC,HV,C,K], f [NC,HV,C] of b where that is also the write gate, else None, e [NC,HV,K] of e^Gl,
    far [NC,HV,K/64] not 0 where one of 64 channels is too far from its chunk's middle row to be centred on it,
    and x, kt, qt [NC,HV,C,K] in q's dtype.
    Without decay e is None, for rows far is.
    """

    G: Tensor
    f: Tensor | None
    e: Tensor | None
    far: Tensor | None
    x: Tensor
    kt: Tensor
    qt: Tensor


def by_channel(problem: Problem) -> bool:
    """Whether a gate on the key side has one number per channel."""
    return problem.operator.by_channel


def exponent_limit(problem: Problem) -> float:
    """How far a centred operand may reach: e^60 is far inside bf16 and fp32, e^8 inside fp16."""
    return 8.0 if problem.dtype is torch.float16 else 60.0


def gated(problem: Problem, x: Operands, chunks: Chunks, tiles: Tiles) -> Gated:
    p, out = problem, allocated(problem, x, chunks.count)
    args = dict(g=x.g, b=x.erase, table=chunks.table, scale=p.scale, T=p.T, HV=p.HV, BT=chunks.size)
    if not by_channel(p):
        BH = min(16, triton.next_power_of_2(p.HV))
        grid = (chunks.count * triton.cdiv(p.HV, BH),)
        Launch(row_gates, grid, args | dict(G=out.G, f=out.f, e=out.e, BH=BH)).run()
        return out
    Launch(
        channel_gates,
        grid=(chunks.count * p.HV * triton.cdiv(p.K, tiles.BK),),
        args=args
        | out._asdict()
        | dict(q=x.q, k=x.k, H=p.H, K=p.K, BK=tiles.BK)
        | dict(
            CHANNEL_DECAY=p.operator.decay is Gate.CHANNEL,
            CHANNEL_ERASE=p.operator.erase is Gate.CHANNEL,
            LIMIT=exponent_limit(p),
        ),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    ).run()
    return out


def allocated(problem: Problem, x: Operands, count: int) -> Gated:
    """A problem's `Gated` for as many chunks, before anything is in it."""
    p, C, channel = problem, problem.chunk_size, by_channel(problem)

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return x.q.new_empty(count, p.HV, *shape, dtype=dtype)

    e = None if p.operator.decay is Gate.NONE else numbers(p.K if channel else LANES.value)
    if not channel:
        return Gated(numbers(C), numbers(4, C), e, None, x.k, x.k, x.q)
    f = numbers(C) if p.operator.tied else None
    far = numbers(triton.cdiv(p.K, FAR_CHANNELS.value), dtype=torch.int32)
    return Gated(numbers(C, p.K), f, e, far, *(x.q.new_empty(count, p.HV, C, p.K) for _ in range(3)))


def kept(problem: Problem) -> tuple[str, ...]:
    """What of a `Gated` the backward takes over: the numbers of rows, which are few; all if nothing is formed again."""
    rows, op = not by_channel(problem), problem.operator
    numbers = ("G",) + ("f",) * (rows or op.tied) + ("e",) * (op.decay is not Gate.NONE)
    if rows:
        return numbers
    return () if problem.recompute else (*numbers, "far", "x", "kt", "qt")


def restored(x: Operands, tensors: dict[str, Tensor]) -> Gated:
    """A `Gated` from what was kept of it."""
    made: dict[str, Any] = dict(f=None, e=None, far=None, x=x.k, kt=x.k, qt=x.q)
    return Gated(**made | tensors)
