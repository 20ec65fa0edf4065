"""All gradients of a chunk from (q, k, v, do, U, dR, S, dS+) and the gates: no T, no W, no Gram matrix.

    dA = scale tril(do U^T)          dL = -tril(dR U^T, -1)        dX = -dR S^T        dv = w dR
    dq = e^G scale do S^T + dA k~                                   E = e^G dX + dL k~
    dk = b E + dA^T q~ + dL^T (b k)~ + e^(Gl-G) U dS+^T            db = k E            dw = v dR

where ~ carries the decay between two rows of the chunk. `score_gradients` forms dA and dL of a chunk once, with what
else lies on the value side; `key_gradients` takes them for each tile of key channels; `sum_parts` adds what several
programs have. The plan may have `hopper_rows` do all of it in one kernel, or `hopper_channels` all but the keys of
chunks whose gates cannot be centred. dA and dL are stored in the dtype they are multiplied in, so nothing is rounded
that would not be. Of U, dA takes the digits that follow too, where they are kept; dS+ is in units of `state.unit`.

The gate of row t decays what passes from rows before t to rows from t on, so its gradient sums exactly those
terms:

    dg_t = sum_(i >= t) (in rows i, minus within the chunk out of rows i)
         + sum_(i < t) (out of rows i to the next state) + e^Gl S . dS+

Three things keep dg as good as the rest:
- a pair inside the chunk is met twice, going out of a row and into a row, and has to cancel when both are
  at or after t; both are formed from the same rounded operands, so only the rounding of true terms is left;
- what goes to the next state is summed over i < t, never as a total minus the rest;
- the diagonal of A, whose decay is 1, stays out of it.

With a decay per channel, every factor e^G of a row is split at the chunk's middle row c: e^(G - c) belongs to
the row, e^c to the state. One accumulator then takes both what passes through the state and what passes between
rows, and is scaled once.

`key_gradients` forms what crosses the chunk's start and what stays inside it, stores it, and only then loads its
tiles again for what crosses the end: all at once would not fit into registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda import state
from rewy.backends.cuda.chunks import Chunks, chunk_rows
from rewy.backends.cuda.gates import FAR_CHANNELS, LOG2_E, Gated, by_channel, exp, exponent_limit
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.pairs import centred, precision, reaches
from rewy.backends.cuda.plan import Plan
from rewy.problem import Gate, Gradients, Operands, Problem


@triton.jit
def add_selected(b_c, m_x, b_x, dtype: tl.constexpr):
    """c_i + sum of the fp32 rows x_j with m_ij: exact but for the sum itself, in any dtype of the product."""
    if dtype == tl.float32:
        b_c = tl.dot(tl.where(m_x, 1.0, 0.0), b_x, b_c, input_precision="ieee")
    else:
        # zeros that come from an accumulator, to have the selection made in its layout and not in shared memory
        b_m = (tl.where(m_x, 1.0, 0.0) + 0.0 * tl.sum(b_x, 1)[:, None]).to(dtype)
        b_h = b_x.to(dtype)
        b_c = tl.dot(b_m, (b_x - b_h).to(dtype), b_c)
        b_c = tl.dot(b_m, b_h, b_c)
    return b_c


@triton.jit(do_not_specialize=["T"])
def score_gradients(
    # inputs and outputs
    v,
    b,
    w,
    G,
    do,
    u,
    u2,
    dr,
    dv,
    dw,
    db,
    dA,
    dL,
    diagonal,
    table,
    # sizes
    scale,
    T,
    HV,
    V: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    i_ch = tl.program_id(0)
    i_c, i_hv = i_ch // HV, i_ch % HV
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    # from the chunk's first row, in 32 bits
    i_ch = i_ch.to(tl.int64)
    i_g = start * HV + i_hv
    v, do, dv = v + i_g * V, do + i_g * V, dv + i_g * V
    u, dr = u + i_ch * BT * V, dr + i_ch * BT * V
    dA, dL, diagonal = dA + i_ch * BT * BT, dL + i_ch * BT * BT, diagonal + i_ch * BT
    o_t = tl.arange(0, BT)
    m_t = o_t < rows
    if w is None:
        db += i_g
        b_w = tl.load(b + i_g + o_t * HV, mask=m_t, other=0.0)[:, None]
    else:
        w, dw = w + i_g * V, dw + i_g * V

    # scores, and all that the write gate needs: [BT,BT], [BT,BV]
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    b_L = tl.zeros([BT, BT], dtype=tl.float32)
    b_dw = tl.zeros([BT], dtype=tl.float32)
    # products in fp32 are unrolled themselves, so their tiles are not
    UNROLLED: tl.constexpr = BV if PRECISION == "ieee" else V
    for i_u in range(0, V, UNROLLED):
        for i_v in tl.static_range(0, UNROLLED, BV):
            o_v = i_u + i_v + tl.arange(0, BV)
            m_v = (o_v < V)[None, :]
            m_tv = m_t[:, None] & m_v
            o_hv = o_t[:, None] * (HV * V) + o_v[None, :]
            o_cv = o_t[:, None] * V + o_v[None, :]
            b_do = tl.load(do + o_hv, mask=m_tv, other=0.0)
            b_u = tl.load(u + o_cv, mask=m_v, other=0.0)
            b_dr = tl.load(dr + o_cv, mask=m_v, other=0.0)
            b_v = tl.load(v + o_hv, mask=m_tv, other=0.0)
            b_A = tl.dot(b_do, tl.trans(b_u), b_A, input_precision=PRECISION)
            if u2 is not None:
                b_u2 = tl.load(u2 + i_ch * BT * V + o_cv, mask=m_v, other=0.0)
                b_A = tl.dot(b_do, tl.trans(b_u2), b_A, input_precision=PRECISION)
            b_L = tl.dot(b_dr, tl.trans(b_u), b_L, input_precision=PRECISION)
            b_drf = b_dr.to(tl.float32)
            if w is None:
                b_dw += tl.sum(b_v * b_drf, 1)
            else:
                b_w = tl.load(w + o_hv, mask=m_tv, other=0.0)
                tl.store(dw + o_hv, (b_v * b_drf).to(dw.dtype.element_ty), mask=m_tv)
            tl.store(dv + o_hv, (b_w * b_drf).to(dv.dtype.element_ty), mask=m_tv)
    if w is None:
        tl.store(db + o_t * HV, b_dw, mask=m_t)

    b_A *= scale
    m_low = o_t[:, None] > o_t[None, :]
    tl.store(diagonal + o_t, tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_A, 0.0), 1))
    if BY_CHANNEL:
        b_A = tl.where(m_low, b_A, 0.0)
        b_L = tl.where(m_low, -b_L, 0.0)
    else:
        p_G = G + i_ch * BT + o_t
        b_D = exp(tl.where(m_low, tl.load(p_G)[:, None] - tl.load(p_G)[None, :], -float("inf")))
        b_A *= b_D
        b_L *= -b_D
    o_c = o_t[:, None] * BT + o_t[None, :]
    tl.store(dA + o_c, b_A.to(dA.dtype.element_ty))
    tl.store(dL + o_c, b_L.to(dL.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "TOKENS"])
def key_gradients(
    # inputs and outputs
    q,
    k,
    b,
    G,
    far,
    do,
    u,
    dr,
    s,
    ds,
    dA,
    dL,
    diagonal,
    dq,
    dk,
    dg,
    db,
    table,
    # sizes
    scale,
    unit,
    T,
    TOKENS,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    CHANNEL_ERASE: tl.constexpr,
    FAR: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NK: tl.constexpr = (K + BK - 1) // BK
    CENTRED: tl.constexpr = BY_CHANNEL and not FAR
    i_k = tl.program_id(0) % NK
    i_ch = tl.program_id(0) // NK
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_t < rows
    m_k = o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    i_ch = i_ch.to(tl.int64)
    if BY_CHANNEL:
        G += i_ch * BT * K
        p_G = G + o_k
        tl.static_assert(
            FAR_CHANNELS % BK == 0 or K <= FAR_CHANNELS, "a tile of keys has one verdict of its gates"
        )
        NF: tl.constexpr = (K + FAR_CHANNELS - 1) // FAR_CHANNELS
        if (tl.load(far + i_ch * NF + i_k * BK // FAR_CHANNELS) != 0) != FAR:
            return
    else:
        G += i_ch * BT
    # from the chunk's first row, in 32 bits
    i_qk, i_g = start * H + i_h, start * HV + i_hv
    q, k = q + i_qk * K, k + i_qk * K
    do, dq, dk = do + i_g * V, dq + i_g * K, dk + i_g * K
    u, dr, s, ds = u + i_ch * BT * V, dr + i_ch * BT * V, s + i_ch * K * V, ds + i_ch * K * V
    dA, dL, diagonal = dA + i_ch * BT * BT, dL + i_ch * BT * BT, diagonal + i_ch * BT
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    o_hk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_c = o_t[:, None] * BT + o_t[None, :]
    if CHANNEL_ERASE:
        b, db = b + i_g * K, db + i_g * K
    else:
        b, db = b + i_g, db + i_g + i_k.to(tl.int64) * TOKENS * HV
    if CHANNEL_DECAY:
        dg += i_g * K
    elif dg is not None:
        dg += i_g + i_k.to(tl.int64) * TOKENS * HV
    dtype = q.dtype.element_ty

    # What comes into rows through the state before the chunk, [BT,BK]: to q, and to b k.
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_E = tl.zeros([BT, BK], dtype=tl.float32)
    b_ss = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        m_s = m_k[:, None] & m_v[None, :]
        o_cv = o_t[:, None] * V + o_v[None, :]
        o_s = o_k[:, None] * V + o_v[None, :]
        b_do = tl.load(
            do + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0
        )
        b_dr = tl.load(dr + o_cv, mask=m_v[None, :], other=0.0)
        b_s = tl.load(s + o_s, mask=m_s, other=0.0)
        b_dq = tl.dot(b_do, tl.trans(b_s), b_dq, input_precision=PRECISION)
        b_E = tl.dot(b_dr, tl.trans(b_s), b_E, input_precision=PRECISION)
        if dg is not None:
            b_ds = tl.load(ds + o_s, mask=m_s, other=0.0)
            b_ss += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)

    b_q = tl.load(q + o_qk, mask=m_tk, other=0.0)
    b_k = tl.load(k + o_qk, mask=m_tk, other=0.0)
    if CHANNEL_ERASE:
        b_b = tl.load(b + o_hk, mask=m_tk, other=0.0).to(tl.float32)
    else:
        b_b = tl.load(b + o_t * HV, mask=m_t, other=0.0)[:, None].to(tl.float32)
    if CENTRED:
        b_f = exp(tl.load(p_G + (BT // 2) * K, mask=m_k, other=0.0))[None, :]
    elif FAR:
        b_G = tl.load(p_G[None, :] + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
        b_f = exp(b_G)
    else:
        b_f = exp(tl.load(G + o_t))[:, None]
    b_dq *= scale * b_f
    b_E *= -b_f

    # ... and between rows; b_x is what goes out of them.
    b_A = tl.load(dA + o_c)
    b_L = tl.load(dL + o_c)
    if FAR:
        b_gi = b_q * b_dq + b_b * b_k * b_E
        b_x = tl.zeros([BT, BK], dtype=tl.float32)
        b_At = tl.load(dA + (o_t[None, :] * BT + o_t[:, None]))
        b_Lt = tl.load(dL + (o_t[None, :] * BT + o_t[:, None]))
        i_s = BT
        while i_s > 0:
            b_p, b_n, m_block, i_s = centred(p_G, b_G, m_k, i_s, LIMIT, K, BT)
            b_qp, b_kp, b_kn = (b_q * b_p).to(dtype), (b_b * b_k * b_p).to(dtype), (b_k * b_n).to(dtype)
            b_y = tl.dot(tl.where(m_block, b_A, 0.0), b_kn, input_precision=PRECISION)
            b_gi += b_qp * b_y
            b_dq += b_p * b_y
            b_y = tl.dot(tl.where(m_block, b_L, 0.0), b_kn, input_precision=PRECISION)
            b_gi += b_kp * b_y
            b_E += b_p * b_y
            b_y = tl.dot(tl.where(m_block, b_At, 0.0), b_qp, input_precision=PRECISION)
            b_y = tl.dot(tl.where(m_block, b_Lt, 0.0), b_kp, b_y, input_precision=PRECISION)
            b_gi -= b_kn * b_y
            b_x += b_n * b_y
    else:
        b_p, b_n = 1.0, 1.0
        if CENTRED:
            # zeros that come from an accumulator: else these tiles are computed in two layouts
            b_c = tl.load(p_G + (BT // 2) * K, mask=m_k, other=0.0)[None, :]
            b_G = tl.load(p_G[None, :] + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
            b_e = (b_G - b_c + 0.0 * b_dq) * LOG2_E
            b_p, b_n = tl.exp2(b_e), tl.exp2(-b_e)
        b_qp, b_kp, b_kn = (b_q * b_p).to(dtype), (b_b * b_k * b_p).to(dtype), (b_k * b_n).to(dtype)
        b_dq = tl.dot(b_A, b_kn, b_dq, input_precision=PRECISION)
        b_E = tl.dot(b_L, b_kn, b_E, input_precision=PRECISION)
        b_x = tl.dot(tl.trans(b_A), b_qp, input_precision=PRECISION)
        b_x = tl.dot(tl.trans(b_L), b_kp, b_x, input_precision=PRECISION)
        b_gi = b_qp * b_dq + b_kp * b_E - b_kn * b_x
        b_dq *= b_p
        b_E *= b_p
        b_x *= b_n
    if CHANNEL_DECAY:
        b_dg = tl.zeros([BT, BK], dtype=tl.float32)
        b_dg = add_selected(b_dg, o_t[:, None] <= o_t[None, :], b_gi, dtype)
    elif dg is not None:
        b_gi = tl.sum(b_gi, 1)[:, None]
    b_a = tl.load(diagonal + o_t)[:, None]
    tl.store(dq + o_hk, (b_dq + b_a * b_k).to(dq.dtype.element_ty), mask=m_tk)
    if CHANNEL_ERASE:
        tl.store(db + o_hk, (b_k * b_E).to(db.dtype.element_ty), mask=m_tk)
    else:
        tl.store(db + o_t * HV, tl.sum(b_k * b_E, 1), mask=m_t)
    b_x += b_a * b_q + b_b * b_E

    # What goes out of rows to the state after the chunk; the stores above have its tiles loaded again.
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        b_u = tl.load(u + o_t[:, None] * V + o_v[None, :], mask=m_v[None, :], other=0.0)
        b_ds = tl.load(ds + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
        b_dk = tl.dot(b_u, tl.trans(b_ds), b_dk, input_precision=PRECISION)
    b_k = tl.load(k + o_qk, mask=m_tk, other=0.0)
    if BY_CHANNEL:
        b_Gl = tl.load(p_G + (BT - 1) * K, mask=m_k, other=0.0)
        b_G = tl.load(p_G[None, :] + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
        b_f = exp(b_Gl[None, :] - b_G)
    else:
        b_Gl = tl.load(G + BT - 1)
        b_f = unit * exp(b_Gl - tl.load(G + o_t))[:, None]
    b_dk *= b_f
    b_go = b_k * b_dk
    tl.store(dk + o_hk, (b_dk + b_x).to(dk.dtype.element_ty), mask=m_tk)
    if CHANNEL_DECAY:
        b_dg += (exp(b_Gl) * b_ss)[None, :]
        b_dg = add_selected(b_dg, o_t[:, None] > o_t[None, :], b_go, dtype)
        tl.store(dg + o_hk, b_dg.to(dg.dtype.element_ty), mask=m_tk)
    elif dg is not None:
        b_go = tl.sum(b_go, 1)[:, None]
        b_dg = tl.sum(tl.where(o_t[:, None] >= o_t[None, :], b_gi, b_go), 0) + exp(b_Gl) * tl.sum(b_ss, 0)
        tl.store(dg + o_t * HV, b_dg, mask=m_t)


@triton.jit(do_not_specialize=["SIZE", "RUN"])
def sum_parts(
    # inputs and outputs
    parts,
    total,
    # sizes
    SIZE,
    RUN,
    COUNT: tl.constexpr,
    # meta
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    p_part = parts + o // RUN * COUNT * RUN + o % RUN
    b_total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(COUNT):
        b_total += tl.load(p_part, mask=m, other=0.0)
        p_part += RUN
    tl.store(total + o, b_total.to(total.dtype.element_ty), mask=m)


class Buffers(NamedTuple):
    """Where the kernels write gradients: tensors as their inputs, or fp32 parts of those that several programs add to.

    Of parts (`in_parts`) q, k are [B,T,HV,K]; g, erase [parts,B,T,HV]: one for each tile of keys, and for erase one for
    the values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    erase: Tensor
    write: Tensor | None


