"""The recurrence token by token, for decoding.

    S~ = e^g S        S = S~ + k (w v - S~^T (b k))^T        o = scale S^T q

One program owns a [K, BV] slice of one head's state and keeps it in registers from the first token
to the last: columns of S never meet, so the slices are independent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rewy.backends.cuda.launch import Launch
from rewy.problem import Gate, Operands, Problem


@triton.jit(do_not_specialize=["T"])
def recurrent_step(
    # inputs and outputs
    q,
    k,
    v,
    g,
    erase,
    write,
    h0,
    cu_seqlens,
    o,
    ht,
    # sizes
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    # meta
    CHANNEL_DECAY: tl.constexpr,
    CHANNEL_ERASE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_nh = (tl.program_id(0) // NV).to(tl.int64)
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    if cu_seqlens is None:
        bos = i_n * T
        eos = bos + T
    else:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    o_s = i_nh * K * V + o_k[:, None] * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]

    if h0 is None:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        b_s = tl.load(h0 + o_s, mask=m_s, other=0.0).to(tl.float32)
    for t in range(bos, eos):
        i_qk = t * H + i_h
        i_gv = t * HV + i_hv
        b_q = tl.load(q + i_qk * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k + i_qk * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(v + i_gv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        if CHANNEL_ERASE:
            b_b = tl.load(erase + i_gv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        else:
            b_b = tl.load(erase + i_gv).to(tl.float32)
        if write is None:
            b_w = b_b
        else:
            b_w = tl.load(write + i_gv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        if g is not None:
            if CHANNEL_DECAY:
                b_g = tl.load(g + i_gv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_s *= tl.exp(b_g)[:, None]
            else:
                b_s *= tl.exp(tl.load(g + i_gv).to(tl.float32))
        b_u = b_w * b_v - tl.sum(b_s * (b_b * b_k)[:, None], axis=0)
        b_s += b_k[:, None] * b_u[None, :]
        b_o = scale * tl.sum(b_s * b_q[:, None], axis=0)
        tl.store(o + i_gv * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
    tl.store(ht + o_s, b_s, mask=m_s)


def step(problem: Problem, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B,T,HV,V] in q's dtype and the final state [N,HV,K,V] in fp32, from contiguous operands."""
    p = problem
    BK = triton.next_power_of_2(p.K)
    BV = min(triton.next_power_of_2(p.V), 32 if BK <= 128 else 16)
    # Rows past the last offset belong to no sequence: no program would write them.
    o = torch.zeros_like(x.v) if p.varlen else torch.empty_like(x.v)
    ht = x.v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32)
    Launch(
        recurrent_step,
        grid=(p.N * p.HV * triton.cdiv(p.V, BV),),
        args=dict(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            erase=x.erase,
            write=x.write,
            h0=x.initial_state,
            cu_seqlens=x.cu_seqlens,
            o=o,
            ht=ht,
            scale=p.scale,
            T=p.T,
            H=p.H,
            HV=p.HV,
            K=p.K,
            V=p.V,
            CHANNEL_DECAY=p.operator.decay is Gate.CHANNEL,
            CHANNEL_ERASE=p.operator.erase is Gate.CHANNEL,
            BK=BK,
            BV=BV,
        ),
    ).run()
    return o, ht
