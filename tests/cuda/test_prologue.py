"""The prologues against autograd of their fp64 definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rewy.backends.cuda import prologue

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_rounded(actual: Tensor, exact: Tensor, fp32: float = 5e-6) -> None:
    """The error is that of rounding the exact result once, and a few fp32 roundings before it."""
    exact = exact.double()
    rounding = 1.05 * (exact.to(actual.dtype).double() - exact).norm()
    if actual.dtype is torch.bfloat16 and actual.device.type == "cpu":
        # The interpreter cuts fp32 down to bf16 where the GPU rounds to nearest.
        rounding = torch.finfo(torch.bfloat16).eps * exact.norm()
    error = (actual.double() - exact).norm()
    assert error <= rounding + fp32 * exact.norm(), f"error {error:.3e}, rounding alone {rounding:.3e}"


def exact(function, *inputs: Tensor | None, grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The fp64 result of a function and its gradients."""
    leaves = [None if x is None else x.double().requires_grad_() for x in inputs]
    y = function(*leaves)
    grads = iter(torch.autograd.grad(y, [x for x in leaves if x is not None], grad.double()))
    return y.detach(), [None if x is None else next(grads) for x in leaves]


def l2norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gate(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    z = x if dt_bias is None else x + dt_bias.view(x.shape[2:])
    rate = 1.0 if A_log is None else A_log.exp().view(-1, *[1] * (x.dim() - 3))
    if lower_bound is None:
        return -rate * torch.logaddexp(z, torch.zeros_like(z))
    return lower_bound * torch.sigmoid(rate * z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [8, 16, 20, 100, 128, 256])
def test_l2norm(device, fenced, dtype, D):
    gen = torch.Generator().manual_seed(D)
    x = torch.randn(2, 7, 3, D, generator=gen)
    x[0, 0, 0] = 0.0
    x[0, 1] *= 1e-3
    x = fenced(x.to(device, dtype))
    dy = fenced(torch.randn(x.shape, generator=gen).to(device, dtype))
    y, (dx,) = exact(l2norm, x, grad=dy)
    assert_rounded(prologue.l2norm_forward(x), y)
    # One row is zero: its gradient, dy / sqrt(1e-6), would hide the others in a common norm.
    actual = prologue.l2norm_backward(x, dy)
    assert actual.dtype is dtype
    assert_rounded(actual[0, 0, 0], dx[0, 0, 0])
    assert_rounded(actual[0, 1], dx[0, 1])
    assert_rounded(actual[1], dx[1])


def test_budget_sees_a_second_rounding(device):
    """A gradient formed from the rounded output, where little is left of dy along x, is out of budget."""
    x = torch.randn(64, 16, device=device).half()
    dy = (x + 0.1 * torch.randn(64, 16, device=device)).half()
    _, (dx,) = exact(l2norm, x, grad=dy)
    y = prologue.l2norm_forward(x).float()
    rate = (y / x.float()).mean(-1, keepdim=True)
    faulty = rate * (dy.float() - y * (dy.float() * y).sum(-1, keepdim=True))
    assert_rounded(prologue.l2norm_backward(x, dy), dx)
    with pytest.raises(AssertionError, match="rounding alone"):
        assert_rounded(faulty.half(), dx)


def test_l2norm_reads_strided_inputs(device):
    wide = torch.randn(2, 5, 3, 40, device=device)
    x, dy = wide[..., ::2], wide.transpose(1, 2)[..., 20:].transpose(1, 2)
    assert torch.equal(prologue.l2norm_forward(x), prologue.l2norm_forward(x.clone()))
    assert torch.equal(prologue.l2norm_backward(x, dy), prologue.l2norm_backward(x.clone(), dy.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 300, 6), (1, 9, 3, 20), (2, 130, 2, 128)])
