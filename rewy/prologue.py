"""What the fla-named functions can do to their inputs "in kernel": normalise, activate gates. Differentiable.

Arithmetic is fp32 (fp64 for fp64 inputs) whatever the input's dtype; gates come back in it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

L2_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last dimension, in x's dtype."""
    y = x.to(_work(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def log_decay(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """The log decay of a raw gate g [B,T,HV] or [B,T,HV,K].

    −exp(A_log) · softplus(g + dt_bias), or with a lower bound lower_bound · sigmoid(exp(A_log) · (g + dt_bias)).
    A_log [HV]; dt_bias [HV] or [HV·K]; either may be None (0).
    """
    x = g.to(_work(g))
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).view(g.shape[2:])
    rate = 1.0 if A_log is None else _rate(A_log.to(x.dtype)).view(-1, *[1] * (g.dim() - 3))
    if lower_bound is None:
        return -rate * F.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


def sigmoid_beta(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(beta), doubled when negative eigenvalues are allowed."""
    activated = torch.sigmoid(beta.to(_work(beta)))
    return 2 * activated if allow_neg_eigval else activated


def _rate(A_log: Tensor) -> Tensor:
    # Past e^80 every gate is saturated, and an infinite rate would turn its zero derivative into NaN.
    return A_log.clamp(max=80.0).exp()


def _work(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
