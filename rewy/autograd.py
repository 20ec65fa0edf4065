"""The one autograd function, over operators that torch.compile sees as opaque.

`rewy::forward`, `rewy::backward` and `rewy::step` take the operands one by one and the options as plain values;
the backend is resolved inside, where shapes are concrete.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rewy.algebra import chunked
from rewy.algebra.arithmetic import Arithmetic
from rewy.dispatch import resolve
from rewy.problem import Algebra, Operands, Options, Problem, problem_of
from rewy.prologue import first_derivative, refuse_tangents

_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor erase, Tensor? write, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
_OPTIONS = "float scale, int chunk_size, bool recompute, str algebra, bool state_v_first, str backend"

_library = torch.library.Library("rewy", "DEF")
_library.define(
    f"forward({_OPERANDS}, {_OPTIONS}, bool training) -> (Tensor, Tensor, Tensor[])",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"backward({_OPERANDS}, {_OPTIONS}, Tensor[] kept, Tensor do, Tensor? dht) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(f"step({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)

_N_OPERANDS = len(Operands._fields)
_N_OPTIONS = len(Options._fields)


def _unpack(args: tuple[Any, ...]) -> tuple[Problem, Operands, str, tuple[Any, ...]]:
    x = Operands(*args[:_N_OPERANDS])
    rest = args[_N_OPERANDS:]
    problem = problem_of(x, Options(*rest[:_N_OPTIONS]))
    return problem, x, rest[_N_OPTIONS], rest[_N_OPTIONS + 1 :]


def _no_autocast(x: Operands) -> AbstractContextManager[Any]:
    kind = x.q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _forward(*args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    problem, x, backend, (training,) = _unpack(args)
    with _no_autocast(x):
        o, final_state, kept = resolve(problem, backend).forward(problem, x, training)
    return o, _laid_out(problem, final_state), kept


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    problem, x, backend, (training,) = _unpack(args)
    o, final_state = _fake_outputs(problem, x)
    return o, final_state, resolve(problem, backend).fake_kept(problem, x) if training else []


def _backward(*args: Any) -> list[Tensor]:
    problem, x, backend, (kept, do, dht) = _unpack(args)
    with _no_autocast(x):
        grads = resolve(problem, backend).backward(problem, x, kept, do, dht)
    return _given(problem, grads)


def _fake_backward(*args: Any) -> list[Tensor]:
    problem, x, _, _ = _unpack(args)
    return _given(problem, [None if t is None else t.new_empty(t.shape) for t in x[:7]])


def _given(p: Problem, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that there are, in the order of `Operands`; the last one is that of initial states."""
    *others, states = grads
    laid_out = None if states is None else _laid_out(p, states)
    return [grad for grad in (*others, laid_out) if grad is not None]


def _step(*args: Any) -> tuple[Tensor, Tensor]:
    problem, x, backend, _ = _unpack(args)
    with _no_autocast(x):
        o, final_state = resolve(problem, backend).step(problem, x)
    return o, _laid_out(problem, final_state)


def _fake_step(*args: Any) -> tuple[Tensor, Tensor]:
    problem, x, _, _ = _unpack(args)
    return _fake_outputs(problem, x)


def _fake_outputs(p: Problem, x: Operands) -> tuple[Tensor, Tensor]:
    final_state = x.q.new_empty(p.N, p.HV, p.K, p.V, dtype=p.work_dtype)
    return x.v.new_empty(p.B, p.T, p.HV, p.V), _laid_out(p, final_state)


def _laid_out(p: Problem, states: Tensor) -> Tensor:
    """States [N,HV,K,V] as the call wants them in memory; no copy where the backend wrote them so."""
    return states.mT.contiguous().mT if p.state_v_first else states


for _name, _impl, _fake in (
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
    ("step", _step, _fake_step),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rewy::{_name}", _fake, lib=_library)


class DeltaAttention(torch.autograd.Function):
    """(operands…, options, backend) -> (o, final state)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *operands, options, backend = args
        o, final_state, kept = torch.ops.rewy.forward(*operands, *options, backend, True)
        ctx.save_for_backward(*operands, *kept)
        ctx.options, ctx.backend = options, backend
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @first_derivative
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them when they are asked for
        x, kept = Operands(*saved[:_N_OPERANDS]), list(saved[_N_OPERANDS:])
        if do is None:
            do = torch.zeros_like(x.v)
        grads = iter(torch.ops.rewy.backward(*x, *ctx.options, ctx.backend, kept, do, dht))
        return *(None if t is None else next(grads) for t in x[:7]), None, None, None, None


def delta_attention(
    problem: Problem, x: Operands, options: Options, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(o, final state) of a validated problem, differentiable in every operand."""
    if problem.algebra is Algebra.AUTOGRAD:
        return _autograd_of_forward(problem, x, backend)
    refuse_tangents(*x[:7])
    if torch.is_grad_enabled() and any(t.requires_grad for t in x[:7] if t is not None):
        o, final_state = DeltaAttention.apply(*x, options, backend or "")
        return o, final_state
    o, final_state, _ = torch.ops.rewy.forward(*x, *options, backend or "", False)
    return o, final_state


def step(x: Operands, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """(o, final state) token by token; no gradients."""
    refuse_tangents(*x[:7])
    o, final_state = torch.ops.rewy.step(*x, *options, backend or "")
    return o, final_state


def _autograd_of_forward(problem: Problem, x: Operands, backend: str | None) -> tuple[Tensor, Tensor]:
    """torch's own derivative of the chunked forward: the yardstick for both hand-written backwards."""
    if backend not in (None, "reference"):
        raise ValueError(f"algebra='autograd' differentiates the reference backend, got backend={backend!r}")
    with _no_autocast(x):
        o, final_state, _ = chunked.forward(problem, x, Arithmetic.of(problem.dtype))
    return o, final_state