def gradients(
    problem: Problem, x: Operands, gated: Gated, do: Tensor, u: Tensor, dr: Tensor, s: Tensor, ds: Tensor,
    dh0: Tensor | None, chunks: Chunks, tiles: Plan,
) -> Gradients:  # fmt: skip
    """Gradients of every operand: do [B,T,HV,V], u [digits,NC,HV,C,V], dr [NC,HV,C,V], s and ds [NC,HV,K,V].

    ds and dh0 are in units of `state.unit`.
    """
    out = buffers(problem, x, tiles)
    write(problem, x, gated, do, u, dr, s, ds, out, chunks, tiles)
    return finished(problem, x, out, dh0, tiles)


def in_parts(problem: Problem, tiles: Plan) -> list[str]:
    """Which buffers hold parts; none where each program has whole chunks, of all heads that share their keys."""
    grouped, op = problem.group > 1, problem.operator
    several = dict(q=grouped, k=grouped, g=op.decay is Gate.SCALAR, erase=op.erase is Gate.SCALAR)
    return [name for name, parts in several.items() if parts and not tiles.programs]


def buffers(problem: Problem, x: Operands, tiles: Plan) -> Buffers:
    p, NK = problem, triton.cdiv(problem.K, tiles.keys.BK)
    fresh = torch.zeros if p.varlen else torch.empty  # no chunk holds the rows past the last offset
    tokens = p.B, p.T, p.HV
    parts = dict(q=(*tokens, p.K), k=(*tokens, p.K), g=(NK, *tokens), erase=(NK + 1, *tokens))
    names = in_parts(p, tiles)

    def buffer(name: str) -> Any:
        t = getattr(x, name)
        if name in names:
            return fresh(parts[name], dtype=torch.float32, device=t.device)
        return None if t is None else fresh(t.shape, dtype=t.dtype, device=t.device)

    return Buffers(*map(buffer, Buffers._fields))


