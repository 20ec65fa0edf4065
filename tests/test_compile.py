"""torch.compile sees three opaque operators: no break, no recompilation for other lengths."""

from __future__ import annotations

import pytest
import torch
from checks import EXACT, assert_operators_are_sound
from torch._dynamo.testing import CompileCounterWithBackend

import rewy
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, error, leaves, make

# Dynamo warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compiled(counter: CompileCounterWithBackend, **options):
    def run(given):
        o, ht = rewy.delta_attention(**given, output_final_state=True, **options)
        return o, ht, o.square().sum() + ht.sum()

    return torch.compile(run, backend=counter, fullgraph=True)


def run(function, x):
    x = leaves(x)
    o, ht, loss = function(arguments(x))
    wanted = [t for t in x if t is not None and t.requires_grad]
    return [o, ht, *torch.autograd.grad(loss, wanted)]


def eager(given):
    o, ht = rewy.delta_attention(**given, output_final_state=True)
    return o, ht, o.square().sum() + ht.sum()


@pytest.mark.parametrize("operator", OPERATORS)
def test_lengths_do_not_recompile(operator):
    """Once for the first length, once for any length."""
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter)
    for T in (40, 70, 100, 130):
        x = make(Case(operator, T=T, K=8, V=12))[0]
        assert all(error(a, b) <= EXACT for a, b in zip(run(function, x), run(eager, x), strict=True))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("operator", OPERATORS)
def test_packs_do_not_recompile(operator):
    """Neither for other offsets of as many sequences nor, after the second, for another number of them."""
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter)
    for lengths in ((30, 40), (60, 10), (10, 50, 10), (20, 0, 25, 25), (70, 0, 0, 0, 0)):
        x = make(Case(operator, B=1, T=70, K=8, V=12, lengths=lengths))[0]
        assert all(error(a, b) <= EXACT for a, b in zip(run(function, x), run(eager, x), strict=True))
    assert counter.frame_count <= 2


def test_batch_and_heads_compile():
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter)
    for B, H, HV in ((2, 2, 4), (3, 2, 4), (4, 1, 4), (2, 3, 3)):
        x = make(Case("kda", B=B, T=40, H=H, HV=HV, K=8, V=12))[0]
        assert all(error(a, b) <= EXACT for a, b in zip(run(function, x), run(eager, x), strict=True))


@pytest.mark.parametrize("lower_bound", [-5.0, -3.0])
def test_in_kernel_options_compile(lower_bound):
    x = leaves(make(Case("kda", T=40, K=8, V=12))[0])
    A_log, dt_bias = torch.zeros(4, requires_grad=True), torch.zeros(32, requires_grad=True)

    def layer():
        return rewy.chunk_kda(
            x.q, x.k, x.v, x.g, x.erase, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias,
        )[0]  # fmt: skip

    wanted = [x.q, x.k, x.v, x.g, x.erase, A_log, dt_bias]
    plain = layer()
    expected = torch.autograd.grad(plain.square().sum(), wanted)
    o = torch.compile(layer, backend="aot_eager", fullgraph=True)()
    found = torch.autograd.grad(o.square().sum(), wanted)
    assert all(error(a, b) <= EXACT for a, b in zip((o, *found), (plain, *expected), strict=True))


def test_inference_and_steps_compile():
    x = make(Case("gdn2", T=5, K=8, V=12))[0]
    for function in (rewy.delta_attention, rewy.delta_attention_step):
        call = torch.compile(
            lambda f=function: f(**arguments(x), output_final_state=True), backend="aot_eager", fullgraph=True
        )
        with torch.no_grad():
            for a, b in zip(call(), function(**arguments(x), output_final_state=True), strict=True):
                assert error(a, b) <= EXACT


@pytest.mark.parametrize("state_v_first", [False, True], ids=["keys first", "values first"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator, packed, state_v_first):
    case = Case(operator, B=1, T=40, K=8, V=12, dtype=torch.float32, lengths=(10, 0, 25) if packed else None)
    assert_operators_are_sound(*make(case), 0.3, 16, True, "rewy", state_v_first, "")
