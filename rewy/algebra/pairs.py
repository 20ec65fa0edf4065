"""Pair products under decay: the only stage that needs to know which kind of gate decays.

For rows a and columns k of one chunk (both [..,C,K]) a pair stage offers

    scores(a, k)_ij     = Σ_d a_id k_jd e^{G_id − G_jd}     for i > j, else 0
    adjoint(M, a, k)    = da, dk, dG: the gradients of a, k and G when M is the gradient of the scores
        da_i = Σ_{j<i} M_ij k_j ⊙ e^{G_i − G_j}
        dk_j = Σ_{i>j} M_ij a_i ⊙ e^{G_i − G_j}
        dG   = a ⊙ da − k ⊙ dk, summed over channels for a scalar decay

dG needs no product of its own: where it is None the caller forms it with the other terms of its kind. Each pair
enters it twice with opposite signs, and dg sums it over tokens: the two cancel only when what was multiplied was a and
k themselves, so the products of `adjoint` round no operand.
Diagonal pairs carry no decay; they are elementwise and stay with the caller.

Every exponent that is formed is either ≤ 0 or within `Arithmetic.span`, so the result is right for any finite
g ≤ 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from rewy.algebra.arithmetic import Arithmetic
from rewy.problem import Gate


class Pairs(Protocol):
    def scores(self, a: Tensor, k: Tensor) -> Tensor: ...

    def adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]: ...


def pairs(decay: Gate, arithmetic: Arithmetic, G: Tensor) -> Pairs:
    """The pair stage for in-chunk cumulative decays G [..,C,1] or [..,C,K]."""
    if decay is not Gate.CHANNEL:
        return WeightedPairs(arithmetic, G)
    if not arithmetic.waits:
        return HalvedPairs(arithmetic, G)
    return CentredPairs(arithmetic, G, centred_block(G.detach(), arithmetic.span))


class WeightedPairs:
    """Scalar decay (or none): one weight e^{G_i − G_j} per pair, applied to the finished product."""

    def __init__(self, arithmetic: Arithmetic, G: Tensor) -> None:
        self.mm, self.mm_work = arithmetic.mm, arithmetic.mm_work
        C = G.shape[-2]
        above = torch.ones(C, C, dtype=torch.bool, device=G.device).triu()
        self.weight = arithmetic.exp((G - G.mT).masked_fill(above, -torch.inf))

    def scores(self, a: Tensor, k: Tensor) -> Tensor:
        return self.weight * self.mm(a, k.mT)

    def adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        M = self.weight * M
        return self.mm_work(M, k), self.mm_work(M.mT, a), None


class CentredPairs:
    """Decay per channel, contracted as matrix products of operands centred on a reference row.

    e^{G_i − G_j} = e^{G_i − c} e^{c − G_j} for any c. Blocks as large as the range of G allows take the middle of
    their range as c: one product each. Between two such blocks c is the last decay of the earlier one, so that
    both exponents are ≤ 0; those off-diagonal squares tile the rest of the triangle by halves.
    """

    def __init__(self, arithmetic: Arithmetic, G: Tensor, size: int) -> None:
        self.mm, self.mm_work, self.exp = arithmetic.mm, arithmetic.mm_work, arithmetic.exp
        self.G = G
        self.size = size

    def scores(self, a: Tensor, k: Tensor) -> Tensor:
        out = a.new_zeros(*a.shape[:-1], a.shape[-2])
        if self.size > 1:
            rows, cols = self._centred()
            product = self.mm(blocks(a, self.size) * rows, (blocks(k, self.size) * cols).mT)
            diagonal_blocks(out, self.size).copy_(product.tril(-1))
        for m, rows, cols in squares(self.G, self.size, self.exp):
            square(out, m).copy_(self.mm(later(a, m) * rows, (earlier(k, m) * cols).mT))
        return out

    def adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.size > 1:
            da, dk = self._diagonal_adjoint(M, a, k)
        else:
            da, dk = torch.zeros_like(a), torch.zeros_like(k)
        for m, rows, cols in squares(self.G, self.size, self.exp):
            block = square(M, m)
            later(da, m).add_(rows * self.mm_work(block, earlier(k, m) * cols))
            earlier(dk, m).add_(cols * self.mm_work(block.mT, later(a, m) * rows))
        return da, dk, None

    def _diagonal_adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rows, cols = self._centred()
        block = diagonal_blocks(M, self.size).tril(-1)
        da = self.mm_work(block, blocks(k, self.size) * cols) * rows
        dk = self.mm_work(block.mT, blocks(a, self.size) * rows) * cols
        return da.flatten(-3, -2), dk.flatten(-3, -2)

    def _centred(self) -> tuple[Tensor, Tensor]:
        G = blocks(self.G, self.size)
        centre = ((G.amax(-2, keepdim=True) + G.amin(-2, keepdim=True)) / 2).detach()
        return self.exp(G - centre), self.exp(centre - G)


class HalvedPairs:
    """Decay per channel by halves alone: right for any decays without a look at them.

    Level m has the pairs of the two halves of each block of 2m. Between them c is the last decay of the earlier half,
    so that no exponent is positive. All later halves against all earlier ones are one product [C/2,C/2] a chunk,
    equally large at every level; the blocks [m,m] on its diagonal count.
    """

    def __init__(self, arithmetic: Arithmetic, G: Tensor) -> None:
        self.mm, self.mm_work, self.exp = arithmetic.mm, arithmetic.mm_work, arithmetic.exp
        self.G = G

    def scores(self, a: Tensor, k: Tensor) -> Tensor:
        out = a.new_zeros(*a.shape[:-1], a.shape[-2])
        for m, rows, cols in squares(self.G, 1, self.exp):
            product = self.mm((later(a, m) * rows).flatten(-3, -2), (earlier(k, m) * cols).flatten(-3, -2).mT)
            square(out, m).copy_(diagonal_blocks(product, m))
        return out

    def adjoint(self, M: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        da, dk = torch.zeros_like(a), torch.zeros_like(k)
        half = a.shape[-2] // 2
        for m, rows, cols in squares(self.G, 1, self.exp):
            block = M.new_zeros(*M.shape[:-2], half, half)
            diagonal_blocks(block, m).copy_(square(M, m))
            left = self.mm_work(block, (earlier(k, m) * cols).flatten(-3, -2))
            right = self.mm_work(block.mT, (later(a, m) * rows).flatten(-3, -2))
            later(da, m).add_(rows * blocks(left, m))
            earlier(dk, m).add_(cols * blocks(right, m))
        return da, dk, None


def squares(G: Tensor, m: int, exp: Callable[[Tensor], Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(m, e^{G_i − c}, e^{c − G_j}) for the squares of m, 2m, ..., with c the last decay before a later half."""
    while m < G.shape[-2]:
        early, late = earlier(G, m), later(G, m)
        boundary = early[..., -1:, :].detach()
        yield m, exp(late - boundary), exp(boundary - early)
        m *= 2


