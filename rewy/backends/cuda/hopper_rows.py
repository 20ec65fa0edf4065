"""All gradients of a chunk in one kernel for Hopper, in Gluon: `gradients` without dA and dL going through memory.

For gates with one number a row, of which one erases and writes. By channel two programs at a time on a multiprocessor,
as `hopper_channels` has them, are faster.

A program takes one chunk and head after another, whole. Eight warps compute, one more brings tiles and one takes them
away. What belongs to values comes by tiles of 64 channels into one of two places, so that the next chunk's tiles are
under way while this one's keys are worked on. First come all products over values: the scores' gradients dA and dL,
and what passes through the states; then those between the chunk's rows. Results leave from the places of what they
are made of. The formulas, and the care for dg, are those of `gradients`.

Nearly all of a multiprocessor's memory is taken, so what spilled registers would come and go between is the L2 cache:
a few hundred bytes a thread have doubled the time. Hence `here`, and sums of rows that another warp finishes.
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

from rewy.backends.cuda.hopper_tiles import (
    BESIDES,
    barriers,
    bring,
    chunk,
    clear_tail,
    exp,
    numbers,
    store_rows,
    thread_barrier,
    tiled,
)
from rewy.backends.cuda.launch import Launch
from rewy.problem import Problem

TILE = gl.constexpr(64)  # value channels that come together
WORKERS = gl.constexpr(8)  # warps that compute


@gluon.jit
def here(x):
    """x, of which the compiler computes nothing ahead: what only rare branches use would crowd the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def times(x, y):
    """x y, rounded: not the compiler's to fuse with a sum, so that equal factors have equal products everywhere."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def add_before(sum1, before1, sum2, before2):
    return sum1 + sum2, sum1 + before2


@gluon.jit
def taken(COUNT, GROUP: gl.constexpr):
    """How many chunks and value heads this program takes, of COUNT chunks and key heads."""
    return gl.cdiv(COUNT - gl.program_id(0), gl.num_programs(0)) * GROUP


@gluon.jit
def item(i, table, T, H, GROUP: gl.constexpr, BT: gl.constexpr):
    """The i-th of them: its place among all, its key and value head, first token and number of rows.

    The value heads of a key head come one after the other.
    """
    i_kh = gl.program_id(0) + i // GROUP * gl.num_programs(0)
    i_c, i_h = i_kh // H, i_kh % H
    start, rows = chunk(table, i_c, T, BT)
    return i_kh * GROUP + i % GROUP, i_h, i_h * GROUP + i % GROUP, start, rows


@gluon.jit
def loads(
    q, k, v, do, u, dr, s, ds, b, G, q_s, k_s, v_s, do_s, u_s, dr_s, s_s, ds_s, b_s, G_s,
    full, empty, gone, gates, keys, free, table, T, H, COUNT,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    tile, turn = 0, 0
    for i in range(taken(COUNT, GROUP)):
        i_ch, i_h, i_hv, start, rows = item(i, table, T, H, GROUP, BT)
        if rows > 0:
            place = turn % 2
            bar = gates.index(place)
            mbarrier.wait(free.index(place), turn // 2 & 1 ^ 1)
            mbarrier.expect(bar, 8 * BT)
            # of the four rows that b is the first of, that alone
            tma.async_copy_global_to_shared(b, [i_ch * 4 * BT], bar, b_s.index(place))
            tma.async_copy_global_to_shared(G, [i_ch * BT], bar, G_s.index(place))
            for i_v in range(0, V, TILE):
                slot = tile % 2
                bar = full.index(slot)
                mbarrier.wait(empty.index(slot), tile // 2 & 1 ^ 1)
                mbarrier.expect(bar, 4 * TILE * (2 * BT + K))
                bring(do, do_s, slot, start, i_hv * V + i_v, bar)
                bring(u, u_s, slot, i_ch * BT, i_v, bar)
                bring(dr, dr_s, slot, i_ch * BT, i_v, bar)
                bring(s, s_s, slot, i_ch * K, i_v, bar)
                bring(ds, ds_s, slot, i_ch * K, i_v, bar)
                mbarrier.wait(gone.index(slot), tile // 2 & 1 ^ 1)
                bring(v, v_s, slot, start, i_hv * V + i_v, bar)
                tile += 1
            bar = keys.index(place)
            mbarrier.expect(bar, 4 * BT * K)
            bring(k, k_s, place, start, i_h * K, bar)
            bring(q, q_s, place, start, i_h * K, bar)
            turn += 1


@gluon.jit
def row_sums(dg, db, sums_s, b_Gl, i_g, rows, HV, BT: gl.constexpr):
    """db, and dg: what goes into rows from each on, and out of those before it."""
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, BT, line)
    m_t = o_t < rows
    gl.store(db + i_g + o_t * HV, sums_s.index(0).load(line).to(db.dtype.element_ty), mask=m_t)
    if dg is not None:
        b_go = sums_s.index(2).load(line)
        b_dg = gl.associative_scan(sums_s.index(1).load(line), 0, add, reverse=True)
        b_dg += gl.associative_scan((b_go, gl.zeros_like(b_go)), 0, add_before)[1]
        b_dg += exp(b_Gl) * gl.sum(sums_s.index(3).load(line), 0)
        gl.store(dg + i_g + o_t * HV, b_dg.to(dg.dtype.element_ty), mask=m_t)


@gluon.jit
def stores(
    dq, dk, dv, dg, db, G, q_s, k_s, v_s, sums_s, made, gone, left, free, table, T, H, COUNT,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    HV = H * GROUP
    tile, turn = 0, 0
    for i in range(taken(COUNT, GROUP)):
        i_ch, i_h, i_hv, start, rows = item(i, table, T, H, GROUP, BT)
        if rows > 0:
            for i_v in range(0, V, TILE):
                slot = tile % 2
                mbarrier.wait(made.index(slot), tile // 2 & 1)
                if rows == BT:
                    tma.async_copy_shared_to_global(dv, [start, i_hv * V + i_v], v_s.index(slot))
                    tma.store_wait(0)
                mbarrier.arrive(gone.index(slot))
                tile += 1
            place = turn % 2
            mbarrier.wait(left, turn & 1)
            if (rows == BT) & (i % GROUP == GROUP - 1):
                tma.async_copy_shared_to_global(dq, [start, i_h * K], q_s.index(place))
                tma.async_copy_shared_to_global(dk, [start, i_h * K], k_s.index(place))
            b_Gl = gl.load(G + i_ch.to(gl.int64) * BT + BT - 1)
            row_sums(dg, db, sums_s, b_Gl, start.to(gl.int64) * HV + i_hv, rows, HV, BT)
            tma.store_wait(0)
            mbarrier.arrive(free.index(place))
            turn += 1


@gluon.jit
def wait_for_values(full, do_s, slot, tile, rows, BT: gl.constexpr):
    mbarrier.wait(full.index(slot), tile // 2 & 1)
    if rows < BT:
        clear_tail(do_s.index(slot), rows)
        fence_async_shared()
        thread_barrier()


@gluon.jit
def value_products(b_A, b_L, b_dq, b_E, b_dk, do_t, u_t, dr_t, s_t, ds_t, again):
    """What one tile of values adds to dA, dL, and to what passes through the states."""
    b_A = warpgroup_mma(do_t, u_t.permute((1, 0)), b_A, use_acc=again, is_async=True)
    b_L = warpgroup_mma(dr_t, u_t.permute((1, 0)), b_L, use_acc=again, is_async=True)
    b_dq = warpgroup_mma(do_t, s_t.permute((1, 0)), b_dq, use_acc=again, is_async=True)
    b_E = warpgroup_mma(dr_t, s_t.permute((1, 0)), b_E, use_acc=again, is_async=True)
    b_dk = warpgroup_mma(u_t, ds_t.permute((1, 0)), b_dk, use_acc=again, is_async=True)
    return b_A, b_L, b_dq, b_E, b_dk


@gluon.jit
def row_compute(
    q_s, k_s, do_s, u_s, dr_s, v_s, s_s, ds_s, G_s, b_s, A_s, L_s, kp_s, sums_s,
    full, empty, made, gates, keys, left, free, dq, dk, dv, parts, table, scale, unit, T, H, COUNT,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, DECAY: gl.constexpr,
    acc: gl.constexpr, pairs: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_s.dtype
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    pair_row: gl.constexpr = gl.SliceLayout(1, pairs)
    pair_column: gl.constexpr = gl.SliceLayout(0, pairs)
    flat_row: gl.constexpr = gl.SliceLayout(1, flat)
    o_t = gl.arange(0, BT, by_row)
    o_k = gl.arange(0, K, gl.SliceLayout(0, acc))
    o_i = gl.arange(0, BT, pair_row)
    o_j = gl.arange(0, BT, pair_column)
    o_f = gl.arange(0, BT, flat_row)
    o_v = gl.arange(0, TILE, gl.SliceLayout(0, flat))
    zeros = gl.zeros([BT, K], gl.float32, acc)
    no_pairs = gl.zeros([BT, BT], gl.float32, pairs)
    HV = H * GROUP
    tile, turn = 0, 0
    for i in range(taken(COUNT, GROUP)):
        _, i_h, i_hv, start, rows = item(i, table, T, H, GROUP, BT)
        if rows > 0:
            i_t = start.to(gl.int64)
            place = turn % 2
            G_t, b_t = G_s.index(place), b_s.index(place)
            mbarrier.wait(gates.index(place), turn // 2 & 1)
            b_w = gl.expand_dims(b_t.load(flat_row), 1)

            # all products over values, one tile of them after the other
            b_A, b_L, b_dq, b_E, b_dk = no_pairs, no_pairs, zeros, zeros, zeros
            b_db = gl.zeros([BT], gl.float32, flat_row)
            b_ss = gl.zeros([TILE], gl.float32, flat_row)
            for i_v in range(V // TILE):
                slot = tile % 2
                wait_for_values(full, do_s, slot, tile, rows, BT)
                dr_t, v_t, s_t, ds_t = dr_s.index(slot), v_s.index(slot), s_s.index(slot), ds_s.index(slot)
                b_A, b_L, b_dq, b_E, b_dk = value_products(
                    b_A, b_L, b_dq, b_E, b_dk, do_s.index(slot), u_s.index(slot), dr_t, s_t, ds_t, i_v > 0
                )
                b_dr = dr_t.load(flat).to(gl.float32)
                b_v = v_t.load(flat).to(gl.float32)
                b_db += gl.sum(gl.where((o_f < rows)[:, None], b_v * b_dr, 0.0), 1)
                b_dv = (b_w * b_dr).to(dtype)
                v_t.store(b_dv)
                if rows < BT:
                    o_hv = o_f[:, None] * here(HV * V) + o_v[None, :]
                    store_rows(dv + (i_t * HV + i_hv) * V + i_v * TILE + o_hv, b_dv, o_f < rows)
                if DECAY:
                    for i_k in gl.static_range(K // TILE):
                        b_S = s_t.slice(i_k * TILE, TILE).load(flat).to(gl.float32)
                        b_ss += gl.sum(b_S * ds_t.slice(i_k * TILE, TILE).load(flat).to(gl.float32), 1)
                fence_async_shared()
                b_A, b_L, b_dq, b_E, b_dk = warpgroup_mma_wait(0, (b_A, b_L, b_dq, b_E, b_dk))
                thread_barrier()
                mbarrier.arrive(made.index(slot))
                mbarrier.arrive(empty.index(slot))
                tile += 1

            # the scores' gradients
            b_A = b_A * scale
            o_c = here(o_j)
            b_a = gl.sum(gl.where(o_i[:, None] == o_c[None, :], b_A, 0.0), 1)
            b_a = gl.expand_dims(gl.convert_layout(b_a, by_row), 1)
            b_Gi = gl.expand_dims(G_t.load(pair_row), 1)
            b_Gj = gl.expand_dims(G_t.load(pair_column), 0)
            b_D = exp(gl.where(o_i[:, None] > o_c[None, :], b_Gi - b_Gj, -float("inf")))
            A_s.store((b_A * b_D).to(dtype))
            L_s.store((b_L * -b_D).to(dtype))

            # what passes between the chunk's rows, on top of what passes through the states
            q_t, k_t = q_s.index(place), k_s.index(place)
            mbarrier.wait(keys.index(place), turn // 2 & 1)
            if rows < BT:
                clear_tail(q_t, rows)
                clear_tail(k_t, rows)
                thread_barrier()
            b_k = k_t.load(acc).to(gl.float32)
            b_b = gl.expand_dims(b_t.load(by_row), 1)
            b_G = gl.expand_dims(G_t.load(by_row), 1)
            last: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [WORKERS, 1], [1, 0]))
            b_Gl = gl.max(G_t.slice(BT - 1, 1).load(last), 0)
            kp_s.store((b_b * b_k).to(dtype))
            b_dk = b_dk * (unit * exp(b_Gl - b_G))
            b_f = exp(b_G)
            b_dq = b_dq * (scale * b_f)
            b_E = b_E * -b_f
            if DECAY:
                b_go = gl.sum(times(b_k, b_dk), 1)
            fence_async_shared()
            thread_barrier()
            b_dq = warpgroup_mma(A_s, k_t, b_dq, is_async=True)
            b_E = warpgroup_mma(L_s, k_t, b_E, is_async=True)
            b_dk = warpgroup_mma(A_s.permute((1, 0)), q_t, b_dk, is_async=True)
            b_dk = warpgroup_mma(L_s.permute((1, 0)), kp_s, b_dk, is_async=True)
            b_dq, b_E, b_dk = warpgroup_mma_wait(0, (b_dq, b_E, b_dk))
            thread_barrier()  # other warps' products may still read q and k, which dq and dk are to replace
            b_k = k_t.load(acc).to(gl.float32)
            if DECAY:
                # out of rows: what goes to the next state is taken off again, to the last bit where nothing else does
                b_gi = b_go - gl.sum(times(b_k, b_dk), 1)
                b_in = kp_s.load(acc).to(gl.float32) * b_E
            b_e = gl.sum(b_k * b_E, 1)
            b_dk += b_b * b_E
            thread_barrier()  # or all is loaded at once, into too many registers
            b_q = q_t.load(acc).to(gl.float32)
            if DECAY:
                b_gi += gl.sum(b_in + b_q * b_dq, 1)
            b_dk += b_a * b_q
            b_dq += b_a * b_k

            # ... summed over the value heads of a key head, in a place of this program's own
            if parts is not None:
                p = parts + gl.program_id(0) * (2 * BT * K) + o_t[:, None] * here(K) + o_k[None, :]
                if i % GROUP > 0:
                    b_dq += gl.load(p)
                    b_dk += gl.load(p + BT * K)
                if i % GROUP < GROUP - 1:
                    gl.store(p, b_dq)
                    gl.store(p + BT * K, b_dk)
            if i % GROUP == GROUP - 1:
                if rows < BT:
                    o_hk = (i_t * H + i_h) * K + o_t[:, None] * here(H * K) + o_k[None, :]
                    store_rows(dq + o_hk, b_dq, o_t < rows)
                    store_rows(dk + o_hk, b_dk, o_t < rows)
                else:
                    q_t.store(b_dq.to(dtype))
                    k_t.store(b_dk.to(dtype))
                    fence_async_shared()
            mbarrier.wait(free.index(1 - place), (turn - 1) // 2 & 1, pred=turn > 0)  # so are the last sums
            sums_s.index(0).store(gl.convert_layout(b_db, by_row) + b_e)
            if DECAY:
                sums_s.index(1).store(b_gi)
                sums_s.index(2).store(b_go)
                sums_s.index(3).store(b_ss)
            thread_barrier()
            mbarrier.arrive(left)
            turn += 1


@gluon.jit(do_not_specialize=["T", "COUNT"])
def row_chunks(
    # inputs and outputs
    q,
    k,
    v,
    do,
    u,
    dr,
    s,
    ds,
    b,
    G,
    dq,
    dk,
    dv,
    p_G,
    p_dq,
    p_dk,
    p_dv,
    dg,
    db,
    parts,
    table,
    # sizes
    scale,
    unit,
    T,
    H,
    COUNT,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    # meta
    BT: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BT // 2, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WORKERS, 1], [1, 0])
    do_s = gl.allocate_shared_memory(dtype, [2, BT, TILE], do.layout)
    u_s = gl.allocate_shared_memory(dtype, [2, BT, TILE], u.layout)
    dr_s = gl.allocate_shared_memory(dtype, [2, BT, TILE], dr.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, BT, TILE], v.layout)
    s_s = gl.allocate_shared_memory(dtype, [2, K, TILE], s.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, K, TILE], ds.layout)
    q_s = gl.allocate_shared_memory(dtype, [2, BT, K], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, BT, K], k.layout)
    kp_s = gl.allocate_shared_memory(dtype, [BT, K], k.layout)
    A_s = gl.allocate_shared_memory(dtype, [BT, BT], do.layout)
    L_s = gl.allocate_shared_memory(dtype, [BT, BT], do.layout)
    G_s = gl.allocate_shared_memory(gl.float32, [2, BT], G.layout)
    b_s = gl.allocate_shared_memory(gl.float32, [2, BT], G.layout)
    sums_s = gl.allocate_shared_memory(gl.float32, [4, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(2), barriers(2)  # a tile of values
    made, gone = barriers(2), barriers(2)  # dv in the place of v
    gates, keys = barriers(2), barriers(2)  # what comes once a chunk
    free = barriers(2)  # and that its places are free
    left = barriers(1).index(0)  # dq and dk lie in the places of q and k
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (
                row_compute,
                (
                    q_s, k_s, do_s, u_s, dr_s, v_s, s_s, ds_s, G_s, b_s, A_s, L_s, kp_s, sums_s,
                    full, empty, made, gates, keys, left, free, p_dq, p_dk, p_dv, parts, table,
                    scale, unit, T, H, COUNT, GROUP, K, V, BT, dg is not None, acc, pairs, flat,
                ),
            ),
            (
                loads,
                (
                    q, k, v, do, u, dr, s, ds, b, G, q_s, k_s, v_s, do_s, u_s, dr_s, s_s, ds_s, b_s, G_s,
                    full, empty, gone, gates, keys, free, table, T, H, COUNT, GROUP, K, V, BT,
                ),
            ),
            (
                stores,
                (
                    dq, dk, dv, dg, db, p_G, q_s, k_s, v_s, sums_s, made, gone, left, free, table, T, H, COUNT,
                    GROUP, K, V, BT,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip


def write(problem: Problem, made: Mapping[str, Any], programs: int) -> None:
    """The gradients of all `count` chunks by so many programs at most, from and into what `made` has by name."""
    p, C, items = problem, problem.chunk_size, made["count"] * problem.H
    programs = min(programs, items)
    args = dict(
        q=tiled(made["q"], p.H * p.K, columns=p.K),
        k=tiled(made["k"], p.H * p.K, columns=p.K),
        v=tiled(made["v"], p.HV * p.V),
        do=tiled(made["do"], p.HV * p.V),
        **{name: tiled(made[name], p.V) for name in ("u", "dr")},
        **{name: tiled(made[name], p.V, rows=p.K) for name in ("s", "ds")},
        b=numbers(made["f"], C),
        G=numbers(made["G"], C),
        **{name: tiled(made[name], p.H * p.K, columns=p.K) for name in ("dq", "dk")},
        dv=tiled(made["dv"], p.HV * p.V),
        p_G=made["G"], p_dq=made["dq"], p_dk=made["dk"], p_dv=made["dv"], dg=made["dg"], db=made["db"],
        parts=None if p.group == 1 else made["q"].new_empty(programs, 2, C, p.K, dtype=torch.float32),
        table=made["table"],
        scale=p.scale, unit=made["unit"], T=p.T, H=p.H, COUNT=items, GROUP=p.group, K=p.K, V=p.V, BT=C,
    )  # fmt: skip
    Launch(row_chunks, (programs,), args, num_warps=WORKERS.value).run()


def shared(problem: Problem) -> int:
    """Bytes of shared memory that `row_chunks` takes."""
    C, K = problem.chunk_size, problem.K
    values, keys = (4 * C + 2 * K) * TILE.value, 2 * C * K
    in_16_bits, in_fp32 = 2 * (values + keys) + C * K + 2 * C * C, 8 * C
    return 2 * in_16_bits + 4 * in_fp32 + BESIDES
