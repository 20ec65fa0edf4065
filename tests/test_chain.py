"""Packed sequences whose offsets the host does not read: the chain, here on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checks import EXACT, assert_close, assert_exact

import rewy
from rewy.algebra import layout, scan
from rewy.algebra.backend import AlgebraBackend
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, computed, errors, exact, leaves, make, poisoned

# Empty sequences first, last, between and alone; tails of every kind; none; one; tokens past the last.
PACKS = [
    ((64, 0), 64),
    ((0, 64), 64),
    ((0, 64, 0, 0, 36), 130),
    ((1, 1, 1), 3),
    ((5, 130, 7, 75), 217),
    ((64, 128), 192),
    ((100,), 100),
    ((100,), 211),
    ((0,), 7),
    ((0, 0, 0), 0),
    ((), 70),
]


@pytest.fixture(autouse=True)
def chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No backend waits for a device, and every test here goes by a chain."""
    arithmetic, chained, made = AlgebraBackend.arithmetic, layout._chained, []

    def counted(offsets: torch.Tensor, T: int, C: int) -> tuple[torch.Tensor, layout.Chain]:
        made.append(offsets)
        return chained(offsets, T, C)

    monkeypatch.setattr(AlgebraBackend, "arithmetic", lambda *a: replace(arithmetic(*a), waits=False))
    monkeypatch.setattr(layout, "_chained", counted)
    yield
    assert made


@pytest.mark.parametrize("algebra", ["rewy", "conventional"])
@pytest.mark.parametrize(("lengths", "T"), PACKS, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_packs(operator, lengths, T, algebra):
    assert_exact(Case(operator, B=1, T=T, H=1, HV=3, lengths=lengths), algebra=algebra)


@pytest.mark.parametrize("chunk_size", [16, 32])
@pytest.mark.parametrize("gate", ["GL10", "GX1000", "GQ"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gates_and_chunks(operator, gate, chunk_size):
    case = Case(operator, B=1, T=150, lengths=(33, 0, 16, 90), gate=gate, chunk_size=chunk_size)
    assert_exact(case)
    assert_exact(case, disable_recompute=True)


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("dht", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_states(operator, dht, initial_state):
    assert_exact(Case(operator, B=1, T=140, lengths=(65, 0, 64, 3), dht=dht, initial_state=initial_state))


@pytest.mark.parametrize("operator", OPERATORS)
def test_state_layouts(operator):
    """States as [V,K] are states as [K,V] transposed, and so is the gradient of the first ones."""
    x, do, dht = make(Case(operator, B=1, T=140, lengths=(65, 0, 64, 3)))

    def results(v_first: bool) -> list[torch.Tensor]:
        named = {name: t for name, t in arguments(leaves(x)).items() if t is not None}
        first, last = (t.detach().mT.contiguous() if v_first else t for t in (x.initial_state, dht))
        named["initial_state"] = first.requires_grad_()
        o, state = rewy.delta_attention(**named, output_final_state=True, state_v_first=v_first)
        wanted = [t for name, t in named.items() if t.requires_grad and name != "initial_state"]
        *gradients, dh0 = torch.autograd.grad([o, state], [*wanted, named["initial_state"]], [do, last])
        assert state.is_contiguous() and dh0.is_contiguous()
        return [o, *(t.mT if v_first else t for t in (state, dh0)), *gradients]

    assert all(torch.equal(a, b) for a, b in zip(results(False), results(True), strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_empty_sequence_passes_its_state_through(operator):
    x, do, dht = make(Case(operator, B=1, T=64, lengths=(0, 30, 0, 34, 0)))
    found = computed(x, do, dht)
    for n in (0, 2, 4):
        assert torch.equal(found["ht"][n], x.initial_state[n])
        assert torch.equal(found["dh0"][n], dht[n])


@pytest.mark.parametrize("lengths", [(73, 42, 94), (211,), (0,)], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_tokens_past_the_last_offset(operator, lengths):
    """They are in no sequence: zeros in o and in every gradient, whatever they hold and memory held before."""
    case = Case(operator, B=1, T=256, H=1, HV=2, lengths=lengths)
    x, do, dht = make(case)
    for t in (*x[:6], do):
        if t is not None:
            t[:, sum(lengths) :] = float("nan")
    with poisoned():
        found = computed(x, do, dht)
    clean, clean_do, _ = make(case)
    assert_close(found, exact(clean, clean_do, dht), EXACT)
    assert not any(found[name][:, sum(lengths) :].any() for name in found.keys() - {"ht", "dh0"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_given_offsets_are_left_alone(dtype):
    x, do, dht = make(Case("kda", B=1, T=140, lengths=(65, 0, 64, 3)))
    offsets = x.cu_seqlens.to(dtype)
    x = x._replace(cu_seqlens=offsets, initial_state=x.initial_state.clone())
    kept = offsets.clone(), x.initial_state.clone(), dht.clone()
    assert_close(computed(x, do, dht), exact(x, do, dht), EXACT)
    assert all(torch.equal(a, b) for a, b in zip(kept, (offsets, x.initial_state, dht), strict=True))


def test_the_table_takes_32_bits():
    """But for the rows and sequences that it names, which torch wants in 64."""
    tokens, chain = layout._chained(torch.tensor([0, 65, 65, 130]), T=140, C=64)
    assert tokens.view(-1, 64)[:, 0].tolist() == [0, 64, 65, 129, 140]
    assert chain.sequences.tolist() == [0, 0, 2, 2, 2] and chain.starts.tolist() == [0, 2, 2, 4]
    assert chain.starts.dtype is torch.int32


# What a chain could get wrong, and what then is.
FAULTS = {
    "a state that no sequence starts with": (
        "find",
        lambda self, step: self.states[:1].clone(),
        {"o", "ht", "dq", "dk", "dv", "dh0"},
    ),
    "states that are not left": ("leave", lambda self, step, states: None, {"o", "ht", "dq", "dk", "dv"}),
    "the sequence after": (
        "leave",
        lambda self, step, states: self.states.index_copy_(0, (self.sequences[step] + 1) % 3, states),
        {"o", "ht", "dh0"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_planted_faults(operator, fault, monkeypatch):
    method, wrong, noticed = FAULTS[fault]
    x, do, dht = make(Case(operator, B=1, T=140, lengths=(70, 0, 65)))
    monkeypatch.setattr(scan.Chained, method, wrong)
    found = errors(computed(x, do, dht), exact(x, do, dht))
    assert {name for name, e in found.items() if not e <= EXACT} >= noticed
