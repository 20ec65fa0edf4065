"""The kernels in Gluon: when the plan takes them, and that they give what the plain ones give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_kernels import results
from torch import Tensor

from rewy.backends.cuda import gates, pairs, segments, state
from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.chunks import chunks_of
from rewy.backends.cuda.launch import recording
from rewy.backends.cuda.plan import GLUON, HOPPER, Limits, Pipeline, Plan, limits_of, plan
from rewy.backends.cuda.replay import Program
from rewy.problem import OPERATORS, Gate, Gradients, Operands, Operator, Options, Problem, problem_of
from rewy.testing import Case, errors, exact, leaves, make

if not GLUON:
    pytest.skip("none for this Triton", allow_module_level=True)
from rewy.backends.cuda import hopper, hopper_rows

H200 = Limits(shared=227 * 1024, capability=HOPPER)
BY_ROW = [name for name, op in OPERATORS.items() if not op.by_channel]
BY_CHANNEL = [name for name, op in OPERATORS.items() if op.by_channel]
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


def in_spans(count: int, stretches: int = 1) -> Callable[[Problem, Limits], Plan]:
    return lambda problem, _: replace(plan(problem, H200), spans=count, stretches=stretches)


def in_parts(parts: int) -> Callable[[Problem, Limits], Plan]:
    return lambda problem, _: replace(plan(problem, H200), parts=parts)


def by_programs(count: int) -> Callable[[Problem, Limits], Plan]:
    return lambda problem, _: replace(plan(problem, H200), programs=count)


def shared(problem: Problem, chosen: Plan) -> dict[str, tuple[Pipeline, Callable[[int], int]]]:
    """Of every pass its depth, and the shared memory it takes at any."""
    keep = not problem.recompute
    return {
        "outputs": (chosen.outputs, lambda stages: hopper.forward_shared(problem, stages, output=True, keep=keep)),
        "states": (chosen.states, lambda stages: hopper.forward_shared(problem, stages, output=False, keep=True)),
        "reverse": (chosen.reverse, lambda stages: hopper.reverse_shared(problem, stages)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "shape, parts",
    [
        (dict(H=4, HV=4, T=32768), 8),
        (dict(H=8, HV=8, T=32768), 8),
        (dict(H=1, HV=2, T=65536), 16),
        (dict(H=16, HV=16, T=32768), 4),
        (dict(H=32, HV=32, T=32768), 1),  # two parts would be more work than one
        (dict(H=4, HV=4, T=8192), 1),  # too short
        (dict(H=4, HV=4, T=32768, B=8), 1),
        (dict(H=4, HV=4, T=32768, K=192), 1),
    ],
)
def test_few_heads_are_walked_in_parts(shape: dict, parts: int) -> None:
    problem = replace(described(replace(CASE, T=1))[0], **shape)
    chosen = plan(replace(problem, N=problem.B), H200)
    assert chosen.parts == parts
    assert chosen.spans * chosen.stretches == 1 or parts == 1


@pytest.mark.parametrize(
    "shape, stretches",
    [
        (dict(), 2),
        (dict(T=16384), 2),
        (dict(T=8192), 2),
        (dict(T=4096), 1),  # too short
        (dict(H=16, HV=16, V=256), 2),
        (dict(V=256), 1),  # heads enough
        (dict(HV=64), 1),
        (dict(HV=4, H=4), 1),  # in parts
        (dict(K=64, V=64), 1),  # in parts
        (dict(B=2), 1),
        (dict(varlen=True), 1),
        (dict(recompute=False), 1),
    ],
    ids=str,
)
def test_states_are_found_in_stretches_where_heads_are_few(shape: dict, stretches: int) -> None:
    problem = replace(described(replace(CASE, T=1))[0], **dict(H=32, HV=32, T=32768) | shape)
    problem = replace(problem, N=problem.B)
    chosen = plan(problem, H200)
    assert chosen.stretches == stretches
    assert plan(problem, replace(H200, processors=64)).stretches == 1 or shape.get("V") == 64


@pytest.mark.parametrize("operator", OPERATORS)
def test_stretches_are_walked_side_by_side(operator: str) -> None:
    """The forward passes over one after the other; the backward over all of a span at once, from what that left."""
    problem, x, do, dht = described(replace(CASE, operator=operator, T=600))
    backend = CudaBackend(in_spans(2, stretches=3))
    with recording() as forward:
        _, _, kept = backend.forward(problem, x, training=True)
    with recording() as backward:
        backend.backward(problem, x, kept, do, dht)
    starts = kept[-1]
    assert starts.shape == (2, 3, problem.HV, problem.K, problem.V)
    forward, backward = (
        [launch.args for launch in all_ if launch.kernel is hopper.forward_pass]
        for all_ in (forward, backward)
    )
    assert [args["T"] for args in forward] == [128, 128, 64, 128, 128, 24]
    begins = [starts[i, j] for i in range(2) for j in range(3)]
    assert [args["h0"].data_ptr() for args in forward] == [t.data_ptr() for t in begins]
    assert [args["ht"].data_ptr() for args in forward[:-1]] == [t.data_ptr() for t in begins[1:]]
    assert [(args["T"], args["PARTS"]) for args in backward] == [(280, 3), (320, 3)]
    assert [args["h0"].data_ptr() for args in backward] == [starts[i].data_ptr() for i in (1, 0)]


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
    chosen = plan(replace(problem, T=problem.T + 1), H200)  # for which none is remembered from above
    assert chosen == chosen.portable()


@pytest.mark.parametrize("K, V", [(64, 64), (64, 256), (128, 128), (128, 192)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_kernel_has_the_gradients_of_rows(operator: str, K: int, V: int) -> None:
    """On every multiprocessor of the card; by channel, chunks are left to another."""
    problem = described(replace(CASE, operator=operator, HV=1, K=K, V=V))[0]
    by_row = operator in BY_ROW
    taken = hopper_rows.shared(problem)
    for limits in (H200, replace(H200, processors=114), replace(H200, shared=taken)):
        chosen = plan(problem, limits)
        assert chosen.programs == (limits.processors if by_row else 0)
        assert chosen.chunks_on_hopper == (not by_row and V != 192 and limits.shared >= 113 * 1024)
        assert chosen.portable().programs == 0
    assert plan(problem, replace(H200, shared=taken - 1)).programs == 0


def test_grouped_heads_have_one_kernel_where_every_program_has_several_groups() -> None:
    problem = described(replace(CASE, operator="gated_delta_rule"))[0]
    for chunks, programs in (4, 0), (4 * 132 - 1, 0), (4 * 132, 132):
        assert plan(replace(problem, T=64 * chunks), H200).programs == programs


def test_a_write_gate_of_its_own_is_not_for_the_kernel_of_rows() -> None:
    operator = Operator("two", "Two gates", Gate.SCALAR, Gate.SCALAR, Gate.CHANNEL, tied=False)
    problem = described(replace(CASE, operator="gated_delta_rule", HV=1))[0]
    assert plan(problem, H200).programs and not plan(replace(problem, operator=operator), H200).programs


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


@pytest.mark.parametrize("HV", [1, 4])
@pytest.mark.parametrize("lengths", [None, (70, 0, 100)], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", BY_ROW)
def test_a_backward_by_rows_has_three_kernels(
    operator: str, lengths: tuple[int, ...] | None, HV: int
) -> None:
    """They leave gradients as they are returned; rows past the last offset, which none of them sees, are 0."""
    problem, x, do, dht = described(replace(CASE, operator=operator, HV=HV, lengths=lengths))
    listed = ["list_chunks"] if lengths else []
    for recompute, again in (True, ["forward_pass"]), (False, []):
        backend, problem = CudaBackend(by_programs(132)), replace(problem, recompute=recompute)
        kept = backend.fake_kept(problem, x)
        with recording() as launches:
            found = backend.backward(problem, x, kept, do, dht)
        assert [launch.name for launch in launches] == [*listed, *again, "reverse_pass", "row_chunks"]
        args = launches[-1].args
        assert args["dq"].base is found.q and args["dk"].base is found.k and args["dv"].base is found.v
        assert args["dg"] is found.g and args["db"] is found.erase
        assert (args["parts"] is None) == (HV == 1)
        for t, given in zip(found[:5], x[:5], strict=True):
            assert (t is None) == (given is None)
            if t is not None:
                assert t.dtype is given.dtype and t.shape == given.shape
                assert lengths is None or not t.any()


@pytest.mark.parametrize("operator", BY_ROW)
def test_every_span_has_its_rows_gradients_from_one_kernel(operator: str) -> None:
    problem, x, do, dht = described(replace(CASE, operator=operator, HV=1))
    backend = CudaBackend(in_spans(3))
    kept = backend.fake_kept(problem, x)
    with recording() as launches:
        found = backend.backward(problem, x, kept, do, dht)
    assert [launch.name for launch in launches] == ["forward_pass", "reverse_pass", "row_chunks"] * 2
    last, first = (launch.args for launch in launches if launch.name == "row_chunks")
    assert (first["T"], last["T"]) == (128, 72)
    for name, t in dict(dq=found.q, dv=found.v, db=found.erase).items():
        at = [getattr(args[name], "base", args[name]).data_ptr() - t.data_ptr() for args in (first, last)]
        assert at == [0, t[:, :128].nbytes]


@pytest.mark.parametrize("programs", [1, 7, 8, 132])
def test_no_more_programs_than_chunks_of_key_heads(programs: int) -> None:
    problem, x, do, dht = described(replace(CASE, operator="gated_delta_rule", H=2, HV=4))
    backend = CudaBackend(by_programs(programs))
    with recording() as launches:
        backend.backward(problem, x, backend.fake_kept(problem, x), do, dht)
    assert launches[-1].name == "row_chunks" and launches[-1].grid == (min(programs, 8),)


@pytest.mark.parametrize(
    "planner",
    [on_h200, in_spans(2), in_spans(2, stretches=2), in_parts(2)],
    ids=["whole", "spans", "stretches", "parts"],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_recorded_call_launches_the_same(operator: str, planner: Callable[[Problem, Limits], Plan]) -> None:
    problem, x, do, dht = described(replace(CASE, operator=operator, initial_state=False, dht=False))
    backend = CudaBackend(planner)
    with recording() as launches:
        _, _, kept = backend.forward(problem, x, training=True)
    with recording() as launches:
        backend.backward(problem, x, kept, do, dht)

    def stages(do: Tensor, *tensors: Tensor) -> Gradients:
        operands = Operands(*tensors[: len(x)])
        return backend._backward(problem, operands, [*tensors[len(x) :]], do, None)

    program = Program(stages, [do, *x, *kept])
    recorded = [stage.kernel.launch for stage in program.stages if stage.kernel]
    assert [launch.signature for launch in recorded] == [launch.signature for launch in launches]
    assert [launch.grid for launch in recorded] == [launch.grid for launch in launches]


@pytest.mark.parametrize("recompute", [True, False])
def test_parts_are_launched_side_by_side(recompute: bool) -> None:
    """M takes no values; passes that are run for the states between parts alone leave nothing else behind."""
    problem, x, do, dht = described(CASE)
    problem = replace(problem, recompute=recompute)
    backend = CudaBackend(in_parts(8))
    with recording() as forward:
        _, _, kept = backend.forward(problem, x, training=True)
    with recording() as backward:
        backend.backward(problem, x, kept, do, dht)
    to_starts = [hopper.forward_pass, hopper.forward_pass, segments.chain_parts]
    to_ends = [hopper.reverse_pass, segments.chain_parts, hopper.reverse_pass]
    walked = {hopper.forward_pass, hopper.reverse_pass, segments.chain_parts}
    forward, backward = (
        [launch for launch in all_ if launch.kernel in walked] for all_ in (forward, backward)
    )
    assert [launch.kernel for launch in forward] == [*to_starts, hopper.forward_pass]
    again = [hopper.forward_pass] if recompute else []
    assert [launch.kernel for launch in backward] == [*again, *to_ends]
    for launch in (*forward, *backward):
        assert launch.args["PARTS"] == 8
        slices = problem.V // (16 if launch.kernel is segments.chain_parts else 64)
        parts = 1 if launch.kernel is segments.chain_parts else 8
        assert launch.grid == (problem.N * problem.HV * parts * slices,)
    assert all(forward[0].args[name] is None for name in ("v", "w", "h0", "s", "u", "o"))
    if recompute:
        assert backward[0].args["h0"] is kept[-1]
    dN = backward[-3].args
    assert dN["ds"] is dN["dr"] is None and dN["dh0"] is not None


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
    found = dict(o=o, ht=ht, s=s[filled], u=u[:, filled], ds=ds[filled], dr=dr[filled])
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
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize(
    "change, recompute",
    [
        (dict(B=2, T=520, HV=1), True),
        (dict(T=700, K=64, V=64, lengths=(0, 449, 1, 0, 200)), True),
        (dict(T=300, V=192, HV=1, initial_state=False, dht=False), False),
    ],
    ids=["dense", "packed", "no states"],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_parts_are_as_exact_as_the_whole(
    operator: str, change: dict, recompute: bool, parts: int, device: torch.device
) -> None:
    """Parts of several chunks, of one and of none, and decays so slow that states pass through many."""
    case = replace(CASE, operator=operator, gate="GL1000", **change)
    x, do, dht = make(case)
    expected = exact(x, do, dht)

    def found(parts: int) -> dict[str, float]:
        return errors(results(case, device, x, do, dht, CudaBackend(in_parts(parts)), recompute), expected)

    whole, split = found(1), found(parts)
    assert split == found(parts)
    over = {name: (e, whole[name]) for name, e in split.items() if not e <= 2 * whole[name]}
    assert not over, over


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(B=2, T=64, HV=1),
        dict(T=1, H=2, HV=2),
        dict(T=300, K=64, HV=3),
        dict(T=300, K=64, V=64),
        dict(T=300, V=64, HV=4),
        dict(T=300, H=1, HV=2, V=256),
        dict(T=500, H=2, V=256, lengths=(0, 129, 0, 271, 64)),
        dict(T=320, H=2, V=256, gate="GX1000"),
        dict(T=130, dtype=torch.float16, initial_state=False, dht=False),
        dict(T=500, H=2, lengths=(0, 129, 0, 271, 64)),
        dict(gate="G1000", T=130),
        dict(gate="GX1000", T=200),
    ],
    ids=lambda change: "-".join(f"{k}{v}" for k, v in change.items()).replace(" ", "") or "usual",
)
@pytest.mark.parametrize("operator", BY_CHANNEL)
def test_chunks_by_channel_as_the_plain_kernels(operator: str, change: dict, device: torch.device) -> None:
    problem, x, do, dht = described(replace(CASE, operator=operator, **change), device)
    _, _, kept = CudaBackend().forward(problem, x, training=True)

    def gradients(chunks_on_hopper: bool) -> dict[str, Tensor]:
        backend = CudaBackend(lambda p, limits: replace(plan(p, limits), chunks_on_hopper=chunks_on_hopper))
        found = backend.backward(problem, x, kept, do, dht)._asdict()
        return {name: t for name, t in found.items() if t is not None}

    assert plan(problem, limits_of(device)).chunks_on_hopper
    found, again, plain = gradients(True), gradients(True), gradients(False)
    assert all(torch.equal(t, again[name]) for name, t in found.items())
    assert_rounded_alike(found, plain)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(B=2, T=64, HV=1, V=64),
        dict(T=1, H=2, HV=2),
        dict(B=2, T=300, H=2, HV=8, K=64, V=256),
        dict(T=300, K=64, V=64, HV=3),
        dict(T=130, H=2, HV=4, V=192, initial_state=False, dht=False),
        dict(T=500, H=2, V=256, lengths=(0, 129, 0, 271, 64)),
        dict(T=500, HV=4, lengths=(0, 129, 0, 271, 64)),
        dict(T=500, H=1, HV=1, K=64, V=128, lengths=(65, 0, 400)),
        dict(T=130, gate="G1000"),
        dict(gate="GX1000"),
        dict(gate="G20"),
        dict(T=320, HV=4, V=256, gate="GB20"),
    ],
    ids=lambda change: "-".join(f"{k}{v}" for k, v in change.items()).replace(" ", "") or "usual",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", BY_ROW)
def test_chunks_as_the_plain_kernels(
    operator: str, dtype: torch.dtype, change: dict, device: torch.device
) -> None:
    """By any number of programs the same bits."""
    case = replace(CASE, operator=operator, dtype=dtype, **change)
    problem, x, do, dht = described(case, device)
    if case.lengths is not None:  # rows past the last offset may hold anything
        for t in (*x[:6], do):
            if t is not None:
                t[:, sum(case.lengths) :] = float("nan")
    _, _, kept = CudaBackend().forward(problem, x, training=True)

    def gradients(programs: int) -> dict[str, Tensor]:
        found = CudaBackend(by_programs(programs)).backward(problem, x, kept, do, dht)._asdict()
        return {name: t for name, t in found.items() if t is not None}

    processors = limits_of(device).processors
    found, plain = gradients(processors), gradients(0)
    for programs in (processors, 3, 1):
        again = gradients(programs)
        assert all(torch.equal(t, again[name]) for name, t in found.items())
    assert_rounded_alike(found, plain)


@pytest.mark.cuda
@pytest.mark.parametrize("operator", OPERATORS)
def test_spans_change_no_bit(operator: str, device: torch.device) -> None:
    case = replace(CASE, operator=operator, T=700)
    x, do, dht = make(case)
    whole = results(case, device, x, do, dht, CudaBackend(on_h200))
    for _ in range(3):
        found = results(case, device, x, do, dht, CudaBackend(in_spans(2, stretches=2)))
        assert all(torch.equal(t, found[name]) for name, t in whole.items())