def centred_block(G: Tensor, span: float) -> int:
    """The largest block, halving from C, over which no channel's G leaves ± `span` around its middle."""
    size = G.shape[-2]
    while size > 1 and G.numel():
        parts = blocks(G, size)
        if float((parts.amax(-2) - parts.amin(-2)).max()) <= 2 * span:
            break
        size //= 2
    return size


def unit_lower_inverse(L: Tensor, mm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(I + L)⁻¹ for strictly lower triangular L [..,C,C], by halves, with products as precise as L.

    The inverse of a block of 2m has −T₂ L₂₁ T₁ in its lower left, T₁ and T₂ being the inverses of its halves.
    """
    T = torch.ones_like(L[..., :, :1, None])
    while (m := T.shape[-1]) < L.shape[-1]:
        T1, T2 = T.unflatten(-3, (-1, 2)).unbind(-3)
        T21 = -mm(mm(T2, square(L, m)), T1)
        T = torch.cat([torch.cat([T1, torch.zeros_like(T1)], -1), torch.cat([T21, T2], -1)], -2)
    return T.squeeze(-3)


# Views of [..,C,D] in blocks of rows, and of [..,C,C] in blocks around the diagonal; all writable.


def blocks(x: Tensor, m: int) -> Tensor:
    return x.unflatten(-2, (-1, m))


def earlier(x: Tensor, m: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, m))[..., 0, :, :]


def later(x: Tensor, m: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, m))[..., 1, :, :]


def diagonal_blocks(x: Tensor, m: int) -> Tensor:
    """[..,C/m,m,m]: the blocks on the diagonal."""
    return x.unflatten(-1, (-1, m)).unflatten(-3, (-1, m)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def square(x: Tensor, m: int) -> Tensor:
    """[..,C/2m,m,m]: the lower-left quarter of each diagonal block of 2m."""
    return diagonal_blocks(x, 2 * m)[..., m:, :m]
