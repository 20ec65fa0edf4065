"""The forward over chunks: C tokens at a time, exact.

With G the inclusive cumulative sum of g in the chunk, Γ its last row and S the state before the chunk:

    L_ij = Σ_d (b k)_id k_jd e^{G_id − G_jd}   (i > j)      T = (I + L)⁻¹
    A_ij = scale Σ_d q_id k_jd e^{G_id − G_jd} (i ≥ j)
    X = b ⊙ k ⊙ e^G         K̃ = k ⊙ e^{Γ − G}         Q̃ = scale · q ⊙ e^G
    R = w ⊙ v − X S         U = T R
    o = Q̃ S + A U           S⁺ = e^Γ ⊙ S + K̃ᵀ U
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.layout import Layout
from rewy.algebra.pairs import Pairs, pairs, unit_lower_inverse
from rewy.problem import Operands, Problem


@dataclass(frozen=True)
class Chunks:
    """The operands of all M chunks, stacked [M,HV,C,D] in the work dtype, and what follows from them alone."""

    problem: Problem
    layout: Layout
    arithmetic: Arithmetic
    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    """Erase gate [..,C,1] or [..,C,K]."""
    w: Tensor
    """Write gate [..,C,1] or [..,C,V]."""
    G: Tensor
    """Inclusive cumulative decay [..,C,1] or [..,C,K]; in parts [2,..,C,D] where `arithmetic` sums it in parts."""

    @classmethod
    def of(cls, problem: Problem, x: Operands, arithmetic: Arithmetic) -> Chunks:
        layout = Layout.of(problem, x, arithmetic.waits)

        def stack(t: Tensor, dtype: torch.dtype = arithmetic.work) -> Tensor:
            chunks = layout.stack(t, dtype)
            return chunks[..., None] if t.dim() == 3 else chunks

        q, k = (stack(t) for t in (x.q, x.k))
        if problem.group > 1:
            q, k = (t.repeat_interleave(problem.group, dim=1) for t in (q, k))
        b = stack(x.erase)
        g = b.new_zeros(*b.shape[:-1], 1) if x.g is None else stack(x.g, arithmetic.log)
        return cls(
            problem, layout, arithmetic,
            q=q, k=k, v=stack(x.v), b=b, w=b if x.write is None else stack(x.write),
            G=arithmetic.cumulative(g),
        )  # fmt: skip

    @cached_property
    def decayed(self) -> Tensor:
        """e^G: the decay from the chunk's start up to each token."""
        return self.arithmetic.exp(self.G)

    @cached_property
    def remaining(self) -> Tensor:
        """e^{Γ − G}: the decay after each token up to the chunk's end."""
        return self.arithmetic.exp(self.G[..., -1:, :] - self.G)

    @property
    def whole(self) -> Tensor:
        """e^Γ: the decay of the whole chunk, [..,1,1] or [..,1,K]."""
        return self.decayed[..., -1:, :]

    @cached_property
    def erased(self) -> Tensor:
        """b ⊙ k as it enters the products."""
        return self.arithmetic.rounded(self.b * self.k)

    @property
    def X(self) -> Tensor:
        return self.k * (self.b * self.decayed)

    @property
    def K(self) -> Tensor:
        """K̃"""
        return self.k * self.remaining

    @property
    def Q(self) -> Tensor:
        """Q̃"""
        return self.q * (self.problem.scale * self.decayed)

    @property
    def written(self) -> Tensor:
        return self.w * self.v

    def pairs(self) -> Pairs:
        return pairs(self.problem.operator.decay, self.arithmetic, self.G)

    def initial(self, x: Operands) -> Tensor:
        """The initial states, in the order of the stack."""
        p = self.problem
        if x.initial_state is None:
            return self.k.new_zeros(p.N, p.HV, p.K, p.V)
        return self.layout.sort(x.initial_state.to(self.arithmetic.work))


def wy_inverse(c: Chunks, stage: Pairs) -> Tensor:
    """T [M,HV,C,C]."""
    return unit_lower_inverse(stage.scores(c.erased, c.k), c.arithmetic.mm_work)


def attention(c: Chunks, stage: Pairs) -> Tensor:
    """A [M,HV,C,C], the diagonal included."""
    diagonal = (c.q * c.k).sum(-1)
    return c.problem.scale * (stage.scores(c.q, c.k) + torch.diag_embed(diagonal))


def state_pass(
    c: Chunks, initial: Tensor, solve: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan over chunks: states before each chunk S [M,HV,K,V], U = solve(step, S) [M,HV,C,V], final states."""
    mm, K, carry = c.arithmetic.mm, c.K, c.whole.mT
    states, solved, scan = [], [], c.layout.scan(initial)
    for i in c.layout.steps:
        S = scan.find(i)
        U = solve(i, S)
        states.append(S)
        solved.append(U)
        scan.leave(i, carry[i] * S + mm(K[i].mT, U))
    final = c.layout.unsort(scan.last())
    if not states:
        return final.new_zeros(0, *final.shape[1:]), c.v.new_zeros(c.v.shape), final
    return torch.cat(states), torch.cat(solved), final


def solve_rewy(c: Chunks, T: Tensor) -> Callable[[slice, Tensor], Tensor]:
    """U = T (w ⊙ v − X S): two products, R rounded once."""
    mm, X, written = c.arithmetic.mm, c.X, c.written
    return lambda i, S: mm(T[i], written[i] - mm(X[i], S))


def forward(problem: Problem, x: Operands, arithmetic: Arithmetic) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o, final states, [T, S, U]); differentiable by autograd."""
    c = Chunks.of(problem, x, arithmetic)
    stage = c.pairs()
    T = wy_inverse(c, stage)
    S, U, final = state_pass(c, c.initial(x), solve_rewy(c, T))
    o = arithmetic.mm(c.Q, S) + arithmetic.mm(attention(c, stage), U)
    return c.layout.unstack(o).to(problem.dtype), final, [T, S, U]
