"""Decays at their limits: nothing overflows, nothing is divided, nothing is clamped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import EXACT, GATED, assert_close, assert_exact, assert_within_budget
from torch.nn import functional as F

import rewy
from rewy.algebra import chunked, pairs
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, computed, error, exact, leaves, make
from rewy.testing.cases import log_decay

LIMITS = [1.0, 2.5, 3.0, 5.0, 5.9, 6.0, 8.0, 11.0, 16.0, 20.0, 25.8, 32.0, 88.0, 100.0, 1000.0]


@pytest.mark.parametrize("T", [16, 64, 200])
@pytest.mark.parametrize("kind", ["G", "GH", "GB"])
@pytest.mark.parametrize("operator", GATED)
def test_finite_and_right_in_bf16(operator, kind, T):
    """Constant, one hot token or channel, and half and half, at every strength that overflowed somewhere."""
    case = Case(operator, B=len(LIMITS), T=T, H=1, HV=1, K=8, V=8, dtype=torch.bfloat16)
    x, do, dht = make(case)
    generator = torch.Generator().manual_seed(0)
    g = torch.cat([log_decay(f"{kind}{amount}", (1, *x.g.shape[1:]), generator) for amount in LIMITS])
    x = x._replace(g=g.float())
    found, expected = computed(x, do, dht), exact(x, do, dht)
    for name, tensor in expected.items():
        assert found[name].isfinite().all(), name
        for amount, a, b in zip(LIMITS, found[name], tensor, strict=True):
            # What is under bf16's smallest number may be lost; all else keeps two digits.
            assert error(a, b) < 0.02 or b.norm() < 1e-37, (amount, name)


@pytest.mark.parametrize("operator", GATED)
@pytest.mark.parametrize("gate", ["GQ", "G5", "G20"])
@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
def test_gate_gradient_under_strong_decay(operator, gate, initial_state):
    """dg is small there, and no difference of large sums."""
    case = Case(operator, B=1, T=200, H=1, HV=2, gate=gate, dtype=torch.bfloat16, initial_state=initial_state)
    assert_within_budget(case)
    x, do, dht = make(case)
    assert error(computed(x, do, dht)["dg"], exact(x, do, dht)["dg"]) < 1e-2


@pytest.mark.parametrize("operator", GATED)
def test_none_and_zero_state_give_one_gate_gradient(operator):
    x, do, dht = make(Case(operator, T=100, gate="GQ", dtype=torch.bfloat16))
    zero = computed(x._replace(initial_state=torch.zeros_like(x.initial_state)), do, dht)
    none = computed(x._replace(initial_state=None), do, dht)
    assert all(torch.equal(zero[name], none[name]) for name in none)


@pytest.mark.parametrize("gate", ["GB20", "GB25.8", "GB1000"])
@pytest.mark.parametrize("operator", GATED)
def test_no_division_by_the_decay(operator, gate):
    """dg where the decay is 0 or nearly, element by element, from terms and not as a quotient."""
    x, do, dht = make(Case(operator, T=100, gate=gate))
    dg, expected = computed(x, do, dht)["dg"], exact(x, do, dht)["dg"]
    assert (dg - expected).abs().max() <= EXACT * expected.abs().max()


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("gate", ["GL16", "GQ", "GX25.8", "GH1000", "G5"])
@pytest.mark.parametrize("operator", ["kda", "gdn2"])
def test_halves_need_no_look_at_the_decays(operator, gate, chunk_size, monkeypatch):
    """The pairs of devices whose values the host does not read."""

    def unread(decay, arithmetic, G):
        return pairs.pairs(decay, replace(arithmetic, waits=False), G)

    monkeypatch.setattr(chunked, "pairs", unread)
    case = Case(operator, T=100, gate=gate, chunk_size=chunk_size)
    assert_exact(case)
    for dtype in (torch.float16, torch.bfloat16):
        assert_within_budget(replace(case, dtype=dtype))


@pytest.mark.parametrize("raw", ["mixed", "saturated"])
@pytest.mark.parametrize("operator", GATED)
def test_gradients_of_the_raw_gate_and_its_parameters(operator, raw):
    """Gates at 0 and at -25 side by side: draw, dA_log and d(dt_bias) in fp64."""
    torch.manual_seed(0)
    x, do, dht = make(Case(operator, T=100))
    g = torch.randn_like(x.g) * (10 if raw == "mixed" else 1) - (0 if raw == "mixed" else 30)
    x = leaves(x._replace(g=g))
    A_log = torch.linspace(-2, 3, 4, dtype=torch.float64).requires_grad_()
    dt_bias = torch.randn(g[0, 0].numel(), dtype=torch.float64).requires_grad_()
    o, ht = rewy.delta_attention(
        **arguments(x), output_final_state=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias
    )
    found = torch.autograd.grad([o, ht], [x.g, A_log, dt_bias], [do, dht])
    z = x.g + dt_bias.view(g.shape[2:])
    outside = x._replace(g=-A_log.exp().view(-1, *[1] * (g.dim() - 3)) * F.softplus(z))
    o, ht = rewy.delta_attention(**arguments(outside), output_final_state=True)
    expected = torch.autograd.grad([o, ht], [x.g, A_log, dt_bias], [do, dht])
    assert all(error(a, b) <= EXACT for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("A", [0.0, 50.0, 88.0, 200.0])
@pytest.mark.parametrize("sign", [-1, 1], ids=["raw-50", "raw+50"])
@pytest.mark.parametrize("operator", GATED)
def test_saturated_lower_bound(operator, sign, A):
    """An infinite rate times a derivative of 0 is 0: finite everywhere, 0 where saturated."""
    x, _, _ = make(Case(operator, B=1, T=20, dtype=torch.float32))
    x = leaves(x._replace(g=torch.full_like(x.g, 50.0 * sign)))
    A_log = torch.full((4,), A).requires_grad_()
    dt_bias = torch.zeros(x.g[0, 0].numel()).requires_grad_()
    o, _ = rewy.delta_attention(
        **arguments(x),
        use_gate_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    grads = torch.autograd.grad(o.square().sum(), [x.q, x.k, x.v, x.g, A_log, dt_bias])
    assert o.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    assert all(not grad.any() for grad in grads[3:]) or A == 0.0


@pytest.mark.parametrize("operator", GATED)
def test_positive_log_decays_are_computed_as_they_are(operator):
    """A growing state is no decay, but it is arithmetic: nothing is clamped."""
    x, do, dht = make(Case(operator, T=100))
    g = x.g.clone()
    g[:, ::7] = 0.1
    g[:, 50] = 1.0
    x = x._replace(g=g)
    assert_close(computed(x, do, dht), exact(x, do, dht), EXACT)


def test_no_gate_equals_deltanet_under_its_other_name():
    """`chunk_gated_delta_rule` with g = None, and its steps."""
    x, do, _ = make(Case("delta_rule", T=100, dtype=torch.bfloat16))
    x = leaves(x)
    results = []
    for call in (
        lambda: rewy.chunk_gated_delta_rule(x.q, x.k, x.v, None, x.erase, initial_state=x.initial_state),
        lambda: rewy.chunk_delta_rule(x.q, x.k, x.v, x.erase, initial_state=x.initial_state),
    ):
        o, _ = call()
        results.append([o, *torch.autograd.grad(o, [x.q, x.k, x.v, x.erase, x.initial_state], do)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with torch.no_grad():
        a = rewy.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, None, x.erase)[0]
        assert torch.equal(a, rewy.fused_recurrent_delta_rule(x.q, x.k, x.v, x.erase)[0])


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_value_is_lost_in_training_like_inputs(operator):
    """Seeds of model-like gates in bf16, the gate in the kernel and outside: all finite, both routes agree."""
    for seed in range(20):
        torch.manual_seed(seed)
        case = Case(operator, B=1, T=192, H=2, HV=2, K=32, V=32, dtype=torch.bfloat16, seed=seed)
        x, do, dht = make(case)
        x = x._replace(q=torch.randn(1, 192, 2, 32).bfloat16(), k=torch.randn(1, 192, 2, 32).bfloat16())
        gate, outside = {}, x
        if x.g is not None:
            raw = torch.randn_like(x.g) * 0.5 + 1
            A_log = torch.rand(2).mul(16).log()
            gate = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=torch.zeros(raw[0, 0].numel()))
            rate = A_log.exp().view(-1, *[1] * (raw.dim() - 3))
            x, outside = x._replace(g=raw), x._replace(g=-rate * F.softplus(raw))
        inside = computed(x, do, dht, use_qk_l2norm_in_kernel=True, **gate)
        by_hand = computed(outside, do, dht, use_qk_l2norm_in_kernel=True)
        assert all(t.isfinite().all() for t in inside.values())
        assert all(error(inside[name], by_hand[name]) < 1e-2 for name in inside.keys() - {"dg"})
