"""The backward rewy replaces, as it is commonly written: seven products around the WY matrix T.

The forward is read as W = T X, Ū = T (w ⊙ v), U = Ū − W S. Its adjoints are

    (1) dW = −dU Sᵀ        (2) + (3) dT = dW Xᵀ + dU (w ⊙ v)ᵀ        (4) dX = Tᵀ dW        (5) d(w ⊙ v) = Tᵀ dU
    (6) + (7) dL = −tril(Tᵀ dT Tᵀ, −1)

Scalar gates take their gradient from the recomputed Gram products, per-channel gates loop over pairs of tokens
within blocks of 16. It exists for comparison: same results, more work, more rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rewy.algebra.adjoint import gradients, reverse_pass
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.chunked import Chunks, attention, state_pass
from rewy.algebra.pairs import CentredPairs, Pairs, WeightedPairs, blocks, diagonal_blocks
from rewy.problem import Gate, Gradients, Operands, Problem

BLOCK = 16


def through_inverse(
    arithmetic: Arithmetic, T: Tensor, X: Tensor, written: Tensor, S: Tensor, dU: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dL, dX and d(w ⊙ v): all seven products."""
    mm = arithmetic.mm
    dW = -mm(dU, S.mT)
    dT = mm(dW, X.mT) + mm(dU, written.mT)
    dX = mm(T.mT, dW)
    d_written = mm(T.mT, dU)
    dL = -mm(mm(T.mT, dT), T.mT).tril(-1)
    return dL, dX, d_written


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
    T, *states = (t[: len(c.k)] for t in kept)
    mm, X, written = arithmetic.mm, c.X, c.written
    W = mm(T, X)
    if states:
        S, U = states
    else:
        updates = mm(T, written)
        S, U, _ = state_pass(c, c.initial(x), lambda i, S: updates[i] - mm(W[i], S))
    dU = torch.empty_like(c.v)

    def through_wy(i: slice, step: Tensor) -> Tensor:
        dU[i] = step
        return mm(W[i].mT, step)

    back = reverse_pass(c, attention(c, c.pairs()), do, dht, through_wy)
    dL, dX, dR = through_inverse(arithmetic, T, X, written, S, dU)
    stage = conventional_pairs(problem.operator.decay, arithmetic, c.G)
    return gradients(c, x, stage, S, U, back, dL, dX, dR)


def conventional_pairs(decay: Gate, arithmetic: Arithmetic, G: Tensor) -> Pairs:
    """The pair stage with the gate gradient and the gating of the conventional form."""
    kinds: dict[Gate, Callable[[Arithmetic, Tensor], Pairs]]
    kinds = {Gate.NONE: WeightedPairs, Gate.SCALAR: GramPairs, Gate.CHANNEL: PairwisePairs}
    return kinds[decay](arithmetic, G)


class GramPairs(WeightedPairs):
    """Scalar decay with the gate gradient from the recomputed products a kᵀ: row sums less column sums."""

    def adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        M = self.weight * M
        P = M * self.mm(a, k.mT)
        return self.mm(M, k), self.mm(M.mT, a), P.sum(-1)[..., None] - P.sum(-2)[..., None]


class PairwisePairs(CentredPairs):
    """Decay per channel with every pair inside a block of 16 weighted on its own, token by token."""

    def __init__(self, arithmetic: Arithmetic, G: Tensor) -> None:
        super().__init__(arithmetic, G, min(BLOCK, G.shape[-2]))

    def _diagonal_adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        M, G, a, k = diagonal_blocks(M, self.size), *(blocks(t, self.size) for t in (self.G, a, k))
        da, dk = torch.zeros_like(a), torch.zeros_like(k)
        for j in range(self.size - 1):
            weight = M[..., j + 1 :, j, None] * self.exp(G[..., j + 1 :, :] - G[..., j : j + 1, :])
            da[..., j + 1 :, :] += weight * k[..., j : j + 1, :]
            dk[..., j, :] = (weight * a[..., j + 1 :, :]).sum(-2)
        return da.flatten(-3, -2), dk.flatten(-3, -2)
