"""The gradients of keys and gates for Hopper, in Gluon: `gradients.key_gradients` with every movement spelled out.

A program takes a chunk and 64 key channels, whole tiles of it: the copy engine brings all of them at once, two
programs share a multiprocessor, and while one waits the other computes. Tiles that the first products have used up
hold what the next ones need. The formulas, and the care for dg, are those of `gradients`; chunks whose gates are too
far apart to be centred are left to its general form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rewy.backends.cuda.gates import LOG2_E
from rewy.backends.cuda.hopper import clear_tail, thread_barrier, tiled
from rewy.backends.cuda.launch import Launch
from rewy.problem import Problem

SHARED = 113 * 1024  # bytes of shared memory a program takes: two fit a multiprocessor


@gluon.jit
def exp(x):
    return gl.exp2(x * LOG2_E)


@gluon.jit
def chunk(table, i_c, T, BT: gl.constexpr):
    """First token and number of rows of a chunk."""
    if table is None:
        NT = gl.maximum(gl.cdiv(T, BT), 1)
        i_n, i_t = i_c // NT, i_c % NT
        start = i_n * T + i_t * BT
        rows = gl.minimum(T - i_t * BT, BT)
    else:
        start = gl.load(table + 2 * i_c)
        rows = gl.load(table + 2 * i_c + 1)
    return start, rows


@gluon.jit
def barrier():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def store_rounded(tile, rest, b_x):
    """x in two tiles: its leading digits, and what they leave."""
    b_h = b_x.to(tile.dtype)
    tile.store(b_h)
    rest.store((b_x - b_h.to(gl.float32)).to(tile.dtype))


@gluon.jit
def store_rows(p, b_x, m_t):
    gl.store(p, b_x.to(p.dtype.element_ty), mask=m_t[:, None])


@gluon.jit(do_not_specialize=["T", "TOKENS"])
def centred_keys(
    # inputs and outputs
    q,
    k,
    do,
    u,
    dr,
    s,
    ds,
    dA,
    dL,
    b,
    G,
    diagonal,
    dq,
    dk,
    p_dq,
    p_dk,
    dg,
    db,
    table,
    # sizes
    scale,
    T,
    TOKENS,
    H,
    HV,
    K: gl.constexpr,
    V: gl.constexpr,
    # meta
    BY_CHANNEL: gl.constexpr,
    CHANNEL_DECAY: gl.constexpr,
    CHANNEL_ERASE: gl.constexpr,
    LIMIT: gl.constexpr,
    BT: gl.constexpr,
):
    BK: gl.constexpr = 64
    NK: gl.constexpr = K // BK
    DECAY: gl.constexpr = dg is not None
    COPY: gl.constexpr = dq is not None
    dtype: gl.constexpr = q.dtype
    i_k = gl.program_id(0) % NK
    i_ch = gl.program_id(0) // NK
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    start, rows = chunk(table, i_c, T, BT)
    if rows == 0:
        return
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    tile: gl.constexpr = q.layout

    q_s = gl.allocate_shared_memory(dtype, [BT, BK], tile)
    k_s = gl.allocate_shared_memory(dtype, [BT, BK], tile)
    A_s = gl.allocate_shared_memory(dtype, [BT, BT], dA.layout)
    L_s = gl.allocate_shared_memory(dtype, [BT, BT], dL.layout)
    do_s = gl.allocate_shared_memory(dtype, [BT, V], do.layout)
    dr_s = gl.allocate_shared_memory(dtype, [BT, V], dr.layout)
    u_s = gl.allocate_shared_memory(dtype, [BT, V], u.layout)
    s_s = gl.allocate_shared_memory(dtype, [BK, V], s.layout)
    ds_s = gl.allocate_shared_memory(dtype, [BK, V], ds.layout)
    before, after, within = barrier(), barrier(), barrier()
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(before, 2 * V * (2 * BT + BK))
    tma.async_copy_global_to_shared(s, [i_ch * K + i_k * BK, 0], before, s_s)
    tma.async_copy_global_to_shared(do, [start, i_hv * V], before, do_s)
    tma.async_copy_global_to_shared(dr, [i_ch * BT, 0], before, dr_s)
    mbarrier.expect(after, 2 * V * (BT + BK))
    tma.async_copy_global_to_shared(u, [i_ch * BT, 0], after, u_s)
    tma.async_copy_global_to_shared(ds, [i_ch * K + i_k * BK, 0], after, ds_s)
    mbarrier.expect(within, 4 * BT * (BK + BT))
    tma.async_copy_global_to_shared(k, [start, i_h * K + i_k * BK], within, k_s)
    tma.async_copy_global_to_shared(q, [start, i_h * K + i_k * BK], within, q_s)
    tma.async_copy_global_to_shared(dA, [i_ch * BT, 0], within, A_s)
    tma.async_copy_global_to_shared(dL, [i_ch * BT, 0], within, L_s)

    # meanwhile: gates, as they lie in memory
    o_t = gl.arange(0, BT, by_row)
    o_j = gl.arange(0, BT, by_column)
    o_k = i_k * BK + gl.arange(0, BK, by_column)
    m_t = o_t < rows
    i_g = start.to(gl.int64) * HV + i_hv
    o_hk = o_t[:, None] * (HV * K) + o_k[None, :]
    if BY_CHANNEL:
        p_G = G + i_ch.to(gl.int64) * BT * K + o_k
        b_c = gl.load(p_G + (BT // 2) * K)
        b_Gl = gl.load(p_G + (BT - 1) * K)
        far = gl.max(gl.maximum(gl.abs(gl.load(p_G) - b_c), gl.abs(b_Gl - b_c)), 0) > LIMIT
        b_G = gl.load(gl.expand_dims(p_G, 0) + o_t[:, None] * K)
    else:
        p_G = G + i_ch.to(gl.int64) * BT
        b_G = gl.expand_dims(gl.load(p_G + o_t), 1)
        b_Gl = gl.load(p_G + BT - 1)
        far = False
    if CHANNEL_ERASE:
        b_b = gl.load(b + i_g * K + o_hk, mask=m_t[:, None], other=0.0)
    else:
        b_b = gl.expand_dims(gl.load(b + i_g + o_t * HV, mask=m_t, other=0.0), 1).to(gl.float32)
    b_a = gl.expand_dims(gl.load(diagonal + i_ch.to(gl.int64) * BT + o_t), 1)

    # what passes through the states: [BT,BK]
    mbarrier.wait(before, 0)
    mbarrier.wait(after, 0)
    mbarrier.wait(within, 0)
    if far:
        return
    if rows < BT:
        clear_tail(do_s, rows)
        clear_tail(q_s, rows)
        clear_tail(k_s, rows)
        fence_async_shared()
        thread_barrier()
    zeros = gl.zeros([BT, BK], gl.float32, acc)
    b_dq = warpgroup_mma(do_s, s_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_E = warpgroup_mma(dr_s, s_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_dk = warpgroup_mma(u_s, ds_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if DECAY:
        ss = gl.zeros([BK], gl.float32, gl.SliceLayout(1, flat))
        for i in gl.static_range(V // 64):
            b_s = s_s.slice(i * 64, 64, 1).load(flat).to(gl.float32)
            ss += gl.sum(b_s * ds_s.slice(i * 64, 64, 1).load(flat).to(gl.float32), 1)
        ss = gl.convert_layout(ss, by_column)
    b_dq, b_E, b_dk = warpgroup_mma_wait(0, (b_dq, b_E, b_dk))
    thread_barrier()

    # what passes between the chunk's rows, on top of it
    b_k = k_s.load(acc).to(gl.float32)
    kp_s = do_s._reinterpret(dtype, [2, BT, BK], tile).index(0)
    if BY_CHANNEL:
        qp_s = do_s._reinterpret(dtype, [2, BT, BK], tile).index(1)
        kn_s = dr_s._reinterpret(dtype, [2, BT, BK], tile).index(0)
        b_e = (b_G - gl.expand_dims(b_c, 0)) * LOG2_E
        b_n = gl.exp2(-b_e)
        kn_s.store((b_k * b_n).to(dtype))
        b_dk = b_dk * (b_n * gl.expand_dims(exp(b_Gl - b_c), 0))
        b_p = gl.exp2(b_e)
        kp_s.store((b_b.to(gl.float32) * b_k * b_p).to(dtype))
        qp_s.store((q_s.load(acc).to(gl.float32) * b_p).to(dtype))
        b_f = gl.expand_dims(exp(b_c), 0)
    else:
        qp_s, kn_s = q_s, k_s
        kp_s.store((b_b * b_k).to(dtype))
        b_dk = b_dk * exp(b_Gl - b_G)
        b_f = exp(b_G)
    b_dq = b_dq * (scale * b_f)
    b_E = b_E * -b_f
    if CHANNEL_DECAY:
        go_s = s_s._reinterpret(dtype, [2, BT, BK], tile)
        gi_s = u_s._reinterpret(dtype, [2, BT, BK], tile)
        store_rounded(go_s.index(0), go_s.index(1), b_k * b_dk)
    elif DECAY:
        b_go = gl.sum(b_k * b_dk, 1)
    fence_async_shared()
    thread_barrier()
    b_dq = warpgroup_mma(A_s, kn_s, b_dq, is_async=True)
    b_E = warpgroup_mma(L_s, kn_s, b_E, is_async=True)
    b_x = warpgroup_mma(A_s.permute((1, 0)), qp_s, zeros, use_acc=False, is_async=True)
    b_x = warpgroup_mma(L_s.permute((1, 0)), kp_s, b_x, is_async=True)
    b_dq, b_E, b_x = warpgroup_mma_wait(0, (b_dq, b_E, b_x))
    if DECAY:
        b_gi = qp_s.load(acc).to(gl.float32) * b_dq + kp_s.load(acc).to(gl.float32) * b_E
        b_gi -= kn_s.load(acc).to(gl.float32) * b_x
    if CHANNEL_DECAY:
        store_rounded(gi_s.index(0), gi_s.index(1), b_gi)
        # dA and dL are used up: which rows each gate acts on takes their place
        A_s.store((o_t[:, None] <= o_j[None, :]).to(dtype))
        L_s.store((o_t[:, None] > o_j[None, :]).to(dtype))
        fence_async_shared()
        thread_barrier()
        b_dg = zeros + gl.expand_dims(exp(b_Gl) * ss, 0)
        b_dg = warpgroup_mma(A_s, gi_s.index(1), b_dg, is_async=True)
        b_dg = warpgroup_mma(L_s, go_s.index(1), b_dg, is_async=True)
        b_dg = warpgroup_mma(A_s, gi_s.index(0), b_dg, is_async=True)
        b_dg = warpgroup_mma(L_s, go_s.index(0), b_dg, is_async=True)
        b_dg = warpgroup_mma_wait(0, (b_dg,))
        store_rows(dg + i_g * K + o_hk, b_dg, m_t)
    elif DECAY:
        b_gi = gl.sum(b_gi, 1)
    if BY_CHANNEL:
        # read again: held from before, they would crowd the registers
        b_e = (
            gl.load(gl.expand_dims(p_G, 0) + o_t[:, None] * K)
            - gl.expand_dims(gl.load(p_G + (BT // 2) * K), 0)
        ) * LOG2_E
        b_p = gl.exp2(b_e)
        b_dq = b_dq * b_p
        b_E = b_E * b_p
        b_x = b_x * gl.exp2(-b_e)
    if CHANNEL_ERASE:
        b_b = gl.load(b + i_g * K + o_hk, mask=m_t[:, None], other=0.0)
    b_k = k_s.load(acc).to(gl.float32)
    b_dq = b_dq + b_a * b_k
    b_dk = b_dk + b_x + b_a * q_s.load(acc).to(gl.float32) + b_b.to(gl.float32) * b_E
    if COPY:
        if rows < BT:
            store_rows(p_dq + i_g * K + o_hk, b_dq, m_t)
            store_rows(p_dk + i_g * K + o_hk, b_dk, m_t)
        else:
            q_s.store(b_dq.to(dtype))
            k_s.store(b_dk.to(dtype))
            fence_async_shared()
            thread_barrier()
            tma.async_copy_shared_to_global(dq, [start, i_hv * K + i_k * BK], q_s)
            tma.async_copy_shared_to_global(dk, [start, i_hv * K + i_k * BK], k_s)
    else:
        store_rows(p_dq + i_g * K + o_hk, b_dq, m_t)
        store_rows(p_dk + i_g * K + o_hk, b_dk, m_t)
    if CHANNEL_ERASE:
        store_rows(db + i_g * K + o_hk, b_k * b_E, m_t)
    else:
        gl.store(db + i_k.to(gl.int64) * TOKENS * HV + i_g + o_t * HV, gl.sum(b_k * b_E, 1), mask=m_t)
    if DECAY and not CHANNEL_DECAY:
        b_in, b_out = gl.expand_dims(b_gi, 1), gl.expand_dims(b_go, 1)
        b_dg = gl.sum(gl.where(o_t[:, None] >= o_j[None, :], b_in, b_out), 0) + exp(b_Gl) * gl.sum(ss, 0)
        gl.store(dg + i_k.to(gl.int64) * TOKENS * HV + i_g + o_j * HV, b_dg, mask=o_j < rows)
    tma.store_wait(0)
    # the compiler does not see that these hold other tiles too
    do_s._keep_alive()
    dr_s._keep_alive()
    u_s._keep_alive()
    s_s._keep_alive()


def keys(problem: Problem, grid: tuple[int], made: Mapping[str, Any]) -> None:
    """The gradients of keys and gates of all chunks that can be centred: `made` is what `key_gradients` takes."""
    p, C = problem, problem.chunk_size
    copied = p.group == 1  # else dq and dk are parts in fp32, which no tile holds
    args = {name: arg for name, arg in made.items() if name != "PRECISION"} | dict(
        q=tiled(made["q"], p.H * p.K),
        k=tiled(made["k"], p.H * p.K),
        do=tiled(made["do"], p.HV * p.V, columns=p.V),
        **{name: tiled(made[name], p.V, columns=p.V) for name in ("u", "dr", "s", "ds")},
        **{name: tiled(made[name], C) for name in ("dA", "dL")},
        **{name: tiled(made[name], p.HV * p.K) if copied else None for name in ("dq", "dk")},
        p_dq=made["dq"],
        p_dk=made["dk"],
    )
    Launch(centred_keys, grid, args).run()
