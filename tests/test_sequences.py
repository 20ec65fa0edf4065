"""Packed sequences: where they begin and end, that there may be none, and what lies past the last."""

from __future__ import annotations

import pytest
import torch
from checks import EXACT, assert_close, assert_exact

import rewy
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, computed, error, exact, fenced, leaves, make, poisoned

PACKS = [
    (64, 0),
    (0, 64),
    (128, 0, 128),
    (0, 64, 0, 0, 36),
    (100, 0),
    (15, 85, 156),
    (1, 1, 1),
    (17, 33, 47),
    (63, 65, 2, 31),
    (5, 130, 7, 75),
]


@pytest.mark.parametrize("lengths", PACKS, ids=lambda p: "-".join(map(str, p)))
@pytest.mark.parametrize("operator", OPERATORS)
def test_packs(operator, lengths):
    """Empty documents first, last, in the middle and repeated; tails of every kind as last document."""
    assert_exact(Case(operator, B=1, T=sum(lengths), H=1, HV=2, lengths=lengths))


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_empty_sequence_passes_its_state_through(operator):
    lengths = (30, 0, 34)
    x, do, dht = make(Case(operator, B=1, T=64, lengths=lengths))
    found = computed(x, do, dht)
    assert torch.equal(found["ht"][1], x.initial_state[1])
    assert torch.equal(found["dh0"][1], dht[1])
    without = computed(x._replace(initial_state=None), do, dht)
    assert not without["ht"][1].any()


@pytest.mark.parametrize("lengths", [(73, 42, 94), (211,), (0,), ()], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_tokens_past_the_last_offset(operator, lengths):
    """They are in no sequence: zeros in o and in every gradient, whatever they hold and memory held before."""
    case = Case(operator, B=1, T=256, H=1, HV=2, lengths=lengths)
    x, do, dht = make(case)
    end = sum(lengths)
    for t in (*x[:6], do):
        if t is not None:
            t[:, end:] = float("nan")
    with poisoned():
        found = computed(x, do, dht)
    clean, clean_do, _ = make(case)
    assert_close(found, exact(clean, clean_do, dht), EXACT)
    for name in found.keys() - {"ht", "dh0"}:
        assert not found[name][:, end:].any(), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_offset_dtypes(operator, dtype):
    x, do, dht = make(Case(operator, B=1, T=70, lengths=(20, 50)))
    plain = computed(x, do, dht)
    other = computed(x._replace(cu_seqlens=x.cu_seqlens.to(dtype)), do, dht)
    assert all(torch.equal(other[name], plain[name]) for name in plain)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_tokens(operator, packed):
    """T = 0: empty tensors, final states that are the initial ones, and their gradients."""
    x, do, dht = make(Case(operator, B=1 if packed else 2, T=0, lengths=(0, 0, 0) if packed else None))
    found = computed(x, do, dht)
    assert found["o"].shape == do.shape
    assert torch.equal(found["ht"], x.initial_state) and torch.equal(found["dh0"], dht)
    assert all(found[f"d{name}"].shape == getattr(x, name).shape for name in ("q", "k", "v"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_batch(operator):
    x, do, dht = make(Case(operator, B=0, T=5))
    found = computed(x, do, dht)
    assert found["o"].shape == (0, 5, 4, 24) and found["ht"].shape == (0, 4, 16, 24)


@pytest.mark.parametrize("T", [1, 2, 15, 17, 31, 33, 39, 47, 63, 65, 75, 130])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tails_read_nothing_beyond(operator, T):
    """Rows past the end take part in nothing: NaN all around every tensor, fresh memory NaN, 5 runs bit for bit."""
    case = Case(operator, B=1, T=T, H=1, HV=2, K=12, V=20, lengths=(T - T // 3, T // 3), dtype=torch.float32)
    plain = computed(*make(case))
    for _ in range(5):
        x, do, dht = make(case)
        around = x._replace(**{name: fenced(t) for name, t in x._asdict().items() if t is not None})
        with poisoned():
            found = computed(around, fenced(do), fenced(dht))
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("K", [48, 60, 100])
@pytest.mark.parametrize("operator", ["kda", "gdn2"])
def test_head_sizes_read_nothing_beyond(operator, K):
    case = Case(operator, B=1, T=20, H=1, HV=1, K=K, V=80)
    x, do, dht = make(case)
    around = x._replace(**{name: fenced(t) for name, t in x._asdict().items() if t is not None})
    with poisoned():
        assert_close(computed(around, fenced(do), fenced(dht)), exact(x, do, dht), EXACT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_transposed_and_packed(operator):
    """Views of [B,H,T,D] memory, as head-first layers pass them, with documents at odd offsets."""
    x, do, dht = make(Case(operator, B=1, T=256, lengths=(15, 85, 156)))
    head_first = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2)
        for name, t in zip(x._fields[:6], x[:6], strict=True)
        if t is not None
    }
    plain, viewed = (
        computed(x, do, dht),
        computed(x._replace(**head_first), do.transpose(1, 2).contiguous().transpose(1, 2), dht),
    )
    assert all(torch.equal(viewed[name], plain[name]) for name in plain)


@pytest.mark.parametrize("operator", OPERATORS)
def test_steps_of_packed_sequences(operator):
    x, _, _ = make(Case(operator, B=1, T=6, lengths=(2, 0, 3)))
    expected = exact(x, torch.zeros(1, 6, 4, 24), None)
    o, ht = rewy.delta_attention_step(**arguments(x), output_final_state=True)
    assert error(o, expected["o"]) <= EXACT and error(ht, expected["ht"]) <= EXACT


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_final_state_alone(operator):
    """A loss that never sees o."""
    x, do, dht = make(Case(operator, T=70))
    x = leaves(x)
    _, ht = rewy.delta_attention(**arguments(x), output_final_state=True)
    expected = exact(x, torch.zeros_like(do), dht)
    inputs = {name: t for name, t in arguments(x).items() if t is not None}
    for name, grad in zip(inputs, torch.autograd.grad(ht, list(inputs.values()), dht), strict=True):
        assert error(grad, expected["dh0" if name == "initial_state" else f"d{name}"]) <= EXACT
