"""All gradients of a chunk from (q, k, v, do, U, dR, S, dS+) and the gates: no T, no W, no Gram matrix.

    dA = scale tril(do U^T)          dL = -tril(dR U^T, -1)        dX = -dR S^T        dv = w dR
    dq = e^G scale do S^T + dA k~                                   E = e^G dX + dL k~
    dk = b E + dA^T q~ + dL^T (b k)~ + e^(Gl-G) U dS+^T            db = k E            dw = v dR

where ~ carries the decay between two rows of the chunk. The gate of row t decays what passes from rows
before t to rows from t on, so its gradient sums exactly those terms:

    dg_t = sum_(i >= t) (in rows i, minus within the chunk out of rows i)
         + sum_(i < t) (out of rows i to the next state) + e^Gl S . dS+

Three things keep dg as good as the rest:
- a pair inside the chunk is met twice, going out of a row and into a row, and has to cancel when both are
  at or after t; both are formed from the same rounded operands, so only the rounding of true terms is left;
- what goes to the next state is summed over i < t, never as a total minus the rest;
- the diagonal of A, whose decay is 1, stays out of it.

Transposed scores are products of their own (U do^T, U dR^T) instead of transposed accumulators: every left
operand then comes straight from registers, and it avoids a form that Triton 3.4 to 3.7.0 miscompile on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda.chunks import Chunks, chunk_rows
from rewy.backends.cuda.gates import by_channel
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.pairs import centred, exponent_limit, is_far, precision, reaches
from rewy.backends.cuda.plan import Tiles
from rewy.problem import Gate, Gradients, Operands, Problem


@triton.jit
def dot_selected(m_a, b_b, b_c):
    """Sums of fp32 rows selected by a 0/1 matrix, plus c: exact but for the sum itself, in any dtype of m."""
    if m_a.dtype == tl.float32:
        b_c += tl.dot(m_a, b_b, input_precision="ieee")
    else:
        b_h = b_b.to(m_a.dtype)
        b_c += tl.dot(m_a, b_h, tl.dot(m_a, (b_b - b_h).to(m_a.dtype)))
    return b_c


@triton.jit
def over_values(p_a, m_a, p_b, m_b, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """sum over v of a_iv b_jv, from pointers to rows of V contiguous channels."""
    b_c = tl.zeros([p_a.shape[0], p_b.shape[0]], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        b_a = tl.load(p_a[:, None] + o_v[None, :], mask=m_a[:, None] & m_v, other=0.0)
        b_b = tl.load(p_b[:, None] + o_v[None, :], mask=m_b[:, None] & m_v, other=0.0)
        b_c = tl.dot(b_a, tl.trans(b_b), b_c, input_precision=PRECISION)
    return b_c


@triton.jit
def over_channels(b_x, CHANNEL: tl.constexpr):
    """A gradient's terms [BT,BK] as its gate has them: apart for each channel, or their sums [BT,1]."""
    if not CHANNEL:
        b_x = tl.sum(b_x, 1)[:, None]
    return b_x