def write(
    problem: Problem, x: Operands, gated: Gated, do: Tensor, u: Tensor, dr: Tensor, s: Tensor, ds: Tensor,
    out: Buffers, chunks: Chunks, tiles: Plan,
) -> None:  # fmt: skip
    p, C = problem, chunks.size
    if tiles.programs:
        from rewy.backends.cuda import hopper_rows  # needs Gluon

        made = dict(q=x.q, k=x.k, v=x.v, do=do, u=u[0], dr=dr, s=s, ds=ds, f=gated.f, G=gated.G)
        made |= dict(dq=out.q, dk=out.k, dv=out.v, dg=out.g, db=out.erase, table=chunks.table)
        hopper_rows.write(p, made | dict(unit=state.unit(p), count=chunks.count), tiles.programs)
        return
    channel, scalar_erase = by_channel(p), p.operator.erase is Gate.SCALAR
    dA = do.new_empty(chunks.count, p.HV, C, C)
    dL, diagonal = dA.new_empty(dA.shape), dA.new_empty(dA.shape[:-1], dtype=torch.float32)
    u, u2 = state.following(u)
    common = dict(
        b=x.erase, do=do, u=u, dr=dr, dA=dA, dL=dL, diagonal=diagonal, table=chunks.table,
        scale=p.scale, T=p.T, HV=p.HV, V=p.V, BY_CHANNEL=channel, PRECISION=precision(p), BT=C,
    )  # fmt: skip
    values = dict(v=x.v, w=x.write, u2=u2, dv=out.v, dw=out.write)
    values_erase = out.erase[-1] if scalar_erase else None
    keys = common | dict(
        q=x.q, k=x.k, G=gated.G, far=gated.far, s=s, ds=ds, dq=out.q, dk=out.k, dg=out.g, db=out.erase,
        TOKENS=out.erase.stride(0) // p.HV if scalar_erase else 0,
        unit=state.unit(p), H=p.H, K=p.K,
        CHANNEL_DECAY=p.operator.decay is Gate.CHANNEL,
        CHANNEL_ERASE=p.operator.erase is Gate.CHANNEL,
        LIMIT=exponent_limit(p),
    )  # fmt: skip
    grid = (chunks.count * p.HV * triton.cdiv(p.K, tiles.keys.BK),)
    if tiles.chunks_on_hopper:
        from rewy.backends.cuda import hopper_channels  # needs Gluon

        hopper_channels.write(p, keys | values | dict(db_values=values_erase), chunks.count)
    else:
        Launch(
            score_gradients,
            grid=(chunks.count * p.HV,),
            args=common | values | dict(G=None if channel else gated.G, db=values_erase, BV=tiles.scores.BV),
            num_warps=tiles.scores.warps,
            num_stages=tiles.scores.stages,
            maxnreg=tiles.scores.registers,
        ).run()
    for far in reaches(p):
        if tiles.chunks_on_hopper and not far:
            continue
        Launch(
            key_gradients,
            grid,
            args=keys | dict(FAR=far, BK=tiles.keys.BK, BV=tiles.keys.BV),
            num_warps=tiles.keys.warps,
            num_stages=tiles.keys.stages,
            maxnreg=tiles.keys.registers,
        ).run()


def finished(problem: Problem, x: Operands, out: Buffers, dh0: Tensor | None, tiles: Plan) -> Gradients:
    """Parts are summed in fp32 and rounded once."""
    p = problem
    if dh0 is not None and x.initial_state is not None:
        unit = state.unit(p)
        dh0 = (dh0 if unit == 1 else dh0 * unit).to(x.initial_state.dtype)

    def total(name: str) -> Tensor:
        parts, like = getattr(out, name), getattr(x, name)
        of_heads = name in ("q", "k")
        return summed(parts, like, *(p.group, p.K) if of_heads else (len(parts), like.numel()))

    return Gradients(*out._replace(**{name: total(name) for name in in_parts(p, tiles)}), dh0)


def summed(parts: Tensor, like: Tensor, count: int, run: int) -> Tensor:
    """The sum of every `count` runs, of `run` numbers each, that lie one after another; shape and dtype of `like`."""
    total = like.new_empty(like.shape)
    BLOCK = 1024
    args = dict(parts=parts, total=total, SIZE=total.numel(), RUN=run, COUNT=count, BLOCK=BLOCK)
    Launch(sum_parts, (triton.cdiv(total.numel(), BLOCK),), args).run()
    return total
