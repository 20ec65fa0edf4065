"""Pair scores of a chunk and the triangular inverse.

    A_ij = scale sum_d q_id k_jd e^(G_id - G_jd)   i >= j
    L_ij =       sum_d (b k)_id k_jd e^(G_id - G_jd)   i > j          T = (I + L)^-1

A decay per channel enters through operands centred on a reference row c: the sum over d of
(q e^(G - c))_i (k e^(c - G))_j is one matrix product. The chunk's middle row serves unless some gate is too
far from it; then `centred` finds references that no g <= 0 can overflow.

T is kept without the ones of its diagonal: who multiplies by it adds T's operand itself, before it is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewy.backends.cuda.chunks import Chunks, chunk_rows
from rewy.backends.cuda.gates import FAR_CHANNELS, Gated, by_channel, exp, exponent_limit
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.plan import Tiles
from rewy.problem import Gate, Operands, Problem


@triton.jit
def is_far(far, i_ch, K: tl.constexpr):
    """Whether some channel of a chunk cannot be centred on the chunk's middle row."""
    NF: tl.constexpr = (K + FAR_CHANNELS - 1) // FAR_CHANNELS
    o_f = tl.arange(0, triton.next_power_of_2(NF))
    return tl.max(tl.load(far + i_ch * NF + o_f, mask=o_f < NF, other=0), 0) != 0


