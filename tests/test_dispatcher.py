"""An eager call passes torch's dispatcher by; whoever stands in its way sees the operators as before."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from checks import EXACT
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import rewy
from rewy import autograd
from rewy.problem import OPERATORS, Options, describe
from rewy.testing import Case, arguments, error, leaves, make

FakeTensorMode = torch._subclasses.FakeTensorMode


class Seen(TorchDispatchMode):
    """The names of our operators, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rewy":
            self.names.append(func._opname)
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def inputs(operator="kda"):
    return make(Case(operator, T=40, K=8, V=12))[0]


def negative(t):
    """t by a tensor that only claims to be it: the dispatcher would negate what is in memory."""
    seen = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert seen.is_neg() and torch.equal(seen, t)
    return seen


@pytest.mark.parametrize("operator", OPERATORS)
def test_plain_calls_pass_it_by(operator, monkeypatch):
    def refused(*_):
        raise AssertionError("an operator was called")

    for name in ("forward", "backward", "step", "l2norm", "l2norm_backward"):
        monkeypatch.setattr(torch.ops.rewy, name, refused)
    x = inputs(operator)
    rewy.delta_attention(**arguments(leaves(x)), use_qk_l2norm_in_kernel=True)[0].sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        rewy.delta_attention(**arguments(leaves(x)))[0].sum().backward()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            rewy.delta_attention(**arguments(x))
            rewy.delta_attention_step(**arguments(x))
    with Seen(), pytest.raises(AssertionError, match="an operator was called"):
        rewy.delta_attention(**arguments(x))


@pytest.mark.parametrize("operator", OPERATORS)
def test_both_ways_give_the_same(operator):
    def outputs(x):
        o, ht = rewy.delta_attention(**arguments(x), output_final_state=True)
        return o, ht, *torch.autograd.grad(o.square().sum() + ht.sum(), [t for t in x if t is not None])

    x = leaves(inputs(operator))
    found = outputs(x)
    with Seen():
        assert all(torch.equal(a, b) for a, b in zip(found, outputs(x), strict=True))


def test_modes_see_operators():
    x = leaves(inputs())
    with Seen() as both:
        rewy.delta_attention(**arguments(x))[0].sum().backward()
    o = rewy.delta_attention(**arguments(x))[0]
    with Seen() as backward:
        o.sum().backward()
    with Seen() as step, torch.no_grad():
        rewy.delta_attention_step(**arguments(x))
    assert (both.names, backward.names, step.names) == (["forward", "backward"], ["backward"], ["step"])
    with Functions() as functions:
        rewy.delta_attention(**arguments(inputs()))
    assert "rewy.forward" in functions.names


def test_profiles_name_operators():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as events:
        rewy.delta_attention(**arguments(leaves(inputs())))[0].sum().backward()
    assert {"rewy::forward", "rewy::backward"} <= {event.name for event in events.events()}


def test_fake_tensors_are_not_computed():
    with FakeTensorMode() as mode:
        o, state = rewy.delta_attention(
            **{n: None if t is None else mode.from_tensor(t) for n, t in arguments(inputs()).items()},
            output_final_state=True,
        )
    assert (o.shape, state.shape) == ((2, 40, 4, 12), (2, 4, 8, 12))
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in (o, state))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_graphs_have_operators(mode):
    x = inputs()

    def call(q, k, v, g, beta):
        return rewy.delta_attention(q, k, v, g=g, beta=beta)[0]

    graph = make_fx(call, tracing_mode=mode)(*x[:5])
    assert [str(node.target) for node in graph.graph.nodes if "rewy" in str(node.target)] == [
        "rewy.forward.default"
    ]
    assert error(graph(*x[:5]), call(*x[:5])) <= EXACT


def test_subclasses_see_operators():
    names = []

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    x = inputs()
    o, _ = rewy.delta_attention(**arguments(x._replace(q=x.q.as_subclass(Named))))
    assert type(o) is Named and "rewy.forward" in names


@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_tensors_that_are_not_what_their_memory_says(kind, monkeypatch):
    """The dispatcher makes ordinary ones of them, so they have to pass it."""
    x = leaves(inputs())
    o = rewy.delta_attention(**arguments(x))[0]
    do = torch.randn_like(o) if kind == "negative" else torch.zeros_like(o)
    expected = torch.autograd.grad(o, [x.q, x.g], do, retain_graph=True)
    monkeypatch.setattr(autograd, "_FUNCTIONS", {})
    lazy = negative(do) if kind == "negative" else torch._efficientzerotensor(do.shape, dtype=do.dtype)
    found = torch.autograd.grad(o, [x.q, x.g], lazy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if kind == "negative":
        with torch.no_grad():
            assert torch.equal(rewy.delta_attention(**arguments(x._replace(q=negative(x.q))))[0], o)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch.func itself
def test_transforms_are_refused():
    x = inputs()

    def loss(q):
        return rewy.delta_attention(**arguments(x._replace(q=q)))[0].sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(x.q)


def test_a_problem_is_described_once():
    """Until anything about it differs that is more than a tensor's contents."""
    x, options = inputs(), Options(0.5, 64, True, "rewy")
    problem = describe(x, options)
    assert describe(x._replace(q=x.q + 1), options) is problem
    for other, changed in (
        (x._replace(q=x.q[:, :, :1], k=x.k[:, :, :1]), dict(H=1)),
        (x._replace(g=x.g[..., 0]), dict(operator=OPERATORS["gated_delta_rule"])),
        (x._replace(g=None), dict(operator=OPERATORS["delta_rule"])),
        (x._replace(initial_state=None), dict()),
    ):
        assert describe(other, options) == replace(problem, **changed)
    assert describe(x, options._replace(scale=0.25)) == replace(problem, scale=0.25)


def test_a_problem_equals_its_copies():
    problem = describe(inputs(), Options(0.5, 64, True, "rewy"))
    assert copy.deepcopy(problem) == pickle.loads(pickle.dumps(problem)) == problem


def test_contents_of_offsets_are_checked_every_time():
    x = make(Case("kda", B=1, T=40, lengths=(20, 20)))[0]
    rewy.delta_attention(**arguments(x))
    for offsets, message in (([0, 20, 41], "at or before T = 40"), ([0, 30, 20], "must not decrease")):
        with pytest.raises(ValueError, match=message):
            rewy.delta_attention(**arguments(x._replace(cu_seqlens=torch.tensor(offsets))))
