"""All gradients of a chunk where keys are gated by channel, for Hopper, in Gluon: `gradients` in one kernel.

A program takes a chunk and 64 key channels, whole tiles of it, of values up to 128 channels and then the next into
the same places: the copy engine brings all of them at once, two programs share a multiprocessor, and while one waits
the other computes. Each forms dA and dL for itself, which costs a chunk three products more and saves them the way
through memory, and has a part of the rows of dv. Tiles that the first products have used up hold what the next ones
need. The formulas, and the care for dg, are those of `gradients`. The sums of dg run down the rows in registers, in
fp32: each thread has the rows of two channels, and runs of 16 rows are joined through shared memory. Where gates are
too far apart to be centred, dA and dL are left in memory for the general form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
from rewy.backends.cuda.hopper_tiles import (
    barriers,
    chunk,
    clear_tail,
    exp,
    store_rows,
    thread_barrier,
    tiled,
)
from rewy.backends.cuda.launch import Launch
from rewy.problem import Problem

KEYS = gl.constexpr(64)  # key channels a program takes
SHARED = 113 * 1024  # bytes of shared memory a program takes: two fit a multiprocessor
# Sums of dg run over rows: of a tile in fp32 each of 128 threads holds so many rows of so many channels.
RUN = gl.constexpr(16)
RUN_CHANNELS = gl.constexpr(2)


@gluon.jit
def wide(b_x):
    """A tile of 16 bits in fp32. Of two bf16 in one register, one is a shift away and the other a mask."""
    if b_x.dtype == gl.bfloat16:
        b_y = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [b_x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        b_y = b_x.to(gl.float32)
    return b_y


@gluon.jit
def reciprocal(b_x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=gl.float32, is_pure=True, pack=1
    )


def _running(rows: int, columns: int, onward: bool) -> str:
    """Of each number a thread holds, row by row: the sum from its row on, or of the rows before it."""
    n, lines = rows * columns, []
    for i in reversed(range(n)) if onward else range(n):
        if onward:
            last = i >= n - columns
            lines.append(f"mov.f32 ${i}, ${n + i};" if last else f"add.f32 ${i}, ${i + columns}, ${n + i};")
        elif i < columns:
            lines.append(f"mov.f32 ${i}, 0f00000000;")
        else:
            lines.append(f"add.f32 ${i}, ${i - columns}, ${n + i - columns};")
    return "\n".join(lines)


HELD = gl.constexpr(RUN.value * RUN_CHANNELS.value)
FROM_ROW = gl.constexpr(_running(RUN.value, RUN_CHANNELS.value, onward=True))
BEFORE_ROW = gl.constexpr(_running(RUN.value, RUN_CHANNELS.value, onward=False))
OPERANDS = gl.constexpr(",".join(["=&f"] * HELD.value + ["f"] * HELD.value))


@gluon.jit
def running(b_x, sums: gl.constexpr):
    return gl.inline_asm_elementwise(sums, OPERANDS, [b_x], dtype=gl.float32, is_pure=True, pack=HELD)


@gluon.jit
def end_of_runs(b_x, LAST: gl.constexpr):
    """The first or the last row of every run of rows: each thread has its own."""
    BLOCKS: gl.constexpr = b_x.shape[0] // RUN
    COLUMNS: gl.constexpr = b_x.shape[1]
    for i in gl.static_range(4):
        b_x = b_x.reshape([BLOCKS, 2, RUN >> (i + 1), COLUMNS]).permute((0, 2, 3, 1))
        b_0, b_1 = b_x.split()
        if LAST:
            b_x = b_1
        else:
            b_x = b_0
    return b_x.reshape([BLOCKS, COLUMNS])


@gluon.jit
def side_by_side(b_x, b_y):
    """Two tiles as one of twice the columns; in shared memory one lies after the other."""
    return gl.join(b_x, b_y).permute((0, 2, 1)).reshape([b_x.shape[0], 2 * b_x.shape[1]])


@gluon.jit
def expect_values(has_u, has_u2, has_dr, has_do, has_s, has_ds, BYTES: gl.constexpr):
    """A tile of values of each, whose rows are as many, of a chunk or of key channels."""
    mbarrier.expect(has_u, BYTES)
    mbarrier.expect(has_u2, BYTES)
    mbarrier.expect(has_dr, BYTES)
    mbarrier.expect(has_do, BYTES)
    mbarrier.expect(has_s, BYTES)
    mbarrier.expect(has_ds, BYTES)


@gluon.jit
def wait_for_scores(has_do, has_dr, has_u, has_u2, PHASE: gl.constexpr, do_s, rows):
    """Until a tile of values has come of all that `score_products` takes."""
    mbarrier.wait(has_do, PHASE)
    mbarrier.wait(has_dr, PHASE)
    mbarrier.wait(has_u, PHASE)
    mbarrier.wait(has_u2, PHASE)
    if rows < do_s.shape[0]:
        clear_tail(do_s, rows)
        fence_async_shared()
        thread_barrier()


@gluon.jit
def score_products(b_A, b_L, do_s, dr_s, u_s, u2_s, again):
    """What a tile of values adds to dA, which takes two digits of U, and dL."""
    b_A = warpgroup_mma(do_s, u_s.permute((1, 0)), b_A, use_acc=again, is_async=True)
    b_A = warpgroup_mma(do_s, u2_s.permute((1, 0)), b_A, is_async=True)
    b_L = warpgroup_mma(dr_s, u_s.permute((1, 0)), b_L, use_acc=again, is_async=True)
    return b_A, b_L


@gluon.jit
def value_gradients(
    v, b, w, dr, dv, dw, db, i_g, i_ch, first, rows, HV,
    ROWS: gl.constexpr, V: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    """dv and what the write gate has of it, of ROWS rows of a chunk from `first` on."""
    BV: gl.constexpr = min(V, 128)
    line: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [gl.num_warps(), 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, line)
    o_t = first + gl.arange(0, ROWS, by_row)
    o_v = gl.arange(0, BV, gl.SliceLayout(0, line))
    m_t = o_t < rows
    m_tv = gl.expand_dims(m_t, 1)
    o_hv = o_t[:, None] * (HV * V) + o_v[None, :]
    v, dv = v + i_g * V, dv + i_g * V
    dr += i_ch.to(gl.int64) * BT * V
    if w is None:
        b_w = gl.expand_dims(gl.load(b + i_g + o_t * HV, mask=m_t, other=0.0), 1)
        b_db = gl.zeros([ROWS], gl.float32, by_row)
    else:
        w, dw = w + i_g * V, dw + i_g * V
    for i_v in gl.static_range(0, V, BV):
        b_v = gl.load(v + i_v + o_hv, mask=m_tv, other=0.0)
        b_dr = gl.load(dr + i_v + o_t[:, None] * V + o_v[None, :]).to(gl.float32)
        if w is None:
            b_db += gl.sum(b_v * b_dr, 1)
        else:
            b_w = gl.load(w + i_v + o_hv, mask=m_tv, other=0.0)
            store_rows(dw + i_v + o_hv, b_v * b_dr, m_t)
        store_rows(dv + i_v + o_hv, b_w * b_dr, m_t)
    if w is None:
        gl.store(db + i_g + o_t * HV, b_db, mask=m_t)


@gluon.jit(do_not_specialize=["T", "TOKENS"])
def channel_chunks(
    # inputs and outputs
    q,
    k,
    do,
    u,
    u2,
    dr,
    s,
    ds,
    v,
    b,
    w,
    G,
    far,
    p_dr,
    dA,
    dL,
    diagonal,
    dq,
    dk,
    db_tiles,
    dg_tiles,
    p_dq,
    p_dk,
    dv,
    dg,
    db,
    db_values,
    dw,
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
    CHANNEL_ERASE: gl.constexpr,
    BT: gl.constexpr,
):
    BK: gl.constexpr = KEYS
    NK: gl.constexpr = K // BK
    BV: gl.constexpr = u.block_shape[1]
    COPY: gl.constexpr = dq is not None
    dtype: gl.constexpr = q.dtype
    i_k = gl.program_id(0) % NK
    i_ch = gl.program_id(0) // NK
    if table is not None:  # noqa: SIM102  (known when it compiles: without a table every chunk has rows)
        if gl.load(table + 2 * (i_ch // HV) + 1) == 0:
            return
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    run: gl.constexpr = gl.BlockedLayout([RUN, RUN_CHANNELS], [1, 32], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    tile: gl.constexpr = q.layout
    # rows of fp32 without two threads at one bank, written as accumulators lie and read row by row
    wide_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_s = gl.allocate_shared_memory(dtype, [BT, BK], tile)
    k_s = gl.allocate_shared_memory(dtype, [BT, BK], tile)
    # each has room for two tiles of keys, or one in fp32, which will take its place
    do_m = gl.allocate_shared_memory(dtype, [BT, 2 * BK], tile)
    dr_m = gl.allocate_shared_memory(dtype, [BT, 2 * BK], tile)
    u_m = gl.allocate_shared_memory(dtype, [BT, 2 * BK], tile)
    u2_m = gl.allocate_shared_memory(dtype, [BT, 2 * BK], tile)
    s_m = gl.allocate_shared_memory(dtype, [BK, 2 * BK], tile)
    ds_m = gl.allocate_shared_memory(dtype, [BK, 2 * BK], tile)
    do_s = do_m._reinterpret(dtype, [BT, BV], do.layout)
    dr_s = dr_m._reinterpret(dtype, [BT, BV], dr.layout)
    u_s = u_m._reinterpret(dtype, [BT, BV], u.layout)
    u2_s = u2_m._reinterpret(dtype, [BT, BV], u2.layout)
    s_s = s_m._reinterpret(dtype, [BK, BV], s.layout)
    ds_s = ds_m._reinterpret(dtype, [BK, BV], ds.layout)
    ss_s = gl.allocate_shared_memory(gl.float32, [BK], row)
    # one for each tile: threads need not meet between two copies
    has = barriers(8)
    has_k, has_q, has_s, has_ds = has.index(0), has.index(1), has.index(2), has.index(3)
    has_do, has_dr, has_u, has_u2 = has.index(4), has.index(5), has.index(6), has.index(7)
    fence_async_shared()
    thread_barrier()
    expect_values(has_u, has_u2, has_dr, has_do, has_s, has_ds, 2 * BT * BV)
    mbarrier.expect(has_k, 2 * BT * BK)
    mbarrier.expect(has_q, 2 * BT * BK)
    tma.async_copy_global_to_shared(u, [i_ch * BT, 0], has_u, u_s)
    tma.async_copy_global_to_shared(dr, [i_ch * BT, 0], has_dr, dr_s)
    tma.async_copy_global_to_shared(u2, [i_ch * BT, 0], has_u2, u2_s)
    tma.async_copy_global_to_shared(s, [i_ch * K + i_k * BK, 0], has_s, s_s)
    thread_barrier()  # or the compiler puts these off to what follows
    # what takes divisions to find
    i_c, i_hv = i_ch // HV, i_ch % HV
    if COPY:
        i_h = i_hv  # one value head to each key head
    else:
        i_h = i_hv // (HV // H)
    start, rows = chunk(table, i_c, T, BT)
    tma.async_copy_global_to_shared(do, [start, i_hv * V], has_do, do_s)
    tma.async_copy_global_to_shared(k, [start, i_h * K + i_k * BK], has_k, k_s)
    tma.async_copy_global_to_shared(q, [start, i_h * K + i_k * BK], has_q, q_s)
    tma.async_copy_global_to_shared(ds, [i_ch * K + i_k * BK, 0], has_ds, ds_s)

    # meanwhile: values, as they lie in memory
    i_g = start.to(gl.int64) * HV + i_hv
    value_gradients(v, b, w, p_dr, dv, dw, db_values, i_g, i_ch, i_k * (BT // NK), rows, HV, BT // NK, V, BT)
    o_t = gl.arange(0, BT, by_row)
    o_j = gl.arange(0, BT, by_column)
    o_k = i_k * BK + gl.arange(0, BK, by_column)
    m_t = o_t < rows
    o_hk = o_t[:, None] * (HV * K) + o_k[None, :]
    p_G = G + i_ch.to(gl.int64) * BT * K

    # all but the last tile of values
    zeros = gl.zeros([BT, BK], gl.float32, acc)
    b_A, b_L = zeros, zeros
    b_dq, b_E, b_dk = zeros, zeros, zeros
    b_sum = gl.zeros([BK], gl.float32, by_row)
    NV: gl.constexpr = V // BV
    for i_v in gl.static_range(NV - 1):
        wait_for_scores(has_do, has_dr, has_u, has_u2, i_v % 2, do_s, rows)
        mbarrier.wait(has_s, i_v % 2)
        mbarrier.wait(has_ds, i_v % 2)
        b_A, b_L = score_products(b_A, b_L, do_s, dr_s, u_s, u2_s, i_v > 0)
        b_dq = warpgroup_mma(do_s, s_s.permute((1, 0)), b_dq, use_acc=i_v > 0, is_async=True)
        b_E = warpgroup_mma(dr_s, s_s.permute((1, 0)), b_E, use_acc=i_v > 0, is_async=True)
        b_ss = warpgroup_mma(s_s, ds_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_dk = warpgroup_mma(u_s, ds_s.permute((1, 0)), b_dk, use_acc=i_v > 0, is_async=True)
        b_A, b_L, b_dq, b_E, b_ss, b_dk = warpgroup_mma_wait(0, (b_A, b_L, b_dq, b_E, b_ss, b_dk))
        thread_barrier()
        o_v = (i_v + 1) * BV
        expect_values(has_u, has_u2, has_dr, has_do, has_s, has_ds, 2 * BT * BV)
        tma.async_copy_global_to_shared(u, [i_ch * BT, o_v], has_u, u_s)
        tma.async_copy_global_to_shared(dr, [i_ch * BT, o_v], has_dr, dr_s)
        tma.async_copy_global_to_shared(u2, [i_ch * BT, o_v], has_u2, u2_s)
        tma.async_copy_global_to_shared(do, [start, i_hv * V + o_v], has_do, do_s)
        tma.async_copy_global_to_shared(s, [i_ch * K + i_k * BK, o_v], has_s, s_s)
        tma.async_copy_global_to_shared(ds, [i_ch * K + i_k * BK, o_v], has_ds, ds_s)
        b_sum += gl.sum(gl.where(o_t[:, None] == o_j[None, :], b_ss, 0.0), 1)
    LAST: gl.constexpr = (NV - 1) % 2
    b_G = gl.load(gl.expand_dims(p_G + o_k, 0) + o_t[:, None] * K)
    b_c = gl.load(p_G + o_k + (BT // 2) * K) * LOG2_E
    is_far = gl.load(far + i_ch * NK + i_k) != 0
    if CHANNEL_ERASE:
        b_b = gl.load(b + i_g * K + o_hk, mask=m_t[:, None], other=0.0)
    else:
        b_b = gl.expand_dims(gl.load(b + i_g + o_t * HV, mask=m_t, other=0.0), 1).to(gl.float32)

    # the scores' gradients
    wait_for_scores(has_do, has_dr, has_u, has_u2, LAST, do_s, rows)
    b_A, b_L = score_products(b_A, b_L, do_s, dr_s, u_s, u2_s, NV > 1)
    b_A, b_L = warpgroup_mma_wait(0, (b_A, b_L))
    thread_barrier()
    b_A = b_A * scale
    b_a = gl.sum(gl.where(o_t[:, None] == o_j[None, :], b_A, 0.0), 1)
    m_low = o_t[:, None] > o_j[None, :]
    A_16 = gl.where(m_low, b_A, 0.0).to(dtype)
    L_16 = gl.where(m_low, -b_L, 0.0).to(dtype)
    mbarrier.wait(has_s, LAST)
    mbarrier.wait(has_k, 0)
    mbarrier.wait(has_q, 0)
    if is_far:
        mbarrier.wait(has_ds, LAST)
        o_c = o_t[:, None] * BT + o_j[None, :]
        gl.store(dA + i_ch.to(gl.int64) * (BT * BT) + o_c, A_16)
        gl.store(dL + i_ch.to(gl.int64) * (BT * BT) + o_c, L_16)
        gl.store(diagonal + i_ch.to(gl.int64) * BT + o_t, b_a)
        return
    A_s = u2_m._reinterpret(dtype, [2, BT, BT], tile).index(0)
    L_s = u2_m._reinterpret(dtype, [2, BT, BT], tile).index(1)
    u2_m.store(side_by_side(A_16, L_16))
    b_a = gl.expand_dims(b_a, 1)

    # what passes through the state before the chunk: [BT,BK]
    if rows < BT:
        clear_tail(q_s, rows)
        clear_tail(k_s, rows)
        fence_async_shared()
        thread_barrier()
    b_dq = warpgroup_mma(do_s, s_s.permute((1, 0)), b_dq, use_acc=NV > 1, is_async=True)
    b_E = warpgroup_mma(dr_s, s_s.permute((1, 0)), b_E, use_acc=NV > 1, is_async=True)
    b_k = wide(k_s.load(acc))
    b_e = b_G * LOG2_E - gl.expand_dims(b_c, 0)
    b_p, b_n = gl.exp2(b_e), gl.exp2(-b_e)
    b_kn = (b_k * b_n).to(dtype)
    b_qp = (wide(q_s.load(acc)) * b_p).to(dtype)
    if CHANNEL_ERASE:
        b_kp = (wide(b_b) * b_k * b_p).to(dtype)
    else:
        b_kp = (b_b * b_k * b_p).to(dtype)
    b_f = gl.expand_dims(gl.exp2(b_c), 0)
    b_dq, b_E = warpgroup_mma_wait(0, (b_dq, b_E))
    thread_barrier()
    KEEP_ERASE: gl.constexpr = CHANNEL_ERASE and b.dtype.element_ty == dtype
    kp_s = do_m._reinterpret(dtype, [2, BT, BK], tile).index(0)
    qp_s = do_m._reinterpret(dtype, [2, BT, BK], tile).index(1)
    kn_s = dr_m._reinterpret(dtype, [2, BT, BK], tile).index(0)
    do_m.store(side_by_side(b_kp, b_qp))
    if KEEP_ERASE:
        b_s = dr_m._reinterpret(dtype, [2, BT, BK], tile).index(1)
        dr_m.store(side_by_side(b_kn, b_b))
    else:
        kn_s.store(b_kn)
    b_dq = b_dq * (scale * b_f)
    b_E = b_E * -b_f

    # ... through the state after it, and between its rows on top of the former
    mbarrier.wait(has_ds, LAST)
    fence_async_shared()
    thread_barrier()
    b_ss = warpgroup_mma(s_s, ds_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_dk = warpgroup_mma(u_s, ds_s.permute((1, 0)), b_dk, use_acc=NV > 1, is_async=True)
    b_dq = warpgroup_mma(A_s, kn_s, b_dq, is_async=True)
    b_E = warpgroup_mma(L_s, kn_s, b_E, is_async=True)
    b_x = warpgroup_mma(A_s.permute((1, 0)), qp_s, zeros, use_acc=False, is_async=True)
    b_x = warpgroup_mma(L_s.permute((1, 0)), kp_s, b_x, is_async=True)
    # again: held from before, they would crowd the registers
    b_c = gl.load(p_G + o_k + (BT // 2) * K)
    b_Gl = gl.load(p_G + o_k + (BT - 1) * K)
    b_dk, b_ss = warpgroup_mma_wait(4, (b_dk, b_ss))
    # of S dS^T the diagonal
    b_ss = gl.where(o_t[:, None] == o_j[None, :], b_ss, 0.0)
    b_dk = b_dk * gl.expand_dims(exp(b_Gl - b_c), 0)
    thread_barrier()
    gi_s = u_m._reinterpret(gl.float32, [BT, BK], wide_tile)
    go_s = ds_m._reinterpret(gl.float32, [BT, BK], wide_tile)
    ss_s.store(b_sum + gl.sum(b_ss, 1))
    go_s.store(wide(k_s.load(acc)) * (b_dk * reciprocal(b_p)))
    p_s = s_m._reinterpret(gl.float32, [BT, BK], wide_tile)
    p_s.store(b_p)
    b_dq, b_E, b_x = warpgroup_mma_wait(0, (b_dq, b_E, b_x))
    b_gi = wide(qp_s.load(acc)) * b_dq + wide(kp_s.load(acc)) * b_E
    b_gi -= wide(kn_s.load(acc)) * b_x
    gi_s.store(b_gi)
    b_p = p_s.load(acc)
    b_dq = b_dq * b_p
    b_E = b_E * b_p
    b_dk = (b_dk + b_x) * reciprocal(b_p)
    thread_barrier()
    b_k = wide(k_s.load(acc))
    b_dq = b_dq + b_a * b_k
    if KEEP_ERASE:
        b_b = wide(b_s.load(acc))
    elif CHANNEL_ERASE:
        b_b = wide(gl.load(b + i_g * K + o_hk, mask=m_t[:, None], other=0.0))
    b_dk = b_dk + b_a * wide(q_s.load(acc)) + b_b * b_E
    b_db = b_k * b_E
    if not CHANNEL_ERASE:
        p_db = db + i_k.to(gl.int64) * TOKENS * HV + i_g
        gl.store(p_db + o_t * HV, gl.sum(b_db, 1), mask=m_t)

    COPY_ERASE: gl.constexpr = db_tiles is not None
    if rows == BT:
        if COPY:
            q_s.store(b_dq.to(dtype))
            k_s.store(b_dk.to(dtype))
        if COPY_ERASE:
            b_s.store(b_db.to(dtype))
        fence_async_shared()
    thread_barrier()
    if rows == BT:
        if COPY:
            tma.async_copy_shared_to_global(dq, [start, i_hv * K + i_k * BK], q_s)
            tma.async_copy_shared_to_global(dk, [start, i_hv * K + i_k * BK], k_s)
        if COPY_ERASE:
            tma.async_copy_shared_to_global(db_tiles, [start, i_hv * K + i_k * BK], b_s)
    if not COPY or rows < BT:
        store_rows(p_dq + i_g * K + o_hk, b_dq, m_t)
        store_rows(p_dk + i_g * K + o_hk, b_dk, m_t)
    if CHANNEL_ERASE:  # noqa: SIM102  (known when it compiles)
        if not COPY_ERASE or rows < BT:
            store_rows(db + i_g * K + o_hk, b_db, m_t)

    # rows in runs: sums within each, then what other runs have
    BLOCKS: gl.constexpr = BT // RUN
    o_r = gl.arange(0, BT, gl.SliceLayout(1, run))
    o_c = gl.arange(0, BK, gl.SliceLayout(0, run))
    b_e = exp(gl.load(p_G + i_k * BK + o_c + (BT - 1) * K))
    b_go = go_s.load(run)
    b_in = running(gi_s.load(run), FROM_ROW)
    b_out = running(b_go, BEFORE_ROW)
    # dA and dL are used up
    ends: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    in_s = A_s._reinterpret(gl.float32, [BLOCKS, BK], ends)
    out_s = L_s._reinterpret(gl.float32, [BLOCKS, BK], ends)
    in_s.store(end_of_runs(b_in, False))
    out_s.store(end_of_runs(b_out, True) + end_of_runs(b_go, True))
    thread_barrier()
    b_ends = gl.expand_dims(b_e * ss_s.load(gl.SliceLayout(0, run)), 0)
    in_s = A_s._reinterpret(gl.float32, [BLOCKS, BK], row)
    out_s = L_s._reinterpret(gl.float32, [BLOCKS, BK], row)
    for i in gl.static_range(BLOCKS):
        b_i = gl.expand_dims(in_s.index(i).load(gl.SliceLayout(0, run)), 0)
        b_o = gl.expand_dims(out_s.index(i).load(gl.SliceLayout(0, run)), 0)
        i_r = gl.expand_dims(o_r // RUN, 1)
        b_ends += gl.where(i_r < i, b_i, gl.where(i_r > i, b_o, 0.0))
    o_rc = o_r[:, None] * (HV * K) + i_k * BK + o_c[None, :]
    b_dg = b_in + (b_out + b_ends)
    if dg_tiles is None or rows < BT:
        store_rows(dg + i_g * K + o_rc, b_dg, o_r < rows)
    else:
        # the copy engine's layout: no thread reads what lies here any more
        dg_s = do_m._reinterpret(gl.float32, [BT, BK], dg_tiles.layout)
        dg_s.store(b_dg)
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(dg_tiles, [start, i_hv * K + i_k * BK], dg_s)
    tma.store_wait(0)
    # The compiler does not see that these hold other tiles too, nor that the copy engine reads them until here.
    q_s._keep_alive()
    k_s._keep_alive()
    do_m._keep_alive()
    dr_m._keep_alive()
    u_m._keep_alive()
    s_m._keep_alive()
    ds_m._keep_alive()
    u2_m._keep_alive()


def write(problem: Problem, made: Mapping[str, Any], count: int) -> None:
    """All gradients of `count` chunks; where they cannot be centred, what `key_gradients` takes and leaves to others.

    `made` is what `key_gradients` and `score_gradients` take, but for their tiles; `db_values` is the latter's db.
    """
    p, dg, db = problem, made["dg"], made["db"]
    general = ("PRECISION", "BY_CHANNEL", "CHANNEL_DECAY", "LIMIT", "unit")
    BV = min(p.V, 128)
    copied = p.group == 1  # else dq and dk are parts in fp32, which no tile holds
    args = {name: arg for name, arg in made.items() if name not in general} | dict(
        q=tiled(made["q"], p.H * p.K),
        k=tiled(made["k"], p.H * p.K),
        do=tiled(made["do"], p.HV * p.V, columns=BV),
        **{name: tiled(made[name], p.V, columns=BV) for name in ("u", "u2", "dr", "s", "ds")},
        **{name: tiled(made[name], p.HV * p.K) if copied else None for name in ("dq", "dk")},
        p_dr=made["dr"],
        p_dq=made["dq"],
        p_dk=made["dk"],
        db_tiles=tiled(db, p.HV * p.K) if made["CHANNEL_ERASE"] and db.dtype is p.dtype else None,
        dg_tiles=tiled(dg, p.HV * p.K) if dg.dtype is torch.float32 else None,
    )
    Launch(channel_chunks, (count * p.HV * p.K // KEYS.value,), args).run()
