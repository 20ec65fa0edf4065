"""The two sequential passes for Hopper, in Gluon: the stages of `state`, with every movement spelled out.

    forward:  R = w v - X S      U = T R          o = Q~ S + A U       S+ = e^Gl S + K~^T U
    reverse:  dU = A^T do + K~ dS+                 dR = T^T dU          dS = e^Gl dS+ + Q~^T do - X^T dR

The state is kept transposed, [BV,K], with the value channels along the rows of the matrix unit: each product's
accumulator is the next one's left operand, so the chain S -> R -> U -> S never leaves the registers. Two more warps
drive the copy engine: one brings the right operands and all else a chunk needs as soon as a place is free, the other
takes away what a chunk leaves behind. The copy engine knows no sequences: in a sequence's last chunk the rows past
its end are cleared in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rewy.backends.cuda.chunks import Chunks
from rewy.backends.cuda.gates import LANES, Gated, by_channel
from rewy.backends.cuda.hopper_tiles import (
    BESIDES,
    barriers,
    bring,
    clear_tail,
    numbers,
    thread_barrier,
    tiled,
)
from rewy.backends.cuda.launch import Launch
from rewy.backends.cuda.plan import Pipeline
from rewy.backends.cuda.state import digits
from rewy.problem import Gate, Operands, Problem

ROWS = gl.constexpr(64)  # of the matrix unit: value channels a program takes


@gluon.jit
def sequence(cu_seqlens, first, i_p, T, BT: gl.constexpr, PARTS: gl.constexpr):
    """As `sequence_chunks`, in 32 bits."""
    i_n = i_p // PARTS
    if cu_seqlens is None:
        bos = i_n * T
        length = T
        i_c = i_n * gl.cdiv(T, BT)
    else:
        bos = gl.load(cu_seqlens + i_n).to(gl.int32)
        length = gl.load(cu_seqlens + i_n + 1).to(gl.int32) - bos
        i_c = gl.load(first + i_n)
    if PARTS > 1:
        count = gl.cdiv(length, BT)
        per_part = gl.cdiv(count, PARTS)
        before = gl.minimum(i_p % PARTS * per_part, count)
        length = gl.maximum(gl.minimum(length - before * BT, per_part * BT), 0)
        bos += before * BT
        i_c += before
    return bos, length, i_c


@gluon.jit
def by_column(row, layout: gl.constexpr):
    """A row of numbers in shared memory, one for each column of a tile."""
    return gl.expand_dims(row.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def store_transposed(p, b_x, m_row, m_column, stride, layout: gl.constexpr):
    """x [BV, columns] at p[column * stride + row], for what is stored once or must be masked."""
    o_r = gl.arange(0, b_x.shape[0], gl.SliceLayout(1, layout))
    o_c = gl.arange(0, b_x.shape[1], gl.SliceLayout(0, layout))
    gl.store(
        p + o_c[None, :] * stride + o_r[:, None], b_x, mask=(o_c < m_column)[None, :] & (o_r < m_row)[:, None]
    )


@gluon.jit
def bring_numbers(row, rows, slot, offset, bar):
    if rows is not None:
        tma.async_copy_global_to_shared(row, [offset], bar, rows.index(slot))


@gluon.jit
def hand_over(tile, b_x):
    """Leave x, transposed, for the copy engine."""
    if tile is not None:
        tile.permute((1, 0)).store(b_x)


@gluon.jit
def take_away(tile, out, row, column, pred):
    if tile is not None:  # noqa: SIM102  (known when it compiles, the other when it runs)
        if pred:
            tma.async_copy_shared_to_global(out, [row, column], tile)


@gluon.jit
def last_decay(numbers, layout: gl.constexpr, BY_CHANNEL: gl.constexpr):
    """e^Gl of a chunk: along the columns of the state, or one number, which every thread loads."""
    if BY_CHANNEL:
        b_e = by_column(numbers, layout)
    else:  # of one number: a largest of more would go from lane to lane
        b_e = gl.max(numbers.slice(0, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    return b_e


@gluon.jit
def forward_loads(
    x, kt, qt, v, w, f, e, A, Ti, x_s, kt_s, q_s, v_s, w_s, f_s, e_s, A_s, T_s, full, late, ended,
    bos, length, i_c0, i_h, i_hv, i_v, HV,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BY_CHANNEL: gl.constexpr, NF: gl.constexpr,
    NE: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr, LATE_BYTES: gl.constexpr,
):  # fmt: skip
    """Whenever chunk i has ended, its places go to the chunks that are to follow there."""
    NT = gl.cdiv(length, BT)
    for i in range(-STAGES, NT - STAGES + 1):
        if i >= 0:
            mbarrier.wait(ended.index(i % STAGES), (i // STAGES) & 1)
        j = i + STAGES
        if j < NT:
            slot = j % STAGES
            bar = full.index(slot)
            i_t = bos + j * BT
            i_ch = (i_c0 + j) * HV + i_hv
            if BY_CHANNEL:
                row, column = i_ch * BT, 0
            else:
                row, column = i_t, i_h * K
            mbarrier.expect(bar, BYTES)
            bring(x, x_s, slot, row, column, bar)
            bring(v, v_s, slot, i_t, i_hv * V + i_v * BV, bar)
            bring(w, w_s, slot, i_t, i_hv * V + i_v * BV, bar)
            bring_numbers(f, f_s, slot, i_ch * NF * BT, bar)
            bring_numbers(e, e_s, slot, i_ch * NE, bar)
            bring(qt, q_s, slot, row, column, bar)
            bring(Ti, T_s, slot, i_ch * BT, 0, bar)
        if LATE_BYTES > 0:
            j = i + STAGES - 1
            if (j >= 0) & (j < NT):
                slot = j % (STAGES - 1)
                bar = late.index(slot)
                i_ch = (i_c0 + j) * HV + i_hv
                mbarrier.expect(bar, LATE_BYTES)
                bring(kt, kt_s, slot, i_ch * BT, 0, bar)
                bring(A, A_s, slot, i_ch * BT, 0, bar)


@gluon.jit
def forward_stores(
    s, u, u2, o, s_out, u_out, u2_out, o_out, left, gone, bos, length, i_c0, i_hv, i_v, HV,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    """With the state at the start of chunk i comes what chunk i - 1 made."""
    NT = gl.cdiv(length, BT)
    for i in range(NT + 1):
        i_ch = (i_c0 + i) * HV + i_hv
        mbarrier.wait(left, i & 1)
        take_away(s_out, s, i_ch * K, i_v * BV, i < NT)
        take_away(u_out, u, (i_ch - HV) * BT, i_v * BV, i > 0)
        take_away(u2_out, u2, (i_ch - HV) * BT, i_v * BV, i > 0)
        take_away(o_out, o, bos + (i - 1) * BT, i_hv * V + i_v * BV, (i > 0) & (length >= i * BT))
        tma.store_wait(0)
        mbarrier.arrive(gone)


@gluon.jit
def receive_forward(
    i, NT, length, x_s, q_s, v_s, w_s, f_s, full, layout: gl.constexpr,
    BY_CHANNEL: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Wait for chunk i: w v and what scales the rows of X, both along columns."""
    slot = i % STAGES
    mbarrier.wait(full.index(slot), (i // STAGES) & 1, pred=i < NT)
    rows = length - i * BT
    if (rows < BT) & (i < NT):
        if v_s is not None:
            clear_tail(v_s.index(slot), rows)
        if w_s is not None:
            clear_tail(w_s.index(slot), rows)
        if not BY_CHANNEL:
            clear_tail(x_s.index(slot), rows)
            if q_s is not None:
                clear_tail(q_s.index(slot), rows)
        fence_async_shared()
        thread_barrier()
    if v_s is None:
        b_v = 0.0
    else:
        b_v = v_s.index(slot).permute((1, 0)).load(layout).to(gl.float32)
    if w_s is not None:
        b_v = b_v * w_s.index(slot).permute((1, 0)).load(layout).to(gl.float32)
    elif v_s is not None:
        b_v = b_v * by_column(f_s.index(slot).slice(0, BT), layout)
    if BY_CHANNEL:
        f_x = 1.0
    else:
        f_x = by_column(f_s.index(slot).slice(BT, BT), layout)
    return b_v, f_x


@gluon.jit
def forward_chunks(
    S, x_s, kt_s, q_s, v_s, w_s, f_s, e_s, A_s, T_s, s_out, u_out, u2_out, o_out, full, late, ended, left, gone,
    p_o, p_ht, bos, length, HV, scale,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BY_CHANNEL: gl.constexpr, DECAY: gl.constexpr,
    BT: gl.constexpr, STAGES: gl.constexpr,
    c_acc: gl.constexpr, k_acc: gl.constexpr,
):  # fmt: skip
    NT = gl.cdiv(length, BT)
    dtype: gl.constexpr = x_s.dtype
    FACTORS: gl.constexpr = DECAY and not BY_CHANNEL
    TWO: gl.constexpr = dtype == gl.bfloat16 and not DECAY and not BY_CHANNEL
    c_left: gl.constexpr = gl.DotOperandLayout(0, c_acc, 2)
    k_left: gl.constexpr = gl.DotOperandLayout(0, k_acc, 2)
    u_16 = gl.zeros([BV, BT], dtype, c_acc)
    u2_16, o_16 = u_16, u_16
    b_v, f_x = receive_forward(0, NT, length, x_s, q_s, v_s, w_s, f_s, full, c_acc, BY_CHANNEL, BT, STAGES)
    for i in range(NT):
        slot = i % STAGES
        S_16 = S.to(dtype)
        S_left = gl.convert_layout(S_16, c_left, assert_trivial=True)
        zeros = gl.zeros([BV, BT], gl.float32, c_acc)
        b_r = warpgroup_mma(S_left, x_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if o_out is not None:
            b_o = warpgroup_mma(S_left, q_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if i > 0:
            mbarrier.arrive(ended.index((i - 1) % STAGES))
        mbarrier.wait(gone, i & 1 ^ 1)
        hand_over(s_out, S_16)
        hand_over(u_out, u_16)
        hand_over(u2_out, u2_16)
        hand_over(o_out, o_16)
        if DECAY:
            S = S * last_decay(e_s.index(slot), k_acc, BY_CHANNEL)
        # Some instructions after the stores, or it would wait for them.
        fence_async_shared()
        mbarrier.arrive(left)
        if o_out is not None:
            b_r = warpgroup_mma_wait(1, (b_r,))
        else:
            b_r = warpgroup_mma_wait(0, (b_r,))

        b_r = b_v - f_x * b_r
        r_left = gl.convert_layout(b_r.to(dtype), c_left, assert_trivial=True)
        b_u = warpgroup_mma(r_left, T_s.index(slot).permute((1, 0)), b_r, is_async=True)
        if o_out is not None:
            b_u, b_o = warpgroup_mma_wait(0, (b_u, b_o))
        else:
            b_u = warpgroup_mma_wait(0, (b_u,))
        u_16 = b_u.to(dtype)
        if u2_out is not None or TWO:
            u2_16 = (b_u - u_16.to(gl.float32)).to(dtype)
        if FACTORS:
            k_u = (b_u * by_column(f_s.index(slot).slice(2 * BT, BT), c_acc)).to(dtype)
        else:
            k_u = u_16
        k_u = gl.convert_layout(k_u, k_left, assert_trivial=True)
        if kt_s is not None or A_s is not None:
            slot_late = i % (STAGES - 1)
            mbarrier.wait(late.index(slot_late), (i // (STAGES - 1)) & 1)
        if BY_CHANNEL:
            S = warpgroup_mma(k_u, kt_s.index(slot_late), S, is_async=True)
        else:
            S = warpgroup_mma(k_u, x_s.index(slot), S, is_async=True)
            if TWO:
                k_u2 = gl.convert_layout(u2_16, k_left, assert_trivial=True)
                S = warpgroup_mma(k_u2, x_s.index(slot), S, is_async=True)
        if o_out is not None:
            if FACTORS:
                b_o = b_o * by_column(f_s.index(slot).slice(3 * BT, BT), c_acc)
            elif not BY_CHANNEL:
                b_o = b_o * scale
            u_left = gl.convert_layout(u_16, c_left, assert_trivial=True)
            b_o = warpgroup_mma(u_left, A_s.index(slot_late).permute((1, 0)), b_o, is_async=True)
        b_v, f_x = receive_forward(
            i + 1, NT, length, x_s, q_s, v_s, w_s, f_s, full, c_acc, BY_CHANNEL, BT, STAGES
        )
        if o_out is not None:
            S, b_o = warpgroup_mma_wait(0, (S, b_o))
            rows = length - i * BT
            if rows < BT:
                store_transposed(
                    p_o + (bos + i * BT).to(gl.int64) * HV * V, b_o.to(dtype), BV, rows, HV * V, c_acc
                )
            o_16 = b_o.to(dtype)
        else:
            S = warpgroup_mma_wait(0, (S,))
    mbarrier.wait(gone, NT & 1 ^ 1)
    hand_over(u_out, u_16)
    hand_over(u2_out, u2_16)
    hand_over(o_out, o_16)
    fence_async_shared()
    mbarrier.arrive(left)
    if p_ht is not None:
        store_transposed(p_ht, S, BV, K, V, k_acc)


@gluon.jit(do_not_specialize=["T"])
def forward_pass(
    # inputs and outputs
    x,
    kt,
    qt,
    v,
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
    p_o,
    ht,
    cu_seqlens,
    first,
    # sizes
    scale,
    T,
    H,
    HV,
    K: gl.constexpr,
    V: gl.constexpr,
    # meta
    BY_CHANNEL: gl.constexpr,
    DECAY: gl.constexpr,
    BT: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    BV: gl.constexpr = ROWS
    NF: gl.constexpr = 1 if BY_CHANNEL else 4
    NE: gl.constexpr = K if BY_CHANNEL else LANES
    OUTPUT: gl.constexpr = o is not None
    dtype: gl.constexpr = x.dtype
    NV: gl.constexpr = V // BV
    i_v = gl.program_id(0) % NV
    i_ph = gl.program_id(0) // NV
    i_p, i_hv = i_ph // HV, i_ph % HV
    i_h = i_hv // (HV // H)
    bos, length, i_c0 = sequence(cu_seqlens, first, i_p, T, BT, PARTS)

    c_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    k_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])

    kt_s, q_s, v_s, w_s, f_s, e_s, A_s = None, None, None, None, None, None, None
    s_out, u_out, u2_out, o_out = None, None, None, None
    x_s = gl.allocate_shared_memory(dtype, [STAGES, BT, K], x.layout)
    T_s = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], Ti.layout)
    if v is not None:
        v_s = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], v.layout)
    if BY_CHANNEL:
        kt_s = gl.allocate_shared_memory(dtype, [STAGES - 1, BT, K], kt.layout)
    if w is not None:
        w_s = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], w.layout)
    if f is not None:
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, NF * BT], f.layout)
    if e is not None:
        e_s = gl.allocate_shared_memory(gl.float32, [STAGES, NE], e.layout)
    if OUTPUT:
        q_s = gl.allocate_shared_memory(dtype, [STAGES, BT, K], qt.layout)
        A_s = gl.allocate_shared_memory(dtype, [STAGES - 1, BT, BT], A.layout)
        o_out = gl.allocate_shared_memory(dtype, [BT, BV], o.layout)
    if s is not None:
        s_out = gl.allocate_shared_memory(dtype, [K, BV], s.layout)
        u_out = gl.allocate_shared_memory(dtype, [BT, BV], u.layout)
    if u2 is not None:
        u2_out = gl.allocate_shared_memory(dtype, [BT, BV], u2.layout)
    VALUES: gl.constexpr = (0 if v is None else 1) + (0 if w is None else 1)
    TILES: gl.constexpr = (2 if OUTPUT else 1) * K + BT + VALUES * BV
    BYTES: gl.constexpr = 2 * BT * TILES + 4 * ((0 if f is None else NF * BT) + (0 if e is None else NE))
    LATE_BYTES: gl.constexpr = 2 * BT * ((K if BY_CHANNEL else 0) + (BT if OUTPUT else 0))
    full = barriers(STAGES)  # a chunk's operands have come
    late = barriers(STAGES - 1)  # and those that are used last
    ended = barriers(STAGES)  # their places are free
    left = barriers(1).index(0)  # results lie in shared memory
    gone = barriers(1).index(0)  # and have been taken away
    fence_async_shared()
    thread_barrier()

    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, k_acc))
    o_k = gl.arange(0, K, gl.SliceLayout(0, k_acc))
    if v is None:
        S = (o_k[None, :] == o_v[:, None]).to(gl.float32)
    elif h0 is None:
        S = gl.zeros([BV, K], gl.float32, k_acc)
    else:
        S = gl.load(h0 + i_ph.to(gl.int64) * K * V + o_k[None, :] * V + o_v[:, None]).to(gl.float32)
    if p_o is not None:
        p_o += i_hv * V + i_v * BV
    if ht is not None:
        ht += i_ph.to(gl.int64) * K * V + i_v * BV
    gl.warp_specialize(
        [
            (
                forward_chunks,
                (
                    S, x_s, kt_s, q_s, v_s, w_s, f_s, e_s, A_s, T_s, s_out, u_out, u2_out, o_out,
                    full, late, ended, left, gone, p_o, ht, bos, length, HV, scale,
                    K, V, BV, BY_CHANNEL, DECAY, BT, STAGES, c_acc, k_acc,
                ),
            ),
            (
                forward_loads,
                (
                    x, kt, qt, v, w, f, e, A, Ti,
                    x_s, kt_s, q_s, v_s, w_s, f_s, e_s, A_s, T_s, full, late, ended,
                    bos, length, i_c0, i_h, i_hv, i_v, HV,
                    K, V, BV, BY_CHANNEL, NF, NE, BT, STAGES, BYTES, LATE_BYTES,
                ),
            ),
            (
                forward_stores,
                (
                    s, u, u2, o, s_out, u_out, u2_out, o_out, left, gone, bos, length, i_c0, i_hv, i_v, HV,
                    K, V, BV, BT,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


@gluon.jit
def reverse_loads(
    x, kt, qt, do, f, e, A, Ti, x_s, kt_s, q_s, do_s, f_s, e_s, A_s, T_s, full, late, ended,
    bos, length, i_c0, i_h, i_hv, i_v, HV,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BY_CHANNEL: gl.constexpr, NF: gl.constexpr,
    NE: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr, LATE_BYTES: gl.constexpr,
):  # fmt: skip
    NT = gl.cdiv(length, BT)
    for i in range(-STAGES, NT - STAGES + 1):
        if i >= 0:
            mbarrier.wait(ended.index(i % STAGES), (i // STAGES) & 1)
        j = i + STAGES
        if j < NT:
            slot = j % STAGES
            bar = full.index(slot)
            i_t = bos + (NT - 1 - j) * BT
            i_ch = (i_c0 + NT - 1 - j) * HV + i_hv
            if BY_CHANNEL:
                row, column = i_ch * BT, 0
            else:
                row, column = i_t, i_h * K
            mbarrier.expect(bar, BYTES)
            bring(do, do_s, slot, i_t, i_hv * V + i_v * BV, bar)
            bring(A, A_s, slot, i_ch * BT, 0, bar)
            bring(kt, kt_s, slot, row, column, bar)
            bring(qt, q_s, slot, row, column, bar)
            bring_numbers(f, f_s, slot, i_ch * NF * BT, bar)
            bring_numbers(e, e_s, slot, i_ch * NE, bar)
            bring(Ti, T_s, slot, i_ch * BT, 0, bar)
        if LATE_BYTES > 0:
            j = i + STAGES - 1
            if (j >= 0) & (j < NT):
                slot = j % (STAGES - 1)
                bar = late.index(slot)
                mbarrier.expect(bar, LATE_BYTES)
                bring(x, x_s, slot, ((i_c0 + NT - 1 - j) * HV + i_hv) * BT, 0, bar)


@gluon.jit
def reverse_stores(
    ds, dr, ds_out, dr_out, left, gone, length, i_c0, i_hv, i_v, HV,
    K: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    NT = gl.cdiv(length, BT)
    for j in range(NT + 1):
        i_ch = (i_c0 + NT - 1 - j) * HV + i_hv
        mbarrier.wait(left, j & 1)
        take_away(ds_out, ds, i_ch * K, i_v * BV, j < NT)
        take_away(dr_out, dr, (i_ch + HV) * BT, i_v * BV, j > 0)
        tma.store_wait(0)
        mbarrier.arrive(gone)


@gluon.jit
def receive_reverse(
    j, NT, length, kt_s, q_s, do_s, f_s, A_s, full, power, layout: gl.constexpr,
    BY_CHANNEL: gl.constexpr, DECAY: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Wait for the chunk that is j before the last: A^T do under way, and do scaled for Q~^T do."""
    slot = j % STAGES
    mbarrier.wait(full.index(slot), (j // STAGES) & 1, pred=j < NT)
    rows = length - (NT - 1 - j) * BT
    if (rows < BT) & (j < NT):
        clear_tail(do_s.index(slot), rows)
        if not BY_CHANNEL:
            clear_tail(kt_s.index(slot), rows)
            clear_tail(q_s.index(slot), rows)
        fence_async_shared()
        thread_barrier()
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    do_t = do_s.index(slot).permute((1, 0))
    do_16 = do_t.load(left)
    zeros = gl.zeros([do_16.shape[0], BT], gl.float32, layout)
    b_do = warpgroup_mma(do_t, A_s.index(slot), zeros, use_acc=False, is_async=True)
    q_do = do_16
    if DECAY and not BY_CHANNEL:
        q_do = (do_16.to(gl.float32) * by_column(f_s.index(slot).slice(3 * BT, BT), left)).to(do_16.dtype)
    elif not BY_CHANNEL:
        q_do = (do_16.to(gl.float32) * power).to(do_16.dtype)
    return b_do, q_do


@gluon.jit
def reverse_chunks(
    dS, x_s, kt_s, q_s, do_s, f_s, e_s, A_s, T_s, ds_out, dr_out, full, late, ended, left, gone,
    p_dh0, length, scale, unit,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BY_CHANNEL: gl.constexpr, DECAY: gl.constexpr,
    BT: gl.constexpr, STAGES: gl.constexpr, c_acc: gl.constexpr, k_acc: gl.constexpr,
):  # fmt: skip
    NT = gl.cdiv(length, BT)
    power = scale / unit
    dtype: gl.constexpr = do_s.dtype
    FACTORS: gl.constexpr = DECAY and not BY_CHANNEL
    TWO: gl.constexpr = dtype == gl.bfloat16 and not DECAY and not BY_CHANNEL
    c_left: gl.constexpr = gl.DotOperandLayout(0, c_acc, 2)
    k_left: gl.constexpr = gl.DotOperandLayout(0, k_acc, 2)
    b_do, q_do = receive_reverse(
        0, NT, length, kt_s, q_s, do_s, f_s, A_s, full, power, c_acc, BY_CHANNEL, DECAY, BT, STAGES
    )
    b_do = warpgroup_mma_wait(0, (b_do,))
    dr_16 = gl.zeros([BV, BT], dtype, c_acc)
    for j in range(NT):
        slot = j % STAGES
        dS_16 = dS.to(dtype)
        dS_left = gl.convert_layout(dS_16, c_left, assert_trivial=True)
        zeros = gl.zeros([BV, BT], gl.float32, c_acc)
        if BY_CHANNEL:
            b_du = warpgroup_mma(dS_left, kt_s.index(slot).permute((1, 0)), b_do, is_async=True)
        else:
            b_du = warpgroup_mma(
                dS_left, kt_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
        if j > 0:
            mbarrier.arrive(ended.index((j - 1) % STAGES))
        mbarrier.wait(gone, j & 1 ^ 1)
        hand_over(ds_out, dS_16)
        hand_over(dr_out, dr_16)
        if TWO:
            dS2_left = gl.convert_layout((dS - dS_16.to(gl.float32)).to(dtype), c_left, assert_trivial=True)
            b_du = warpgroup_mma(dS2_left, kt_s.index(slot).permute((1, 0)), b_du, is_async=True)
        if DECAY:
            dS = dS * last_decay(e_s.index(slot), k_acc, BY_CHANNEL)
        # Some instructions after the stores, or it would wait for them.
        fence_async_shared()
        mbarrier.arrive(left)
        b_du = warpgroup_mma_wait(0, (b_du,))
        if FACTORS:
            b_du = b_du * by_column(f_s.index(slot).slice(2 * BT, BT), c_acc) + b_do
        elif not BY_CHANNEL:
            b_du = b_du * unit + b_do
        du_left = gl.convert_layout(b_du.to(dtype), c_left, assert_trivial=True)
        b_dr = warpgroup_mma(du_left, T_s.index(slot), b_du, is_async=True)
        # Nothing of the chain dS -> dU -> dR waits for it.
        dS = warpgroup_mma(
            gl.convert_layout(q_do, k_left, assert_trivial=True), q_s.index(slot), dS, is_async=True
        )
        b_dr = warpgroup_mma_wait(1, (b_dr,))
        if BY_CHANNEL:
            x_dr = gl.convert_layout((-b_dr).to(dtype), k_left, assert_trivial=True)
            mbarrier.wait(late.index(j % (STAGES - 1)), (j // (STAGES - 1)) & 1)
            dS = warpgroup_mma(x_dr, x_s.index(j % (STAGES - 1)), dS, is_async=True)
        else:
            f_x = by_column(f_s.index(slot).slice(BT, BT), c_acc)
            if not DECAY:
                f_x = f_x / unit
            x_dr = (-b_dr * f_x).to(dtype)
            x_dr = gl.convert_layout(x_dr, k_left, assert_trivial=True)
            dS = warpgroup_mma(x_dr, kt_s.index(slot), dS, is_async=True)
        dr_16 = b_dr.to(dtype)
        b_do, q_do = receive_reverse(
            j + 1, NT, length, kt_s, q_s, do_s, f_s, A_s, full, power, c_acc, BY_CHANNEL, DECAY, BT, STAGES
        )
        dS, b_do = warpgroup_mma_wait(0, (dS, b_do))
    mbarrier.wait(gone, NT & 1 ^ 1)
    hand_over(dr_out, dr_16)
    fence_async_shared()
    mbarrier.arrive(left)
    if p_dh0 is not None:
        store_transposed(p_dh0, dS.to(p_dh0.dtype.element_ty), BV, K, V, k_acc)


@gluon.jit(do_not_specialize=["T"])
def reverse_pass(
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
    scale,
    unit,
    T,
    H,
    HV,
    K: gl.constexpr,
    V: gl.constexpr,
    # meta
    BY_CHANNEL: gl.constexpr,
    DECAY: gl.constexpr,
    BT: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    BV: gl.constexpr = ROWS
    NF: gl.constexpr = 1 if BY_CHANNEL else 4
    NE: gl.constexpr = K if BY_CHANNEL else LANES
    dtype: gl.constexpr = do.dtype
    NV: gl.constexpr = V // BV
    i_v = gl.program_id(0) % NV
    i_ph = gl.program_id(0) // NV
    i_p, i_hv = i_ph // HV, i_ph % HV
    i_h = i_hv // (HV // H)
    bos, length, i_c0 = sequence(cu_seqlens, first, i_p, T, BT, PARTS)

    c_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    k_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])

    x_s, f_s, e_s, ds_out, dr_out = None, None, None, None, None
    kt_s = gl.allocate_shared_memory(dtype, [STAGES, BT, K], kt.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BT, K], qt.layout)
    A_s = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], A.layout)
    T_s = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], Ti.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], do.layout)
    if BY_CHANNEL:
        x_s = gl.allocate_shared_memory(dtype, [STAGES - 1, BT, K], x.layout)
    else:
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, NF * BT], f.layout)
    if DECAY:
        e_s = gl.allocate_shared_memory(gl.float32, [STAGES, NE], e.layout)
    if ds is not None:
        ds_out = gl.allocate_shared_memory(dtype, [K, BV], ds.layout)
        dr_out = gl.allocate_shared_memory(dtype, [BT, BV], dr.layout)
    NUMBERS: gl.constexpr = (0 if BY_CHANNEL else NF * BT) + (NE if DECAY else 0)
    BYTES: gl.constexpr = 2 * BT * (2 * K + 2 * BT + BV) + 4 * NUMBERS
    LATE_BYTES: gl.constexpr = 2 * BT * K if BY_CHANNEL else 0
    full = barriers(STAGES)  # a chunk's operands have come
    late = barriers(STAGES - 1)  # and those that are used last
    ended = barriers(STAGES)  # their places are free
    left = barriers(1).index(0)  # results lie in shared memory
    gone = barriers(1).index(0)  # and have been taken away
    fence_async_shared()
    thread_barrier()

    if dht is None:
        dS = gl.zeros([BV, K], gl.float32, k_acc)
    else:
        o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, k_acc))
        o_k = gl.arange(0, K, gl.SliceLayout(0, k_acc))
        dS = gl.load(dht + i_ph.to(gl.int64) * K * V + o_k[None, :] * V + o_v[:, None]).to(gl.float32)
    if dh0 is not None:
        dh0 += i_ph.to(gl.int64) * K * V + i_v * BV
    gl.warp_specialize(
        [
            (
                reverse_chunks,
                (
                    dS, x_s, kt_s, q_s, do_s, f_s, e_s, A_s, T_s, ds_out, dr_out, full, late, ended, left, gone,
                    dh0, length, scale, unit,
                    K, V, BV, BY_CHANNEL, DECAY, BT, STAGES, c_acc, k_acc,
                ),
            ),
            (
                reverse_loads,
                (
                    x, kt, qt, do, f, e, A, Ti, x_s, kt_s, q_s, do_s, f_s, e_s, A_s, T_s, full, late, ended,
                    bos, length, i_c0, i_h, i_hv, i_v, HV,
                    K, V, BV, BY_CHANNEL, NF, NE, BT, STAGES, BYTES, LATE_BYTES,
                ),
            ),
            (
                reverse_stores,
                (ds, dr, ds_out, dr_out, left, gone, length, i_c0, i_hv, i_v, HV, K, BV, BT),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


def forward(
    problem: Problem, x: Operands | None, gated: Gated, A: Tensor | None, Ti: Tensor,
    s: Tensor | None, u: Tensor | None, u2: Tensor | None, o: Tensor | None, ht: Tensor | None,
    chunks: Chunks, pipeline: Pipeline,
) -> None:  # fmt: skip
    """The forward pass into those of s [NC,HV,K,V], u and u2 [NC,HV,C,V], o [B,T,HV,V], ht [N·parts,HV,K,V] there are.

    Without x it begins with the identity and has no values.
    """
    v, w, h0 = (None, None, None) if x is None else (x.v, x.write, x.initial_state)
    keys, args = _common(problem, gated, Ti, chunks, pipeline)
    args |= dict(
        x=keys(gated.x),
        kt=keys(gated.kt) if by_channel(problem) else None,
        qt=None if o is None else keys(gated.qt),
        v=tiled(v, problem.HV * problem.V),
        w=tiled(w, problem.HV * problem.V),
        f=numbers(gated.f),
        A=tiled(A, chunks.size),
        h0=h0,
        s=tiled(s, problem.V, rows=problem.K),
        u=tiled(u, problem.V),
        u2=tiled(u2, problem.V),
        o=tiled(o, problem.HV * problem.V),
        p_o=o,
        ht=ht,
    )
    Launch(forward_pass, _grid(problem, chunks), args).run()


def reverse(
    problem: Problem, gated: Gated, A: Tensor, Ti: Tensor, do: Tensor, dht: Tensor | None,
    ds: Tensor | None, dr: Tensor | None, dh0: Tensor | None, unit: float, chunks: Chunks, pipeline: Pipeline,
) -> None:  # fmt: skip
    """The reverse pass into those of ds [NC,HV,K,V], dr [NC,HV,C,V], dh0 [N·parts,HV,K,V] that are there."""
    keys, args = _common(problem, gated, Ti, chunks, pipeline)
    args |= dict(
        x=keys(gated.x) if by_channel(problem) else None,
        kt=keys(gated.kt),
        qt=keys(gated.qt),
        do=tiled(do, problem.HV * problem.V),
        f=None if by_channel(problem) else numbers(gated.f),
        A=tiled(A, chunks.size),
        dht=dht,
        ds=tiled(ds, problem.V, rows=problem.K),
        dr=tiled(dr, problem.V),
        dh0=dh0,
        unit=unit,
    )
    Launch(reverse_pass, _grid(problem, chunks), args).run()


def _common(
    problem: Problem, gated: Gated, Ti: Tensor, chunks: Chunks, pipeline: Pipeline
) -> tuple[Callable[[Tensor], TensorDescriptor | None], dict[str, object]]:
    """How k, q or what is made of them is brought, and what both passes take."""
    p, channel = problem, by_channel(problem)
    width = p.K if channel else p.H * p.K
    return lambda t: tiled(t, width, columns=p.K), dict(
        e=numbers(gated.e),
        Ti=tiled(Ti, chunks.size),
        cu_seqlens=chunks.cu_seqlens, first=chunks.first,
        scale=p.scale, T=p.T, H=p.H, HV=p.HV, K=p.K, V=p.V,
        BY_CHANNEL=channel, DECAY=p.operator.decay is not Gate.NONE,
        BT=chunks.size, PARTS=chunks.parts, STAGES=pipeline.stages,
    )  # fmt: skip


def _grid(problem: Problem, chunks: Chunks) -> tuple[int]:
    return (problem.N * chunks.parts * problem.HV * problem.V // ROWS.value,)


def forward_shared(problem: Problem, stages: int, output: bool, keep: bool) -> int:
    """Bytes of shared memory that `forward_pass` takes with (`output`) o and with (`keep`) s and u."""
    C, K, V, channel = problem.chunk_size, problem.K, ROWS.value, by_channel(problem)
    tied = problem.operator.tied
    columns = K + C + V * (1 if tied else 2) + K * output
    numbers = (C if tied else 0) if channel else 4 * C
    late = K * channel + C * output
    out = C * output + (K + C * digits(problem)) * keep
    return _shared(problem, stages, columns, numbers, late, out)


def reverse_shared(problem: Problem, stages: int) -> int:
    """Bytes of shared memory that `reverse_pass` takes."""
    C, K, V, channel = problem.chunk_size, problem.K, ROWS.value, by_channel(problem)
    columns, numbers, late, out = 2 * K + 2 * C + V, 0 if channel else 4 * C, K * channel, K + C
    return _shared(problem, stages, columns, numbers, late, out)


def _shared(problem: Problem, stages: int, columns: int, numbers: int, late: int, out: int) -> int:
    """From what a chunk has: tiles of C rows, by columns, and fp32 numbers, then e^Gl; tiles that come late; and
    what leaves it, by rows of tiles of `ROWS` columns.
    """
    if problem.operator.decay is not Gate.NONE:
        numbers += problem.K if by_channel(problem) else LANES.value
    coming = 2 * problem.chunk_size * columns + 4 * numbers
    coming_late = 2 * problem.chunk_size * late
    going = 2 * ROWS.value * out
    return stages * coming + (stages - 1) * coming_late + going + BESIDES
