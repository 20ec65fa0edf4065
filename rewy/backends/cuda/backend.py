"""The CUDA backend: the stages of the chunked forward and of the ReWY backward, one after the other.

    forward    gates -> pairs -> state
    backward   gates -> state (again, for S and U) -> reverse -> gradients

A and T are kept between the two, and gates with one number a row. S, U and what gates by channel make of q and k are
formed again, unless `disable_recompute` keeps them too. `segments` and `spans` walk the same stages in pieces, and keep
the states that these begin with.

`forward` and `backward` are what callers see; what they do for one problem is recorded and replayed (`replay`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from rewy.backends.cuda import conventional, gates, gradients, pairs, prologue, segments, spans, state
from rewy.backends.cuda.chunks import chunk_count, chunks_of
from rewy.backends.cuda.plan import FAMILIAR, RUN, Limits, Plan, limits_of, plan
from rewy.backends.cuda.replay import Calls
from rewy.backends.cuda.step import step
from rewy.problem import Algebra, Gradients, Operands, Problem

log = logging.getLogger("rewy")


class CudaBackend:
    """Triton kernels for NVIDIA GPUs; `planner` chooses their tiles."""

    name = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    prologue = prologue

    def __init__(self, planner: Callable[[Problem, Limits], Plan] = plan) -> None:
        self.planner = planner
        self.calls = Calls()

    def unusable(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device is available"

    def insists(self) -> bool:
        return False

    def supports(self, problem: Problem) -> tuple[bool, str]:
        if problem.dtype not in self.dtypes:
            return False, "the CUDA kernels compute in float32, float16 and bfloat16, not in float64"
        if problem.algebra is Algebra.AUTOGRAD:
            return False, "the CUDA kernels compute the rewy and the conventional backward, not autograd's"
        if problem.device.type == "cuda":
            if limits_of(problem.device).capability < (8, 0):
                return False, "the CUDA kernels need compute capability 8.0 or later"
            if not FAMILIAR:
                _say_unfamiliar()
        return True, ""

    def forward(self, problem: Problem, x: Operands, training: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        def stages(*x: Tensor | None) -> list[Tensor]:
            o, ht, kept = self._forward(problem, Operands(*x), training)  # type: ignore[arg-type]
            return [o, ht, *kept]

        def training_step(*x: Tensor | None) -> None:
            o, ht, *kept = stages(*x)
            operands = Operands(*x)  # type: ignore[arg-type]
            # Who gives an initial state mostly has a gradient for the final one.
            self._backward(problem, operands, kept, o, None if operands.initial_state is None else ht)

        x = x._replace(cu_seqlens_cpu=None)  # the device has the offsets
        rehearsal = training_step if training else stages
        o, ht, *kept = self._called(("forward", problem, training), stages, x, rehearsal)
        return o, ht, kept

    def backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        def stages(do: Tensor, dht: Tensor | None, *tensors: Tensor) -> Gradients:
            x, kept = tensors[: len(Operands._fields)], tensors[len(Operands._fields) :]
            unit = state.unit(problem)
            if dht is not None and unit != 1:
                dht = dht / unit
            return self._backward(problem, Operands(*x), [*kept], do, dht)

        x = x._replace(cu_seqlens_cpu=None)
        return Gradients(*self._called(("backward", problem), stages, (do, dht, *x, *kept)))

    def _called(
        self,
        key: tuple[Any, ...],
        stages: Callable[..., Any],
        tensors: Iterable[Tensor | None],
        rehearsal: Callable[..., Any] | None = None,
    ) -> Any:
        """What the stages return. A planner, the problem and dtypes determine all that they do."""
        tensors = _contiguous(tensors)
        key = (*key, *[None if t is None else t.dtype for t in tensors])
        return self.calls(key, stages, tensors, rehearsal)

    def _forward(self, problem: Problem, x: Operands, training: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        tiles, chunks = self._plan(problem, x), chunks_of(problem, x)
        gated = gates.gated(problem, x, chunks, tiles.gates)
        A, Ti = pairs.scores(problem, x, gated, chunks, tiles.pairs)
        keep = training and not problem.recompute
        if tiles.in_pieces and training:
            assert problem.recompute
            o, ht, states = spans.outputs(problem, x, gated, A, Ti, tiles)
        elif tiles.parts > 1:
            o, ht, states = segments.outputs(problem, x, gated, A, Ti, chunks, tiles, keep)
        else:
            o, ht, states = state.outputs(problem, x, gated, A, Ti, chunks, tiles.outputs, keep)
        if not training:
            return o, ht, []
        return o, ht, [A, Ti, *(getattr(gated, name) for name in gates.kept(problem)), *states]

    def fake_kept(self, problem: Problem, x: Operands) -> list[Tensor]:
        p, C, count, tiles = problem, problem.chunk_size, chunk_count(problem), self._plan(problem, x)

        def each(*shape: int) -> Tensor:
            return x.q.new_empty(count, p.HV, *shape)

        gated = gates.allocated(p, x, count)
        states = [] if p.recompute else [each(p.K, p.V), x.q.new_empty(state.digits(p), count, p.HV, C, p.V)]
        if tiles.in_pieces:
            states = [spans.starts_like(p, x, tiles)]
        elif tiles.parts > 1 and p.algebra is Algebra.REWY:
            states += segments.kept_like(p, x, tiles)
        return [each(C, C), each(C, C), *(getattr(gated, name) for name in gates.kept(p)), *states]

    def _backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        """Of dht in units of `state.unit`."""
        tiles = self._plan(problem, x)
        A, Ti, *rest = kept
        names = gates.kept(problem)
        gated = gates.restored(x, dict(zip(names, rest, strict=False))) if names else None
        states = rest[len(names) :]
        if tiles.in_pieces:
            return spans.backward(problem, x, gated, A, Ti, states[0], do, dht, tiles)
        chunks = chunks_of(problem, x)
        if gated is None:
            gated = gates.gated(problem, x, chunks, tiles.gates)
        if problem.algebra is Algebra.CONVENTIONAL:
            return conventional.backward(problem, x, gated, A, Ti, do, dht, chunks, tiles)
        if tiles.parts > 1:
            s, u, ds, dr, dh0 = segments.both(problem, x, gated, A, Ti, do, dht, states, chunks, tiles)
        else:
            s, u = states or state.states(problem, x, gated, Ti, chunks, tiles.states)
            ds, dr, dh0 = state.reverse(problem, x, gated, A, Ti, do, dht, chunks, tiles.reverse)
        return gradients.gradients(problem, x, gated, do, u, dr, s, ds, dh0, chunks, tiles)

    def step(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
        return step(problem, Operands(*_contiguous(x)))  # type: ignore[arg-type]

    def _plan(self, problem: Problem, x: Operands) -> Plan:
        chosen = self.planner(problem, limits_of(problem.device))
        # A write gate may have a dtype of its own, which `hopper` takes no tiles of.
        return chosen if x.write is None or x.write.dtype is problem.dtype else chosen.portable()


def _contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


@cache
def _say_unfamiliar() -> None:
    run = " and ".join(f"{major}.{minor}" for major, minor in RUN)
    log.warning(
        f"the CUDA kernels have run on a GPU under Triton {run} only, this is {triton.__version__}: all are in plain "
        "Triton, also on Hopper"
    )
