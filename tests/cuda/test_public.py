"""The public functions on a CUDA device: what only a GPU can show."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from checks import assert_operators_are_sound
from torch.utils.checkpoint import checkpoint

import rewy
from rewy.problem import OPERATORS, Operands
from rewy.testing import Case, budgets, errors, exact, fenced, leaves, make
from rewy.testing.oracle import Results, arguments, results

pytestmark = pytest.mark.cuda

SMALL = Case("kda", B=1, T=150, H=2, HV=4, K=64, V=64, dtype=torch.bfloat16)
PACKED = Case("kda", B=1, T=300, H=2, HV=2, K=64, V=64, dtype=torch.bfloat16, lengths=(70, 0, 129, 64))


def case(operator: str, like: Case = SMALL, **changes: Any) -> Case:
    return Case(**{**vars(like), "operator": operator, **changes})


def on_cuda(x: Operands, do: torch.Tensor, dht: torch.Tensor | None, **options: Any) -> Results:
    """Outputs and gradients of `rewy.delta_attention` on the GPU, brought back."""
    return of_leaves(leaves(x, "cuda"), do, dht, **options)


def of_leaves(x: Operands, do: torch.Tensor, dht: torch.Tensor | None, **options: Any) -> Results:
    o, ht = rewy.delta_attention(**arguments(x), output_final_state=True, **options)
    assert ht is not None
    found = results(x, o, ht, do.to(o.device), None if dht is None else dht.to(o.device))
    return {name: t.cpu() for name, t in found.items()}


def assert_within_budget(c: Case, found: Results) -> None:
    x, do, dht = make(c)
    expected = exact(x, do, dht, c.scale)
    allowed = budgets(x, do, dht, expected)
    over = {n: (e, allowed[n]) for n, e in errors(found, expected).items() if not e <= allowed[n]}
    assert not over, over


@pytest.mark.parametrize("algebra", ["rewy", "conventional"])
@pytest.mark.parametrize("like", [SMALL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_parity_through_the_public_function(operator: str, like: Case, algebra: str) -> None:
    c = case(operator, like)
    assert_within_budget(c, on_cuda(*make(c), algebra=algebra))


@pytest.mark.parametrize("operator", OPERATORS)
def test_fp32_is_true_fp32(operator: str) -> None:
    c = case(operator, dtype=torch.float32, K=32, V=32, T=100)
    x, do, dht = make(c)
    found = errors(on_cuda(x, do, dht), exact(x, do, dht))
    assert all(e <= 1e-5 for e in found.values()), found


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_automatic_choice_is_the_kernels(operator: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rewy"):
        on_cuda(*make(case(operator)))
    assert not [message for message in caplog.messages if "reference" in message]


def test_an_explicit_choice_does_not_fall_back() -> None:
    x = leaves(make(case("kda", dtype=torch.float64))[0], "cuda")
    with pytest.raises(ValueError, match="not in float64"):
        rewy.delta_attention(**arguments(x), backend="cuda")


@pytest.mark.parametrize("operator", OPERATORS)
def test_repeats_are_bitwise_equal_next_to_a_busy_stream(operator: str) -> None:
    c = case(operator, PACKED)
    inputs = make(c)
    first = on_cuda(*inputs)
    side = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        with torch.cuda.stream(side):
            for _ in range(10):
                a = a @ a * 1e-3
        again = on_cuda(*inputs)
        assert all(torch.equal(t, again[name]) for name, t in first.items())


def test_a_thread_that_only_launches() -> None:
    """As autograd's does when all memory comes from torch's cache: it has no CUDA context of its own yet."""
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory
    x = make(case("delta_rule"))[0]
    x = Operands(*(None if t is None else t.cuda() for t in x))
    results: list[torch.Tensor] = []

    def call() -> None:
        results.append(rewy.delta_attention(**arguments(x))[0])

    with torch.no_grad():
        call()
        thread = threading.Thread(target=torch.no_grad()(call))
        thread.start()
        thread.join()
    assert torch.equal(*results)


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_lies_around_the_operands_is_not_read(operator: str) -> None:
    c = case(operator, K=48, V=40, T=77)
    x, do, dht = make(c)
    around = Operands(*(None if t is None else fenced(t.cuda()).requires_grad_() for t in x[:7]))
    plain, walled = on_cuda(x, do, dht), of_leaves(around, do, dht)
    assert all(torch.equal(t, walled[name]) for name, t in plain.items())


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_of_no_sequence_are_not_read(operator: str) -> None:
    c = case(operator, PACKED)
    x, do, dht = make(c)
    end = int(x.cu_seqlens[-1])
    plain = on_cuda(x, do, dht)

    def spoil(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[:, end:] = float("nan")
        return t

    spoilt = x._replace(
        **{
            n: spoil(t)
            for n, t in x._asdict().items()
            if t is not None and t.dim() > 2 and n != "initial_state"
        }
    )
    found = on_cuda(spoilt, spoil(do), dht)
    assert all(torch.equal(t, found[name]) for name, t in plain.items())


@pytest.mark.parametrize("operator", OPERATORS)
def test_strided_inputs(operator: str) -> None:
    c = case(operator)
    x, do, dht = make(c)
    turned = (None if t is None else t.cuda() for t in x[:7])
    strided = Operands(
        *(t if t is None else t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in turned)
    )
    assert not strided.q.is_contiguous()
    plain, found = on_cuda(x, do, dht), of_leaves(strided, do, dht)
    assert all(torch.equal(t, found[name]) for name, t in plain.items())


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_cuda_graph_replays_forward_and_backward(operator: str, packed: bool) -> None:
    torch.use_deterministic_algorithms(False)  # filling fresh memory is no part of a graph
    c = case(operator, PACKED if packed else SMALL)
    x, do, _ = make(c)
    x, do = leaves(x, "cuda"), do.cuda()

    def step() -> list[torch.Tensor]:
        # leaves of their own: torch ties a leaf to the stream that it was first used on
        y = Operands(*(None if t is None else t.detach().requires_grad_() for t in x[:7]), *x[7:])
        o, _ = rewy.delta_attention(**arguments(y))
        return [o, *torch.autograd.grad(o, [t for t in y[:7] if t is not None], do)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.v.mul_(-0.5)
        if packed:  # other offsets of as many sequences
            x.cu_seqlens.copy_(torch.tensor([0, 10, 200, 201, 290], device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.11 itself
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiles_as_one_graph(operator: str) -> None:
    torch._dynamo.reset()
    c = case(operator, PACKED)
    x, do, dht = make(c)
    plain = on_cuda(x, do, dht, use_qk_l2norm_in_kernel=True)
    y = leaves(x, "cuda")
    compiled = torch.compile(rewy.delta_attention, fullgraph=True, backend="aot_eager")
    o, ht = compiled(**arguments(y), output_final_state=True, use_qk_l2norm_in_kernel=True)
    found = results(y, o, ht, do.cuda(), dht.cuda())
    assert all(torch.equal(t, found[name].cpu()) for name, t in plain.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.11 itself
@pytest.mark.parametrize("state_v_first", [False, True], ids=["keys first", "values first"])
@pytest.mark.parametrize("recompute", [True, False], ids=["again", "kept"])
@pytest.mark.parametrize("like", [SMALL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator: str, like: Case, recompute: bool, state_v_first: bool) -> None:
    x, do, dht = make(case(operator, like))
    assert dht is not None
    x = Operands(*(None if t is None else t.cuda() for t in x[:-1]), x.cu_seqlens_cpu)  # type: ignore[arg-type, call-arg]
    assert_operators_are_sound(x, do.cuda(), dht.cuda(), 0.3, 64, recompute, "rewy", state_v_first, "cuda")


def test_autocast_and_checkpointing() -> None:
    c = case("gated_delta_rule", dtype=torch.float32)
    x, do, _ = make(c)
    x = leaves(x, "cuda")
    q, k, v = x.q, x.k, x.v

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rewy.chunk_gated_delta_rule(q, k, v, x.g, x.erase)[0]

    with torch.autocast("cuda", torch.bfloat16):
        o = call(q, k, v)
        assert o.dtype is torch.bfloat16
        grads = torch.autograd.grad(o, (q, k, v), do.cuda().bfloat16())
        again = checkpoint(call, q, k, v, use_reentrant=False)
        same = torch.autograd.grad(again, (q, k, v), do.cuda().bfloat16())
    assert all(t.dtype is torch.float32 for t in grads)
    assert torch.equal(o, again) and all(map(torch.equal, grads, same))


@pytest.mark.parametrize("operator", OPERATORS)
def test_decoding_continues_a_chunked_prefill(operator: str) -> None:
    c = case(operator)
    x = make(c)[0]
    x = Operands(*(None if t is None else t.cuda() for t in x))
    whole, state = rewy.delta_attention(**arguments(x), output_final_state=True)
    early = Operands(*(t if t is None or i == 6 else t[:, :-1] for i, t in enumerate(x)))
    last = Operands(*(t if t is None else t[:, -1:] for t in x[:6]), initial_state=None)
    _, before = rewy.delta_attention(**arguments(early), output_final_state=True)
    o, after = rewy.delta_attention_step(
        **arguments(last._replace(initial_state=before)), output_final_state=True
    )
    assert (o - whole[:, -1:]).norm() <= 1e-2 * whole[:, -1:].norm()
    assert (after - state).norm() <= 1e-2 * state.norm()


@pytest.mark.slow
def test_more_elements_than_32_bits_can_count() -> None:
    T, H, D = 262_145, 64, 128  # T·H·D > 2^31

    def long(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, H, *shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = (torch.nn.functional.normalize(long(D), dim=-1).requires_grad_() for _ in range(3))
    beta = long().sigmoid().requires_grad_()
    g = torch.nn.functional.logsigmoid(long().float() + 3).requires_grad_()
    o, _ = rewy.chunk_gated_delta_rule(q, k, v, g, beta)
    do = torch.randn(1, 4096, H, D, device="cuda", dtype=torch.bfloat16)
    grads = torch.autograd.grad(o[:, -4096:], (q, k, v, g, beta), do)
    tail = [t[:, -4096 - 64 * 200 - 1 :].detach().requires_grad_() for t in (q, k, v, g, beta)]
    # 200 chunks of decay leave nothing of the state before them.
    short, _ = rewy.chunk_gated_delta_rule(*tail)
    expected = torch.autograd.grad(short[:, -4096:], tail, do)
    for got, want in zip((o, *grads), (short, *expected), strict=True):
        got, want = got[:, -4096:].float(), want[:, -4096:].float()
        assert (got - want).norm() <= 1e-2 * want.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_on_a_device_that_is_not_current(operator: str) -> None:
    x, do, dht = make(case(operator))
    plain = on_cuda(x, do, dht)
    with torch.cuda.device(0):
        found = of_leaves(leaves(x, "cuda:1"), do, dht)
    assert all(torch.equal(t, found[name]) for name, t in plain.items())
