"""The algebra's forward and ReWY backward with custom operators for the stages that they fit.

Stacks [M,HV,...] go to the operators as [M·HV,...]; chunk i of a sequence is then row i·P + s of P sequences of
heads, for the layout of dense sequences is step-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewy.algebra.adjoint import Reverse, collected, decay_gradient, gradients
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.chunked import Chunks, attention, solve_rewy, state_pass, wy_inverse
from rewy.algebra.pairs import Pairs
from rewy.algebra.rewy import out_of_wy, reverse
from rewy.backends.ascend.ops import Stage
from rewy.problem import Gradients, Operands, Problem


def forward(
    problem: Problem, x: Operands, arithmetic: Arithmetic, fits: set[Stage]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`rewy.algebra.chunked.forward`."""
    c = Chunks.of(problem, x, arithmetic)
    stage = c.pairs()
    T = wy_inverse(c, stage)
    S, U, final = _states(c, x, T, fits)
    o = arithmetic.mm(c.Q, S) + arithmetic.mm(attention(c, stage), U)
    return c.layout.unstack(o).to(problem.dtype), final, [T, S, U]


def backward(
    problem: Problem,
    x: Operands,
    kept: list[Tensor],
    do: Tensor,
    dht: Tensor | None,
    arithmetic: Arithmetic,
    fits: set[Stage],
) -> Gradients:
    """`rewy.algebra.rewy.backward`."""
    c = Chunks.of(problem, x, arithmetic)
    stage = c.pairs()
    T, *states = (t[: len(c.k)] for t in kept)
    S, U = states or _states(c, x, T, fits)[:2]
    back, dR = _reverse(c, stage, T, do, dht, fits)
    if Stage.GRADIENT in fits:
        return _gradients(c, x, S, U, back, dR)
    dL, dX = out_of_wy(arithmetic, dR, U, S)
    return gradients(c, x, stage, S, U, back, dL, dX, dR)


def _states(c: Chunks, x: Operands, T: Tensor, fits: set[Stage]) -> tuple[Tensor, Tensor, Tensor]:
    """`state_pass`: the states before each chunk, U, the final states."""
    if Stage.FORWARD not in fits:
        return state_pass(c, c.initial(x), solve_rewy(c, T))
    operands = _flat(c, c.X), _flat(c, c.K), _flat(c, T), _flat(c, c.written, torch.float32), _carry(c)
    results = torch.ops.rewy_ascend.state_forward(*operands, _first(c, c.initial(x)), len(c.layout.steps))
    S, U, final = _stacked(c, *results)
    return S, U, final


def _reverse(
    c: Chunks, stage: Pairs, T: Tensor, do: Tensor, dht: Tensor | None, fits: set[Stage]
) -> tuple[Reverse, Tensor]:
    """`reverse_pass`, and dR."""
    A = attention(c, stage)
    if Stage.REVERSE not in fits:
        return reverse(c, A, T, do, dht)
    p = c.problem
    do = c.layout.stack(do, c.arithmetic.work)
    last = do.new_zeros(p.N, p.HV, p.K, p.V) if dht is None else dht.to(c.arithmetic.work)
    operands = (_flat(c, t) for t in (-c.X, c.K, T, A, c.Q, do))
    results = torch.ops.rewy_ascend.state_reverse(*operands, _carry(c), _first(c, last), len(c.layout.steps))
    dS, dR, initial = _stacked(c, *results)
    return Reverse(do, dS, initial), dR


def _gradients(c: Chunks, x: Operands, S: Tensor, U: Tensor, back: Reverse, dR: Tensor) -> Gradients:
    """`gradients` for scalar decay or none."""
    p = c.problem
    operands = (_flat(c, t) for t in (c.q, c.k, c.v))
    gates = (_flat(c, t[..., 0], torch.float32) for t in (c.b, c.G))
    adjoints = (_flat(c, t) for t in (back.do, U, dR, S, back.dS))
    results = torch.ops.rewy_ascend.chunk_gradient(*operands, *gates, *adjoints, p.scale)
    dq, dk, dv, dbeta, dG, remaining = _stacked(c, *results)

    dg = None
    if x.g is not None:
        whole = c.whole * (S * back.dS).sum((-2, -1))[..., None, None]
        dg = decay_gradient(dG[..., None], remaining[..., None], whole)
    return collected(c, x, back, dq=dq, dk=dk, dv=dv, dg=dg, db=dbeta[..., None], dw=None)


def _flat(c: Chunks, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[M,HV,...] as an operand [M·HV,...]."""
    return t.flatten(0, 1).to(dtype or c.problem.dtype).contiguous()


def _stacked(c: Chunks, *results: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.unflatten(0, (-1, c.problem.HV)) for t in results)


def _carry(c: Chunks) -> Tensor:
    """e^Γ [M·HV,K], one factor a row of the state."""
    return _flat(c, c.whole[..., 0, :].expand(-1, -1, c.problem.K), torch.float32)


def _first(c: Chunks, states: Tensor) -> Tensor:
    return states.flatten(0, 1).contiguous()
