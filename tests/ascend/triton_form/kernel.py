"""The gradient of a chunk as a Triton kernel for triton-ascend: what csrc/chunk_gradient.h computes, as the vendor's
own front end and compiler see it.

Operands and results are those of the custom operator. Decay per channel takes one pass over the pairs: chunks that
decay too far for it are not for this kernel.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_gradient(
    # operands [N,C,..], states [N,K,V]
    q, k, v, b, w, G, do, U, dR, S, dS,
    # results
    dq, dk, dv, db, dw, dG, remaining,
    # sizes
    N, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    # which gates have a number for each channel
    CHANNEL_DECAY: tl.constexpr, CHANNEL_GATES: tl.constexpr,
):  # fmt: skip
    o_c = tl.arange(0, C)
    m_low = o_c[:, None] > o_c[None, :]
    m_eye = o_c[:, None] == o_c[None, :]
    for i_n in range(tl.program_id(0), N, tl.num_programs(0)):
        o_t = i_n * C + o_c

        # scores and the value side: [C,C], [C,BV]
        b_A = tl.zeros([C, C], dtype=tl.float32)
        b_L = tl.zeros([C, C], dtype=tl.float32)
        b_db = tl.zeros([C], dtype=tl.float32)
        if not CHANNEL_GATES:
            b_b = tl.load(b + o_t)
        for i_v in range(0, V, BV):
            p_v = o_t[:, None] * V + i_v + tl.arange(0, BV)[None, :]
            b_U = tl.load(U + p_v)
            b_A += tl.dot(tl.load(do + p_v), tl.trans(b_U))
            b_L += tl.dot(tl.load(dR + p_v), tl.trans(b_U))
            b_dR = tl.load(dR + p_v).to(tl.float32)
            b_dw = tl.load(v + p_v).to(tl.float32) * b_dR
            if CHANNEL_GATES:
                tl.store(dw + p_v, b_dw)
                tl.store(dv + p_v, (tl.load(w + p_v) * b_dR).to(dv.dtype.element_ty))
            else:
                b_db += tl.sum(b_dw, 1)
                tl.store(dv + p_v, (b_b[:, None] * b_dR).to(dv.dtype.element_ty))
        b_A *= scale
        b_diagonal = tl.sum(tl.where(m_eye, b_A, 0.0), 1)
        if CHANNEL_DECAY:
            b_A = tl.where(m_low, b_A, 0.0)
            b_L = tl.where(m_low, -b_L, 0.0)
        else:
            b_G = tl.load(G + o_t)
            b_P = tl.exp(tl.where(m_low, b_G[:, None] - b_G[None, :], -float("inf")))
            b_A = b_A * b_P
            b_L = -b_L * b_P
            b_E = tl.exp(b_G)[:, None]
            b_R = tl.exp(tl.load(G + i_n * C + C - 1) - b_G)[:, None]
            b_dG = tl.zeros([C], dtype=tl.float32)
            b_rest = tl.zeros([C], dtype=tl.float32)
        b_A = b_A.to(q.dtype.element_ty)
        b_L = b_L.to(q.dtype.element_ty)

        # the key side: [C,BK]
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            p_k = o_t[:, None] * K + o_k[None, :]
            b_q = tl.load(q + p_k).to(tl.float32)
            b_k = tl.load(k + p_k).to(tl.float32)
            if CHANNEL_GATES:
                b_g = tl.load(b + p_k)
            else:
                b_g = b_b[:, None]
            b_bk = (b_g * b_k).to(q.dtype.element_ty).to(tl.float32)
            b_qh, b_kh, b_bkh = b_q, b_k, b_bk
            if CHANNEL_DECAY:
                b_G = tl.load(G + p_k)
                b_last = tl.load(G + (i_n * C + C - 1) * K + o_k)
                b_c = 0.5 * (tl.load(G + i_n * C * K + o_k) + b_last)
                b_E = tl.exp(b_G)
                b_R = tl.exp(b_last[None, :] - b_G)
                b_from = tl.exp(b_G - b_c[None, :])
                b_to = tl.exp(b_c[None, :] - b_G)
                b_qh, b_kh, b_bkh = b_q * b_from, b_k * b_to, b_bk * b_from
            b_q16 = b_qh.to(q.dtype.element_ty)
            b_k16 = b_kh.to(q.dtype.element_ty)
            b_bk16 = b_bkh.to(q.dtype.element_ty)

            # what passes through the states
            b_dQ = tl.zeros([C, BK], dtype=tl.float32)
            b_dX = tl.zeros([C, BK], dtype=tl.float32)
            b_dK = tl.zeros([C, BK], dtype=tl.float32)
            for i_v in range(0, V, BV):
                p_v = o_t[:, None] * V + i_v + tl.arange(0, BV)[None, :]
                p_s = (i_n * K + o_k)[:, None] * V + i_v + tl.arange(0, BV)[None, :]
                b_dQ += tl.dot(tl.load(do + p_v), tl.trans(tl.load(S + p_s)))
                b_dX += tl.dot(tl.load(dR + p_v), tl.trans(tl.load(S + p_s)))
                b_dK += tl.dot(tl.load(U + p_v), tl.trans(tl.load(dS + p_s)))
            b_dQ = b_dQ * scale * b_E
            b_dX = -b_dX * b_E
            b_dK = b_dK * b_R

            # pairs
            b_dq = tl.dot(b_A, b_k16)
            b_e = tl.dot(b_L, b_k16)
            b_right = tl.dot(tl.trans(b_A), b_q16) + tl.dot(tl.trans(b_L), b_bk16)
            b_g_pairs = (
                b_q16.to(tl.float32) * b_dq + b_bk16.to(tl.float32) * b_e - b_k16.to(tl.float32) * b_right
            )
            b_g_states = b_q * b_dQ + b_bk * b_dX
            if CHANNEL_DECAY:
                b_dq, b_e, b_right = b_dq * b_from, b_e * b_from, b_right * b_to
                tl.store(dG + p_k, b_g_pairs + b_g_states)
                tl.store(remaining + p_k, b_k * b_dK)
            else:
                b_dG += tl.sum(b_g_pairs + b_g_states, 1)
                b_rest += tl.sum(b_k * b_dK, 1)
            b_e += b_dX
            if CHANNEL_GATES:
                tl.store(db + p_k, b_k * b_e)
            else:
                b_db += tl.sum(b_k * b_e, 1)
            tl.store(dq + p_k, b_dq + b_dQ + b_diagonal[:, None] * b_k)
            tl.store(dk + p_k, b_g * b_e + b_right + b_dK + b_diagonal[:, None] * b_q)
        if not CHANNEL_DECAY:
            tl.store(dG + o_t, b_dG)
            tl.store(remaining + o_t, b_rest)
        if not CHANNEL_GATES:
            tl.store(db + o_t, b_db)
