"""The one autograd function, over operators that torch.compile sees as opaque.

`rewy::forward`, `rewy::backward` and `rewy::step` take the operands one by one and the options as plain values;
the backend is resolved inside, where shapes are concrete. A plain call goes past them, with its problem in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rewy.algebra import chunked
from rewy.algebra.arithmetic import Arithmetic
from rewy.dispatch import resolve
from rewy.operators import are_plain, define
from rewy.problem import Algebra, Operands, Options, Problem, problem_of
from rewy.prologue import first_derivative, refuse_tangents

_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor erase, Tensor? write, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
_OPTIONS = "float scale, int chunk_size, bool recompute, str algebra, bool state_v_first, str backend"

_N_OPERANDS = len(Operands._fields)
_N_OPTIONS = len(Options._fields)


def _no_autocast(x: Operands) -> AbstractContextManager[Any]:
    kind = x.q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _forward(
    problem: Problem, x: Operands, backend: str, training: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    with _no_autocast(x):
        o, final_state, kept = resolve(problem, backend).forward(problem, x, training)
    return o, _laid_out(problem, final_state), kept


def _fake_forward(
    problem: Problem, x: Operands, backend: str, training: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    o, final_state = _fake_outputs(problem, x)
    return o, final_state, resolve(problem, backend).fake_kept(problem, x) if training else []


def _backward(
    problem: Problem, x: Operands, backend: str, kept: list[Tensor], do: Tensor, dht: Tensor | None
) -> list[Tensor]:
    with _no_autocast(x):
        grads = resolve(problem, backend).backward(problem, x, kept, do, dht)
    return _given(problem, grads)


def _fake_backward(problem: Problem, x: Operands, *_: Any) -> list[Tensor]:
    return _given(problem, [None if t is None else t.new_empty(t.shape) for t in x[:7]])


def _given(p: Problem, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that there are, in the order of `Operands`; the last one is that of initial states."""
    *others, states = grads
    laid_out = None if states is None else _laid_out(p, states)
    return [grad for grad in (*others, laid_out) if grad is not None]


def _step(problem: Problem, x: Operands, backend: str) -> tuple[Tensor, Tensor]:
    with _no_autocast(x):
        o, final_state = resolve(problem, backend).step(problem, x)
    return o, _laid_out(problem, final_state)


def _fake_step(problem: Problem, x: Operands, _: str) -> tuple[Tensor, Tensor]:
    return _fake_outputs(problem, x)


def _fake_outputs(p: Problem, x: Operands) -> tuple[Tensor, Tensor]:
    final_state = x.q.new_empty(p.N, p.HV, p.K, p.V, dtype=p.work_dtype)
    return x.v.new_empty(p.B, p.T, p.HV, p.V), _laid_out(p, final_state)


def _laid_out(p: Problem, states: Tensor) -> Tensor:
    """States [N,HV,K,V] as the call wants them in memory; no copy where the backend wrote them so."""
    return states.mT.contiguous().mT if p.state_v_first else states


def _of_schema(function: Callable[..., Any]) -> Callable[..., Any]:
    """function(problem, operands, backend, …), of arguments as its operator has them."""

    def called(*args: Any) -> Any:
        x, rest = Operands(*args[:_N_OPERANDS]), args[_N_OPERANDS:]
        return function(problem_of(x, Options(*rest[:_N_OPTIONS])), x, *rest[_N_OPTIONS:])

    return called


define(
    f"forward({_OPERANDS}, {_OPTIONS}, bool training) -> (Tensor, Tensor, Tensor[])",
    _of_schema(_forward),
    _of_schema(_fake_forward),
)
define(
    f"backward({_OPERANDS}, {_OPTIONS}, Tensor[] kept, Tensor do, Tensor? dht) -> Tensor[]",
    _of_schema(_backward),
    _of_schema(_fake_backward),
)
define(f"step({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)", _of_schema(_step), _of_schema(_fake_step))

_FUNCTIONS: dict[str, Callable[..., Any]] = {"forward": _forward, "backward": _backward, "step": _step}


def _call(
    name: str, tensors: Iterable[Tensor | None], problem: Problem, x: Operands, options: Options, *rest: Any
) -> Any:
    """The operator, which takes these tensors, or its function."""
    if are_plain(tensors):
        return _FUNCTIONS[name](problem, x, *rest)
    return getattr(torch.ops.rewy, name)(*x, *options, *rest)


class DeltaAttention(torch.autograd.Function):
    """(operands…, problem, options, backend) -> (o, final state)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *operands, problem, options, backend = args
        x = Operands(*operands)
        o, final_state, kept = _call("forward", x, problem, x, options, backend, True)
        ctx.save_for_backward(*x, *kept)
        ctx.call = problem, options, backend
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @first_derivative
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them when they are asked for
        x, kept = Operands(*saved[:_N_OPERANDS]), list(saved[_N_OPERANDS:])
        if do is None:
            do = torch.zeros_like(x.v)
        problem, options, backend = ctx.call
        grads = iter(_call("backward", (*saved, do, dht), problem, x, options, backend, kept, do, dht))
        return *(None if t is None else next(grads) for t in x[:7]), None, None, None, None, None


def delta_attention(
    problem: Problem, x: Operands, options: Options, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(o, final state) of a validated problem, differentiable in every operand."""
    if problem.algebra is Algebra.AUTOGRAD:
        return _autograd_of_forward(problem, x, backend)
    refuse_tangents(*x[:7])
    if torch.is_grad_enabled() and any(t.requires_grad for t in x[:7] if t is not None):
        o, final_state = DeltaAttention.apply(*x, problem, options, backend or "")
        return o, final_state
    o, final_state, _ = _call("forward", x, problem, x, options, backend or "", False)
    return o, final_state


def step(problem: Problem, x: Operands, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """(o, final state) token by token; no gradients."""
    refuse_tangents(*x[:7])
    o, final_state = _call("step", x, problem, x, options, backend or "")
    return o, final_state


def _autograd_of_forward(problem: Problem, x: Operands, backend: str | None) -> tuple[Tensor, Tensor]:
    """torch's own derivative of the chunked forward: the yardstick for both hand-written backwards."""
    if backend not in (None, "reference"):
        raise ValueError(f"algebra='autograd' differentiates the reference backend, got backend={backend!r}")
    with _no_autocast(x):
        o, final_state, _ = chunked.forward(problem, x, Arithmetic.of(problem.dtype))
    return o, final_state
