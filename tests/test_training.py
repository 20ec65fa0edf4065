"""What a training loop does around the call: precision contexts, checkpoints, views, partial gradients, repeats."""

from __future__ import annotations

import threading

import pytest
import torch
from checks import EXACT, assert_close
from torch.utils.checkpoint import checkpoint

import rewy
from rewy import prologue
from rewy.problem import OPERATORS, Operands
from rewy.testing import Case, arguments, computed, error, exact, leaves, make, poisoned


def attention(x, **options):
    return rewy.delta_attention(**arguments(x), output_final_state=True, **options)


def loss(o, ht):
    return o.square().sum() + ht.sum()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-hooks", "reentrant"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_checkpoint(operator, use_reentrant, packed):
    """The same gradients bit for bit, offsets included; in-kernel options are recomputed too."""
    x = make(Case(operator, B=1, T=70, lengths=(30, 0, 40) if packed else None))[0]

    def run(*tensors):
        return attention(Operands(*tensors), use_qk_l2norm_in_kernel=True)

    plain, again = leaves(x), leaves(x)
    loss(*run(*plain)).backward()
    loss(*checkpoint(run, *again, use_reentrant=use_reentrant)).backward()
    for a, b in zip(plain, again, strict=True):
        assert a is None or not a.requires_grad or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("operator", OPERATORS)