def test_gate(device, fenced, dtype, lower_bound, shape):
    gen = torch.Generator().manual_seed(len(shape))
    x = fenced((4 * torch.randn(shape, generator=gen)).to(device, dtype))
    A_log = fenced(torch.rand(shape[2], generator=gen).mul(4).log().to(device))
    dt_bias = fenced(torch.randn(x.shape[2:].numel(), generator=gen).to(device))
    dg = fenced(torch.randn(shape, generator=gen).to(device))
    g, grads = exact(lambda *t: gate(*t, lower_bound), x, A_log, dt_bias, grad=dg)
    actual = prologue.gate_forward(x, A_log, dt_bias, lower_bound)
    assert actual.dtype is torch.float32
    assert_rounded(actual, g)
    mine = prologue.gate_backward(x, A_log, dt_bias, lower_bound, dg)
    for grad, input in zip(mine, (x, A_log, dt_bias), strict=True):
        assert grad.dtype is input.dtype and grad.shape == input.shape
    assert_rounded(mine.x, grads[0])
    # Sums over rows of terms of both signs: their roundings are a larger part of what is left.
    assert_rounded(mine.A_log, grads[1], fp32=5e-5)
    assert_rounded(mine.dt_bias, grads[2], fp32=5e-5)


@pytest.mark.parametrize("A_log", [True, False])
@pytest.mark.parametrize("dt_bias", [True, False])
def test_gate_without_weights(device, A_log, dt_bias):
    x, dg = torch.randn(2, 2, 9, 4, 16, device=device)
    weights = (
        torch.zeros(4, device=device) if A_log else None,
        torch.zeros(64, device=device) if dt_bias else None,
    )
    g, (dx, dA, dbias) = exact(lambda *t: gate(*t, -5.0), x, *weights, grad=dg)
    assert_rounded(prologue.gate_forward(x, *weights, -5.0), g)
    actual = prologue.gate_backward(x, *weights, -5.0, dg)
    assert_rounded(actual.x, dx)
    assert (actual.A_log is None, actual.dt_bias is None) == (dA is None, dbias is None)


def test_gate_keeps_small_decays(device):
    """softplus far on the left is e^z, far below the rounding of 1 + e^z."""
    x = torch.tensor([-10.0, -16.0, -20.0, -40.0, -80.0], device=device).view(1, 5, 1)
    A_log = torch.zeros(1, device=device)
    g = prologue.gate_forward(x, A_log, None, None)
    torch.testing.assert_close(g.double(), -x.double().exp().log1p(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("A_log", [0.0, 50.0, 88.0, 200.0])
@pytest.mark.parametrize("raw", [50.0, -50.0])
def test_saturated_lower_bound(device, A_log, raw):
    x = torch.full((1, 6, 2, 16), raw, device=device)
    weight = torch.full((2,), A_log, device=device)
    g = prologue.gate_forward(x, weight, None, -5.0)
    assert torch.equal(g, torch.full_like(g, -5.0 if raw > 0 else 0.0)) or A_log == 0.0
    grads = prologue.gate_backward(x, weight, torch.zeros(32, device=device), -5.0, torch.ones_like(g))
    for grad in grads:
        assert grad.isfinite().all()
        assert (grad == 0).all() or (A_log == 0.0 and grad.abs().max() < 1e-17)


def test_gate_gradients_repeat_bitwise(device):
    x, dg = torch.randn(2, 1, 700, 3, device=device)
    A_log, dt_bias = torch.randn(2, 3, device=device)
    first = prologue.gate_backward(x, A_log, dt_bias, None, dg)
    second = prologue.gate_backward(x, A_log, dt_bias, None, dg)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_sigmoid(device, fenced, dtype, factor):
    x = fenced((6 * torch.randn(2, 700, 3)).to(device, dtype))
    x[0, 0, 0], x[0, 0, 1] = 200.0, -200.0
    dy = fenced(torch.randn(x.shape).to(device, dtype))
    y, (dx,) = exact(lambda t: factor * torch.sigmoid(t), x, grad=dy)
    assert prologue.sigmoid_forward(x, factor).dtype is torch.float32
    assert_rounded(prologue.sigmoid_forward(x, factor), y)
    assert_rounded(prologue.sigmoid_backward(x, dy, factor), dx)


@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (2, 0, 2, 16)])
def test_no_rows(device, shape):
    x = torch.empty(shape, device=device)
    A_log, dt_bias = torch.zeros(2, device=device), torch.zeros(32, device=device)
    assert prologue.l2norm_forward(x).shape == prologue.l2norm_backward(x, x).shape == shape
    assert prologue.gate_forward(x, A_log, dt_bias, None).shape == shape
    grads = prologue.gate_backward(x, A_log, dt_bias, None, x)
    assert grads.x.shape == shape and not grads.A_log.any() and not grads.dt_bias.any()
    assert prologue.sigmoid_forward(x).shape == prologue.sigmoid_backward(x, x).shape == shape
