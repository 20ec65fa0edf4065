"""The kernels in Gluon: when the plan takes them, and that they give what the plain ones give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rewy.backends.cuda import gates, pairs, state
from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.chunks import chunks_of
from rewy.backends.cuda.launch import recording
from rewy.backends.cuda.plan import GLUON, HOPPER, Limits, Pipeline, Plan, limits_of, plan
from rewy.problem import OPERATORS, Operands, Options, Problem, problem_of
from rewy.testing import Case, errors, leaves, make

if not GLUON:
    pytest.skip("this Triton has no Gluon to write them in", allow_module_level=True)
from rewy.backends.cuda import hopper

H200 = Limits(shared=227 * 1024, capability=HOPPER)
CASE = Case("kda", B=1, T=200, H=1, HV=2, K=128, V=128, dtype=torch.bfloat16)


def described(
    case: Case, device: torch.device | str = "cpu"
) -> tuple[Problem, Operands, Tensor, Tensor | None]:
    x, do, dht = make(case)
    x = Operands(*(None if t is None else t.detach() for t in leaves(x, device)))
    problem = problem_of(x, Options(case.K**-0.5, case.chunk_size, True, "rewy"))
    return problem, x, do.to(device), None if dht is None else dht.to(device)


def on_h200(problem: Problem, _: Limits) -> Plan:
    return plan(problem, H200)


def shared(problem: Problem, chosen: Plan) -> dict[str, tuple[Pipeline, Callable[[int], int]]]:
    """Of every pass its depth, and the shared memory it takes at any."""
    keep = not problem.recompute
    return {
        "outputs": (chosen.outputs, lambda stages: hopper.forward_shared(problem, stages, output=True, keep=keep)),
        "states": (chosen.states, lambda stages: hopper.forward_shared(problem, stages, output=False, keep=True)),
        "reverse": (chosen.reverse, lambda stages: hopper.reverse_shared(problem, stages)),
    }  # fmt: skip


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("K, V", [(64, 64), (64, 256), (128, 128), (128, 192)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_pipelines_are_as_deep_as_fits(operator: str, K: int, V: int, recompute: bool) -> None:
    problem = replace(described(replace(CASE, operator=operator, K=K, V=V))[0], recompute=recompute)
    for name, (depth, taken) in shared(problem, plan(problem, H200)).items():
        assert taken(depth.stages) <= H200.shared, name
        assert depth.stages == 4 or taken(depth.stages + 1) > H200.shared, name


@pytest.mark.parametrize(
    "sizes",
    [
        dict(dtype=torch.float32),
        dict(chunk_size=32),
        dict(K=100),
        dict(K=256),
        dict(V=80),
        dict(V=320),
        dict(T=0),
        dict(T=2**25, HV=32),  # more rows of gates than 31 bits count
    ],
    ids=str,
)
def test_other_problems_take_the_plain_passes(sizes: dict) -> None:
    problem = replace(described(CASE)[0], **sizes)
    chosen = plan(problem, H200)
    assert chosen == chosen.portable()


def test_other_devices_take_the_plain_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = described(CASE)[0]
    assert all(isinstance(depth, Pipeline) for depth, _ in shared(problem, plan(problem, H200)).values())
    for other in (dict(capability=(8, 0)), dict(capability=(10, 0)), dict(shared=64 * 1024)):
        chosen = plan(problem, replace(H200, **other))
        assert chosen == chosen.portable()
    monkeypatch.setattr("rewy.backends.cuda.plan.GLUON", False)
    chosen = plan.__wrapped__(problem, H200)  # not what is remembered from above
    assert chosen == chosen.portable()


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradient_kernels_have_tiles_of_their_own_on_hopper(operator: str) -> None:
    problem = described(replace(CASE, operator=operator))[0]
    ampere = replace(H200, capability=(8, 0))
    assert plan(problem, H200).scores != plan(problem, ampere).scores
    assert (plan(problem, H200).keys == plan(problem, ampere).keys) == (operator == "gdn2")
    for other in (dict(V=64), dict(V=512), dict(dtype=torch.float32)):
        tiles = [plan(replace(problem, **other), limits) for limits in (H200, ampere)]
        assert tiles[0].scores == tiles[1].scores and tiles[0].keys == tiles[1].keys


@pytest.mark.parametrize("lengths", [None, (70, 0, 130)], ids=["dense", "packed"])
def test_both_passes_are_launched(lengths: tuple[int, ...] | None) -> None:
    problem, x, do, dht = described(replace(CASE, lengths=lengths))
    backend = CudaBackend(on_h200)
    with recording() as launches:
        _, _, kept = backend.forward(problem, x, training=True)
        backend.backward(problem, x, kept, do, dht)
    kernels = [launch.kernel for launch in launches]
    assert kernels.count(hopper.forward_pass) == 2 and kernels.count(hopper.reverse_pass) == 1
    assert state.state_forward not in kernels and state.state_reverse not in kernels


def test_a_write_gate_of_another_dtype_takes_the_plain_passes() -> None:
    problem, x, _, _ = described(replace(CASE, operator="gdn2"))
    for write, kernel in ((x.write, hopper.forward_pass), (x.write.float(), state.state_forward)):
        with recording() as launches:
            CudaBackend(on_h200).forward(problem, x._replace(write=write), training=False)
        assert launches[-1].kernel is kernel


def test_operands_that_begin_anywhere_are_copied() -> None:
    """The copy engine takes addresses of whole 16 bytes."""
    problem, x, _, _ = described(replace(CASE, operator="gated_delta_rule"))
    v = torch.cat([x.v.new_zeros(1), x.v.flatten()])[1:].view(x.v.shape)
    assert v.is_contiguous() and v.data_ptr() % 16
    with recording() as launches:
        CudaBackend(on_h200).forward(problem, x._replace(v=v), training=False)
    brought = launches[-1].args["v"].base
    assert brought.data_ptr() % 16 == 0 and torch.equal(brought.view(v.shape), v)
    assert launches[-1].args["x"].base.data_ptr() == x.k.data_ptr()


on_hopper = pytest.mark.usefixtures("hopper_card")


@pytest.fixture
def hopper_card(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper card")


def passes(
    problem: Problem, x: Operands, do: Tensor, dht: Tensor | None, tiles: Plan, keep: bool = False
) -> dict[str, Tensor]:
    """All that the sequential passes give, of chunks that have rows."""
    chunks = chunks_of(problem, x)
    gated = gates.gated(problem, x, chunks, tiles.gates)
    A, Ti = pairs.scores(problem, x, gated, chunks, tiles.pairs)
    o, ht, kept = state.outputs(problem, x, gated, A, Ti, chunks, tiles.outputs, keep)
    s, u = kept or state.states(problem, x, gated, Ti, chunks, tiles.states)
    ds, dr, dh0 = state.reverse(problem, x, gated, A, Ti, do, dht, chunks, tiles.reverse)
    filled = slice(None) if chunks.table is None else chunks.table[:, 1] > 0
    found = dict(o=o, ht=ht, s=s[filled], u=u[filled], ds=ds[filled], dr=dr[filled])
    return found if dh0 is None else found | dict(dh0=dh0)


def assert_rounded_alike(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Sums in another order turn a few roundings over; all of them, in bf16, would be 1.7e-3."""
    over = {name: e for name, e in errors(found, plain).items() if not e <= 1e-3}
    assert not over, over


