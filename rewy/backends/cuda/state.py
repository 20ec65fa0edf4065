"""The two sequential passes: the state forward, its gradient backward. Neither forms W.

    forward:  R = w v - X S      U = T R          o = Q~ S + A U       S+ = e^Gl S + K~^T U
    reverse:  dU = A^T do + K~ dS+                 dR = T^T dU          dS = e^Gl dS+ + Q~^T do - X^T dR

One program walks one sequence with one head's slice of BV value channels; slices never meet. R and dU are formed
in fp32, and rounded only where T mixes rows: the kernels take `Ti`, T without the ones of its diagonal, and add its
product to R or dU itself. dS is in units of `unit` throughout. Where nothing decays, what rounding adds to a state
stays there: in bf16 S takes U, and dU takes dS, in leading and following digits (`TWO`). `hopper` has the same passes
for the card it is named after; the plan says which.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda.chunks import Chunks, sequence_chunks
from rewy.backends.cuda.gates import LANES, Gated, by_channel
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.pairs import precision
from rewy.backends.cuda.plan import Pipeline, Tiles
from rewy.problem import Algebra, Gate, Operands, Problem


@triton.jit
def key_tile(
    p, i_ch, i_t, o_t, o_k, m_t, i_h, H, K: tl.constexpr, BY_CHANNEL: tl.constexpr, BT: tl.constexpr
):
    """A chunk's rows of X, K~ or Q~: written out by channel, else k or q [B,T,H,K] itself."""
    m_k = (o_k < K)[None, :]
    if BY_CHANNEL:
        b_k = tl.load(p + i_ch * BT * K + (o_t[:, None] * K + o_k[None, :]), mask=m_k, other=0.0)
    else:
        o_h = o_t[:, None] * (H * K) + o_k[None, :]
        b_k = tl.load(p + (i_t * H + i_h) * K + o_h, mask=m_t[:, None] & m_k, other=0.0)
    return b_k


@triton.jit
def decays(f, e, i_ch, o_t, o_k, K: tl.constexpr, BY_CHANNEL: tl.constexpr, BT: tl.constexpr):
    """What scales a chunk: rows of X, of K~, of Q~ (all 1 by channel), and the state: e^Gl [BK,1] or a number."""
    if BY_CHANNEL:
        f_x, f_k, f_q = 1.0, 1.0, 1.0
    else:
        p_f = f + i_ch * 4 * BT
        f_x = tl.load(p_f + BT + o_t)[:, None]
        f_k = tl.load(p_f + 2 * BT + o_t)[:, None]
        f_q = tl.load(p_f + 3 * BT + o_t)[:, None]
    if e is None:
        b_e = 1.0
    elif BY_CHANNEL:
        b_e = tl.load(e + i_ch * K + o_k, mask=o_k < K, other=0.0)[:, None]
    else:
        b_e = tl.load(e + i_ch * LANES)
    return f_x, f_k, f_q, b_e


@triton.jit
def values(v, b, w, i_t, o_t, o_v, m_t, i_hv, HV, V: tl.constexpr):
    """A chunk's rows of v and its write gate, as they lie in memory; without v they are 0."""
    o_vt = o_t[:, None] * (HV * V) + o_v[None, :]
    m_vt = m_t[:, None] & (o_v < V)[None, :]
    if v is None:
        b_v = tl.zeros([1, 1], dtype=tl.float32)
    else:
        b_v = tl.load(v + (i_t * HV + i_hv) * V + o_vt, mask=m_vt, other=0.0)
    if v is None:
        b_w = b_v
    elif w is None:
        b_w = tl.load(b + i_t * HV + i_hv + o_t * HV, mask=m_t, other=0.0)[:, None]
    else:
        b_w = tl.load(w + (i_t * HV + i_hv) * V + o_vt, mask=m_vt, other=0.0)
    return b_v, b_w


