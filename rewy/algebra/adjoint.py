"""What both backwards share: the reverse scan over chunks, and the gradients of the operands.

With dS⁺ the gradient of the state after a chunk:

    dU = Aᵀ do + K̃ dS⁺             dS = e^Γ ⊙ dS⁺ + Q̃ᵀ do − (the part through the WY matrix)
    dA = scale · tril(do Uᵀ)        dQ̃ = do Sᵀ           dK̃ = U dS⁺ᵀ
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.algebra.chunked import Chunks
from rewy.algebra.pairs import Pairs
from rewy.problem import Gradients, Operands


@dataclass(frozen=True)
class Reverse:
    """What the reverse scan leaves: do in chunks, dS⁺ per chunk, the gradient of the initial states."""

    do: Tensor
    dS: Tensor
    initial: Tensor


def reverse_pass(
    c: Chunks, A: Tensor, do: Tensor, dht: Tensor | None, through_wy: Callable[[slice, Tensor], Tensor]
) -> Reverse:
    """The scan over chunks, last to first; `through_wy(step, dU)` is what reaches dS through the WY matrix."""
    mm, K, carry = c.arithmetic.mm, c.K, c.whole.mT
    do = c.layout.stack(do, c.arithmetic.work)
    p = c.problem
    if dht is None:
        last = do.new_zeros(p.N, p.HV, p.K, p.V)
    else:
        last = c.layout.sort(dht.to(c.arithmetic.work)).clone()
    dU, dS = mm(A.mT, do), mm(c.Q.mT, do)
    after, scan = torch.empty_like(dS), c.layout.scan_back(last)
    for i in reversed(c.layout.steps):
        after[i] = scan.find(i)
        through = through_wy(i, dU[i] + mm(K[i], after[i]))
        scan.leave(i, carry[i] * after[i] + dS[i] - through)
    return Reverse(do, after, c.layout.unsort(scan.last()))


def gradients(
    c: Chunks,
    x: Operands,
    stage: Pairs,
    S: Tensor,
    U: Tensor,
    back: Reverse,
    dL: Tensor,
    dX: Tensor,
    dR: Tensor,
) -> Gradients:
    """All gradients of the operands from the adjoints of L, X and w ⊙ v (dR).

    The diagonal pairs of A carry no decay: their parts of dq and dk join after the gate gradient is formed, for
    there they would cancel only up to rounding.
    """
    p, mm = c.problem, c.arithmetic.mm
    dA = p.scale * mm(back.do, U.mT)
    diagonal = dA.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, right_A, dG_A = stage.adjoint(dA.tril(-1), c.q, c.k)
    E, right_L, dG_L = stage.adjoint(dL, c.erased, c.k)
    right = right_A + right_L
    dQ = mm(back.do, S.mT) * (p.scale * c.decayed)
    dX = dX * c.decayed
    dK = mm(U, back.dS.mT) * c.remaining

    dg = None
    if x.g is not None:
        if dG_A is None or dG_L is None:
            dG = _fold(c.G, c.q * (dq + dQ) + c.erased * (E + dX) - c.k * right)
        else:
            dG = dG_A + dG_L + _fold(c.G, c.q * dQ + c.erased * dX)
        remaining = _fold(c.G, c.k * dK)
        whole = _fold(c.G, c.whole * (S * back.dS).sum(-1)[..., None, :])
        dg = decay_gradient(dG, remaining, whole)

    dq, E = dq + dQ, E + dX
    dk = c.b * E + right + dK
    dq, dk = dq + diagonal * c.k, dk + diagonal * c.q
    db, dw = _fold(c.b, c.k * E), _fold(c.w, c.v * dR)
    if x.write is None:
        db = db + dw

    return collected(c, x, back, dq=dq, dk=dk, dv=c.w * dR, dg=dg, db=db, dw=dw)


def decay_gradient(dG: Tensor, remaining: Tensor, whole: Tensor) -> Tensor:
    """dg from the terms of G inside the chunk, of K̃ (k ⊙ dK̃ as it decays) and of the whole chunk's decay.

    Row i of K̃ decays by the tokens after it. Its share adds up forwards: in a difference of two reverse sums the
    last row, which does not decay, would drown what strong decays leave of the others.
    """
    return _reverse_cumsum(dG) + F.pad(remaining[..., :-1, :].cumsum(-2), (0, 0, 1, 0)) + whole


def collected(
    c: Chunks,
    x: Operands,
    back: Reverse,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor | None,
    db: Tensor,
    dw: Tensor | None,
) -> Gradients:
    """Stacks [M,HV,C,D] as the gradients of the operands, in their shapes and dtypes."""

    def give(grad: Tensor, like: Tensor) -> Tensor:
        """The gradient of `like`; heads that shared it are summed."""
        if grad.shape[1] != like.shape[2]:
            grad = grad.unflatten(1, (like.shape[2], -1)).sum(2)
        return c.layout.unstack(grad if like.dim() == 4 else grad[..., 0]).to(like.dtype)

    return Gradients(
        q=give(dq, x.q),
        k=give(dk, x.k),
        v=give(dv, x.v),
        g=None if x.g is None or dg is None else give(dg, x.g),
        erase=give(db, x.erase),
        write=None if x.write is None or dw is None else give(dw, x.write),
        initial_state=None if x.initial_state is None else back.initial.to(x.initial_state.dtype),
    )


def _fold(gate: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a gate from that of its broadcast: summed over channels if the gate had none."""
    return grad.sum(-1, keepdim=True) if gate.shape[-1] == 1 else grad


def _reverse_cumsum(x: Tensor) -> Tensor:
    return x.flip(-2).cumsum(-2).flip(-2)
