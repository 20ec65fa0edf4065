"""Every public option, on and off, through the public functions, with a backward each time."""

from __future__ import annotations

import inspect

import pytest
import torch
from checks import EXACT, TIED
from torch import Tensor
from torch.nn import functional as F

import rewy
from rewy.algebra.recurrent import recurrence
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, computed, error, exact, leaves, make

CHUNKED = {
    "delta_rule": rewy.chunk_delta_rule,
    "gated_delta_rule": rewy.chunk_gated_delta_rule,
    "kda": rewy.chunk_kda,
    "gdn2": rewy.chunk_gdn2,
}
STEPS = {
    "delta_rule": rewy.fused_recurrent_delta_rule,
    "gated_delta_rule": rewy.fused_recurrent_gated_delta_rule,
    "kda": rewy.fused_recurrent_kda,
    "gdn2": rewy.fused_recurrent_gdn2,
}
SMALL = dict(T=70, K=8, V=12)


def positional(x):
    """The operands in the order in which fla's functions take them."""
    return [t for t in (x.q, x.k, x.v, x.g, x.erase, x.write) if t is not None]


def parameters(x, double: bool = True) -> dict[str, Tensor]:
    """A_log and dt_bias of an in-kernel gate, for the operands' decay."""
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64 if double else torch.float32
    heads = x.g.shape[2]
    return {
        "A_log": torch.randn(heads, generator=generator, dtype=dtype).requires_grad_(),
        "dt_bias": torch.randn(x.g[0, 0].numel(), generator=generator, dtype=dtype).requires_grad_(),
    }


def by_hand(x, *, l2norm=False, lower_bound=None, gate=None, sigmoid=False, twice=False):
    """The options as plain torch on the operands."""
    if l2norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x.q, x.k))
        x = x._replace(q=q, k=k)
    if gate is not None:
        z = x.g + gate["dt_bias"].view(x.g.shape[2:])
        rate = gate["A_log"].exp().view(-1, *[1] * (x.g.dim() - 3))
        g = -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)
        x = x._replace(g=g)
    if sigmoid:
        x = x._replace(erase=x.erase.sigmoid() * (2 if twice else 1))
    return x


def compare(x, do, dht, expected_x, outputs, also=()):
    """o, ht and all gradients, those of the parameters too, against the recurrence of `expected_x`."""
    o, ht = outputs
    expected_o, expected_ht = recurrence(expected_x, 1 / x.q.shape[-1] ** 0.5)
    wanted = [t for t in x if t is not None and t.requires_grad] + list(also)
    expected = torch.autograd.grad([expected_o, expected_ht], wanted, [do, dht], retain_graph=True)
    found = torch.autograd.grad([o, ht], wanted, [do, dht])
    for a, b in zip([o, ht, *found], [expected_o, expected_ht, *expected], strict=True):
        assert a.dtype == b.dtype and error(a, b) <= EXACT


@pytest.mark.parametrize("operator", OPERATORS)
def test_plain_call_under_the_name_of_fla(operator):
    x, do, dht = make(Case(operator, **SMALL))
    x = leaves(x)
    outputs = CHUNKED[operator](*positional(x), None, x.initial_state, True)
    compare(x, do, dht, x, outputs)


@pytest.mark.parametrize("operator", OPERATORS)
def test_l2norm(operator):
    x, do, dht = make(Case(operator, **SMALL))
    x = leaves(x._replace(q=3 * x.q, k=0.1 * x.k))
    outputs = CHUNKED[operator](
        *positional(x), initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    compare(x, do, dht, by_hand(x, l2norm=True), outputs)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.1], ids=str)
@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda", "gdn2"])
def test_gate_in_kernel(operator, lower_bound):
    x, do, dht = make(Case(operator, **SMALL))
    x = leaves(x._replace(g=2 * torch.randn_like(x.g)))
    gate = parameters(x)
    options = dict(output_final_state=True, use_gate_in_kernel=True, **gate)
    if lower_bound is not None:
        options |= dict(lower_bound=lower_bound, safe_gate=True)
    if operator == "gated_delta_rule" and lower_bound is not None:  # fla's function of this name has no bound
        outputs = rewy.delta_attention(**arguments(x), **options)
    else:
        outputs = CHUNKED[operator](*positional(x), initial_state=x.initial_state, **options)
    compare(x, do, dht, by_hand(x, gate=gate, lower_bound=lower_bound), outputs, gate.values())


def test_gate_in_kernel_without_parameters():
    """With a lower bound neither is needed; without A_log the rate is 1."""
    x, do, dht = make(Case("kda", **SMALL))
    x = leaves(x)
    outputs = rewy.delta_attention(
        **arguments(x), output_final_state=True, use_gate_in_kernel=True, lower_bound=-2.0
    )
    compare(x, do, dht, x._replace(g=-2 * x.g.sigmoid()), outputs)


@pytest.mark.parametrize("twice", [False, True], ids=["sigmoid", "negative-eigenvalues"])
@pytest.mark.parametrize("operator", TIED)
def test_beta_sigmoid_in_kernel(operator, twice):
    x, do, dht = make(Case(operator, **SMALL))
    x = leaves(x._replace(erase=torch.randn_like(x.erase)))
    options = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=twice, output_final_state=True)
    if operator == "delta_rule":
        outputs = rewy.delta_attention(**arguments(x), **options)
    else:
        outputs = CHUNKED[operator](*positional(x), initial_state=x.initial_state, **options)
    compare(x, do, dht, by_hand(x, sigmoid=True, twice=twice), outputs)


