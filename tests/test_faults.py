"""The checks themselves: every planted fault exceeds a budget, so a green test means something."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from checks import GATED

from rewy.algebra import adjoint, chunked, pairs
from rewy.algebra import rewy as rewy_algebra
from rewy.backends.reference import Reference
from rewy.problem import OPERATORS, Operands
from rewy.testing import Case, budgets, computed, error, errors, exact, fenced, make, poisoned, verify
from rewy.testing.cases import log_decay

BF16 = dict(B=1, T=100, V=16, dtype=torch.bfloat16)  # K = V, so that the gates of GDN2 can be swapped


def exceeding(x: Operands, case: Case) -> set[str]:
    """The tensors out of budget when these operands are computed instead of the case's."""
    true, do, dht = make(case)
    expected = exact(true, do, dht)
    allowed = budgets(true, do, dht, expected)
    found = errors(computed(x, do, dht), expected)
    return {name for name, value in found.items() if not value <= allowed[name]}


@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_planted(operator):
    case = Case(operator, **BF16)
    assert not exceeding(make(case)[0], case)


@pytest.mark.parametrize("operator", GATED)
@pytest.mark.parametrize("gate", ["GL10", "GL1"])
def test_no_decay(operator, gate):
    case = Case(operator, gate=gate, **BF16)
    x = make(case)[0]
    assert exceeding(x._replace(g=torch.zeros_like(x.g)), case) >= {"o", "ht", "dq", "dk", "dv", "dg", "dh0"}


