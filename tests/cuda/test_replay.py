"""A call that is replayed does what its function does: same bits, memory freed in time, other problems apart."""

from __future__ import annotations

import importlib
import threading
from dataclasses import replace

import pytest
import torch

from rewy.backends.cuda import replay
from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.direct import _driver
from rewy.backends.cuda.launch import described
from rewy.backends.cuda.plan import plan
from rewy.backends.cuda.replay import Calls, Program
from rewy.problem import OPERATORS, Operands, Options, problem_of
from rewy.testing import Case, make

SMALL = Case("kda", B=1, T=40, H=1, HV=2, K=16, V=16, chunk_size=16, dtype=torch.float32)
LARGE = replace(SMALL, T=200, K=128, V=128, chunk_size=64, dtype=torch.bfloat16)
CHANGES = [
    dict(),
    dict(T=60, lengths=(0, 17, 16, 0, 20)),
    dict(HV=1, recompute=False, initial_state=False, dht=False),
    dict(algebra="conventional"),
    dict(spans=2, initial_state=False),
    dict(spans=2, stretches=2),
    dict(stretches=2, initial_state=False),
    dict(parts=2),
]


@pytest.fixture
def size(device: torch.device) -> Case:
    return SMALL if device.type == "cpu" else LARGE


def called(backend: CudaBackend, case: Case, options: dict, device: torch.device) -> list[torch.Tensor]:
    x, do, dht = make(case)
    x = Operands(*(None if t is None else t.to(device) for t in x))
    dht = None if dht is None else dht.to(device)
    problem = problem_of(x, Options(0.3, case.chunk_size, options["recompute"], options["algebra"]))
    o, ht, kept = backend.forward(problem, x, True)
    return [o, ht, *(t for t in backend.backward(problem, x, kept, do.to(device), dht) if t is not None)]


def planned(pieces: dict[str, int]) -> CudaBackend:
    return CudaBackend(lambda problem, limits: replace(plan(problem, limits), **pieces))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_same_bits_as_without(operator: str, change: dict, size: Case, device: torch.device) -> None:
    pieces = {name: n for name, n in change.items() if name in ("spans", "stretches", "parts")}
    options = dict(recompute=True, algebra="rewy")
    options |= {name: value for name, value in change.items() if name in options}
    fields = {name: value for name, value in change.items() if name not in {*pieces, *options}}
    case = replace(size, operator=operator, **fields)
    backend, plain = planned(pieces), planned(pieces)
    plain.calls = lambda key, function, tensors, _: [*function(*tensors)]
    for seed in range(4 if device.type == "cuda" else 3):
        drawn = replace(case, seed=seed)
        for found, want in zip(
            called(backend, drawn, options, device), called(plain, drawn, options, device), strict=True
        ):
            assert torch.equal(found, want)
    programs = [*backend.calls._programs.values()]
    assert len(programs) == 2 and all(programs)
    kernels = [stage.kernel for program in programs for stage in program.stages if stage.kernel]
    # Triton before 3.5 and drivers before CUDA 12.4 launch through Triton
    known = device.type == "cuda" and _driver() and importlib.util.find_spec("triton.backends.nvidia.driver")
    if known and hasattr(importlib.import_module("triton.backends.nvidia.driver"), "make_tensordesc_arg"):
        assert all(kernel.direct for kernel in kernels)


def test_is_recorded_at_the_second_call_of_a_key(device: torch.device) -> None:
    ran = []

    def doubled(x: torch.Tensor) -> list[torch.Tensor]:
        ran.append(x.device.type)
        return [x + x]

    calls, x = Calls(), torch.ones(16, device=device)
    for key in ("a", "a", "a", "b", "a"):
        (y,) = calls(key, doubled, [x])
        assert torch.equal(y, x + x)
    assert ran == [device.type, "meta", device.type]
    assert torch.equal(calls("a", doubled, [x[1:]])[0], 2 * x[1:])
    assert ran[3:] == [device.type], (
        "what is not aligned as the recorded kernels may count on is not replayed"
    )


def test_frees_a_buffer_after_its_last_use_and_makes_none_that_nobody_uses() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor | None]:
        torch.empty(1000, device=x.device)
        a = torch.zeros_like(x)
        b = a + x
        c = b[1:]
        b.mul_(2)
        return [c, None, x]

    program = Program(function, [torch.empty(3)])
    (stage,) = program.stages
    assert not stage.room and len(stage.operators) == 4
    c, none, x = program([torch.arange(3.0)])
    assert torch.equal(c, torch.tensor([2.0, 4.0])) and none is None and torch.equal(x, torch.arange(3.0))
    assert len(stage.dead) == 2  # a and b


def test_refuses_to_record_what_it_would_not_replay() -> None:
    for function, what in (
        (lambda x: [torch.cat([x, x])], "tensors in a list or by name"),
        (lambda x: [x + torch.zeros(3, device="cpu")], "makes a tensor on cpu"),
    ):
        with pytest.raises(TypeError, match=what):
            Program(function, [torch.empty(3)])


def test_takes_the_function_itself_where_operators_are_hidden() -> None:
    calls, x = Calls(), torch.ones(4)
    for _ in range(3):
        with torch._C._DisableTorchDispatch():
            assert torch.equal(calls("key", lambda x: [x + 1], [x])[0], x + 1)


def test_forgets_the_key_that_was_called_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_REMEMBERED", 2)
    calls, x = Calls(), torch.ones(4)
    for key in ("a", "b", "a", "c"):
        calls(key, lambda x: [x + 1], [x])
    assert [*calls._programs] == ["a", "c"] and calls._programs["a"]


def test_every_buffer_of_a_backward_dies(device: torch.device, size: Case) -> None:
    backend = CudaBackend()
    for _ in range(2):
        called(backend, size, dict(recompute=True, algebra="rewy"), device)
    for program in backend.calls._programs.values():
        made = [n for stage in program.stages for n, *_ in stage.room]
        dead = [n for stage in program.stages for n in stage.dead]
        assert len(made) == len({*made}) and len(dead) == len({*dead})
        assert {*made} <= {*dead, *program._returned}
        assert not {*dead} & {*program._returned}


class Rows:
    """A stand-in for a tensor descriptor, which older versions of Triton do not have."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.block_shape = base, [4]


def test_an_argument_that_is_described_is_described_anew() -> None:
    old, new = Rows(torch.empty(4, device="meta")), torch.ones(4)
    again = described(old, new)
    assert again.base is new and old.base.is_meta and again.block_shape == [4]


@pytest.mark.cuda
def test_threads_share_a_program() -> None:
    backend, options, device = CudaBackend(), dict(recompute=True, algebra="rewy"), torch.device("cuda")
    cases = [replace(LARGE, T=1024, seed=seed) for seed in range(3)]
    want = [called(backend, case, options, device) for case in cases]
    wrong: list[object] = []

    def work(case: Case, expected: list[torch.Tensor]) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                found = called(backend, case, options, device)
                stream.synchronize()
                wrong.extend(case.seed for a, b in zip(found, expected, strict=True) if not torch.equal(a, b))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=both) for both in zip(cases, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.cuda
def test_a_hook_of_tritons_sees_every_launch() -> None:
    from triton import knobs

    backend, options, device = CudaBackend(), dict(recompute=True, algebra="rewy"), torch.device("cuda")
    for _ in range(3):
        called(backend, LARGE, options, device)
    launches = sum(stage.kernel is not None for p in backend.calls._programs.values() for stage in p.stages)
    seen: list[object] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        called(backend, LARGE, options, device)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == launches