@triton.jit
def between_rows(
    b_M, b_x, b_y, b_to, b_from, p_G, m_k, FROM_ABOVE: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, FAR: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """sum_j M_ij x_j e^(+-(G_i - G_j)) and its product with y, for a strictly triangular M.

    FROM_ABOVE: rows i > j receive, with e^(G_i - G_j); else i < j, with e^(G_j - G_i). `b_to`, `b_from` are
    these decays' halves to i and from j. The product with y is a term of the gate's gradient and is formed
    from the operands that were multiplied, as rounded.
    """
    BT: tl.constexpr = b_M.shape[0]
    dtype = b_M.dtype
    if not FAR:
        b_z = tl.dot(b_M, (b_x * b_from).to(dtype), input_precision=PRECISION)
        b_yz = (b_y * b_to).to(dtype) * b_z
        b_z *= b_to
    else:
        o_t = tl.arange(0, BT)
        b_G = tl.load(p_G[None, :] + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
        b_z = tl.zeros([BT, b_x.shape[1]], dtype=tl.float32)
        b_yz = tl.zeros([BT, b_x.shape[1]], dtype=tl.float32)
        i_s = BT
        while i_s > 0:
            b_p, b_n, m_block, i_s = centred(p_G, b_G, m_k, i_s, LIMIT, K, BT)
            if not FROM_ABOVE:
                b_p, b_n = b_n, b_p
            b_r = tl.dot(tl.where(m_block, b_M, 0.0), (b_x * b_n).to(dtype), input_precision=PRECISION)
            b_yz += (b_y * b_p).to(dtype) * b_r
            b_z += b_p * b_r
    return b_z, over_channels(b_yz, CHANNEL_DECAY)


@triton.jit(do_not_specialize=["T", "TOKENS"])
def chunk_gradients(
    # inputs and outputs
    q,
    k,
    v,
    b,
    w,
    G,
    do,
    u,
    dr,
    s,
    ds,
    dq,
    dk,
    dv,
    dg,
    db,
    dw,
    table,
    # sizes
    scale,
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
    i_k = tl.program_id(0) % NK
    i_ch = tl.program_id(0) // NK
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    i_ch = i_ch.to(tl.int64)
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t, m_c, m_k = o_t < rows, o_t < BT, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    p_G = G + i_ch * BT * K + o_k
    if BY_CHANNEL:  # noqa: SIM102  (decided when compiling, the other one when running)
        if is_far(p_G, m_k, LIMIT, K, BT) != FAR:
            return
    o_h = (start + o_t) * HV + i_hv
    o_qk = ((start + o_t) * H + i_h)[:, None] * K + o_k[None, :]
    o_hk = o_h[:, None] * K + o_k[None, :]
    p_do = do + o_h * V
    p_u, p_dr = u + (i_ch * BT + o_t) * V, dr + (i_ch * BT + o_t) * V
    p_s, p_ds = s + (i_ch * K + o_k) * V, ds + (i_ch * K + o_k) * V
    dtype = q.dtype.element_ty

    b_q = tl.load(q + o_qk, mask=m_tk, other=0.0)
    b_k = tl.load(k + o_qk, mask=m_tk, other=0.0)
    if CHANNEL_ERASE:
        b_b = tl.load(b + o_hk, mask=m_tk, other=0.0).to(tl.float32)
    else:
        b_b = tl.load(b + o_h, mask=m_t, other=0.0).to(tl.float32)[:, None]
    b_bk = b_b * b_k

    # decays of rows, [BT,1] or [BT,BK], and between rows of the chunk where one number serves all channels
    m_low = o_t[:, None] > o_t[None, :]
    m_up = o_t[:, None] < o_t[None, :]
    b_p, b_n, b_D = 1.0, 1.0, 1.0
    if BY_CHANNEL:
        b_G = tl.load(p_G[None, :] + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
        b_Gl = tl.load(p_G + (BT - 1) * K, mask=m_k, other=0.0)
        if FAR:
            b_eG, b_eGl = tl.exp(b_G), tl.exp(b_Gl[None, :] - b_G)
        else:
            # all decays from two, so that G itself need not stay
            b_c = tl.load(p_G + (BT // 2) * K, mask=m_k, other=0.0)
            b_p, b_n = tl.exp(b_G - b_c[None, :]), tl.exp(b_c[None, :] - b_G)
            b_eG, b_eGl = b_p * tl.exp(b_c)[None, :], b_n * tl.exp(b_Gl - b_c)[None, :]
    else:
        p_f = G + i_ch * 4 * BT
        b_G = tl.load(p_f + o_t)[:, None]
        b_Gr = tl.load(p_f + o_t)[None, :]
        b_Gl = tl.load(p_f + BT - 1)
        b_eG, b_eGl = tl.exp(b_G), tl.exp(b_Gl - b_G)
        b_D = tl.exp(tl.where(m_low, b_G - b_Gr, 0.0))

    # What comes into a row. The diagonal of A stays apart; each tile is reduced as soon as it is used.
    b_A = scale * over_values(p_do, m_t, p_u, m_c, V, BV, PRECISION)
    b_a = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_A, 0.0), 1)[:, None]
    b_A = tl.where(m_low, b_A * b_D, 0.0).to(dtype)
    b_L = tl.where(m_low, -b_D * over_values(p_dr, m_c, p_u, m_c, V, BV, PRECISION), 0.0).to(dtype)
    b_dq, b_dgi = between_rows(
        b_A, b_k, b_q, b_p, b_n, p_G, m_k, True, CHANNEL_DECAY, FAR, LIMIT, PRECISION, K
    )
    b_z = over_values(p_do, m_t, p_s, m_k, V, BV, PRECISION) * (scale * b_eG)
    b_dgi += over_channels(b_q * b_z, CHANNEL_DECAY)
    b_dq = (b_dq + b_z + b_a * b_k).to(dq.dtype.element_ty)
    b_E, b_y = between_rows(b_L, b_k, b_bk, b_p, b_n, p_G, m_k, True, CHANNEL_DECAY, FAR, LIMIT, PRECISION, K)
    b_z = -b_eG * over_values(p_dr, m_c, p_s, m_k, V, BV, PRECISION)
    b_dgi += b_y + over_channels(b_bk * b_z, CHANNEL_DECAY)
    b_E += b_z
    b_db = over_channels(b_k * b_E, CHANNEL_ERASE).to(db.dtype.element_ty)

    # what goes out of a row
    if not BY_CHANNEL:
        b_D = tl.exp(tl.where(m_up, b_Gr - b_G, 0.0))
    b_dk = b_a * b_q + b_b * b_E
    b_A = tl.where(m_up, scale * b_D * over_values(p_u, m_c, p_do, m_t, V, BV, PRECISION), 0.0).to(dtype)
    b_L = tl.where(m_up, -b_D * over_values(p_u, m_c, p_dr, m_c, V, BV, PRECISION), 0.0).to(dtype)
    b_z, b_y = between_rows(b_A, b_q, b_k, b_n, b_p, p_G, m_k, False, CHANNEL_DECAY, FAR, LIMIT, PRECISION, K)
    b_dgi -= b_y
    b_dk += b_z
    b_z, b_y = between_rows(
        b_L, b_bk, b_k, b_n, b_p, p_G, m_k, False, CHANNEL_DECAY, FAR, LIMIT, PRECISION, K
    )
    b_dgi -= b_y
    b_dk += b_z
    b_z = over_values(p_u, m_c, p_ds, m_k, V, BV, PRECISION) * b_eGl
    b_dgo = over_channels(b_k * b_z, CHANNEL_DECAY)
    tl.store(dq + o_hk, b_dq, mask=m_tk)
    tl.store(dk + o_hk, (b_dk + b_z).to(dk.dtype.element_ty), mask=m_tk)

    # Elementwise parts come last and load their tiles again: held until here, they would crowd the registers.
    b_dw = tl.zeros([BT], dtype=tl.float32)
    if i_k == 0:
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = (o_v < V)[None, :]
            m_tv = m_t[:, None] & m_v
            o_hv = o_h[:, None] * V + o_v[None, :]
            b_dr = tl.load(p_dr[:, None] + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
            b_v = tl.load(v + o_hv, mask=m_tv, other=0.0).to(tl.float32)
            if w is None:
                tl.store(dv + o_hv, (b_b * b_dr).to(dtype), mask=m_tv)
                b_dw += tl.sum(b_v * b_dr, 1)
            else:
                b_w = tl.load(w + o_hv, mask=m_tv, other=0.0).to(tl.float32)
                tl.store(dv + o_hv, (b_w * b_dr).to(dtype), mask=m_tv)
                tl.store(dw + o_hv, (b_v * b_dr).to(dw.dtype.element_ty), mask=m_tv)
    if CHANNEL_ERASE:
        tl.store(db + o_hk, b_db, mask=m_tk)
    else:
        tl.store(db + i_k * TOKENS * HV + o_h, b_dw + tl.sum(b_db, 1), mask=m_t)
    if dg is not None:
        b_ss = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_s = m_k[:, None] & (o_v < V)[None, :]
            b_s = tl.load(p_s[:, None] + o_v[None, :], mask=m_s, other=0.0).to(tl.float32)
            b_ss += tl.sum(b_s * tl.load(p_ds[:, None] + o_v[None, :], mask=m_s, other=0.0).to(tl.float32), 1)
    if CHANNEL_DECAY:
        m_from = (o_t[:, None] <= o_t[None, :]).to(dtype)
        m_before = (o_t[:, None] > o_t[None, :]).to(dtype)
        b_dg = dot_selected(m_before, b_dgo, dot_selected(m_from, b_dgi, (tl.exp(b_Gl) * b_ss)[None, :]))
        tl.store(dg + o_hk, b_dg.to(dg.dtype.element_ty), mask=m_tk)
    elif dg is not None:
        b_dg = tl.sum(tl.where(o_t[:, None] >= o_t[None, :], b_dgi, b_dgo), 0)
        tl.store(dg + i_k * TOKENS * HV + o_h, b_dg + tl.sum(tl.exp(b_Gl) * b_ss, 0), mask=m_t)


def gradients(
    problem: Problem, x: Operands, G: Tensor, do: Tensor, u: Tensor, dr: Tensor, s: Tensor, ds: Tensor,
    dh0: Tensor | None, chunks: Chunks, tiles: Tiles,
) -> Gradients:  # fmt: skip
    """Gradients of every operand.

    What several programs add to (q and k of grouped value heads, gates with one number for all channels) is
    summed from their fp32 parts and rounded once.
    """
    p = problem
    NK = triton.cdiv(p.K, tiles.BK)
    fresh = torch.zeros if p.varlen else torch.empty  # no chunk holds the rows past the last offset

    def like(t: Tensor) -> Tensor:
        return fresh(t.shape, dtype=t.dtype, device=t.device)

    def parts(*shape: int) -> Tensor:
        return fresh(shape, dtype=torch.float32, device=do.device)

    scalar_erase, scalar_decay = p.operator.erase is Gate.SCALAR, p.operator.decay is Gate.SCALAR
    dq, dk = (like(t) if p.group == 1 else parts(p.B, p.T, p.HV, p.K) for t in (x.q, x.k))
    db = parts(NK, p.B, p.T, p.HV) if scalar_erase else like(x.erase)
    dg = None if x.g is None else parts(NK, p.B, p.T, p.HV) if scalar_decay else like(x.g)
    dv, dw = like(x.v), None if x.write is None else like(x.write)
    for far in reaches(p):
        Launch(
            chunk_gradients,
            grid=(chunks.count * p.HV * NK,),
            args=dict(
                q=x.q, k=x.k, v=x.v, b=x.erase, w=x.write, G=G, do=do, u=u, dr=dr, s=s, ds=ds,
                dq=dq, dk=dk, dv=dv, dg=dg, db=db, dw=dw, table=chunks.table,
                scale=p.scale, T=p.T, TOKENS=p.B * p.T, H=p.H, HV=p.HV, K=p.K, V=p.V,
                BY_CHANNEL=by_channel(p),
                CHANNEL_DECAY=p.operator.decay is Gate.CHANNEL,
                CHANNEL_ERASE=p.operator.erase is Gate.CHANNEL,
                FAR=far,
                LIMIT=exponent_limit(p),
                PRECISION=precision(p),
                BT=chunks.size,
                BK=tiles.BK,
                BV=tiles.BV,
            ),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        ).run()  # fmt: skip
    if p.group > 1:
        dq, dk = (t.view(p.B, p.T, p.H, p.group, p.K).sum(3).to(x.q.dtype) for t in (dq, dk))
    if scalar_erase:
        db = db.sum(0).to(x.erase.dtype)
    if dg is not None and x.g is not None and scalar_decay:
        dg = dg.sum(0).to(x.g.dtype)
    return Gradients(dq, dk, dv, dg, db, dw, dh0)
