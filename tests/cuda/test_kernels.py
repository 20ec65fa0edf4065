"""The chunk kernels against the fp64 recurrence: in fp32 under the interpreter, in every dtype on a GPU."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from rewy.backends.cuda import gates
from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.chunks import chunk_count, chunks_of
from rewy.backends.cuda.plan import HOPPER, Limits, Plan, plan
from rewy.problem import OPERATORS, Gradients, Operands, Options, Problem, problem_of
from rewy.testing import Case, budgets, errors, exact, leaves, make

F32 = 2e-5
"""Relative L2 error of true fp32; TF32 products, or a formula that is wrong anywhere, have more."""

GATED = ["gated_delta_rule", "kda", "gdn2"]
SMALL = Case("kda", B=1, T=40, H=1, HV=2, K=16, V=16, chunk_size=16, dtype=torch.float32)


def results(
    case: Case,
    device: torch.device,
    x: Operands,
    do,
    dht,
    backend: CudaBackend | None = None,
    recompute: bool = True,
):
    """o, ht and the gradients under the names `exact` gives them."""
    backend = backend or CudaBackend()
    x = leaves(x, device)
    x = Operands(*(None if t is None else t.detach() for t in x))
    problem = problem_of(x, Options(case.scale or case.K**-0.5, case.chunk_size, recompute, "rewy"))
    o, ht, kept = backend.forward(problem, x, True)
    for actual, fake in zip(kept, backend.fake_kept(problem, x), strict=True):
        assert actual.shape == fake.shape and actual.dtype == fake.dtype
    gradients = backend.backward(problem, x, kept, do.to(device), None if dht is None else dht.to(device))
    names = dict(zip(Gradients._fields, ("dq", "dk", "dv", "dg", "derase", "dwrite", "dh0"), strict=True))
    found = {"o": o, "ht": ht}
    found |= {names[f]: t for f, t in gradients._asdict().items() if t is not None}
    if x.write is None:
        found["dbeta"] = found.pop("derase")
    for f, t in gradients._asdict().items():
        given = getattr(x, f)
        assert (t is None) == (given is None)
        assert t is None or (t.dtype == given.dtype and t.shape == given.shape)
    return {name: t.cpu() for name, t in found.items()}


def assert_right(case: Case, device: torch.device, tolerance: float = F32) -> None:
    x, do, dht = make(case)
    over = {
        name: e
        for name, e in errors(results(case, device, x, do, dht), exact(x, do, dht, case.scale)).items()
        if not e <= tolerance
    }
    assert not over, over


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(T=33, K=20, V=24, B=2),
        dict(T=20, K=40, V=72),
        dict(T=1, chunk_size=64),
        dict(T=100, chunk_size=64, HV=1, gate="GL1"),
        dict(T=70, chunk_size=32, H=2, HV=2, initial_state=False, dht=False),
        dict(T=60, lengths=(0, 17, 16, 0, 20), chunk_size=16),
    ],
    ids=lambda change: "-".join(f"{k}{v}" for k, v in change.items()).replace(" ", "") or "small",
)
def test_outputs_and_gradients(operator: str, change: dict, device: torch.device) -> None:
    assert_right(replace(SMALL, operator=operator, **change), device)


@pytest.mark.parametrize("operator", GATED)
@pytest.mark.parametrize("gate", ["G0", "G1", "G5", "G20", "G1000", "GH1000", "GH30", "GB20", "GM"])
def test_any_decay(operator: str, gate: str, device: torch.device) -> None:
    """No gate overflows, and dg is as right where it is tiny as where it is not."""
    assert_right(replace(SMALL, operator=operator, gate=gate, T=64, HV=1, chunk_size=64), device)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "change, recompute",
    [
        (dict(B=2, T=50), False),
        (dict(T=110, K=20, V=24, lengths=(50, 0, 5, 48)), True),
        (dict(T=40, K=24, initial_state=False, dht=False), True),
        (dict(T=1), True),
        (dict(T=0), True),
    ],
    ids=["dense", "packed", "no states", "one token", "no tokens"],
)
def test_sequences_in_parts(operator: str, change: dict, recompute: bool, device: torch.device) -> None:
    """More parts than chunks, parts of no tokens, and parts that end where chunks do not."""
    case = replace(SMALL, operator=operator, **change)
    x, do, dht = make(case)
    backend = CudaBackend(lambda problem, limits: replace(plan(problem, limits), parts=3))
    found = errors(results(case, device, x, do, dht, backend, recompute), exact(x, do, dht, case.scale))
    assert all(e <= F32 for e in found.values()), found


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_past_the_last_offset(operator: str, device: torch.device) -> None:
    """They may hold anything: o and all gradients are 0 there, and nothing else sees them."""
    case = replace(SMALL, operator=operator, T=50, lengths=(20, 13))
    x, do, dht = make(case)
    clean = results(case, device, x, do, dht)
    for t in (*x[:6], do):
        if t is not None:
            t[:, 33:] = float("nan")
    found = results(case, device, x, do, dht)
    for name, t in found.items():
        assert torch.equal(t, clean[name]), name
        if name not in ("ht", "dh0"):
            assert not t[:, 33:].any(), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_tokens(operator: str, device: torch.device) -> None:
    """The state passes through, and its gradient."""
    for case in (
        replace(SMALL, operator=operator, T=0),
        replace(SMALL, operator=operator, T=0, lengths=(0, 0)),
    ):
        x, do, dht = make(case)
        found = results(case, device, x, do, dht)
        assert found["o"].numel() == 0 and found["dq"].numel() == 0
        torch.testing.assert_close(found["ht"], x.initial_state, rtol=0, atol=0)
        torch.testing.assert_close(found["dh0"], dht, rtol=0, atol=0)


def test_strided_inputs(device: torch.device) -> None:
    x, do, dht = make(replace(SMALL, B=2))
    strided = Operands(
        *(None if t is None else t.transpose(0, 1).contiguous().transpose(0, 1) for t in x[:7]), None, None
    )
    for name, t in results(
        SMALL, device, strided, do.transpose(1, 2).contiguous().transpose(1, 2), dht
    ).items():
        assert torch.equal(t, results(SMALL, device, x, do, dht)[name]), name


def test_fp16_keeps_to_its_range(device: torch.device) -> None:
    """A gate at its usual lower bound of -5 reaches e^160 from the middle of a chunk; fp16 ends at e^11."""
    case = replace(SMALL, dtype=torch.float16, gate="G5", T=64, HV=1, chunk_size=64)
    x, do, dht = make(case)
    found, expected = results(case, device, x, do, dht), exact(x, do, dht)
    allowed = budgets(x, do, dht, expected)
    over = {n: (e, allowed[n]) for n, e in errors(found, expected).items() if not e <= allowed[n]}
    assert not over, over


def test_the_chunk_list(device: torch.device) -> None:
    lengths = (0, 17, 16, 0, 40, 1)
    x, _, _ = make(replace(SMALL, T=80, lengths=lengths))
    x = leaves(x, device)
    problem = problem_of(x, Options(1.0, 16, True, "rewy"))
    chunks = chunks_of(problem, x)
    expected, start = [], 0
    for length in lengths:
        expected += [[start + i, min(16, length - i)] for i in range(0, length, 16)]
        start += length
    assert chunks.count == chunk_count(problem) == 80 // 16 + len(lengths)
    table = chunks.table.tolist()
    assert table[: len(expected)] == expected
    assert all(rows == 0 for _, rows in table[len(expected) :])
    assert chunks.first.tolist() == [0, 0, 2, 3, 3, 6]


@pytest.mark.parametrize("shared", [99, 163, 227])
@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_obey_the_device(operator: str, shared: int) -> None:
    """Less shared memory never means more chunks in flight, and one chunk is always in flight."""
    x, _, _ = make(replace(SMALL, operator=operator, K=128, V=128))
    problem = replace(problem_of(x, Options(1.0, 64, True, "rewy")), dtype=torch.bfloat16)
    small, large = (plan(problem, Limits(s * 1024, (9, 0))) for s in (shared, 227))
    assert 1 <= small.sequential.stages <= large.sequential.stages <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_narrow_tiles_in_16_bits(operator: str, dtype: torch.dtype) -> None:
    """Triton 3.6 miscompiles chunk kernels whose tiles are narrower than 64 channels for Hopper."""
    x, _, _ = make(replace(SMALL, operator=operator))
    problem = replace(problem_of(x, Options(1.0, 64, True, "rewy")), dtype=dtype)
    for sizes in (dict(K=16, V=16), dict(K=256, V=512)):
        tiles = plan(replace(problem, **sizes), Limits(227 * 1024, (9, 0)))
        # By channel bf16 pair scores are products of tf32, of which half as many are as wide.
        in_tf32 = problem.operator.by_channel and dtype is torch.bfloat16
        pairs = tiles.pairs.BK * (2 if in_tf32 else 1)
        assert min(pairs, tiles.scores.BV, tiles.keys.BK, tiles.keys.BV) >= 64


@pytest.mark.parametrize("lengths", [None, (23, 0, 17)], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", ["gated_delta_rule", "gdn2"])
def test_kept_states_change_nothing(
    operator: str, lengths: tuple[int, ...] | None, device: torch.device
) -> None:
    case = replace(SMALL, operator=operator, lengths=lengths)
    x, do, dht = make(case)
    again, kept = (results(case, device, x, do, dht, recompute=recompute) for recompute in (True, False))
    assert all(torch.equal(t, kept[name]) for name, t in again.items())


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "change",
    [dict(), dict(T=96, H=2, initial_state=False, dht=False), dict(T=40, dtype=torch.float16)],
    ids=["tail", "stateless", "half"],
)
def test_spans_and_stretches_change_no_bit(operator: str, change: dict, device: torch.device) -> None:
    case = replace(SMALL, operator=operator, **(dict(T=100) | change))
    x, do, dht = make(case)
    whole = results(case, device, x, do, dht)
    for pieces in (dict(spans=3), dict(spans=50, stretches=2), dict(stretches=4), dict(spans=2, stretches=3)):
        backend = CudaBackend(lambda problem, limits, n=pieces: replace(plan(problem, limits), **n))
        found = results(case, device, x, do, dht, backend)
        assert all(torch.equal(t, found[name]) for name, t in whole.items())


def test_long_sequences_go_by_spans() -> None:
    def spans(case: Case, **options: bool) -> int:
        x = Operands(*(None if t is None else t.to("meta") for t in make(replace(case, T=1))[0]))
        problem = problem_of(x, Options(1.0, 64, options.get("recompute", True), "rewy"))
        tokens = dict(T=case.T, varlen=case.lengths is not None)
        return plan(replace(problem, **tokens), Limits(232448, (9, 0))).spans

    long = Case("kda", B=1, T=32768, H=32, HV=32, K=128, V=128, dtype=torch.bfloat16, initial_state=False)
    assert spans(long) == 2
    assert spans(replace(long, T=8 * 32768)) == 16
    for other in (replace(long, T=8192), replace(long, B=2)):
        assert spans(other) == 1
    assert spans(long, recompute=False) == 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_kept_can_be_told_of_a_length_that_is_traced(operator: str) -> None:
    x = make(replace(SMALL, operator=operator, T=300, initial_state=False))[0]
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def of_any_length(t: torch.Tensor) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if i == 1 else DimDynamic.STATIC for i in range(t.dim())]
        return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    traced = Operands(*(None if t is None else of_any_length(t) for t in x))
    with mode:
        problem = problem_of(traced, Options(1.0, 16, True, "rewy"))
        assert not isinstance(problem.T, int)
        kept = CudaBackend().fake_kept(problem, traced)
        long = CudaBackend(lambda p, limits: replace(plan(p, limits), spans=triton.cdiv(chunk_count(p), 4)))
        assert not isinstance(
            long.fake_kept(problem, traced)[-1].shape[0], int
        )  # nor compiled for a number of spans
    known = problem_of(x, Options(1.0, 16, True, "rewy"))
    expected = [t.shape for t in CudaBackend().fake_kept(known, x)]
    assert [tuple(map(int, t.shape)) for t in kept] == [tuple(shape) for shape in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("operator", ["kda", "gdn2"])
def test_a_tile_of_channels_has_one_verdict_on_far_gates(
    operator: str, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """A program of `channel_gates` writes one for its tile, one of `key_gradients` reads one for its own."""
    for K in (1, 16, 64, 65, 100, 128, 200, 256):
        x, _, _ = make(Case(operator, B=1, T=1, H=1, HV=1, K=K, V=64, dtype=dtype))
        tiles = plan(problem_of(x, Options(1.0, 64, True, "rewy")), Limits(227 * 1024, capability))
        verdicts = triton.cdiv(K, gates.FAR_CHANNELS.value)
        assert triton.cdiv(K, tiles.gates.BK) == verdicts
        assert gates.FAR_CHANNELS.value % tiles.keys.BK == 0


def test_the_planner_can_be_replaced(device: torch.device) -> None:
    asked = []

    def planner(problem: Problem, limits: Limits) -> Plan:
        asked.append(problem)
        chosen = plan(problem, limits)
        return replace(chosen, sequential=replace(chosen.sequential, BV=16)).portable()

    x, do, dht = make(replace(SMALL, V=32))
    results(SMALL, device, x, do, dht, CudaBackend(planner))
    assert len(asked) in (3, 5)  # forward, what it keeps, backward; where kernels are missing, both before
    assert len({*asked}) == 1


def test_a_triton_that_no_gpu_has_seen_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules[CudaBackend.__module__]  # the package's `backend` is another
    monkeypatch.setattr(module, "limits_of", lambda device: Limits(227 * 1024, HOPPER))
    x = leaves(make(SMALL)[0], "cpu")
    problem = replace(
        problem_of(x, Options(1.0, SMALL.chunk_size, True, "rewy")), device=torch.device("cuda")
    )
    for familiar, said in (True, 0), (False, 1):
        monkeypatch.setattr(module, "FAMILIAR", familiar)
        module._say_unfamiliar.cache_clear()
        with caplog.at_level(logging.WARNING, "rewy"):
            assert all(CudaBackend().supports(problem)[0] for _ in range(2))
        assert [triton.__version__ in message for message in caplog.messages] == [True] * said


@pytest.mark.cuda
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change",
    [
        dict(H=4, HV=4, K=128, V=128, T=512),
        dict(H=2, HV=4, K=100, V=72, T=300),
        dict(K=64, V=128, T=400, lengths=(0, 33, 97, 1, 169, 90)),
        dict(K=64, V=64, T=200, chunk_size=32),
        dict(K=64, V=64, T=200, chunk_size=16),
        dict(K=256, V=512, T=128, HV=1),
        dict(K=128, V=256, T=190, initial_state=False, dht=False),
    ],
    ids=lambda change: "-".join(f"{k}{v}" for k, v in change.items()).replace(" ", ""),
)
def test_half_precision_within_budget(
    operator: str, dtype: torch.dtype, change: dict, device: torch.device
) -> None:
    case = replace(SMALL, operator=operator, dtype=dtype, **(dict(chunk_size=64) | change))
    x, do, dht = make(case)
    found, expected = results(case, device, x, do, dht), exact(x, do, dht)
    allowed = budgets(x, do, dht, expected)
    over = {n: (e, allowed[n]) for n, e in errors(found, expected).items() if not e <= allowed[n]}
    assert not over, over


@pytest.mark.cuda
@pytest.mark.parametrize("operator", GATED)
@pytest.mark.parametrize("gate", ["G1", "G5", "G20", "GX1000", "GH1000"])
def test_strong_decay_in_bf16(operator: str, gate: str, device: torch.device) -> None:
    case = replace(
        SMALL, operator=operator, dtype=torch.bfloat16, gate=gate, T=256, K=128, V=128, chunk_size=64
    )
    x, do, dht = make(case)
    found = errors(results(case, device, x, do, dht), exact(x, do, dht))
    assert all(e <= 2e-2 for e in found.values()), found