@triton.jit
def centred(p_G, b_G, m_k, i_s, LIMIT: tl.constexpr, K: tl.constexpr, BT: tl.constexpr):
    """Decays to and from the middle row c of each block of `i_s` rows.

    Returns (e^(G - c), e^(c - G), mask of pairs in one block, size of the blocks left to do). Where a
    channel's gate is further than LIMIT from its middle row, only pairs across the middle are served: rows
    from it on keep e^(G - c), rows before it e^(c - G), neither exponent positive, the rest is 0. The blocks
    are then to be halved, down to one row, which always fits and leaves nothing.
    """
    o_t = tl.arange(0, BT)
    i_m = (o_t // i_s) * i_s + i_s // 2
    b_d = b_G - tl.load(p_G[None, :] + i_m[:, None] * K, mask=m_k[None, :], other=0.0)
    far = (tl.max(tl.max(tl.abs(b_d), 1), 0) > LIMIT).to(tl.int32)
    b_p = exp(tl.where((o_t >= i_m * far)[:, None], b_d, -float("inf")))
    b_n = exp(tl.where((o_t < i_m + BT * (1 - far))[:, None], -b_d, -float("inf")))
    return b_p, b_n, i_m[:, None] == i_m[None, :], far * (i_s // 2)


@triton.jit
def gated_scores(b_a, b_b, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T of fp32 tiles. Rounding them to bf16 would cost A as much again as its own rounding; tf32 does not."""
    if dtype != tl.bfloat16:
        b_a, b_b = b_a.to(dtype), b_b.to(dtype)
    return tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)


@triton.jit
def scores_between(
    b_a, b_b, p_G, b_G, m_k,
    FAR: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """sum_d a_id b_jd e^(G_id - G_jd) for i >= j, anything finite above the diagonal."""
    if FAR:
        o_t = tl.arange(0, BT)
        b_S = tl.zeros([BT, BT], dtype=tl.float32)
        i_s = BT
        while i_s > 0:
            b_p, b_n, m_block, i_s = centred(p_G, b_G, m_k, i_s, LIMIT, K, BT)
            b_x = gated_scores(b_a * b_p, b_b * b_n, b_b.dtype, PRECISION)
            b_S += tl.where(m_block & (o_t[:, None] >= o_t[None, :]), b_x, 0.0)
    else:
        b_c = tl.load(p_G + (BT // 2) * K, mask=m_k, other=0.0)[None, :]
        b_S = gated_scores(b_a * exp(b_G - b_c), b_b * exp(b_c - b_G), b_b.dtype, PRECISION)
    return b_S


@triton.jit
def dot_split(b_a, b_b, dtype: tl.constexpr):
    """A product of fp32 tiles, in fp32 or from the leading and the following digits of a 16-bit type."""
    if dtype == tl.float32:
        return tl.dot(b_a, b_b, input_precision="ieee")
    b_ah, b_bh = b_a.to(dtype), b_b.to(dtype)
    b_al, b_bl = (b_a - b_ah).to(dtype), (b_b - b_bh).to(dtype)
    return tl.dot(b_ah, b_bh, tl.dot(b_ah, b_bl, tl.dot(b_al, b_bh)))


@triton.jit
def diagonal_blocks(b_L, before: tl.constexpr, BT: tl.constexpr):
    """[BT/16,16,16]: the blocks of L that stand `before` blocks left of the diagonal; zeros where there are none.

    No product is of less than 16.
    """
    o_t = tl.arange(0, BT) // 16
    b_x = tl.where(o_t[:, None] == o_t[None, :] + before, b_L, 0.0)
    return tl.sum(tl.reshape(b_x, [BT // 16, 16, BT // 16, 16]), 2)


@triton.jit
def halves(b_x):
    """[N,n,n] of the even and of the odd blocks of x [2N,n,n]."""
    N: tl.constexpr = b_x.shape[0] // 2
    n: tl.constexpr = b_x.shape[1]
    return tl.split(tl.permute(tl.reshape(b_x, [N, 2, n, n]), [0, 2, 3, 1]))


@triton.jit
def below(b_L):
    """[n,n], the lower left quarter of L [2n,2n]."""
    n: tl.constexpr = b_L.shape[0] // 2
    left, _ = tl.split(tl.permute(tl.reshape(b_L, [2, n, 2, n]), [1, 3, 0, 2]))
    _, lower = tl.split(left)
    return lower


@triton.jit
def put_together(b_a, b_l, b_c):
    """[[a, 0], [l, c]] of blocks [N,n,n]."""
    b_x = tl.join(tl.join(b_a, b_l), tl.join(tl.zeros_like(b_a), b_c))
    return tl.reshape(tl.permute(b_x, [0, 3, 1, 4, 2]), [b_a.shape[0], 2 * b_a.shape[1], 2 * b_a.shape[1]])


@triton.jit
def between(b_a, b_l, b_c, dtype: tl.constexpr):
    """What stands below a in the inverse of a block whose diagonal has the inverses a and c, with l below a."""
    return -dot_split(b_c, dot_split(b_l, b_a, dtype), dtype)


@triton.jit
def inverses_of_blocks(b_L, dtype: tl.constexpr):
    """(I + L)^-1 of strictly lower blocks L [N,16,16], from their blocks of 2 rows."""
    o_t = tl.arange(0, 16)
    m_2 = ((o_t // 2)[:, None] == (o_t // 2)[None, :])[None, :, :]
    b_T = (o_t[:, None] == o_t[None, :])[None, :, :].to(tl.float32) - tl.where(m_2, b_L, 0.0)
    for i in tl.static_range(1, 4):
        o_i = o_t >> i
        m_l = (o_i[:, None] == o_i[None, :] + 1) & (o_i & 1 == 1)[:, None]
        b_l = tl.where(m_l[None, :, :], b_L, 0.0)
        if dtype == tl.bfloat16:
            b_T -= tl.dot(tl.dot(b_T, b_l, input_precision="tf32"), b_T, input_precision="tf32")
        else:
            b_T -= dot_split(dot_split(b_T, b_l, dtype), b_T, dtype)
    return b_T


@triton.jit
def unit_lower_inverse(b_L, dtype: tl.constexpr, BT: tl.constexpr):
    """(I + L)^-1 of a strictly lower L: from blocks of 2 rows, joined pairwise up to BT.

    [[a, 0], [l, c]]^-1 = [[A, 0], [-C l A, C]] with A, C the inverses of a, c: no power of L is ever formed.
    Up to 16 rows, the blocks on the diagonal are inverted side by side (in 16 bits and chunks of 64 a warp each); no
    product is of more than a block.
    In bf16 blocks of up to 16 rows are joined in tf32, which adds a tenth to what rounding T leaves, and a third where
    keys are much alike; fp16 has as many digits as tf32.
    """
    b_d = diagonal_blocks(b_L, 0, BT)
    if BT >= 32:
        _, b_l16 = halves(diagonal_blocks(b_L, 1, BT))
    if BT == 64:
        b_l32 = below(b_L)
    b_T = inverses_of_blocks(b_d, dtype)
    if BT >= 32:
        b_a, b_c = halves(b_T)
        b_T = put_together(b_a, between(b_a, b_l16, b_c, dtype), b_c)
    if BT == 64:
        b_a, b_c = halves(b_T)
        # Of one block products are shared by all warps where it has no batch.
        b_l = between(tl.reshape(b_a, [32, 32]), b_l32, tl.reshape(b_c, [32, 32]), dtype)
        b_T = put_together(b_a, tl.reshape(b_l, [1, 32, 32]), b_c)
    return tl.reshape(b_T, [BT, BT])


@triton.jit(do_not_specialize=["T"])
def pair_scores(
    # inputs and outputs
    q,
    k,
    b,
    G,
    far,
    A,
    Ti,
    table,
    # sizes
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    # meta
    BY_CHANNEL: tl.constexpr,
    CHANNEL_ERASE: tl.constexpr,
    FAR: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    i_ch = tl.program_id(0)
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk_rows(table, i_c, T, BT)
    if rows == 0:
        return
    i_ch = i_ch.to(tl.int64)
    if BY_CHANNEL:  # noqa: SIM102  (known when it compiles, the other when it runs)
        if is_far(far, i_ch, K) != FAR:
            return
    o_t = tl.arange(0, BT)
    m_t = o_t < rows
    o_h = (start + o_t) * HV + i_hv
    if not CHANNEL_ERASE:
        b_b = tl.load(b + o_h, mask=m_t, other=0.0).to(tl.float32)[:, None]

    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    b_L = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        p_qk = ((start + o_t) * H + i_h)[:, None] * K + o_k[None, :]
        b_q = tl.load(q + p_qk, mask=m_tk, other=0.0)
        b_k = tl.load(k + p_qk, mask=m_tk, other=0.0)
        if BY_CHANNEL:
            if CHANNEL_ERASE:
                b_b = tl.load(b + o_h[:, None] * K + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
            p_G = G + i_ch * BT * K + o_k
            b_G = tl.load(p_G[None, :] + o_t[:, None] * K, mask=m_k[None, :], other=0.0)
            b_A += scores_between(b_q, b_k, p_G, b_G, m_k, FAR, LIMIT, PRECISION, K, BT)
            b_L += scores_between(b_b * b_k, b_k, p_G, b_G, m_k, FAR, LIMIT, PRECISION, K, BT)
        else:
            b_A = tl.dot(b_q, tl.trans(b_k), b_A, input_precision=PRECISION)
            b_L = tl.dot(b_k, tl.trans(b_k), b_L, input_precision=PRECISION)
    if not BY_CHANNEL:
        b_G = tl.load(G + i_ch * BT + o_t)
        b_D = exp(tl.where(o_t[:, None] >= o_t[None, :], b_G[:, None] - b_G[None, :], -float("inf")))
        b_A *= b_D
        b_L *= b_D * b_b
    b_A = tl.where(o_t[:, None] >= o_t[None, :], scale * b_A, 0.0)
    b_L = tl.where(o_t[:, None] > o_t[None, :], b_L, 0.0)

    o_c = i_ch * BT * BT + o_t[:, None] * BT + o_t[None, :]
    tl.store(A + o_c, b_A.to(A.dtype.element_ty))
    b_T = unit_lower_inverse(b_L, Ti.dtype.element_ty, BT)
    b_T -= (o_t[:, None] == o_t[None, :]).to(tl.float32)
    tl.store(Ti + o_c, b_T.to(Ti.dtype.element_ty))


def precision(problem: Problem) -> str:
    """Of products of the inputs' own dtype: true fp32 for fp32."""
    return "ieee" if problem.dtype is torch.float32 else "tf32"


def reaches(problem: Problem) -> tuple[bool, ...]:
    """The launches of a kernel that centres gates: one for chunks within the exponent limit, one for the rest.

    Each leaves the other's chunks at once. The general form would cost the usual one its registers.
    """
    return (False, True) if by_channel(problem) else (False,)


def scores(
    problem: Problem, x: Operands, gated: Gated, chunks: Chunks, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """A and T - I of every chunk, [NC,HV,C,C] in q's dtype."""
    C = chunks.size
    A = x.q.new_empty(chunks.count, problem.HV, C, C)
    Ti = A.new_empty(A.shape)
    for far in reaches(problem):
        Launch(
            pair_scores,
            grid=(chunks.count * problem.HV,),
            args=dict(
                q=x.q, k=x.k, b=x.erase, G=gated.G, far=gated.far, A=A, Ti=Ti, table=chunks.table,
                scale=problem.scale, T=problem.T, H=problem.H, HV=problem.HV, K=problem.K,
                BY_CHANNEL=by_channel(problem),
                CHANNEL_ERASE=problem.operator.erase is Gate.CHANNEL,
                FAR=far,
                LIMIT=exponent_limit(problem),
                PRECISION=precision(problem),
                BT=C,
                BK=tiles.BK,
            ),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        ).run()  # fmt: skip
    return A, Ti
