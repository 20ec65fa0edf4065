"""What the backward costs: matrix products and memory, counted from what runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rewy.algebra import chunked, conventional, rewy
from rewy.algebra.arithmetic import Arithmetic
from rewy.problem import OPERATORS, Operands, Options, Problem, describe
from rewy.testing import Case, computed, make

FP64 = Arithmetic.of(torch.float64)
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


class Products(TorchDispatchMode):
    """Counts matrix products, and those with an operand in the memory of `watched`."""

    def __init__(self, watched: Tensor | None = None) -> None:
        super().__init__()
        self.watched = watched
        self.count = self.with_watched = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in PRODUCTS:
            self.count += 1
            if self.watched is not None:
                watched = self.watched.untyped_storage().data_ptr()
                self.with_watched += any(
                    t.untyped_storage().data_ptr() == watched
                    for t in tree_leaves(args)
                    if isinstance(t, Tensor)
                )
        return func(*args, **(kwargs or {}))


class PeakMemory(TorchDispatchMode):
    """The most bytes that were allocated at once by what ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given | self.known:
                self._allocated(t.untyped_storage())
        return out

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        size, address = storage.nbytes(), storage._cdata

        def freed() -> None:
            self.live -= size
            self.known.discard(address)

        self.known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, freed)


def counted(function: Callable[..., object], *args: object, watched: Tensor | None = None) -> Products:
    with Products(watched) as products:
        function(*args)
    return products


