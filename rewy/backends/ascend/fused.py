"""The algebra's forward and backwards by custom operators: both state passes, and the gradient of the chunks.

Stacks [M,HV,...] go to the operators as [M·HV,...]. The layout is step-major, longest sequences first, so chunk i of
the s-th sequence of heads is then row starts[i] + s. In a chain chunk i of head h of sequence n is row
starts[n] + i·HV + h: sequences run side by side there too. What the operators leave in chunks of no sequence is
undefined, and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from rewy.algebra.adjoint import Reverse, collected, decay_gradient
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.chunked import Chunks, attention, wy_inverse
from rewy.algebra.layout import sent
from rewy.backends.ascend.ops import CHUNK
from rewy.problem import Algebra, Gate, Gradients, Operands, Problem


def forward(problem: Problem, x: Operands, arithmetic: Arithmetic) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`rewy.algebra.chunked.forward`."""
    c = Chunks.of(problem, x, arithmetic)
    stage = c.pairs()
    T = wy_inverse(c, stage)
    S, U, final = _states(c, x, T)
    o = arithmetic.mm(c.Q, S) + arithmetic.mm(attention(c, stage), U)
    return c.layout.unstack(o).to(problem.dtype), final, [T, S, U]


def backward(
    problem: Problem,
    x: Operands,
    kept: list[Tensor],
    do: Tensor,
    dht: Tensor | None,
    arithmetic: Arithmetic,
) -> Gradients:
    """`rewy.algebra.rewy.backward`, or that of `rewy.algebra.conventional`."""
    c = Chunks.of(problem, x, arithmetic)
    A = attention(c, c.pairs())
    T, *states = (t[: len(c.k)] for t in kept)
    S, U = states or _states(c, x, T)[:2]
    if problem.algebra is Algebra.CONVENTIONAL:
        back, dR, dU = _reverse(c, A, T, do, dht, through=arithmetic.mm(T, c.X))
        return gradients(c, x, S, U, back, dR, [dU, -c.X, c.written, T])
    back, dR, _ = _reverse(c, A, T, do, dht)
    return gradients(c, x, S, U, back, dR)


def _states(c: Chunks, x: Operands, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`state_pass`: the states before each chunk, U, the final states."""
    operands = _flat(c, c.X), _flat(c, c.K), _flat(c, T), _flat(c, c.written, torch.float32), _carry(c)
    results = torch.ops.rewy_ascend.state_forward(
        *operands,
        _first(c.initial(x)),
        _starts(c),
        v_first=c.problem.state_v_first,
        by_sequence=c.layout.chain is not None,
    )
    S, U, final = _stacked(c, *results)
    return S, U, c.layout.unsort(final)


def _reverse(
    c: Chunks, A: Tensor, T: Tensor, do: Tensor, dht: Tensor | None, through: Tensor | None = None
) -> tuple[Reverse, Tensor, Tensor]:
    """`reverse_pass` and dR; also dU, empty without `through`, the W of the conventional form."""
    p = c.problem
    do = c.layout.stack(do, c.arithmetic.work)
    last = do.new_zeros(p.N, p.HV, p.K, p.V) if dht is None else c.layout.sort(dht.to(c.arithmetic.work))
    keys = -(c.X if through is None else through)
    operands = (_flat(c, t) for t in (keys, c.K, T, A, c.Q, do))
    results = torch.ops.rewy_ascend.state_reverse(
        *operands,
        _carry(c),
        _first(last),
        _starts(c),
        v_first=p.state_v_first,
        by_sequence=c.layout.chain is not None,
        conventional=through is not None,
    )
    dS, dR, initial, dU = _stacked(c, *results)
    return Reverse(do, dS, c.layout.unsort(initial)), dR, dU


def gradients(
    c: Chunks,
    x: Operands,
    S: Tensor,
    U: Tensor,
    back: Reverse,
    dR: Tensor,
    conventional: Sequence[Tensor] = (),
) -> Gradients:
    """`rewy.algebra.adjoint.gradients`, with the second and third of the three products.

    Or, from dU, −X, w ⊙ v and T, with those of the conventional form.
    """
    decay = c.problem.operator.decay
    by_channel, gram = decay is Gate.CHANNEL, len(conventional) > 0 and decay is Gate.SCALAR
    operands = (_flat(c, t) for t in (c.q, c.k, c.v))
    b, G = (_flat(c, t, torch.float32) for t in (c.b, c.G))
    w = None if x.write is None else _flat(c, c.w, torch.float32)
    adjoints = (_flat(c, t) for t in (back.do, U, dR, S, back.dS))
    far = _far(c) if by_channel else None
    results = torch.ops.rewy_ascend.chunk_gradient(
        *operands,
        b,
        w,
        G,
        *adjoints,
        far,
        _masks(G.device),
        c.problem.scale,
        c.problem.group > 1,
        *(_flat(c, t) for t in conventional),
        gram=gram,
    )
    dq, dk, dv, db, dG, remaining = _stacked(c, *results[:4], *results[5:])
    dG = dG.sum(2) if gram else dG
    dw = None if w is None else _stacked(c, results[4])[0]

    dg = None
    if x.g is not None:
        whole = (S * back.dS).sum(-1)[..., None, :]
        whole = whole if by_channel else whole.sum(-1, keepdim=True)
        dg = decay_gradient(dG, remaining, c.whole * whole)
    return collected(c, x, back, dq=dq, dk=dk, dv=dv, dg=dg, db=db, dw=dw)


def _far(c: Chunks) -> Tensor:
    """[M·HV]: 1 where some channel decays too far from the middle of the chunk, on which operands are centred."""
    middle = (c.G[..., :1, :] + c.G[..., -1:, :]) / 2
    return ((c.G - middle).abs().amax((-2, -1)) > c.arithmetic.span).flatten().to(torch.int32)


@cache
def _masks(device: torch.device) -> Tensor:
    """[8,C,C]: the pairs i > j, those of each pass of a far chunk, the diagonal.

    Pass l has the pairs of the two halves of each block of 2^(l+1) tokens: i and j differ in bit l and none above.
    """
    i = torch.arange(CHUNK)[:, None]
    j = i.mT
    differ = i ^ j
    passes = [(i > j) & (differ >= m) & (differ < 2 * m) for m in (1, 2, 4, 8, 16, 32)]
    return sent(torch.stack([i > j, *passes, i == j]).float(), device)


def _flat(c: Chunks, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[M,HV,...] as an operand [M·HV,...]."""
    return t.flatten(0, 1).to(dtype or c.problem.dtype).contiguous()


def _stacked(c: Chunks, *results: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.unflatten(0, (-1, c.problem.HV)) for t in results)


def _carry(c: Chunks) -> Tensor:
    """e^Γ [M·HV,K], one factor a row of the state."""
    return _flat(c, c.whole[..., 0, :].expand(-1, -1, c.problem.K), torch.float32)


def _first(states: Tensor) -> Tensor:
    """[N,HV,K,V] as [P,K,V], which may lie in memory as [P,V,K]."""
    states = states.flatten(0, 1)
    return states if states.mT.is_contiguous() else states.contiguous()


def _starts(c: Chunks) -> Tensor:
    """[steps+1]: the row that each step of the scan starts at, or in a chain each sequence, and the end."""
    if c.layout.chain is not None:
        return c.layout.chain.starts * c.problem.HV
    ends = [i.stop * c.problem.HV for i in c.layout.steps]
    return sent(torch.tensor([0, *ends], dtype=torch.int32), c.k.device)
