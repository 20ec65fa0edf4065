"""The ReWY backward: three products around the WY matrix T instead of seven, and no inverse adjoint.

U = T R, so the adjoint of R is dR = Tᵀ dU, and the adjoint of L through the inverse is
−Tᵀ (dU Rᵀ) Tᵀ = −(Tᵀ dU)(T R)ᵀ = −dR Uᵀ. X acts only in R = w ⊙ v − X S. That leaves

    (1) dR = Tᵀ dU          (2) dL = −tril(dR Uᵀ, −1)          (3) dX = −dR Sᵀ
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewy.algebra.adjoint import Reverse, gradients, reverse_pass
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.chunked import Chunks, attention, solve_rewy, state_pass
from rewy.problem import Gradients, Operands, Problem


def into_wy(arithmetic: Arithmetic, T: Tensor, dU: Tensor) -> Tensor:
    """dR: the first of the three products."""
    return arithmetic.mm(T.mT, dU)


def out_of_wy(arithmetic: Arithmetic, dR: Tensor, U: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """dL and dX: the second and the third."""
    return -arithmetic.mm(dR, U.mT).tril(-1), -arithmetic.mm(dR, S.mT)


def reverse(c: Chunks, A: Tensor, T: Tensor, do: Tensor, dht: Tensor | None) -> tuple[Reverse, Tensor]:
    """The reverse scan, which forms dR on its way."""
    arithmetic, X, dR = c.arithmetic, c.X, torch.empty_like(c.v)

    def through_wy(i: slice, dU: Tensor) -> Tensor:
        dR[i] = into_wy(arithmetic, T[i], dU)
        return arithmetic.mm(X[i].mT, dR[i])

    return reverse_pass(c, A, do, dht, through_wy), dR


def backward(
    problem: Problem,
    x: Operands,
    kept: list[Tensor],
    do: Tensor,
    dht: Tensor | None,
    arithmetic: Arithmetic,
) -> Gradients:
    """Gradients of every operand from what the forward kept, [T] or [T, S, U], with or without spare chunks."""
    c = Chunks.of(problem, x, arithmetic)
    stage = c.pairs()
    T, *states = (t[: len(c.k)] for t in kept)
    S, U = states or state_pass(c, c.initial(x), solve_rewy(c, T))[:2]
    back, dR = reverse(c, attention(c, stage), T, do, dht)
    dL, dX = out_of_wy(arithmetic, dR, U, S)
    return gradients(c, x, stage, S, U, back, dL, dX, dR)