def assert_same_as_plain(
    case: Case, device: torch.device, stages: int | None = None, keep: bool = False
) -> None:
    problem, x, do, dht = described(case, device)
    problem = replace(problem, recompute=not keep)
    if case.lengths is not None:  # rows past the last offset may hold anything
        for t in (*x[:6], do):
            if t is not None:
                t[:, sum(case.lengths) :] = float("nan")
    chosen, limits = plan(problem, limits_of(device)), limits_of(device)
    if stages is not None:
        fitting = (
            name for name, (_, taken) in shared(problem, chosen).items() if taken(stages) <= limits.shared
        )
        chosen = replace(chosen, **{name: Pipeline(stages) for name in fitting})
    found, again = (passes(problem, x, do, dht, chosen, keep) for _ in range(2))
    plain = passes(problem, x, do, dht, chosen.portable(), keep)
    assert all(torch.equal(t, again[name]) for name, t in found.items())
    assert_rounded_alike(found, plain)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("lengths", [None, (0, 64, 1, 0, 100)], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_depth(
    operator: str, lengths: tuple[int, ...] | None, stages: int, device: torch.device
) -> None:
    """More chunks than any pipeline holds, and fewer."""
    T = 500 if lengths is None else 200
    case = replace(CASE, operator=operator, T=T, lengths=lengths, K=64, V=64)
    assert_same_as_plain(case, device, stages)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(B=2, T=64, V=64),
        dict(T=1, H=2, HV=2),
        dict(T=300, K=64, V=256, HV=3),
        dict(T=130, dtype=torch.float16, initial_state=False, dht=False),
        dict(T=500, lengths=(0, 129, 0, 271, 64), V=192),
        dict(gate="G1000", T=130),
    ],
    ids=lambda change: "-".join(f"{k}{v}" for k, v in change.items()).replace(" ", "") or "usual",
)
@pytest.mark.parametrize("keep", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_as_the_plain_passes(operator: str, keep: bool, change: dict, device: torch.device) -> None:
    assert_same_as_plain(replace(CASE, operator=operator, **change), device, keep=keep)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(B=2, T=64, HV=1),
        dict(T=1, H=2, HV=2),
        dict(T=300, K=64, HV=3),
        dict(T=130, dtype=torch.float16, initial_state=False, dht=False),
        dict(T=500, H=2, lengths=(0, 129, 0, 271, 64)),
        dict(gate="G1000", T=130),
        dict(gate="GX1000", T=200),
    ],
    ids=lambda change: "-".join(f"{k}{v}" for k, v in change.items()).replace(" ", "") or "usual",
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_keys_as_the_plain_kernel(operator: str, change: dict, device: torch.device) -> None:
    problem, x, do, dht = described(replace(CASE, operator=operator, **change), device)
    _, _, kept = CudaBackend().forward(problem, x, training=True)

    def gradients(keys_on_hopper: bool) -> dict[str, Tensor]:
        backend = CudaBackend(lambda p, limits: replace(plan(p, limits), keys_on_hopper=keys_on_hopper))
        found = backend.backward(problem, x, kept, do, dht)._asdict()
        return {name: t for name, t in found.items() if t is not None}

    assert plan(problem, limits_of(device)).keys_on_hopper
    found, again, plain = gradients(True), gradients(True), gradients(False)
    assert all(torch.equal(t, again[name]) for name, t in found.items())
    assert_rounded_alike(found, plain)
