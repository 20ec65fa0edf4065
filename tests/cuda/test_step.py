"""The decoding kernel against the fp64 recurrence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rewy.algebra.recurrent import recurrence
from rewy.backends.cuda.backend import CudaBackend
from rewy.problem import OPERATORS, Gate, Operands, Options, describe

# (B, T, H, HV, K, V, offsets): one token and several, grouped heads, tails of K and V, packed rows with
# empty sequences and rows past the last offset.
SHAPES = [
    (3, 1, 2, 2, 16, 16, None),
    (2, 5, 1, 3, 20, 50, None),
    (1, 4, 2, 4, 100, 33, None),
    (1, 3, 1, 1, 256, 40, None),
    (2, 0, 1, 2, 16, 16, None),
    (1, 9, 1, 2, 24, 16, [0, 0, 4, 4, 5, 7]),
    (1, 4, 1, 1, 16, 20, [0, 0, 0]),
    (1, 2, 1, 1, 16, 16, [0]),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(
    operator: str,
    shape: tuple,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    state: bool = True,
    offsets_dtype: torch.dtype = torch.int64,
    place: Callable[[Tensor], Tensor] = lambda x: x,
) -> Operands:
    """Unit keys, gates from nearly closed to open, a state that matters."""
    B, T, H, HV, K, V, offsets = shape
    op = OPERATORS[operator]
    gen = torch.Generator().manual_seed(K * V + T)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=gen)

    def at(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        return place(x.to(device, dtype))

    def gate(kind: Gate, channels: int) -> Tensor:
        return randn(B, T, HV, *([channels] if kind is Gate.CHANNEL else []))

    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=offsets_dtype, device=device)
    N = B if offsets is None else len(offsets) - 1
    decay = 3 * gate(op.decay, K)
    return Operands(
        q=at(randn(B, T, H, K)),
        k=at(torch.nn.functional.normalize(randn(B, T, H, K), dim=-1)),
        v=at(randn(B, T, HV, V)),
        g=None if op.decay is Gate.NONE else at(torch.nn.functional.logsigmoid(decay), torch.float32),
        erase=at(gate(op.erase, K).sigmoid()),
        write=None if op.tied else at(gate(op.write, V).sigmoid()),
        initial_state=at(randn(N, HV, K, V), torch.float32) if state else None,
        cu_seqlens=cu_seqlens,
    )


def run(x: Operands, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    problem = describe(x, Options(scale=scale, chunk_size=64, recompute=True, algebra="rewy"))
    return CudaBackend().step(problem, x)


def assert_near(actual: Tensor, exact: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """fp32 arithmetic, and one rounding to the result's dtype (the interpreter cuts to bf16)."""
    eps = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps
    assert actual.dtype is dtype and actual.shape == exact.shape
    error = (actual.double() - exact).norm()
    assert error <= (2e-6 + eps) * exact.norm(), f"{error:.3e} of {exact.norm():.3e}"


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("shape", "state"),
    [*((shape, True) for shape in SHAPES), (SHAPES[1], False), (SHAPES[5], False)],
    ids=str,
)
def test_parity(device, fenced, operator, shape, state):
    x = draw(operator, shape, device, state=state, place=fenced)
    o, ht = run(x)
    expected_o, expected_ht = recurrence(x, 0.3)
    assert_near(o, expected_o)
    assert_near(ht, expected_ht)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("dtype", "offsets_dtype"), [*((dtype, torch.int64) for dtype in DTYPES), (torch.float32, torch.int32)]
)
def test_dtypes(device, operator, dtype, offsets_dtype):
    x = draw(operator, (1, 7, 2, 4, 24, 40, [0, 3, 6]), device, dtype, offsets_dtype=offsets_dtype)
    o, ht = run(x)
    expected_o, expected_ht = recurrence(x, 0.3)
    assert_near(o, expected_o, dtype)
    assert_near(ht, expected_ht)


@pytest.mark.parametrize("field", ["g", "initial_state", "erase", "write"])
def test_budget_sees_a_fault(device, field):
    """A neighbour's gate or state is out of budget."""
    x = draw("gdn2", (2, 5, 1, 3, 20, 50, None), device)
    o, ht = run(x)
    faulty = recurrence(x._replace(**{field: getattr(x, field).roll(1, dims=0)}), 0.3)
    for actual, fault in zip((o, ht), faulty, strict=True):
        with pytest.raises(AssertionError, match=" of "):
            assert_near(actual, fault)


@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda", "gdn2"])
@pytest.mark.parametrize("g", [-1000.0, -88.0, 0.0])
def test_extreme_decay(device, operator, g):
    x = draw(operator, (2, 4, 1, 2, 16, 16, None), device)
    decay = x.g.clone()
    decay[:, 1] = g
    x = x._replace(g=decay)
    for actual, expected in zip(run(x), recurrence(x, 0.3), strict=True):
        assert_near(actual, expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_token_by_token_is_the_whole(device, operator):
    x = draw(operator, (2, 6, 1, 2, 20, 24, None), device)
    o, ht = run(x)
    state = x.initial_state
    for t in range(6):
        token = {
            name: None if tensor is None else tensor[:, t : t + 1]
            for name, tensor in x._asdict().items()
            if name not in ("initial_state", "cu_seqlens", "cu_seqlens_cpu")
        }
        o_t, state = run(Operands(**token, initial_state=state))
        assert torch.equal(o_t, o[:, t : t + 1])
    assert torch.equal(state, ht)


@pytest.mark.parametrize("operator", OPERATORS)
def test_strided_inputs_are_read_and_kept(device, operator):
    x = draw(operator, (2, 3, 2, 4, 16, 24, None), device)
    wide = {
        name: None if t is None else torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0]
        for name, t in x._asdict().items()
    }
    before = {name: None if t is None else t.clone() for name, t in wide.items()}
    for actual, expected in zip(run(Operands(**wide)), run(x), strict=True):
        assert torch.equal(actual, expected)
    assert all(t is None or torch.equal(t, before[name]) for name, t in wide.items())


@pytest.mark.cuda
@pytest.mark.slow
def test_state_past_32_bit_offsets(device):
    """2^31 state elements and more than 65 535 programs: the last sequence is what it is alone."""
    if torch.cuda.get_device_properties(device).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    x = draw("kda", (1, 1, 1, 64, 128, 128, None), device, torch.bfloat16)
    B = 2049
    many = Operands(
        *(None if t is None else t.expand(B, *t.shape[1:]).clone() for t in x[:6]),
        initial_state=x.initial_state.expand(B, -1, -1, -1),
    )
    o, ht = run(many)
    expected_o, expected_ht = run(x)
    assert torch.equal(o[-1:], expected_o)
    assert torch.equal(ht[-1:], expected_ht)


@pytest.mark.cuda
def test_runs_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = draw("gdn2", (2, 3, 1, 2, 16, 16, None), torch.device("cuda:1"))
    with torch.cuda.device(0):
        o, ht = run(x)
    expected_o, expected_ht = recurrence(x, 0.3)
    assert_near(o, expected_o)
    assert_near(ht, expected_ht)


@pytest.mark.cuda
def test_replays_in_a_cuda_graph(device):
    x = draw("gated_delta_rule", (2, 1, 2, 4, 64, 64, None), device, torch.bfloat16)
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, ht = run(x)
    x.v.copy_(torch.randn_like(x.v))
    graph.replay()
    expected_o, expected_ht = run(x)
    assert torch.equal(o, expected_o)
    assert torch.equal(ht, expected_ht)