def around_t() -> dict[str, Tensor]:
    """T, what enters the WY update U = T (written − X S), and a gradient of U."""
    torch.manual_seed(0)
    M, HV, C, K, V = 3, 2, 16, 8, 12
    L = torch.randn(M, HV, C, C, dtype=torch.float64).tril(-1) / 4
    shapes = {"X": (C, K), "written": (C, V), "S": (K, V), "dU": (C, V)}
    t = {name: torch.randn(M, HV, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    return t | {"L": L, "T": torch.linalg.inv(torch.eye(C, dtype=torch.float64) + L)}


def by_rewy(t: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    dR = rewy.into_wy(FP64, t["T"], t["dU"])
    U = t["T"] @ (t["written"] - t["X"] @ t["S"])
    return *rewy.out_of_wy(FP64, dR, U, t["S"]), dR


def by_convention(t: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return conventional.through_inverse(FP64, *(t[name] for name in ("T", "X", "written", "S", "dU")))


def test_three_products_around_t():
    t = around_t()
    dR = rewy.into_wy(FP64, t["T"], t["dU"])
    into = counted(rewy.into_wy, FP64, t["T"], t["dU"])
    out = counted(rewy.out_of_wy, FP64, dR, t["written"], t["S"])
    assert (into.count, out.count) == (1, 2)


def test_seven_products_around_t():
    t = around_t()
    assert counted(by_convention, t).count == 7


@pytest.mark.parametrize("form", [by_rewy, by_convention])
def test_both_are_the_whole_adjoint(form):
    """The three products and the seven give all there is of dL, dX and d(w ⊙ v)."""
    t = around_t()
    inputs = [t[name].requires_grad_() for name in ("L", "X", "written")]
    T = torch.linalg.inv(torch.eye(16, dtype=torch.float64) + t["L"])
    U = T @ (t["written"] - t["X"] @ t["S"])
    expected = torch.autograd.grad(U, inputs, t["dU"])
    with torch.no_grad():
        found = form({name: tensor.detach() for name, tensor in t.items()})
    torch.testing.assert_close(found[0], expected[0].tril(-1))
    torch.testing.assert_close(found[1:], expected[1:])


def prepared(operator: str, algebra: str, **shape: int) -> tuple[Problem, Operands, list[Tensor], Tensor]:
    x, do, _ = make(Case(operator, dht=False, gate="GL10", **shape))
    problem = describe(x, Options(0.3, 64, False, algebra))
    _, _, kept = chunked.forward(problem, x, FP64)
    return problem, x, kept, do


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_backward_goes_through_the_three(operator, monkeypatch):
    """T meets one product per step of the scan, dU; the other two follow once; without them gradients are lost."""
    problem, x, kept, do = prepared(operator, "rewy", B=1, T=180, H=1, HV=1)
    calls = {"into_wy": 0, "out_of_wy": 0}
    whole = rewy.backward(problem, x, kept, do, None, FP64)
    products = counted(rewy.backward, problem, x, kept, do, None, FP64, watched=kept[0])
    assert products.with_watched == 3  # 180 tokens are 3 chunks

    for name in calls:
        monkeypatch.setattr(rewy, name, watch(calls, name, getattr(rewy, name)))
    rewy.backward(problem, x, kept, do, None, FP64)
    assert calls == {"into_wy": 3, "out_of_wy": 1}

    monkeypatch.setattr(
        rewy, "out_of_wy", lambda a, dR, U, S: (torch.zeros_like(kept[0]), torch.zeros_like(dR @ S.mT))
    )
    without = rewy.backward(problem, x, kept, do, None, FP64)
    assert not torch.allclose(without.k, whole.k) and not torch.allclose(without.erase, whole.erase)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_conventional_backward_goes_through_the_seven(operator, monkeypatch):
    problem, x, kept, do = prepared(operator, "conventional", B=1, T=180, H=1, HV=1)
    calls = {"through_inverse": 0}
    products = counted(conventional.backward, problem, x, kept, do, None, FP64, watched=kept[0])
    assert products.with_watched == 5  # W = T X, Tᵀ dW, Tᵀ dU, Tᵀ dT, (Tᵀ dT) Tᵀ
    monkeypatch.setattr(
        conventional, "through_inverse", watch(calls, "through_inverse", conventional.through_inverse)
    )
    conventional.backward(problem, x, kept, do, None, FP64)
    assert calls == {"through_inverse": 1}


def watch(calls: dict[str, int], name: str, function: Callable) -> Callable:
    def watched(*args):
        calls[name] += 1
        return function(*args)

    return watched


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_public_call_runs_them(operator, monkeypatch):
    calls = dict.fromkeys(("into_wy", "out_of_wy", "through_inverse"), 0)
    for module, name in ((rewy, "into_wy"), (rewy, "out_of_wy"), (conventional, "through_inverse")):
        monkeypatch.setattr(module, name, watch(calls, name, getattr(module, name)))
    inputs = make(Case(operator, T=70))
    computed(*inputs)
    assert calls == {"into_wy": 2, "out_of_wy": 1, "through_inverse": 0}
    computed(*inputs, algebra="conventional")
    assert calls == {"into_wy": 2, "out_of_wy": 1, "through_inverse": 1}


@pytest.mark.parametrize("operator", OPERATORS)
def test_products_of_the_whole_backward(operator):
    """One chunk, nothing recomputed.

    Both: A; Aᵀ do, Q̃ᵀ do, K̃ dS⁺ and X or W times its row; dA, dQ̃, dK̃; two for each of dA and dL; and the three or
    the seven. The conventional form adds W, and for scalar gates two Gram matrices, for channels four block products.
    """
    counts = {}
    for algebra, module in (("rewy", rewy), ("conventional", conventional)):
        problem, x, kept, do = prepared(operator, algebra, B=1, T=64, H=1, HV=1)
        counts[algebra] = counted(module.backward, problem, x, kept, do, None, FP64).count
    extra = {"delta_rule": 0, "gated_delta_rule": 2, "kda": 4, "gdn2": 4}[operator]
    assert counts == {"rewy": 12 + 3, "conventional": 12 + 7 + 1 + extra}


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_peak_memory(operator, recompute):
    """Of everything the backward allocates, gradients included."""
    peaks = {}
    for algebra, module in (("rewy", rewy), ("conventional", conventional)):
        problem, x, kept, do = prepared(operator, algebra, B=1, T=512, H=2, HV=2, K=64, V=64)
        kept = kept[:1] if recompute else kept
        with PeakMemory() as memory:
            module.backward(problem, x, kept, do, None, FP64)
        peaks[algebra] = memory.peak
    assert peaks["rewy"] <= peaks["conventional"], peaks


def test_peak_memory_sees_what_is_freed():
    with PeakMemory() as memory:
        for _ in range(3):
            torch.ones(1000).double().sum()
        b = torch.ones(500)
    assert memory.peak == 4000 + 8000
    assert memory.live == b.nbytes