def test_repeats_are_bitwise_equal(operator):
    inputs = make(Case(operator, B=1, T=150, lengths=(70, 0, 80), dtype=torch.bfloat16))
    first = computed(*inputs)
    for _ in range(3):
        again = computed(*inputs)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("algebra", ["rewy", "conventional", "autograd"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_fresh_memory_is_not_read(operator, algebra):
    case = Case(operator, B=1, T=100, lengths=(70, 0, 20))
    plain = computed(*make(case), algebra=algebra)
    with poisoned():
        found = computed(*make(case), algebra=algebra)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("operator", OPERATORS)
def test_inputs_are_never_modified(operator):
    x, do, dht = make(Case(operator, B=1, T=100, lengths=(70, 0, 20)))
    given = [t for t in (*x, do, dht) if t is not None]
    copies = [t.clone() for t in given]
    computed(x, do, dht, use_qk_l2norm_in_kernel=True)
    rewy.delta_attention_step(**arguments(x))
    assert all(torch.equal(a, b) and a._version == 0 for a, b in zip(given, copies, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_are_not_the_inputs(operator):
    """Not even where they are equal: an empty sequence's final state may be written without touching the initial."""
    x, _, _ = make(Case(operator, B=1, T=10, lengths=(0, 10)))
    o, ht = attention(x)
    before = x.initial_state.clone()
    ht.zero_()
    o.zero_()
    assert torch.equal(x.initial_state, before)


def strided(t):
    """The same values in memory that is not contiguous anywhere."""
    wide = t.new_full((*t.shape, 3), float("nan"))
    wide[..., 1] = t
    return wide[..., 1]


@pytest.mark.parametrize("view", ["strided", "expanded", "sliced"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_views(operator, view):
    x, do, dht = make(Case(operator, T=70))
    if view == "expanded":  # one sequence for both rows, one gradient summed by nobody
        x = x._replace(**{n: t[:1].expand_as(t) for n, t in x._asdict().items() if t is not None})
        viewed, do_viewed, dht_viewed = x, do[:1, :1].expand_as(do), dht
        do = do_viewed.contiguous()
        x = x._replace(**{n: t.contiguous() for n, t in x._asdict().items() if t is not None})
    elif view == "strided":
        viewed = x._replace(**{n: strided(t) for n, t in x._asdict().items() if t is not None})
        do_viewed, dht_viewed = strided(do), strided(dht)
    else:  # q, k, v as slices of one projection
        fused = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], -1)
        q, k, v = (
            part.unflatten(-1, t.shape[2:])
            for part, t in zip(fused.split([32, 32, 96], -1), (x.q, x.k, x.v), strict=True)
        )
        viewed, do_viewed, dht_viewed = x._replace(q=q, k=k, v=v), do.flip(1).flip(1), dht
    y = Operands(*(None if t is None else t.detach().requires_grad_() for t in viewed))
    o, ht = attention(y)
    wanted = {n: t for n, t in arguments(y).items() if t is not None and t.requires_grad}
    found = torch.autograd.grad([o, ht], list(wanted.values()), [do_viewed, dht_viewed])
    plain = computed(x, do, dht)
    assert torch.equal(o, plain["o"]) and torch.equal(ht, plain["ht"])
    for name, grad in zip(wanted, found, strict=True):
        assert torch.equal(grad, plain["dh0" if name == "initial_state" else f"d{name}"]), name


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "erase", "write", "initial_state"])
def test_gradients_of_one_input_alone(name):
    x, do, dht = make(Case("gdn2", T=70))
    alone = x._replace(**{name: getattr(x, name).clone().requires_grad_()})
    grad = torch.autograd.grad(attention(alone), [getattr(alone, name)], [do, dht])[0]
    assert error(grad, exact(x, do, dht)["dh0" if name == "initial_state" else f"d{name}"]) <= EXACT


def test_no_gradient_no_graph():
    x = make(Case("kda", T=20))[0]
    o, ht = attention(x)
    assert not o.requires_grad and not ht.requires_grad
    with torch.no_grad():
        assert not attention(leaves(x))[0].requires_grad
    with torch.inference_mode():
        assert not attention(x)[0].requires_grad


@pytest.mark.parametrize("reduced", [torch.sum, torch.linalg.vector_norm], ids=["sum", "norm"])
def test_second_derivatives_are_refused(reduced):
    """Also behind a constant gradient, where torch's own once_differentiable would call ours a constant."""
    x = leaves(make(Case("kda", T=20))[0])
    for o in (attention(x)[0], prologue.l2norm(x.q), prologue.sigmoid_beta(x.erase, False)):
        with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
            torch.autograd.grad(reduced(o), [x.q, x.erase], create_graph=True, allow_unused=True)


@pytest.mark.parametrize("g", [torch.float32, torch.bfloat16], ids=["g-fp32", "g-bf16"])
@pytest.mark.parametrize("beta", [torch.float32, torch.bfloat16], ids=["beta-fp32", "beta-bf16"])
@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda", "gdn2"])
def test_gradients_come_in_their_inputs_dtypes(operator, beta, g):
    x, do, dht = make(Case(operator, T=70, dtype=torch.bfloat16))
    x = x._replace(g=x.g.to(g), erase=x.erase.to(beta), write=None if x.write is None else x.write.to(beta))
    found = computed(x, do, dht)
    for name, t in arguments(x).items():
        if t is not None:
            assert found["dh0" if name == "initial_state" else f"d{name}"].dtype == t.dtype
    assert found["o"].dtype == torch.bfloat16 and found["ht"].dtype == torch.float32
    expected = exact(x, do, dht)
    assert all(error(found[name], expected[name]) < 2e-2 for name in found)


@pytest.mark.parametrize("state", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_state_dtypes(state):
    """The state is carried in fp32 whatever it comes in; its gradient goes back in that."""
    x, do, dht = make(Case("kda", T=70, dtype=torch.bfloat16))
    found = computed(x._replace(initial_state=x.initial_state.to(state)), do, dht)
    assert found["ht"].dtype == torch.float32 and found["dh0"].dtype == state


@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast(operator):
    """As for a matrix product: fp32 q, k, v are computed in bf16, gates and states stay, gradients come in fp32."""
    x, do, dht = make(Case(operator, T=70, dtype=torch.float32))
    x = leaves(x)
    with torch.autocast("cpu", torch.bfloat16):
        o, ht = attention(x)
    assert o.dtype == torch.bfloat16 and ht.dtype == torch.float32
    wanted = [t for t in x if t is not None]
    found = torch.autograd.grad([o, ht], wanted, [do.bfloat16(), dht])
    assert all(grad.dtype == torch.float32 for grad in found)
    by_hand = computed(x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16()), do.bfloat16(), dht)
    assert torch.equal(o, by_hand["o"]) and torch.equal(found[0], by_hand["dq"].float())
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(make(Case(operator, T=5))[0])[0].dtype == torch.float64


@pytest.mark.parametrize("operator", OPERATORS)
def test_signatures_one_after_another(operator):
    """Other head sizes and dtypes, states given and not, packed and dense, in one process: nothing is reused."""
    for K, V in ((64, 32), (16, 48), (32, 32)):
        for options in (dict(), dict(initial_state=False), dict(B=1, lengths=(30, 10))):
            for dtype in (torch.bfloat16, torch.float32):
                case = Case(operator, **dict(T=40, H=1, HV=1, K=K, V=V, dtype=dtype) | options)
                inputs = make(case)
                assert_close(computed(*inputs), exact(*inputs), 2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_threads_of_the_backward():
    """The backward runs on autograd's own thread, where no context of the caller is."""
    x, do, dht = make(Case("kda", T=70))
    results = []
    threads = [threading.Thread(target=lambda: results.append(computed(x, do, dht))) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    plain = computed(x, do, dht)
    assert len(results) == 3 and all(torch.equal(r[n], plain[n]) for r in results for n in plain)
