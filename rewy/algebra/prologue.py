"""What a layer does to its projections before the recurrence, each function with its gradient, in plain torch.

Arithmetic is fp32 (fp64 for fp64 inputs) from the unrounded input, in the backward too. A backend may bring its
own functions of these names and meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6
# Past e^80 every gate is saturated, and an infinite rate would turn its zero derivative into NaN.
MAX_LOG_RATE = 80.0


def l2norm_forward(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) along the last dimension, in x's dtype."""
    y, r = _normalised(x)
    return (y * r).to(x.dtype)


def l2norm_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `l2norm_forward` at x, in x's dtype."""
    y, r = _normalised(x)
    y, dy = y * r, dy.to(y.dtype)
    return (r * (dy - y * (dy * y).sum(-1, keepdim=True))).to(x.dtype)


def gate_forward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """The log decay of a raw gate x [B,T,HV] or [B,T,HV,K], in fp32 (fp64).

    −exp(A_log) · softplus(x + dt_bias), or lower_bound · sigmoid(exp(A_log) · (x + dt_bias)).
    A_log is [HV]; dt_bias is [HV], or [HV·K] per channel; either may be None (0).
    """
    z, rate = _gate(x, A_log, dt_bias)
    return -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)


def gate_backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, dg: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of `gate_forward` in x, A_log and dt_bias, in their dtypes and shapes."""
    z, rate = _gate(x, A_log, dt_bias)
    dg = dg.to(z.dtype)
    if lower_bound is None:
        dz, d_rate = -dg * rate * torch.sigmoid(z), -dg * F.softplus(z)
    else:
        s = torch.sigmoid(rate * z)
        dy = dg * lower_bound * s * (1 - s)
        dz, d_rate = dy * rate, dy * z
    dA = dbias = None
    if A_log is not None:
        per_head = (rate * d_rate).sum((0, 1, *range(3, x.dim())))
        dA = torch.where(A_log <= MAX_LOG_RATE, per_head.view_as(A_log), 0.0).to(A_log.dtype)
    if dt_bias is not None:
        dbias = dz.sum((0, 1)).view_as(dt_bias).to(dt_bias.dtype)
    return dz.to(x.dtype), dA, dbias


def sigmoid_forward(x: Tensor, factor: float = 1.0) -> Tensor:
    """factor · sigmoid(x), in fp32 (fp64)."""
    return factor * torch.sigmoid(x.to(_work(x)))


def sigmoid_backward(x: Tensor, dy: Tensor, factor: float = 1.0) -> Tensor:
    """The gradient of `sigmoid_forward` at x, in x's dtype."""
    s = torch.sigmoid(x.to(_work(x)))
    return (dy.to(s.dtype) * factor * s * (1 - s)).to(x.dtype)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.to(_work(x))
    return y, torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS)


def _gate(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    z = x.to(_work(x))
    if dt_bias is not None:
        z = z + dt_bias.to(z.dtype).view(x.shape[2:])
    rate = z.new_ones(1) if A_log is None else A_log.to(z.dtype).clamp(max=MAX_LOG_RATE).exp()
    return z, rate.view(-1, *[1] * (x.dim() - 3))


def _work(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
