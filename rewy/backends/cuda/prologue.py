"""What a layer does to its projections before the recurrence, each with its gradient.

All of them compute in fp32 from the unrounded input, in the backward too: nothing is saved but the
input. Sums over rows go through one partial sum per strip of rows, so repeats are bitwise equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rewy.backends.cuda.launch import Launch

EPS = 1e-6
# Rows that share one partial sum in the gate's backward; a constant, so that the order of a sum
# does not depend on the card.
STRIP = 256
# Past e^80 every gate is saturated, and an infinite rate would turn its zero derivative into NaN.
MAX_LOG_RATE = tl.constexpr(80.0)


@triton.jit(do_not_specialize=["M"])
def l2norm_fwd(x, y, M, eps, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_x = o_m[:, None] * D + o_d[None, :]
    m_x = (o_m < M)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_r = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + eps)
    tl.store(y + o_x, (b_x * b_r[:, None]).to(y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["M"])
def l2norm_bwd(x, dy, dx, M, eps, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_x = o_m[:, None] * D + o_d[None, :]
    m_x = (o_m < M)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_r = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + eps)
    b_y = b_x * b_r[:, None]
    b_dx = b_r[:, None] * (b_dy - b_y * tl.sum(b_dy * b_y, axis=1)[:, None])
    tl.store(dx + o_x, b_dx.to(dx.dtype.element_ty), mask=m_x)


@triton.jit
def _tail(b_y):
    """e^-|y|, from which sigmoid and softplus follow without overflow."""
    return tl.exp(-tl.abs(b_y))


@triton.jit
def _sigmoid(b_y):
    b_e = _tail(b_y)
    return tl.where(b_y >= 0, 1.0, b_e) / (1.0 + b_e)


@triton.jit
def _dsigmoid(b_y):
    b_e = _tail(b_y)
    return b_e / ((1.0 + b_e) * (1.0 + b_e))


@triton.jit
def _softplus(b_y):
    # max(y, 0) + log(1 + e), and log(1 + e) = 2 atanh(e / (2 + e)): a series in r <= 1/9, small terms exact.
    b_e = _tail(b_y)
    b_s = b_e / (2.0 + b_e)
    b_r = b_s * b_s
    b_p = b_r / 15 + 1 / 13
    b_p = b_p * b_r + 1 / 11
    b_p = b_p * b_r + 1 / 9
    b_p = b_p * b_r + 1 / 7
    b_p = b_p * b_r + 1 / 5
    b_p = b_p * b_r + 1 / 3
    return tl.maximum(b_y, 0.0) + 2.0 * (b_s + b_s * b_r * b_p)


@triton.jit
def _gate_weights(A_log, dt_bias, o_d, m_d, K: tl.constexpr, BD: tl.constexpr):
    """Logarithm of the rate, rate and bias of every gate column."""
    b_A = tl.zeros([BD], dtype=tl.float32)
    if A_log is not None:
        b_A = tl.load(A_log + o_d // K, mask=m_d, other=0.0).to(tl.float32)
    b_bias = tl.zeros([BD], dtype=tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    return b_A, tl.exp(tl.minimum(b_A, MAX_LOG_RATE)), b_bias


@triton.jit(do_not_specialize=["M"])
def gate_fwd(
    # inputs and outputs
    x,
    A_log,
    dt_bias,
    g,
    # sizes
    lower_bound,
    M,
    D: tl.constexpr,
    K: tl.constexpr,
    # meta
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    ND: tl.constexpr = (D + BD - 1) // BD
    o_m = (tl.program_id(0) // ND).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_x = o_m[:, None] * D + o_d[None, :]
    m_x = (o_m < M)[:, None] & m_d[None, :]
    _, b_a, b_bias = _gate_weights(A_log, dt_bias, o_d, m_d, K, BD)
    b_z = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32) + b_bias[None, :]
    if lower_bound is None:
        b_g = -b_a[None, :] * _softplus(b_z)
    else:
        b_g = lower_bound * _sigmoid(b_a[None, :] * b_z)
    tl.store(g + o_x, b_g, mask=m_x)


@triton.jit(do_not_specialize=["M"])
def gate_bwd(
    # inputs and outputs
    x,
    A_log,
    dt_bias,
    dg,
    dx,
    dA_part,
    dbias_part,
    # sizes
    lower_bound,
    M,
    D: tl.constexpr,
    K: tl.constexpr,
    # meta
    STRIP: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    ND: tl.constexpr = (D + BD - 1) // BD
    i_s = (tl.program_id(0) // ND).to(tl.int64)
    o_d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_A, b_a, b_bias = _gate_weights(A_log, dt_bias, o_d, m_d, K, BD)
    b_da = tl.zeros([BM, BD], dtype=tl.float32)
    b_dbias = tl.zeros([BM, BD], dtype=tl.float32)
    for i_m in range(0, STRIP, BM):
        o_m = i_s * STRIP + i_m + tl.arange(0, BM)
        o_x = o_m[:, None] * D + o_d[None, :]
        m_x = (o_m < M)[:, None] & m_d[None, :]
        b_z = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32) + b_bias[None, :]
        b_dg = tl.load(dg + o_x, mask=m_x, other=0.0).to(tl.float32)
        if lower_bound is None:
            b_dz = -b_dg * b_a[None, :] * _sigmoid(b_z)
            b_da -= b_dg * _softplus(b_z)
        else:
            b_dy = b_dg * lower_bound * _dsigmoid(b_a[None, :] * b_z)
            b_dz = b_dy * b_a[None, :]
            b_da += b_dy * b_z
        b_dbias += b_dz
        tl.store(dx + o_x, b_dz.to(dx.dtype.element_ty), mask=m_x)
    if dA_part is not None:
        b_dA = tl.where(b_A <= MAX_LOG_RATE, b_a * tl.sum(b_da, axis=0), 0.0)
        tl.store(dA_part + i_s * D + o_d, b_dA, mask=m_d)
    if dbias_part is not None:
        tl.store(dbias_part + i_s * D + o_d, tl.sum(b_dbias, axis=0), mask=m_d)


@triton.jit(do_not_specialize=["M"])
def sigmoid_fwd(x, y, factor, M, BM: tl.constexpr):
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    b_x = tl.load(x + o_m, mask=o_m < M, other=0.0).to(tl.float32)
    tl.store(y + o_m, (factor * _sigmoid(b_x)).to(y.dtype.element_ty), mask=o_m < M)


@triton.jit(do_not_specialize=["M"])
def sigmoid_bwd(x, dy, dx, factor, M, BM: tl.constexpr):
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    b_x = tl.load(x + o_m, mask=o_m < M, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_m, mask=o_m < M, other=0.0).to(tl.float32)
    b_dx = b_dy * factor * _dsigmoid(b_x)
    tl.store(dx + o_m, b_dx.to(dx.dtype.element_ty), mask=o_m < M)


class GateGradients(NamedTuple):
    x: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


def l2norm_forward(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) along the last dimension, in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    sizes, grid = _rows(x)
    Launch(l2norm_fwd, grid, dict(x=x, y=y, **sizes)).run()
    return y


def l2norm_backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of `l2norm_forward` at x, in x's dtype."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    sizes, grid = _rows(x)
    Launch(l2norm_bwd, grid, dict(x=x, dy=dy, dx=dx, **sizes)).run()
    return dx


def gate_forward(
    x: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """The decay g of a raw gate x [B,T,HV] or [B,T,HV,K], in fp32.

    -exp(A_log) softplus(x + dt_bias), or lower_bound sigmoid(exp(A_log) (x + dt_bias)).
    A_log is [HV]; dt_bias is [HV], or [HV*K] per channel; either may be None (0).
    """
    x = x.contiguous()
    g = torch.empty_like(x, dtype=torch.float32)
    sizes, columns = _columns(x)
    Launch(
        gate_fwd,
        grid=(triton.cdiv(sizes["M"], sizes["BM"]) * columns,),
        args=dict(x=x, A_log=A_log, dt_bias=dt_bias, g=g, lower_bound=lower_bound, **sizes),
    ).run()
    return g


def gate_backward(
    x: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    dg: torch.Tensor,
) -> GateGradients:
    """The gradients of `gate_forward`, in the dtypes and shapes of its inputs."""
    x, dg = x.contiguous(), dg.contiguous()
    sizes, columns = _columns(x)
    strips = triton.cdiv(sizes["M"], STRIP)
    dx = torch.empty_like(x)
    dA_part, dbias_part = (
        None if weight is None else dg.new_empty((strips, sizes["D"]), dtype=torch.float32)
        for weight in (A_log, dt_bias)
    )
    Launch(
        gate_bwd,
        grid=(strips * columns,),
        args=dict(
            x=x, A_log=A_log, dt_bias=dt_bias, dg=dg, dx=dx, dA_part=dA_part, dbias_part=dbias_part,
            lower_bound=lower_bound, STRIP=STRIP, **sizes,
        ),
    ).run()  # fmt: skip
    dA = dbias = None
    if A_log is not None and dA_part is not None:
        dA = dA_part.sum(0).view(A_log.shape[0], -1).sum(1).to(A_log.dtype)
    if dt_bias is not None and dbias_part is not None:
        dbias = dbias_part.sum(0).to(dt_bias.dtype).view_as(dt_bias)
    return GateGradients(dx, dA, dbias)


def sigmoid_forward(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """factor * sigmoid(x), in fp32; factor 2 allows negative eigenvalues."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=torch.float32)
    Launch(sigmoid_fwd, *_flat(x, dict(x=x, y=y, factor=float(factor)))).run()
    return y


