"""The backward as it is commonly written, seven products around T, to measure ReWY against.

    W = T X        Ubar = T (w v)        U = Ubar - W S
    dU = A^T do + K~ dS+                 dS = e^Gl dS+ + Q~^T do - W^T dU
    dW = -dU S^T                         dT = dW X^T + dU (w v)^T
    dX = T^T dW    d(w v) = T^T dU       dL = -tril(T^T dT T^T, -1)

It shares gates, chunk lists, layouts and launch conventions with the ReWY kernels and differs where the forms
do: W and Ubar are written out for the sequential passes, a kernel of its own goes back through T, and gate
gradients come from Gram products (one decay a row) or from pairs of tokens weighted one by one inside 16-row
blocks (a decay per channel), with references at the boundary between blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda.chunks import Chunks, chunk_rows, sequence_chunks
from rewy.backends.cuda.gates import Gated, by_channel
from rewy.backends.cuda.gradients import summed
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.pairs import precision
from rewy.backends.cuda.plan import Plan, Tiles, padded
from rewy.backends.cuda.state import decays, key_tile, values
from rewy.problem import Gate, Gradients, Operands, Problem


@triton.jit(do_not_specialize=["T"])
def wy_factors(
    # inputs and outputs
    x,
    v,
    b,
    w,
    f,
    Ti,
    W,
    u,
    table,
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
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_ch = tl.program_id(0)
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    i_ch = i_ch.to(tl.int64)
    o_t = tl.arange(0, BT)
    m_t = o_t < rows
    dtype = v.dtype.element_ty
    b_T = tl.load(Ti + i_ch * BT * BT + (o_t[:, None] * BT + o_t[None, :]))
    b_T += (o_t[:, None] == o_t[None, :]).to(dtype)
    if not BY_CHANNEL:
        f_x = tl.load(f + (i_ch * 4 + 1) * BT + o_t)[:, None]

    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = key_tile(x, i_ch, start, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        if not BY_CHANNEL:
            b_x = (f_x * b_x).to(dtype)
        b_W = tl.dot(b_T, b_x, input_precision=PRECISION)
        o_w = o_t[:, None] * K + o_k[None, :]
        tl.store(W + i_ch * BT * K + o_w, b_W.to(dtype), mask=(o_k < K)[None, :])
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_v, b_w = values(v, b, w, start, o_t, o_v, m_t, i_hv, HV, V)
        b_wv = (b_w.to(tl.float32) * b_v.to(tl.float32)).to(dtype)
        b_u = tl.dot(b_T, b_wv, input_precision=PRECISION)
        o_u = o_t[:, None] * V + o_v[None, :]
        tl.store(u + i_ch * BT * V + o_u, b_u.to(dtype), mask=(o_v < V)[None, :])


@triton.jit(do_not_specialize=["T"])
def wy_forward(
    # inputs and outputs
    kt,
    f,
    e,
    W,
    h0,
    s,
    u,
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
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = tl.program_id(0) // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, length, i_c0 = sequence_chunks(cu_seqlens, first, i_n, T, BT)
    NT = tl.cdiv(length, BT)
    if NT == 0:
        return

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[None, :]
    m_s = (o_k < K)[:, None] & m_v
    o_s = o_k[:, None] * V + o_v[None, :]
    o_u = o_t[:, None] * V + o_v[None, :]
    o_w = o_t[:, None] * K + o_k[None, :]
    dtype = s.dtype.element_ty

    if h0 is None:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_s = tl.load(h0 + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)
    # What no product takes from shared memory is loaded one chunk ahead.
    i_cn = i_c0.to(tl.int64) * HV + i_hv
    b_un = tl.load(u + i_cn * BT * V + o_u, mask=m_v, other=0.0)
    _, f_kn, _, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)
    for i in range(0, NT):
        i_ch = (i_c0 + i).to(tl.int64) * HV + i_hv
        b_u, f_k, b_e = b_un.to(tl.float32), f_kn, b_en
        i_cn = (i_c0 + tl.minimum(i + 1, NT - 1)).to(tl.int64) * HV + i_hv
        b_un = tl.load(u + i_cn * BT * V + o_u, mask=m_v, other=0.0)
        _, f_kn, _, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)

        b_W = tl.load(W + i_ch * BT * K + o_w, mask=m_k, other=0.0)
        b_kt = key_tile(kt, i_ch, bos + i * BT, o_t, o_k, o_t < length - i * BT, i_h, H, K, BY_CHANNEL, BT)
        b_sd = b_s.to(dtype)
        b_u -= tl.dot(b_W, b_sd, input_precision=PRECISION)
        tl.store(s + i_ch * K * V + o_s, b_sd, mask=m_s)
        tl.store(u + i_ch * BT * V + o_u, b_u.to(dtype), mask=m_v)
        b_s = tl.dot(tl.trans(b_kt), (f_k * b_u).to(dtype), b_e * b_s, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T"])
def wy_reverse(
    # inputs and outputs
    kt,
    qt,
    do,
    f,
    e,
    A,
    W,
    dht,
    ds,
    du,
    dh0,
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
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = tl.program_id(0) // NV
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    bos, length, i_c0 = sequence_chunks(cu_seqlens, first, i_n, T, BT)
    NT = tl.cdiv(length, BT)

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[None, :]
    m_s = (o_k < K)[:, None] & m_v
    o_s = o_k[:, None] * V + o_v[None, :]
    o_u = o_t[:, None] * V + o_v[None, :]
    o_w = o_t[:, None] * K + o_k[None, :]
    o_c = o_t[:, None] * BT + o_t[None, :]
    o_o = o_t[:, None] * (HV * V) + o_v[None, :]
    dtype = do.dtype.element_ty

    if dht is None:
        b_ds = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_ds = tl.load(dht + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)
    if NT == 0:
        if dh0 is not None:
            tl.store(dh0 + i_nh.to(tl.int64) * K * V + o_s, b_ds, mask=m_s)
        return
    i_cn = (i_c0 + NT - 1).to(tl.int64) * HV + i_hv
    _, f_kn, f_qn, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)
    for j in range(0, NT):
        i = NT - 1 - j
        i_t = bos + i * BT
        i_ch = (i_c0 + i).to(tl.int64) * HV + i_hv
        m_t = o_t < length - i * BT
        f_k, f_q, b_e = f_kn, f_qn, b_en
        i_cn = (i_c0 + tl.maximum(i - 1, 0)).to(tl.int64) * HV + i_hv
        _, f_kn, f_qn, b_en = decays(f, e, i_cn, o_t, o_k, K, BY_CHANNEL, BT)

        b_kt = key_tile(kt, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        b_q = key_tile(qt, i_ch, i_t, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        b_W = tl.load(W + i_ch * BT * K + o_w, mask=m_k, other=0.0)
        b_A = tl.load(A + i_ch * BT * BT + o_c)
        b_do = tl.load(do + (i_t * HV + i_hv) * V + o_o, mask=m_t[:, None] & m_v, other=0.0)
        b_dsd = b_ds.to(dtype)
        tl.store(ds + i_ch * K * V + o_s, b_dsd, mask=m_s)
        b_du = f_k * tl.dot(b_kt, b_dsd, input_precision=PRECISION)
        b_du = tl.dot(tl.trans(b_A), b_do, b_du, input_precision=PRECISION)
        tl.store(du + i_ch * BT * V + o_u, b_du.to(dtype), mask=m_v)
        b_ds *= b_e
        b_ds = tl.dot(tl.trans(b_q), (f_q * b_do).to(dtype), b_ds, input_precision=PRECISION)
        b_ds = tl.dot(tl.trans(b_W), (-b_du).to(dtype), b_ds, input_precision=PRECISION)
    if dh0 is not None:
        tl.store(dh0 + i_nh.to(tl.int64) * K * V + o_s, b_ds, mask=m_s)


@triton.jit(do_not_specialize=["T"])
def wy_adjoint(
    # inputs and outputs
    x,
    v,
    b,
    w,
    f,
    Ti,
    do,
    u,
    s,
    du,
    dA,
    dL,
    dX,
    dv,
    dw,
    table,
    # sizes
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_ch = tl.program_id(0)
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    # from the chunk's first row, in 32 bits
    i_ch = i_ch.to(tl.int64)
    i_g = (start * HV + i_hv) * V
    do, dv = do + i_g, dv + i_g
    u, du, dX = u + i_ch * BT * V, du + i_ch * BT * V, dX + i_ch * BT * K
    s += i_ch * K * V
    o_t = tl.arange(0, BT)
    m_t = o_t < rows
    o_c = o_t[:, None] * BT + o_t[None, :]
    dtype = v.dtype.element_ty
    b_Tt = tl.load(Ti + i_ch * BT * BT + (o_t[None, :] * BT + o_t[:, None]))
    b_Tt += (o_t[:, None] == o_t[None, :]).to(dtype)

    b_dT = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_dW = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < V
            b_du = tl.load(du + o_t[:, None] * V + o_v[None, :], mask=m_v[None, :], other=0.0)
            b_s = tl.load(s + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
            b_dW = tl.dot(b_du, tl.trans(b_s), b_dW, input_precision=PRECISION)
        b_dWd = (-b_dW).to(dtype)
        b_x = key_tile(x, i_ch, start, o_t, o_k, m_t, i_h, H, K, BY_CHANNEL, BT)
        b_dT = tl.dot(b_dWd, tl.trans(b_x), b_dT, input_precision=PRECISION)
        b_dX = tl.dot(b_Tt, b_dWd, input_precision=PRECISION)
        tl.store(dX + o_t[:, None] * K + o_k[None, :], b_dX.to(dtype), mask=m_k[None, :])
    if not BY_CHANNEL:
        b_dT *= tl.load(f + (i_ch * 4 + 1) * BT + o_t)[None, :]

    b_dw = tl.zeros([BT], dtype=tl.float32)
    b_dA = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        m_tv = m_t[:, None] & m_v
        o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        b_v, b_w = values(v, b, w, start, o_t, o_v, m_t, i_hv, HV, V)
        b_v, b_w = b_v.to(tl.float32), b_w.to(tl.float32)
        b_du = tl.load(du + o_t[:, None] * V + o_v[None, :], mask=m_v, other=0.0)
        b_dT = tl.dot(b_du, tl.trans((b_w * b_v).to(dtype)), b_dT, input_precision=PRECISION)
        b_dwv = tl.dot(b_Tt, b_du, input_precision=PRECISION)
        tl.store(dv + o_tv, (b_w * b_dwv).to(dtype), mask=m_tv)
        if w is None:
            b_dw += tl.sum(b_v * b_dwv, 1)
        else:
            tl.store(dw + i_g + o_tv, (b_v * b_dwv).to(dw.dtype.element_ty), mask=m_tv)
        if dA is not None:
            b_do = tl.load(do + o_tv, mask=m_tv, other=0.0)
            b_u = tl.load(u + o_t[:, None] * V + o_v[None, :], mask=m_v, other=0.0)
            b_dA = tl.dot(b_do, tl.trans(b_u), b_dA, input_precision=PRECISION)
    if w is None:
        tl.store(dw + (start * HV + i_hv) + o_t * HV, b_dw, mask=m_t)
    if dA is not None:
        tl.store(dA + i_ch * BT * BT + o_c, tl.where(o_t[:, None] >= o_t[None, :], scale * b_dA, 0.0))

    b_dL = tl.dot(b_Tt, b_dT.to(dtype), input_precision=PRECISION)
    b_dL = tl.dot(b_dL.to(dtype), b_Tt, input_precision=PRECISION)
    tl.store(dL + i_ch * BT * BT + o_c, tl.where(o_t[:, None] > o_t[None, :], -b_dL, 0.0))


@triton.jit
def _sum_and_before(sum1, before1, sum2, before2):
    return sum1 + sum2, sum1 + before2


@triton.jit
def sum_before(b_x):
    """Sums of the rows before each row; none is formed by taking the row away again."""
    return tl.associative_scan((b_x, tl.zeros_like(b_x)), 0, _sum_and_before)[1]


@triton.jit
def across(p_G, b_G, m_k, i_s, K: tl.constexpr, BT: tl.constexpr):
    """Decays of the later half of each block of `i_s` rows from its boundary row, and of the earlier half to it.

    Also the mask of pairs in one block. Neither exponent is positive, whatever the gates; the rest is 0.
    """
    o_t = tl.arange(0, BT)
    i_m = (o_t // i_s) * i_s + i_s // 2
    b_e = tl.exp(-tl.abs(b_G - tl.load(p_G + i_m[:, None] * K, mask=m_k[None, :], other=0.0)))
    m_late = (o_t >= i_m)[:, None]
    return tl.where(m_late, b_e, 0.0), tl.where(m_late, 0.0, b_e), i_m[:, None] == i_m[None, :]


@triton.jit
def pairwise(
    q,
    k,
    b,
    G,
    b_G,
    dA,
    dL,
    o_k,
    rows,
    H,
    HV,
    K: tl.constexpr,
    CHANNEL_ERASE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """What pairs inside each 16-row block of a chunk give to dq, E and dk, every pair weighted on its own.

    Pointers are those of the chunk's first row. Row j of every block meets all rows of its block at once.
    """
    o_t = tl.arange(0, BT)
    o_b = o_t // 16 * 16
    m_k = (o_k < K)[None, :]
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_E = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for j in range(0, 16):
        o_j = o_b + j
        m_j = o_j < rows
        m_jk = m_j[:, None] & m_k
        p_j = o_j[:, None] * H * K + o_k[None, :]
        b_q = tl.load(q + p_j, mask=m_jk, other=0.0).to(tl.float32)
        b_k = tl.load(k + p_j, mask=m_jk, other=0.0).to(tl.float32)
        if CHANNEL_ERASE:
            b_b = tl.load(b + o_j[:, None] * HV * K + o_k[None, :], mask=m_jk, other=0.0).to(tl.float32)
        else:
            b_b = tl.load(b + o_j * HV, mask=m_j, other=0.0).to(tl.float32)[:, None]
        b_e = tl.exp(-tl.abs(b_G - tl.load(G + o_j[:, None] * K + o_k[None, :], mask=m_k, other=0.0)))
        # as the earlier row of a pair, then as the later one
        b_ek = b_e * b_k
        b_dq += tl.load(dA + o_t * BT + o_j, mask=o_t > o_j, other=0.0)[:, None] * b_ek
        b_E += tl.load(dL + o_t * BT + o_j, mask=o_t > o_j, other=0.0)[:, None] * b_ek
        b_A = tl.load(dA + o_j * BT + o_t, mask=o_j > o_t, other=0.0)[:, None]
        b_L = tl.load(dL + o_j * BT + o_t, mask=o_j > o_t, other=0.0)[:, None]
        b_dk += b_e * (b_A * b_q + b_L * (b_b * b_k))
    return b_dq, b_E, b_dk


@triton.jit(do_not_specialize=["T"])
def wy_gradients(
    # inputs and outputs
    q,
    k,
    b,
    G,
    do,
    u,
    s,
    ds,
    dA,
    dL,
    dX,
    dw,
    dq,
    dk,
    dg,
    db,
    table,
    # sizes
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    CHANNEL_ERASE: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_ch = tl.program_id(0)
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    # from the chunk's first row, in 32 bits
    i_ch = i_ch.to(tl.int64)
    i_qk, i_g = start * H + i_h, start * HV + i_hv
    q, k = q + i_qk * K, k + i_qk * K
    do, dq, dk = do + i_g * V, dq + i_g * K, dk + i_g * K
    u, dX = u + i_ch * BT * V, dX + i_ch * BT * K
    s, ds = s + i_ch * V * K, ds + i_ch * V * K
    dL += i_ch * BT * BT
    if BY_CHANNEL:
        dA += i_ch * BT * BT
        G += i_ch * BT * K
    else:
        G += i_ch * BT
    if CHANNEL_ERASE:
        b, db = b + i_g * K, db + i_g * K
    else:
        b, db = b + i_g, db + i_g
    if dw is not None:
        dw += i_g
    if CHANNEL_DECAY:
        dg += i_g * K
    elif dg is not None:
        dg += i_g

    o_t = tl.arange(0, BT)
    m_t = o_t < rows
    o_c = o_t[:, None] * BT + o_t[None, :]
    dtype = q.dtype.element_ty
    if not CHANNEL_ERASE:
        b_b = tl.load(b + o_t * HV, mask=m_t, other=0.0).to(tl.float32)[:, None]
        if dw is None:
            b_db = tl.zeros([BT], dtype=tl.float32)
        else:
            b_db = tl.load(dw + o_t * HV, mask=m_t, other=0.0)

    # rows of A's diagonal; for one decay a row, strictly lower scores and their transposes
    if BY_CHANNEL:
        b_a = tl.load(dA + o_t * BT + o_t)[:, None]
    else:
        b_A = tl.zeros([BT, BT], dtype=tl.float32)
        b_At = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = (o_v < V)[None, :]
            b_do = tl.load(do + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_t[:, None] & m_v, other=0.0)
            b_u = tl.load(u + o_t[:, None] * V + o_v[None, :], mask=m_v, other=0.0)
            b_A = tl.dot(b_do, tl.trans(b_u), b_A, input_precision=PRECISION)
            b_At = tl.dot(b_u, tl.trans(b_do), b_At, input_precision=PRECISION)
        b_a = scale * tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_A, 0.0), 1)[:, None]
        b_G = tl.load(G + o_t)[:, None]
        b_Gt = tl.load(G + o_t)[None, :]
        b_D = tl.exp(tl.where(o_t[:, None] > o_t[None, :], b_G - b_Gt, -float("inf")))
        b_Dt = tl.exp(tl.where(o_t[:, None] < o_t[None, :], b_Gt - b_G, -float("inf")))
        b_A = (scale * b_A * b_D).to(dtype)
        b_At = (scale * b_At * b_Dt).to(dtype)
        b_L = (tl.load(dL + o_c) * b_D).to(dtype)
        b_Lt = (tl.load(dL + (o_t[None, :] * BT + o_t[:, None])) * b_Dt).to(dtype)
        b_Gl = tl.load(G + BT - 1)
        b_eG = tl.exp(b_G)
        b_eGl = tl.exp(b_Gl - b_G)
    if not CHANNEL_DECAY:
        b_dgi = tl.zeros([BT], dtype=tl.float32)
        b_dgo = tl.zeros([BT], dtype=tl.float32)
        b_dgl = 0.0
    if dg is not None and not BY_CHANNEL:
        b_qk = tl.zeros([BT, BT], dtype=tl.float32)
        b_kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_tk = m_t[:, None] & (o_k < K)[None, :]
            o_tk = o_t[:, None] * (H * K) + o_k[None, :]
            b_q = tl.load(q + o_tk, mask=m_tk, other=0.0)
            b_k = tl.load(k + o_tk, mask=m_tk, other=0.0)
            b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION)
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PRECISION)
        b_P = b_A * b_qk + b_L * (b_b * b_kk)
        b_dgi += tl.sum(b_P, 1) - tl.sum(b_P, 0)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        o_tk = o_t[:, None] * (H * K) + o_k[None, :]
        o_hk = o_t[:, None] * (HV * K) + o_k[None, :]

        b_q = tl.load(q + o_tk, mask=m_tk, other=0.0)
        b_k = tl.load(k + o_tk, mask=m_tk, other=0.0)
        if CHANNEL_ERASE:
            b_b = tl.load(b + o_hk, mask=m_tk, other=0.0).to(tl.float32)

        # what passes between the chunk's rows: [BT,BK]
        if BY_CHANNEL:
            p_G = G + o_k[None, :]
            b_G = tl.load(p_G + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
            b_Gl = tl.load(G + (BT - 1) * K + o_k, mask=m_k, other=0.0)
            b_dq, b_E, b_dk = pairwise(q, k, b, G, b_G, dA, dL, o_k, rows, H, HV, K, CHANNEL_ERASE, BT, BK)
            b_dGi = b_q * b_dq + b_b * b_k * b_E - b_k * b_dk
            if BT > 16:
                i_s = BT
                while i_s > 16:
                    b_p, b_n, m_block = across(p_G, b_G, m_k, i_s, K, BT)
                    b_qp = (b_q * b_p).to(dtype)
                    b_kp = (b_b * b_k * b_p).to(dtype)
                    b_kn = (b_k * b_n).to(dtype)
                    b_A = tl.where(m_block, tl.load(dA + o_c), 0.0).to(dtype)
                    b_L = tl.where(m_block, tl.load(dL + o_c), 0.0).to(dtype)
                    b_dqp = tl.dot(b_A, b_kn, input_precision=PRECISION)
                    b_Ep = tl.dot(b_L, b_kn, input_precision=PRECISION)
                    # loaded again: a left operand transposed in registers is what Triton miscompiles on Hopper
                    o_ct = o_t[None, :] * BT + o_t[:, None]
                    b_At = tl.where(m_block, tl.load(dA + o_ct), 0.0).to(dtype)
                    b_Lt = tl.where(m_block, tl.load(dL + o_ct), 0.0).to(dtype)
                    b_dkn = tl.dot(b_At, b_qp, input_precision=PRECISION)
                    b_dkn = tl.dot(b_Lt, b_kp, b_dkn, input_precision=PRECISION)
                    b_dGi += b_qp * b_dqp + b_kp * b_Ep - b_kn * b_dkn
                    b_dq += b_p * b_dqp
                    b_E += b_p * b_Ep
                    b_dk += b_n * b_dkn
                    i_s //= 2
            b_eG = tl.exp(b_G)
            b_eGl = tl.exp(b_Gl[None, :] - b_G)
        else:
            b_dq = tl.dot(b_A, b_k, input_precision=PRECISION)
            b_E = tl.dot(b_L, b_k, input_precision=PRECISION)
            b_dk = tl.dot(b_At, b_q, input_precision=PRECISION)
            b_dk = tl.dot(b_Lt, (b_b * b_k).to(dtype), b_dk, input_precision=PRECISION)

        # what passes through the state
        b_dqs = tl.zeros([BT, BK], dtype=tl.float32)
        b_dks = tl.zeros([BT, BK], dtype=tl.float32)
        b_ss = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < V
            o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
            o_s = o_k[:, None] * V + o_v[None, :]
            m_s = m_k[:, None] & m_v[None, :]
            b_do = tl.load(do + o_tv, mask=m_t[:, None] & m_v[None, :], other=0.0)
            b_u = tl.load(u + o_t[:, None] * V + o_v[None, :], mask=m_v[None, :], other=0.0)
            b_s = tl.load(s + o_s, mask=m_s, other=0.0)
            b_ds = tl.load(ds + o_s, mask=m_s, other=0.0)
            b_dqs = tl.dot(b_do, tl.trans(b_s), b_dqs, input_precision=PRECISION)
            b_dks = tl.dot(b_u, tl.trans(b_ds), b_dks, input_precision=PRECISION)
            if dg is not None:
                b_ss += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
        b_dX = tl.load(dX + o_t[:, None] * K + o_k[None, :], mask=m_k[None, :], other=0.0)
        b_dqs *= scale * b_eG
        b_Es = b_eG * b_dX
        b_dks *= b_eGl
        b_dq += b_dqs
        b_E += b_Es
        b_dk += b_dks

        b_dq += b_a * b_k
        b_dk += b_a * b_q + b_b * b_E
        tl.store(dq + o_hk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
        tl.store(dk + o_hk, b_dk.to(dk.dtype.element_ty), mask=m_tk)
        if CHANNEL_ERASE:
            tl.store(db + o_hk, (b_k * b_E).to(db.dtype.element_ty), mask=m_tk)
        else:
            b_db += tl.sum(b_k * b_E, 1)
        if dg is not None:
            b_dGs = b_q * b_dqs + b_b * b_k * b_Es
            b_dGo = b_k * b_dks
            b_dGl = tl.exp(b_Gl) * b_ss
            if BY_CHANNEL:
                b_dGs += b_dGi
            if CHANNEL_DECAY:
                b_dg = tl.cumsum(b_dGs, 0, reverse=True) + sum_before(b_dGo) + b_dGl[None, :]
                tl.store(dg + o_hk, b_dg.to(dg.dtype.element_ty), mask=m_tk)
            else:
                b_dgi += tl.sum(b_dGs, 1)
                b_dgo += tl.sum(b_dGo, 1)
                b_dgl += tl.sum(b_dGl, 0)

    if not CHANNEL_ERASE:
        tl.store(db + o_t * HV, b_db.to(db.dtype.element_ty), mask=m_t)
    if dg is not None and not CHANNEL_DECAY:
        b_dg = tl.sum(tl.where(o_t[:, None] >= o_t[None, :], b_dgi[:, None], b_dgo[:, None]), 0) + b_dgl
        tl.store(dg + o_t * HV, b_dg.to(dg.dtype.element_ty), mask=m_t)


def chunk_tiles(problem: Problem) -> tuple[Tiles, Tiles]:
    """Of the kernels that take a chunk each: around T, and the gradients."""
    side = 32 if problem.dtype is torch.float32 else 64
    K, V = (min(side, d) for d in padded(problem))
    return Tiles(K, V, warps=8, stages=1), Tiles(K, V, warps=8, stages=1)


def backward(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, dht: Tensor | None,
    chunks: Chunks, tiles: Plan,
) -> Gradients:  # fmt: skip
    """Gradients of every operand from what the forward kept, all tensors contiguous."""
    B, T, H, HV, K, V = problem.B, problem.T, problem.H, problem.HV, problem.K, problem.V
    G, f, e = gated.G, gated.f, gated.e
    v, b, w, h0 = x.v, x.erase, x.write, x.initial_state
    C, scale = chunks.size, problem.scale
    around_T, of_chunk = chunk_tiles(problem)
    channel = by_channel(problem)
    common = dict(T=T, H=H, HV=HV, K=K, V=V, BY_CHANNEL=channel, PRECISION=precision(problem), BT=C)

    def per_sequence(kernel: object, by: Tiles, **args: object) -> None:
        args |= common | dict(cu_seqlens=chunks.cu_seqlens, first=chunks.first, BK=by.BK, BV=by.BV)
        grid = (problem.N * HV * triton.cdiv(V, by.BV),)
        Launch(kernel, grid, args, num_warps=by.warps, num_stages=by.stages).run()

    def per_chunk(kernel: object, by: Tiles, **args: object) -> None:
        args |= common | dict(table=chunks.table, BK=by.BK, BV=by.BV)
        Launch(kernel, (chunks.count * HV,), args, num_warps=by.warps, num_stages=by.stages).run()

    def empty(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return do.new_empty(chunks.count, HV, *shape, dtype=dtype)

    W, u, s = empty(C, K), empty(C, V), empty(K, V)
    per_chunk(wy_factors, around_T, x=gated.x, v=v, b=b, w=w, f=f, Ti=Ti, W=W, u=u)
    per_sequence(wy_forward, tiles.sequential, kt=gated.kt, f=f, e=e, W=W, h0=h0, s=s, u=u)

    du, ds = empty(C, V), empty(K, V)
    dh0 = None if h0 is None else torch.empty_like(h0)
    per_sequence(
        wy_reverse, tiles.sequential,
        kt=gated.kt, qt=gated.qt, do=do, f=f, e=e, A=A, W=W, dht=dht, ds=ds, du=du, dh0=dh0,
    )  # fmt: skip

    # No chunk holds rows past the last offset.
    fresh = torch.zeros_like if problem.varlen else torch.empty_like
    dL, dX = empty(C, C, dtype=torch.float32), W  # W has served
    dA = empty(C, C, dtype=torch.float32) if channel else None  # read pair by pair
    dv = fresh(v)
    dw = torch.empty_like(b, dtype=torch.float32) if w is None else fresh(w)  # tied: its share of db
    per_chunk(
        wy_adjoint, around_T,
        x=gated.x, v=v, b=b, w=w, f=f, Ti=Ti, do=do, u=u, s=s, du=du,
        dA=dA, dL=dL, dX=dX, dv=dv, dw=dw, scale=scale,
    )  # fmt: skip

    if problem.group == 1:
        dq, dk = fresh(x.q), fresh(x.k)
    else:
        dq, dk = (fresh(x.q.new_empty(B, T, HV, K, dtype=torch.float32)) for _ in range(2))
    dg, db = None if x.g is None else fresh(x.g), fresh(b)
    per_chunk(
        wy_gradients, of_chunk,
        q=x.q, k=x.k, b=b, G=G, do=do, u=u, s=s, ds=ds, dA=dA, dL=dL, dX=dX,
        dw=dw if w is None else None, dq=dq, dk=dk, dg=dg, db=db, scale=scale,
        CHANNEL_DECAY=problem.operator.decay is Gate.CHANNEL,
        CHANNEL_ERASE=problem.operator.erase is Gate.CHANNEL,
    )  # fmt: skip
    if problem.group > 1:
        dq, dk = (summed(t, like, problem.group, K) for t, like in ((dq, x.q), (dk, x.k)))
    return Gradients(dq, dk, dv, dg, db, None if w is None else dw, dh0)
