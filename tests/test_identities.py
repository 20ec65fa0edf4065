"""What must hold between calls, whatever the right numbers are; no oracle is asked."""

from __future__ import annotations

import pytest
import torch
from checks import EXACT, GATED, assert_close
from torch import Tensor

import rewy
from rewy.problem import OPERATORS, Operands
from rewy.testing import Case, arguments, computed, error, make


def test_gdn_without_decay_is_deltanet():
    x, do, dht = make(Case("gated_delta_rule", T=100, gate="G0"))
    gated = computed(x, do, dht)
    gated.pop("dg")
    assert_close(gated, computed(x._replace(g=None), do, dht), EXACT)


def test_kda_with_one_decay_a_head_is_gdn():
    x, do, dht = make(Case("gated_delta_rule", T=100, gate="GM"))
    kda = computed(x._replace(g=x.g[..., None].expand(*x.g.shape, x.q.shape[-1])), do, dht)
    kda["dg"] = kda["dg"].sum(-1)
    assert_close(kda, computed(x, do, dht), EXACT)


def test_gdn2_with_one_gate_is_kda():
    x, do, dht = make(Case("kda", T=100, gate="GM"))
    erase, write = (
        x.erase[..., None].expand(*x.erase.shape, channels) for channels in (x.q.shape[-1], x.v.shape[-1])
    )
    gdn2 = computed(x._replace(erase=erase, write=write), do, dht)
    gdn2["dbeta"] = gdn2.pop("derase").sum(-1) + gdn2.pop("dwrite").sum(-1)
    assert_close(gdn2, computed(x, do, dht), EXACT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_one_packed_sequence_is_dense(operator):
    x, do, dht = make(Case(operator, B=1, T=100))
    packed = computed(x._replace(cu_seqlens=torch.tensor([0, 100])), do, dht)
    assert_close(packed, computed(x, do, dht), EXACT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_sequences_are_separate_ones(operator):
    lengths = (70, 1, 64, 0, 15)
    x, do, dht = make(Case(operator, B=1, T=sum(lengths), lengths=lengths))
    packed = computed(x, do, dht)
    parts, start = [], 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        parts.append(computed(rows_of(x, rows, n), do[:, rows], dht[n : n + 1]))
        start += length
    whole = {name: torch.cat([p[name] for p in parts], 0 if name in ("ht", "dh0") else 1) for name in packed}
    assert_close(packed, whole, EXACT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_grouped_heads_are_repeated_ones(operator):
    x, do, dht = make(Case(operator, T=70, H=2, HV=6))
    repeated = computed(x._replace(q=x.q.repeat_interleave(3, 2), k=x.k.repeat_interleave(3, 2)), do, dht)
    for name in ("dq", "dk"):
        repeated[name] = repeated[name].unflatten(2, (2, 3)).sum(3)
    assert_close(computed(x, do, dht), repeated, EXACT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_initial_state_is_zero(operator):
    x, do, dht = make(Case(operator, T=100))
    zeros = computed(x._replace(initial_state=torch.zeros_like(x.initial_state)), do, dht)
    zeros.pop("dh0")
    none = computed(x._replace(initial_state=None), do, dht)
    assert_close(zeros, none, 0.0)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("operator", OPERATORS)
def test_chained_parts_are_the_whole(operator, parts):
    """Final state into initial state forwards, its gradient back: what ranks of a split sequence exchange."""
    x, do, dht = make(Case(operator, T=160, gate="GM"))
    whole = computed(x, do, dht)
    spans = [slice(n * 160 // parts, (n + 1) * 160 // parts) for n in range(parts)]
    states = [x.initial_state]
    for span in spans[:-1]:
        states.append(computed(rows_of(x, span)._replace(initial_state=states[-1]), do[:, span], dht)["ht"])
    found, carried = [], dht
    for span, state in zip(reversed(spans), reversed(states), strict=True):
        part = computed(rows_of(x, span)._replace(initial_state=state), do[:, span], carried)
        found.insert(0, part)
        carried = part["dh0"]
    joined = {name: torch.cat([p[name] for p in found], 1) for name in whole if name not in ("ht", "dh0")}
    assert_close(joined | {"ht": found[-1]["ht"], "dh0": found[0]["dh0"]}, whole, EXACT)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)
@pytest.mark.parametrize("gate", ["GL1", "GQ", "GX1000"])
@pytest.mark.parametrize("operator", GATED)
def test_first_decay_of_an_empty_state_has_no_gradient(operator, gate, dtype):
    """There is nothing to decay: 0 itself where no later token is summed over, rounding elsewhere."""
    one = make(Case(operator, T=1, gate=gate, dtype=dtype, initial_state=False))
    assert not computed(*one)["dg"].any()
    long = make(Case(operator, T=150, gate=gate, dtype=dtype, initial_state=False))
    dg = computed(*long)["dg"].double()
    assert dg[:, 0].norm() <= 4 * torch.finfo(dtype).eps * dg.norm()
    packed = make(Case(operator, B=1, T=150, lengths=(70, 80), gate=gate, dtype=dtype, initial_state=False))
    dg = computed(*packed)["dg"].double()
    assert dg[:, [0, 70]].norm() <= 4 * torch.finfo(dtype).eps * dg.norm()


@pytest.mark.parametrize("P", [1, 30, 64, 100])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_past_does_not_see_the_future(operator, P):
    """With a loss on the tokens before P nothing at P or after moves an output or a gradient before P."""
    x, do, _ = make(Case(operator, T=140, dht=False))
    do[:, P:] = 0
    y, _, _ = make(Case(operator, T=140, dht=False, gate="GX1000", seed=1))
    future = Operands(
        *(a if a is None else torch.cat([a[:, :P], b[:, P:]], 1) for a, b in zip(x[:6], y[:6], strict=True)),
        x.initial_state,
    )
    first, second = computed(x, do, None), computed(future, do, None)
    for name in first.keys() - {"ht"}:
        a, b = (r[name] if name == "dh0" else r[name][:, :P] for r in (first, second))
        assert error(a, b) <= EXACT, name
        assert name in ("o", "dh0") or not second[name][:, P:].any(), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_chunk_size_changes_rounding_only(operator):
    x, do, dht = make(Case(operator, T=100, gate="GM"))
    sizes = [computed(x, do, dht, chunk_size=size) for size in (16, 32, 64)]
    assert_close(sizes[0], sizes[2], EXACT)
    assert_close(sizes[1], sizes[2], EXACT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_steps_are_the_chunked_forward(operator):
    """A prompt in chunks, then token by token with the state of the step before."""
    x, do, dht = make(Case(operator, T=40))
    whole = computed(x, do, dht)
    prompt = rows_of(x, slice(0, 33))
    o, state = rewy.delta_attention(**arguments(prompt), output_final_state=True)
    outputs = [o]
    for t in range(33, 40):
        token = rows_of(x, slice(t, t + 1))._replace(initial_state=state)
        o, state = rewy.delta_attention_step(**arguments(token), output_final_state=True)
        outputs.append(o)
    assert error(torch.cat(outputs, 1), whole["o"]) <= EXACT
    assert error(state, whole["ht"]) <= EXACT


def rows_of(x: Operands, rows: slice, sequence: int | None = None) -> Operands:
    """Some tokens of the operands, and one sequence's state of packed ones."""

    def cut(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[:, rows]

    state = x.initial_state
    if sequence is not None and state is not None:
        state = state[sequence : sequence + 1]
    return Operands(*map(cut, x[:6]), state)
