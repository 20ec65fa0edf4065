"""What the kernels in Gluon share: tiles and numbers that the copy engine brings, barriers, where a chunk lies."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rewy.backends.cuda.gates import LOG2_E
from rewy.backends.cuda.launch import described

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)  # of fp32 numbers
BESIDES = 768  # bytes of shared memory for barriers, alignment and what the compiler exchanges there


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
def clear_tail(tile, rows):
    """Zero the rows of a tile from `rows` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    b_x = tile.load(layout)
    tile.store(gl.where((o_t < rows)[:, None], b_x, gl.zeros_like(b_x)))


@gluon.jit
def store_rows(p, b_x, m_t):
    gl.store(p, b_x.to(p.dtype.element_ty), mask=m_t[:, None])


@gluon.jit
def barriers(count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def bring(tile, tiles, slot, row, column, bar):
    """Ask for one tile; nothing where the kernel has no such operand."""
    if tiles is not None:
        tma.async_copy_global_to_shared(tile, [row, column], bar, tiles.index(slot))


def tiled(t: Tensor | None, width: int, rows: int = 64, columns: int = 64) -> TensorDescriptor | None:
    """t as rows of `width` numbers that come and go by tiles of [rows, columns]."""
    if t is None:
        return None
    t = _aligned(t)
    return _descriptor(t, (t.numel() // width, width), (rows, columns))


def numbers(t: Tensor | None, count: int = 0) -> TensorDescriptor | None:
    """t [NC,HV,...] in fp32 as one row of numbers, `count` at a time, or all of a chunk and head."""
    return None if t is None else _descriptor(t, (t.numel(),), (count or t[0, 0].numel(),))


def _descriptor(t: Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    return described(_template(shape, block, t.dtype), t)


@lru_cache(maxsize=4096)
def _template(shape: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype) -> TensorDescriptor:
    """What descriptors of one kind share: to make and check one takes as long as a launch."""
    layout = _tile_layout(*block, dtype) if len(block) == 2 else ROW_LAYOUT
    nothing = torch.empty(0, dtype=dtype, device="meta")
    return TensorDescriptor(nothing, [*shape], [*shape[1:], 1], [*block], layout)


def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def _aligned(t: Tensor) -> Tensor:
    """t, or a copy of what begins where the copy engine cannot: a slice of a tensor may."""
    return t if t.data_ptr() % 16 == 0 else t.clone()
