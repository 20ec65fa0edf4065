"""Plain torch on any device torch runs on, fp64 included: right everywhere, fast nowhere in particular."""

from __future__ import annotations

import torch
from torch import Tensor

from rewy.algebra import chunked, conventional, rewy
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.recurrent import recurrence
from rewy.problem import Algebra, Gradients, Operands, Problem

BACKWARDS = {Algebra.REWY: rewy.backward, Algebra.CONVENTIONAL: conventional.backward}


class Reference:
    name = "reference"

    def unusable(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> tuple[bool, str]:
        return True, ""

    def forward(self, problem: Problem, x: Operands, training: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        o, final_state, kept = chunked.forward(problem, x, Arithmetic.of(problem.dtype))
        return o, final_state, kept[: 0 if not training else 1 if problem.recompute else 3]

    def fake_kept(self, problem: Problem, x: Operands) -> list[Tensor]:
        p = problem
        # Packed sequences are cut into a number of chunks that only their offsets tell.
        M = torch.library.get_ctx().new_dynamic_size() if p.varlen else p.B * (-(-p.T // p.chunk_size))
        shapes = [(p.chunk_size, p.chunk_size), (p.K, p.V), (p.chunk_size, p.V)]
        return [
            x.q.new_empty(M, p.HV, *shape, dtype=p.work_dtype)
            for shape in shapes[: 1 if p.recompute else 3]
        ]

    def backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        return BACKWARDS[problem.algebra](problem, x, kept, do, dht, Arithmetic.of(problem.dtype))

    def step(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
        o, final_state = recurrence(x, problem.scale, problem.work_dtype)
        return o.to(problem.dtype), final_state


backend = Reference()