def sigmoid_backward(x: torch.Tensor, dy: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """The gradient of `sigmoid_forward` at x, in x's dtype."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    Launch(sigmoid_bwd, *_flat(x, dict(x=x, dy=dy, dx=dx, factor=float(factor)))).run()
    return dx


def _rows(x: torch.Tensor) -> tuple[dict[str, Any], tuple[int]]:
    """Tiles of whole rows."""
    D = x.shape[-1]
    BD = triton.next_power_of_2(D)
    M, BM = x.numel() // D, max(1, 4096 // BD)
    return dict(M=M, eps=EPS, D=D, BM=BM, BD=BD), (triton.cdiv(M, BM),)


def _columns(x: torch.Tensor) -> tuple[dict[str, Any], int]:
    """Tiles of tokens by gate columns, and the number of column tiles."""
    D, K = x.shape[2:].numel(), x.shape[3:].numel()
    BD = min(128, triton.next_power_of_2(D))
    BM = min(STRIP, 2048 // BD)
    return dict(M=x.shape[:2].numel(), D=D, K=K, BM=BM, BD=BD), triton.cdiv(D, BD)


def _flat(x: torch.Tensor, args: dict[str, Any]) -> tuple[tuple[int], dict[str, Any]]:
    BM = 1024
    return (triton.cdiv(x.numel(), BM),), dict(args, M=x.numel(), BM=BM)