@triton.jit(do_not_specialize=["T"])
def state_forward(
    # inputs and outputs
    x,
    kt,
    qt,
    v,
    b,
    w,
    f,
    e,
    A,
    Ti,
    h0,
    s,
    u,
    u2,
    o,
    ht,
    cu_seqlens,
    first,
    # sizes
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    PARTS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_ph = tl.program_id(0) // NV
    i_p, i_hv = i_ph // HV, i_ph % HV
    i_h = i_hv // (HV // H)
    bos, length, i_c0 = sequence_chunks(cu_seqlens, first, i_p, T, BT, PARTS)
    NT = tl.cdiv(length, BT)

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = (o_v < V)[None, :]
    m_s = (o_k < K)[:, None] & m_v
    o_s = o_k[:, None] * V + o_v[None, :]
    o_u = o_t[:, None] * V + o_v[None, :]
    o_c = o_t[:, None] * BT + o_t[None, :]
    dtype = x.dtype.element_ty
    TWO: tl.constexpr = dtype == tl.bfloat16 and e is None and not BY_CHANNEL

    if v is None:
        b_s = (o_k[:, None] == o_v[None, :]).to(tl.float32)
    elif h0 is None:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_s = tl.load(h0 + i_ph.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)
    # What no product takes from shared memory is loaded one chunk ahead.
    m_t = o_t < length
    b_vn, b_wn = values(v, b, w, bos, o_t, o_v, m_t, i_hv, HV, V)
    f_xn, f_kn, f_qn, b_en = decays(f, e, i_c0.to(tl.int64) * HV + i_hv, o_t, o_k, K, BY_CHANNEL, BT)
    for i in range(0, NT):
        i_t = bos + i * BT
        i_ch = (i_c0 + i).to(tl.int64) * HV + i_hv
        m_t = o_t < length - i * BT
        b_v, b_w, f_x, f_k, f_q, b_e = b_vn, b_wn, f_xn, f_kn, f_qn, b_en
        b_vn, b_wn = values(v, b, w, i_t + BT, o_t, o_v, o_t < length - (i + 1) * BT, i_hv, HV, V)
        i_cn = (i_c0 + tl.minimum(i + 1, NT - 1)).to(tl.int64) * HV + i_hv
        f_xn, f_kn, f_qn, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)

        b_x = key_tile(x, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        b_T = tl.load(Ti + i_ch * BT * BT + o_c)
        b_sd = b_s.to(dtype)
        b_r = f_x * tl.dot(b_x, b_sd, input_precision=PRECISION)
        b_r = b_w.to(tl.float32) * b_v.to(tl.float32) - b_r
        b_u = tl.dot(b_T, b_r.to(dtype), b_r, input_precision=PRECISION)
        if s is not None:
            tl.store(s + i_ch * K * V + o_s, b_sd, mask=m_s)
            tl.store(u + i_ch * BT * V + o_u, b_u.to(dtype), mask=m_v)
        if u2 is not None:
            tl.store(u2 + i_ch * BT * V + o_u, (b_u - b_u.to(dtype).to(tl.float32)).to(dtype), mask=m_v)
        if o is not None:
            b_q = key_tile(qt, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
            b_A = tl.load(A + i_ch * BT * BT + o_c)
            b_o = f_q * tl.dot(b_q, b_sd, input_precision=PRECISION)
            b_o = tl.dot(b_A, b_u.to(dtype), b_o, input_precision=PRECISION)
            o_o = o_t[:, None] * (HV * V) + o_v[None, :]
            tl.store(o + (i_t * HV + i_hv) * V + o_o, b_o.to(dtype), mask=m_t[:, None] & m_v)
        if BY_CHANNEL:
            b_kt = key_tile(kt, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        else:
            b_kt = b_x
        b_s = tl.dot(tl.trans(b_kt), (f_k * b_u).to(dtype), b_e * b_s, input_precision=PRECISION)
        if TWO:
            b_s = tl.dot(tl.trans(b_kt), (b_u - b_u.to(dtype).to(tl.float32)).to(dtype), b_s)
    if ht is not None:
        tl.store(ht + i_ph.to(tl.int64) * K * V + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["T"])
def state_reverse(
    # inputs and outputs
    x,
    kt,
    qt,
    do,
    f,
    e,
    A,
    Ti,
    dht,
    ds,
    dr,
    dh0,
    cu_seqlens,
    first,
    # sizes
    unit,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    PARTS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_ph = tl.program_id(0) // NV
    i_p, i_hv = i_ph // HV, i_ph % HV
    i_h = i_hv // (HV // H)
    bos, length, i_c0 = sequence_chunks(cu_seqlens, first, i_p, T, BT, PARTS)
    NT = tl.cdiv(length, BT)

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = (o_v < V)[None, :]
    m_s = (o_k < K)[:, None] & m_v
    o_s = o_k[:, None] * V + o_v[None, :]
    o_u = o_t[:, None] * V + o_v[None, :]
    o_c = o_t[:, None] * BT + o_t[None, :]
    o_o = o_t[:, None] * (HV * V) + o_v[None, :]
    dtype = do.dtype.element_ty
    TWO: tl.constexpr = dtype == tl.bfloat16 and e is None and not BY_CHANNEL

    if dht is None:
        b_ds = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_ds = tl.load(dht + i_ph.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)
    i_cn = (i_c0 + tl.maximum(NT - 1, 0)).to(tl.int64) * HV + i_hv
    f_xn, f_kn, f_qn, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)
    for j in range(0, NT):
        i = NT - 1 - j
        i_t = bos + i * BT
        i_ch = (i_c0 + i).to(tl.int64) * HV + i_hv
        m_t = o_t < length - i * BT
        f_x, f_k, f_q, b_e = f_xn, f_kn, f_qn, b_en
        if e is None:
            f_x, f_k, f_q = f_x / unit, f_k * unit, f_q / unit
        i_cn = (i_c0 + tl.maximum(i - 1, 0)).to(tl.int64) * HV + i_hv
        f_xn, f_kn, f_qn, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)

        b_kt = key_tile(kt, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        b_A = tl.load(A + i_ch * BT * BT + o_c)
        b_T = tl.load(Ti + i_ch * BT * BT + o_c)
        b_do = tl.load(do + (i_t * HV + i_hv) * V + o_o, mask=m_t[:, None] & m_v, other=0.0)
        b_dsd = b_ds.to(dtype)
        if ds is not None:
            tl.store(ds + i_ch * K * V + o_s, b_dsd, mask=m_s)
        b_du = tl.dot(b_kt, b_dsd, input_precision=PRECISION)
        if TWO:
            b_du = tl.dot(b_kt, (b_ds - b_dsd.to(tl.float32)).to(dtype), b_du)
        b_du *= f_k
        b_du = tl.dot(tl.trans(b_A), b_do, b_du, input_precision=PRECISION)
        b_dr = tl.dot(tl.trans(b_T), b_du.to(dtype), b_du, input_precision=PRECISION)
        if dr is not None:
            tl.store(dr + i_ch * BT * V + o_u, b_dr.to(dtype), mask=m_v)
        b_ds *= b_e
        b_q = key_tile(qt, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        if BY_CHANNEL:
            b_x = key_tile(x, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        else:
            b_x = b_kt
        b_ds = tl.dot(tl.trans(b_q), (f_q * b_do).to(dtype), b_ds, input_precision=PRECISION)
        b_ds = tl.dot(tl.trans(b_x), (-f_x * b_dr).to(dtype), b_ds, input_precision=PRECISION)
    if dh0 is not None:
        tl.store(dh0 + i_ph.to(tl.int64) * K * V + o_s, b_ds, mask=m_s)


def outputs(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, chunks: Chunks,
    tiles: Tiles | Pipeline, keep: bool, ht: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o [B,T,HV,V], the final state [N,HV,K,V] unless it is known, and what `states` gives if it is to be kept."""
    o = (x.v.new_zeros if problem.varlen else x.v.new_empty)(x.v.shape)
    s, u = _buffers(problem, x.v, chunks, digits(problem)) if keep else (None, None)
    end = _states(problem, x.v, chunks) if ht is None else ht
    forward(problem, x, gated, A, Ti, s, u, o, end if ht is None else None, chunks, tiles)
    return o, end, [t for t in (s, u) if t is not None]


def states(
    problem: Problem, x: Operands, gated: Gated, Ti: Tensor, chunks: Chunks, tiles: Tiles | Pipeline
) -> tuple[Tensor, Tensor]:
    """S [NC,HV,K,V] at the start of every chunk, and U [digits,NC,HV,C,V]."""
    s, u = _buffers(problem, x.v, chunks, digits(problem))
    forward(problem, x, gated, None, Ti, s, u, None, None, chunks, tiles)
    return s, u


def final(
    problem: Problem, x: Operands | None, gated: Gated, Ti: Tensor, chunks: Chunks, tiles: Tiles | Pipeline
) -> Tensor:
    """The final state of every part alone, [N·parts,HV,K,V]."""
    ht = _states(problem, Ti, chunks)
    forward(problem, x, gated, None, Ti, None, None, None, ht, chunks, tiles)
    return ht


def reverse(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, dht: Tensor | None,
    chunks: Chunks, tiles: Tiles | Pipeline,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dS+ [NC,HV,K,V] at the end of every chunk, dR [NC,HV,C,V], and in fp32 dh0 [N,HV,K,V] if there is an h0.

    dS+, dht and dh0 are in units of `unit`.
    """
    ds, dr = _buffers(problem, do, chunks)
    h0 = x.initial_state
    dh0 = None if h0 is None else h0.new_empty(h0.shape, dtype=torch.float32)
    _reverse(problem, gated, A, Ti, do, dht, ds, dr, dh0, chunks, tiles)
    return ds, dr, dh0


def start_gradient(
    problem: Problem, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, chunks: Chunks, tiles: Tiles | Pipeline
) -> Tensor:
    """The gradient at the start of every part alone, [N·parts,HV,K,V], from none at its end."""
    dh0 = _states(problem, Ti, chunks)
    _reverse(problem, gated, A, Ti, do, None, None, None, dh0, chunks, tiles)
    return dh0


def unit(problem: Problem) -> float:
    """What gradients of states are kept in: without decays, the scale but for a power of two.

    Q~^T do then takes do times the power, which is exact; do times the scale would have to be rounded.
    """
    if problem.operator.decay is not Gate.NONE or problem.algebra is not Algebra.REWY:
        return 1.0
    return math.frexp(problem.scale)[0] or 1.0


def digits(problem: Problem) -> int:
    """In how many tensors U is kept: by channel dA also takes what 16 bits leave of it, for dg's sake."""
    return 2 if by_channel(problem) and problem.dtype.itemsize == 2 else 1


def following(u: Tensor) -> tuple[Tensor, Tensor | None]:
    """U's leading digits, and those that follow where they are kept."""
    return u[0], u[1] if len(u) > 1 else None


def forward(
    problem: Problem, x: Operands | None, gated: Gated, A: Tensor | None, Ti: Tensor,
    s: Tensor | None, u: Tensor | None, o: Tensor | None, ht: Tensor | None,
    chunks: Chunks, tiles: Tiles | Pipeline,
) -> None:  # fmt: skip
    """The forward pass into those of its results that are not None; A is for o.

    Without x it begins with the identity and has no values.
    """
    u, u2 = (None, None) if u is None else following(u)
    if isinstance(tiles, Pipeline):
        from rewy.backends.cuda import hopper  # needs Gluon

        hopper.forward(problem, x, gated, A, Ti, s, u, u2, o, ht, chunks, tiles)
    else:
        v, b, w, h0 = (None,) * 4 if x is None else (x.v, x.erase, x.write, x.initial_state)
        args: dict[str, object] = dict(v=v, b=b, w=w, A=A, Ti=Ti, h0=h0, s=s, u=u, u2=u2, o=o, ht=ht)
        _launch(state_forward, problem, gated, chunks, tiles, args)


def _reverse(
    problem: Problem, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, dht: Tensor | None,
    ds: Tensor | None, dr: Tensor | None, dh0: Tensor | None, chunks: Chunks, tiles: Tiles | Pipeline,
) -> None:  # fmt: skip
    """The reverse pass into those of its results that are not None."""
    if isinstance(tiles, Pipeline):
        from rewy.backends.cuda import hopper  # needs Gluon

        hopper.reverse(problem, gated, A, Ti, do, dht, ds, dr, dh0, unit(problem), chunks, tiles)
    else:
        args: dict[str, object] = dict(do=do, A=A, Ti=Ti, dht=dht, ds=ds, dr=dr, dh0=dh0, unit=unit(problem))
        _launch(state_reverse, problem, gated, chunks, tiles, args)


def _launch(
    kernel: object, problem: Problem, gated: Gated, chunks: Chunks, tiles: Tiles, args: dict[str, object]
) -> None:
    args |= dict(
        x=gated.x, kt=gated.kt, qt=gated.qt, f=gated.f, e=gated.e,
        cu_seqlens=chunks.cu_seqlens, first=chunks.first,
        T=problem.T, H=problem.H, HV=problem.HV, K=problem.K, V=problem.V,
        BY_CHANNEL=by_channel(problem), PRECISION=precision(problem),
        BT=chunks.size, PARTS=chunks.parts, BK=tiles.BK, BV=tiles.BV,
    )  # fmt: skip
    grid = (problem.N * chunks.parts * problem.HV * triton.cdiv(problem.V, tiles.BV),)
    Launch(kernel, grid, args, num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers).run()


def _buffers(problem: Problem, like: Tensor, chunks: Chunks, *several: int) -> tuple[Tensor, Tensor]:
    """One tensor of [K,V] and one, or `several`, of [C,V] for each chunk and head."""
    shape = chunks.count, problem.HV
    return like.new_empty(*shape, problem.K, problem.V), like.new_empty(
        *several, *shape, chunks.size, problem.V
    )


def _states(problem: Problem, like: Tensor, chunks: Chunks) -> Tensor:
    """One of [K,V] in fp32 for each part and head."""
    p = problem
    return like.new_empty(p.N * chunks.parts, p.HV, p.K, p.V, dtype=torch.float32)