@pytest.mark.parametrize("operator", GATED)
def test_decay_one_token_late(operator):
    case = Case(operator, gate="GM", **BF16)
    x = make(case)[0]
    late = x.g.roll(1, 1)
    late[:, 0] = 0
    assert exceeding(x._replace(g=late), case) >= {"o", "dq", "dk", "dv", "dg"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_initial_state_dropped(operator):
    case = Case(operator, **BF16)
    x = make(case)[0]
    assert exceeding(x._replace(initial_state=torch.zeros_like(x.initial_state)), case) >= {"o", "dq"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_gates_swapped(operator):
    """Erase for write, or where one gate is both, its complement."""
    case = Case(operator, **BF16)
    x = make(case)[0]
    swapped = x._replace(erase=1 - x.erase) if x.write is None else x._replace(erase=x.write, write=x.erase)
    assert exceeding(swapped, case) >= {"o", "ht", "dq", "dk", "dv"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_one_gradient_zeroed(operator):
    """Each in turn is out of its own budget."""
    inputs = make(Case(operator, **BF16))
    expected = exact(*inputs)
    allowed = budgets(*inputs, expected)
    for name, tensor in expected.items():
        assert error(torch.zeros_like(tensor), tensor) > allowed[name], name


@pytest.mark.parametrize("operator", OPERATORS)
def test_neighbours_swapped(operator):
    """Two tokens of a hundred exchanged in one result."""
    inputs = make(Case(operator, **BF16))
    expected = exact(*inputs)
    allowed = budgets(*inputs, expected)
    for name in expected.keys() - {"ht", "dh0"}:
        swapped = expected[name].clone()
        swapped[:, [50, 51]] = swapped[:, [51, 50]]
        assert error(swapped, expected[name]) > allowed[name], name


def inclusive_wy(c, stage):
    diagonal = (c.erased * c.k).sum(-1)
    return pairs.unit_lower_inverse(stage.scores(c.erased, c.k), torch.matmul) / (1 + diagonal)[..., None]


def strict_attention(c, stage):
    return c.problem.scale * stage.scores(c.q, c.k)


def inclusive_dl(a, dR, U, S):
    return -a.mm(dR, U.mT).tril(), -a.mm(dR, S.mT)


def inclusive(adjoint_of_pairs):
    def wrong(self, M, a, k):
        da, dk, dG = adjoint_of_pairs(self, M, a, k)
        diagonal = M.diagonal(dim1=-2, dim2=-1)[..., None]
        return da + diagonal * k, dk + diagonal * a, dG

    return wrong


def no_dx(a, dR, U, S):
    return -a.mm(dR, U.mT).tril(-1), torch.zeros_like(dR @ S.mT)


def constant_inverse(a, dR, U, S):
    return torch.zeros_like(dR @ U.mT), -a.mm(dR, S.mT)


def exclusive_reverse_cumsum(x):
    return x.flip(-2).cumsum(-2).flip(-2) - x


INCLUSIVE_PAIRS = [
    (kind, "adjoint", inclusive(kind.adjoint)) for kind in (pairs.WeightedPairs, pairs.CentredPairs)
]
# What is replaced by what, and what must then be out of budget.
FAULTS: dict[str, tuple[list[tuple[object, str, Callable]], set[str]]] = {
    "strict mask of L inclusive": ([(chunked, "wy_inverse", inclusive_wy)], {"o", "dk", "dv"}),
    "mask of A strict": ([(chunked, "attention", strict_attention)], {"o"}),
    "strict mask of dL inclusive": (
        [(rewy_algebra, "out_of_wy", inclusive_dl), *INCLUSIVE_PAIRS],
        {"dk", "dbeta", "derase"},
    ),
    "dX forgotten": ([(rewy_algebra, "out_of_wy", no_dx)], {"dk"}),
    "inverse treated as constant": ([(rewy_algebra, "out_of_wy", constant_inverse)], {"dk"}),
    "dU for dR": ([(rewy_algebra, "into_wy", lambda a, T, dU: dU)], {"dk", "dv"}),
    "gate gradient one token late": ([(adjoint, "_reverse_cumsum", exclusive_reverse_cumsum)], {"dg"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_fault_in_the_algebra(operator, fault, monkeypatch):
    patches, touched = FAULTS[fault]
    case = Case(operator, **BF16)
    inputs = make(case)
    expected = exact(*inputs)
    allowed = budgets(*inputs, expected)
    for module, name, wrong in patches:
        monkeypatch.setattr(module, name, wrong)
    found = errors(computed(*inputs), expected)
    assert {n for n, value in found.items() if not value <= allowed[n]} >= touched & found.keys()


@pytest.mark.parametrize("operator", OPERATORS)
def test_last_partial_chunk_skipped(operator):
    """100 tokens are one chunk and 36 more, which a loop over whole chunks never sees."""
    inputs = make(Case(operator, **BF16))
    expected = exact(*inputs)
    allowed = budgets(*inputs, expected)
    for name in expected.keys() - {"ht", "dh0"}:
        skipped = expected[name].clone()
        skipped[:, 64:] = 0
        assert error(skipped, expected[name]) > allowed[name], name


def test_final_state_gradient_ignored():
    x, do, dht = make(Case("kda", **BF16 | dict(T=10)))
    expected = exact(x, do, dht)
    allowed = budgets(x, do, dht, expected)
    found = errors(computed(x, do, None), expected)
    assert all(found[name] > allowed[name] for name in ("dk", "dv", "dg", "dbeta", "dh0"))


def test_error_refuses_to_compare_what_differs():
    with pytest.raises(ValueError, match="shapes differ"):
        error(torch.zeros(2, 1), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="results differ"):
        errors({"o": torch.zeros(1)}, {"o": torch.zeros(1), "dq": torch.zeros(1)})
    assert error(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])) == float("inf")
    assert error(torch.tensor([float("inf")]), torch.tensor([1.0])) == float("inf")
    assert error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5


def test_inputs_keep_the_state_alive():
    """Unit keys, a state that is there, some of it left at the end, and results that depend on it."""
    x, do, dht = make(Case("gated_delta_rule", T=64))
    torch.testing.assert_close(x.k.norm(dim=-1), torch.ones(2, 64, 2, dtype=torch.float64))
    assert x.initial_state.abs().mean() > 0.1
    without = exact(x._replace(initial_state=None), do, dht)
    assert error(without["ht"], exact(x, do, dht)["ht"]) > 1e-3
    assert torch.equal(make(Case("kda"))[0].g, make(Case("kda"))[0].g)
    assert not torch.equal(make(Case("kda"))[0].g, make(Case("kda", seed=1))[0].g)


@pytest.mark.parametrize("gate", ["GL", "G", "GZ", "slow", "GX"])
def test_unknown_decay(gate):
    with pytest.raises(ValueError, match="gate"):
        log_decay(gate, (1, 2, 3), torch.Generator())


def test_poison_is_seen_and_taken_away():
    with poisoned():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    inside = fenced(torch.ones(5, 3))
    around = torch.empty(0).set_(inside.untyped_storage())
    assert inside.eq(1).all() and around.isnan().sum() == around.numel() - 15


def test_verify_is_green_and_sees_a_fault(monkeypatch):
    monkeypatch.setattr(sys.modules[verify.__module__], "QUICK", {"small": Case("", B=1, T=70, H=1, HV=2)})
    rows = verify("cpu")
    assert all(row.ok for row in rows)
    assert {row.operator for row in rows} == set(OPERATORS)
    assert {row.tensor for row in rows} >= {
        "o",
        "ht",
        "dq",
        "dk",
        "dv",
        "dg",
        "dbeta",
        "derase",
        "dwrite",
        "dh0",
    }
    assert {row.case for row in rows} == {
        f"small, {d}" for d in ("float64", "float32", "bfloat16", "float16")
    }

    monkeypatch.setattr(rewy_algebra, "out_of_wy", no_dx)
    assert {row.tensor for row in verify("cpu") if not row.ok} >= {"dk", "dbeta", "derase"}

    def crash(*_):
        raise RuntimeError("launch failed\nand more")

    monkeypatch.setattr(rewy_algebra, "out_of_wy", crash)
    rows = verify("cpu")
    assert not any(row.ok for row in rows)
    assert {(row.tensor, row.note) for row in rows} == {("call", "RuntimeError: launch failed")}


def test_verify_leaves_out_what_a_backend_does_not_take(monkeypatch):
    cases = {f"K = {K}": Case("", B=1, T=3, H=1, HV=1, K=K) for K in (16, 32)}
    monkeypatch.setattr(sys.modules[verify.__module__], "QUICK", cases)
    takes = {16}
    monkeypatch.setattr(Reference, "supports", lambda _, problem: (problem.K in takes, f"K = {problem.K}"))
    rows = verify("cpu")
    assert all(row.ok for row in rows)
    assert {row.case.split(",")[0]: row.note for row in rows} == {"K = 16": "", "K = 32": "K = 32"}
    takes.clear()
    with pytest.raises(ValueError, match="'reference' cannot be verified on cpu: K = 16"):
        verify("cpu")


def test_verify_refuses_what_it_cannot_run():
    with pytest.raises(ValueError, match="backend must be one of"):
        verify("cpu", "no such backend")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' cannot be verified on cpu: "):
            verify("cpu", "cuda")
