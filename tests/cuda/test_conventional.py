"""The conventional backward's kernels against the fp64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.launch import recording
from rewy.problem import OPERATORS, Gradients, Options, describe
from rewy.testing import Case, budgets, errors, exact, make
from rewy.testing.oracle import Results, leaves

F32, F16 = torch.float32, torch.float16

# Every kernel of the backward runs over tails of T, K and V; what else each case is there for:
CASES = {
    "two chunks, grouped heads": Case("", B=1, T=70, H=1, HV=2, K=16, V=24, dtype=F32),
    "packed, one sequence empty, rows past the end": Case(
        "", B=1, T=100, H=1, HV=2, K=20, V=16, dtype=F32, lengths=(65, 0, 3, 17), gate="GM"
    ),
    "strong and no decay side by side, chunks of 32, no state": Case(
        "",
        B=1,
        T=40,
        H=1,
        HV=1,
        K=40,
        V=36,
        dtype=F32,
        chunk_size=32,
        gate="GB25.8",
        initial_state=False,
        dht=False,
    ),
    "chunks of 16, one block of pairs": Case("", B=1, T=33, H=1, HV=1, K=32, V=16, dtype=F32, chunk_size=16),
    "several tiles of K and V, half precision": Case(
        "", B=1, T=70, H=1, HV=1, K=72, V=70, dtype=F16, gate="GM", scale=0.3
    ),
    "hard resets": Case("", B=1, T=64, H=1, HV=1, K=16, V=16, dtype=F16, gate="GX1000"),
    "one token": Case("", B=2, T=1, H=1, HV=1, K=16, V=16, dtype=F32),
}
NOTHING = {
    "no tokens": Case("", B=2, T=0, H=1, HV=2, K=16, V=16, dtype=F32),
    "packed, all sequences empty": Case("", B=1, T=5, H=1, HV=2, K=16, V=16, dtype=F32, lengths=(0, 0)),
}


def gradients(case: Case, device: torch.device) -> tuple[Results, Results, dict[str, float]]:
    """As the kernels compute them, as they are, and what each may err by."""
    x, do, dht = make(case)
    expected = exact(x, do, dht, case.scale)
    allowed = budgets(x, do, dht, expected, case.scale)
    scale = case.K**-0.5 if case.scale is None else case.scale
    x, do, dht = leaves(x, device), do.to(device), None if dht is None else dht.to(device)
    problem = describe(x, Options(scale, case.chunk_size, True, "conventional"))
    backend = CudaBackend()
    assert backend.supports(problem) == (True, "")
    with torch.no_grad():
        kept = backend.forward(problem, x, training=True)[2]
        found = backend.backward(problem, x, kept, do, dht)
    return (
        named(found, expected),
        {name: expected[name] for name in expected if name not in ("o", "ht")},
        allowed,
    )


def named(found: Gradients, expected: Results) -> Results:
    """Under the names of `rewy.testing`."""
    results = {f"d{name}": grad for name, grad in found._asdict().items() if grad is not None}
    for ours, theirs in (("dinitial_state", "dh0"), ("derase", "dbeta")):
        if ours in results and theirs in expected:
            results[theirs] = results.pop(ours)
    return results


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("title", CASES)
def test_gradients(operator: str, title: str, device: torch.device):
    case = replace(CASES[title], operator=operator)
    found, expected, allowed = gradients(case, device)
    over = {name: (e, allowed[name]) for name, e in errors(found, expected).items() if not e <= allowed[name]}
    assert not over, over


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("title", NOTHING)
def test_empty_sequences_pass_the_final_states_gradient_on(operator: str, title: str, device: torch.device):
    case = replace(NOTHING[title], operator=operator)
    x, do, dht = (leaves(t, device) if isinstance(t, tuple) else t.to(device) for t in make(case))
    problem = describe(x, Options(1.0, 64, True, "conventional"))
    kept = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in CudaBackend().fake_kept(problem, x)]
    with torch.no_grad():
        *grads, dh0 = CudaBackend().backward(problem, x, kept, do, dht)
    assert torch.equal(dh0, dht)
    assert all(bool((t == 0).all()) for t in grads if t is not None)


def test_runs_kernels_of_its_own():
    """The two forms share gates and chunk lists; a mixed-up dispatch would compare one with itself."""
    x, do, dht = make(Case("kda", dtype=F32))
    names = {}
    for algebra in ("rewy", "conventional"):
        problem = describe(x, Options(1.0, 64, True, algebra))
        kept = CudaBackend().fake_kept(problem, x)
        with recording() as launches:
            CudaBackend().backward(problem, x, kept, do, dht)
        names[algebra] = [launch.name for launch in launches]
    assert names["conventional"] == [
        "channel_gates", "wy_factors", "wy_forward", "wy_reverse", "wy_adjoint", "wy_gradients",
        "sum_parts", "sum_parts",
    ]  # fmt: skip
    assert not {name for name in names["rewy"] if name.startswith("wy_")}