@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda", "gdn2"])
def test_everything_in_kernel_and_packed(operator):
    x, do, dht = make(Case(operator, B=1, T=70, K=8, V=12, lengths=(20, 0, 50)))
    x = leaves(x._replace(q=2 * x.q, g=torch.randn_like(x.g)))
    gate = parameters(x)
    tied = x.write is None
    outputs = rewy.delta_attention(
        **arguments(x), **gate, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=tied, allow_neg_eigval=tied,
    )  # fmt: skip
    by = by_hand(x, l2norm=True, gate=gate, sigmoid=tied, twice=tied)
    compare(x, do, dht, by, outputs, gate.values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_state_v_first(operator):
    x, do, dht = make(Case(operator, **SMALL))
    x = leaves(x)
    transposed = x.initial_state.detach().mT.contiguous().requires_grad_()
    o, ht = CHUNKED[operator](
        *positional(x), initial_state=transposed, output_final_state=True, state_v_first=True
    )
    assert ht.shape == (2, 4, 12, 8) and ht.is_contiguous()
    grads = torch.autograd.grad([o, ht], [x.q, transposed], [do, dht.mT])
    expected = exact(x, do, dht)
    assert error(o, expected["o"]) <= EXACT and error(ht.mT, expected["ht"]) <= EXACT
    assert grads[1].shape == transposed.shape
    assert error(grads[0], expected["dq"]) <= EXACT and error(grads[1].mT, expected["dh0"]) <= EXACT


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_final_state_asked_for(operator):
    x, do, _ = make(Case(operator, **SMALL))
    x = leaves(x)
    o, ht = CHUNKED[operator](*positional(x), initial_state=x.initial_state, output_final_state=False)
    assert ht is None
    expected = exact(x, do, None)
    grads = torch.autograd.grad(o, [x.q, x.initial_state], do)
    assert error(grads[0], expected["dq"]) <= EXACT and error(grads[1], expected["dh0"]) <= EXACT


@pytest.mark.parametrize("scale", [None, 1, 1.0, 0.3, 2, 0, -1.5], ids=str)
def test_scale(scale):
    """None is K^-0.5; integers and floats behave alike."""
    case = Case("kda", scale=scale, **SMALL)
    x, do, dht = make(case)
    found, expected = (
        computed(x, do, dht, scale),
        exact(x, do, dht, 8**-0.5 if scale is None else float(scale)),
    )
    assert max(error(found[n], expected[n]) for n in expected) <= EXACT


@pytest.mark.parametrize("operator", ["kda", "gdn2"])
def test_options_that_change_no_result(operator):
    x, do, dht = make(Case(operator, **SMALL))
    plain = computed(x, do, dht)
    for options in (
        dict(disable_recompute=True),
        dict(safe_gate=True),
        dict(safe_gate=True, lower_bound=-5.0),
        dict(backend="reference"),
    ):
        same = computed(x, do, dht, **options)
        assert all(torch.equal(same[name], plain[name]) for name in plain), options


def test_chunk_indices_may_be_given():
    x, _, _ = make(Case("gated_delta_rule", B=1, T=70, lengths=(70,)))
    given = dict(cu_seqlens=x.cu_seqlens, initial_state=x.initial_state)
    plain = rewy.chunk_gated_delta_rule(*positional(x), **given)[0]
    assert torch.equal(
        rewy.chunk_gated_delta_rule(*positional(x), chunk_indices=torch.zeros(2, 2), **given)[0], plain
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_host_offsets(operator):
    x, do, dht = make(Case(operator, B=1, T=70, lengths=(30, 40)))
    plain = computed(x, do, dht)
    host = computed(x._replace(cu_seqlens_cpu=x.cu_seqlens.to(torch.int32)), do, dht)
    assert all(torch.equal(host[name], plain[name]) for name in plain)


@pytest.mark.parametrize("operator", OPERATORS)
def test_steps_take_the_same_options(operator):
    x, _, _ = make(Case(operator, T=5, K=8, V=12))
    x = x._replace(q=2 * x.q)
    common = dict(initial_state=x.initial_state.mT, output_final_state=True, state_v_first=True, scale=0.5)
    if x.g is not None:
        with torch.no_grad():
            common |= dict(use_gate_in_kernel=True, **parameters(x))
    with torch.no_grad():
        chunked = CHUNKED[operator](*positional(x), **common, use_qk_l2norm_in_kernel=True)
        stepped = STEPS[operator](*positional(x), **common, use_qk_l2norm_in_kernel=True)
    assert stepped[1].shape == (2, 4, 12, 8)
    assert all(error(a, b) <= EXACT for a, b in zip(stepped, chunked, strict=True))


def test_every_public_option_is_tested_here():
    """A new option of `delta_attention` has to show up in this file."""
    source = inspect.getsource(inspect.getmodule(test_l2norm))
    options = set(inspect.signature(rewy.delta_attention).parameters) - {
        "q",
        "k",
        "v",
        "beta",
        "g",
        "erase",
        "write",
    }
    elsewhere = {"chunk_size", "algebra"}  # test_parity.py
    assert {name for name in options - elsewhere if name not in source} == set()
