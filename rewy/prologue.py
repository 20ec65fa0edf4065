"""What the fla-named functions can do to their inputs "in kernel": normalise, activate gates. Differentiable.

Each is an operator and its gradient, computed by the functions of `rewy.algebra.prologue` or by the backend's own
of the same names. Nothing is saved for the backward but the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rewy.dispatch import prologue_of
from rewy.operators import define


def first_derivative(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A gradient that is not differentiable again; torch's once_differentiable would take it for a constant
    wherever the gradient coming in is one.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph=True: second derivatives are not implemented")
        return backward(ctx, *grads)

    return checked


def refuse_tangents(*inputs: Tensor | None) -> None:
    """Operators without a rule for forward mode would drop the tangents in silence."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # outside of every dual_level
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs):
        raise NotImplementedError("forward-mode differentiation is not implemented")


def l2norm(x: Tensor, backend: str | None = None) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last dimension, in x's dtype."""
    return _L2Norm.apply(x, backend or "")


def log_decay(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    backend: str | None = None,
) -> Tensor:
    """The log decay of a raw gate g [B,T,HV] or [B,T,HV,K], in fp32 (fp64 for fp64).

    −exp(A_log) · softplus(g + dt_bias), or with a lower bound lower_bound · sigmoid(exp(A_log) · (g + dt_bias)).
    A_log [HV]; dt_bias [HV] or [HV·K]; either may be None (0).
    """
    return _LogDecay.apply(g, A_log, dt_bias, lower_bound, backend or "")


def sigmoid_beta(beta: Tensor, allow_neg_eigval: bool, backend: str | None = None) -> Tensor:
    """sigmoid(beta) in fp32 (fp64 for fp64), doubled when negative eigenvalues are allowed."""
    return _SigmoidBeta.apply(beta, 2.0 if allow_neg_eigval else 1.0, backend or "")


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backend = backend
        return _l2norm(x, backend)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _l2norm_backward(*ctx.saved_tensors, dy, ctx.backend), None


class _LogDecay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        backend: str,
    ) -> Tensor:
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound, ctx.backend = lower_bound, backend
        return _log_decay(g, A_log, dt_bias, lower_bound, backend)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dg: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        grads = iter(_log_decay_backward(*inputs, ctx.lower_bound, dg, ctx.backend))
        return *(None if t is None else next(grads) for t in inputs), None, None


class _SigmoidBeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, beta: Tensor, factor: float, backend: str) -> Tensor:
        ctx.save_for_backward(beta)
        ctx.factor, ctx.backend = factor, backend
        return _sigmoid_beta(beta, factor, backend)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return (
            _sigmoid_beta_backward(*ctx.saved_tensors, dy, ctx.factor, ctx.backend),
            None,
            None,
        )


def _gate_gradients(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    dg: Tensor,
    backend: str,
) -> list[Tensor]:
    grads = prologue_of(g, backend).gate_backward(g, A_log, dt_bias, lower_bound, dg)
    return [grad.contiguous() for grad in grads if grad is not None]


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _activated(x: Tensor, *_: Any) -> Tensor:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


_l2norm = define(
    "l2norm(Tensor x, str backend) -> Tensor",
    lambda x, backend: prologue_of(x, backend).l2norm_forward(x).contiguous(),
    _like,
)
_l2norm_backward = define(
    "l2norm_backward(Tensor x, Tensor dy, str backend) -> Tensor",
    lambda x, dy, backend: prologue_of(x, backend).l2norm_backward(x, dy).contiguous(),
    _like,
)
_log_decay = define(
    "log_decay(Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound, str backend) -> Tensor",
    lambda g, *args: prologue_of(g, args[-1]).gate_forward(g, *args[:-1]).contiguous(),
    _activated,
)
_log_decay_backward = define(
    "log_decay_backward(Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound, Tensor dg, str backend)"
    " -> Tensor[]",
    _gate_gradients,
    lambda g, A_log, dt_bias, *_: [_like(t) for t in (g, A_log, dt_bias) if t is not None],
)
_sigmoid_beta = define(
    "sigmoid_beta(Tensor beta, float factor, str backend) -> Tensor",
    lambda beta, factor, backend: prologue_of(beta, backend).sigmoid_forward(beta, factor).contiguous(),
    _activated,
)
_sigmoid_beta_backward = define(
    "sigmoid_beta_backward(Tensor beta, Tensor dy, float factor, str backend) -> Tensor",
    lambda beta, dy, factor, backend: (
        prologue_of(beta, backend).sigmoid_backward(beta, dy, factor).contiguous()
    ),
    _like,
)
