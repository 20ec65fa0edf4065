"""The algebra layer as a backend: what a device needs besides is its arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from rewy.algebra import chunked, conventional, prologue, rewy
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.recurrent import recurrence
from rewy.problem import Algebra, Gradients, Operands, Problem

BACKWARDS = {Algebra.REWY: rewy.backward, Algebra.CONVENTIONAL: conventional.backward}


class AlgebraBackend:
    """Computes with the chunked algebra in plain torch; a subclass names itself and says where it can."""

    prologue = prologue

    def arithmetic(self, problem: Problem) -> Arithmetic:
        return Arithmetic.of(problem.dtype)

    def forward(self, problem: Problem, x: Operands, training: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        o, final_state, kept = chunked.forward(problem, x, self.arithmetic(problem))
        return o, final_state, kept[: 0 if not training else 1 if problem.recompute else 3]

    def fake_kept(self, problem: Problem, x: Operands) -> list[Tensor]:
        p = problem
        # Packed sequences are cut into a number of chunks that only their offsets tell.
        M = torch.library.get_ctx().new_dynamic_size() if p.varlen else p.B * (-(-p.T // p.chunk_size))
        T, S, U = (p.chunk_size, p.chunk_size), (p.K, p.V), (p.chunk_size, p.V)
        shapes = [T] if p.recompute else [T, S, U]
        return [x.q.new_empty(M, p.HV, *shape, dtype=p.work_dtype) for shape in shapes]

    def backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        return BACKWARDS[problem.algebra](problem, x, kept, do, dht, self.arithmetic(problem))

    def step(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
        o, final_state = recurrence(x, problem.scale, problem.work_dtype)
        return o.to(problem.dtype), final_state
