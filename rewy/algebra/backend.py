"""The algebra layer as a backend: what a device needs besides is its arithmetic."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from rewy.algebra import chunked, conventional, prologue, rewy
from rewy.algebra.arithmetic import Arithmetic
from rewy.algebra.recurrent import recurrence
from rewy.problem import Algebra, Gradients, Operands, Problem

BACKWARDS = {Algebra.REWY: rewy.backward, Algebra.CONVENTIONAL: conventional.backward}


class AlgebraBackend:
    """Computes with the chunked algebra in plain torch; a subclass names itself and says where it can."""

    prologue = prologue

    def insists(self) -> bool:
        return False

    def arithmetic(self, problem: Problem) -> Arithmetic:
        return Arithmetic.of(problem.dtype)

    def forward(self, problem: Problem, x: Operands, training: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        o, final_state, kept = self.stages(problem, x)
        kept = kept[: 0 if not training else 1 if problem.recompute else 3]
        spare = _chunks(problem) - kept[0].shape[0] if kept else 0
        return o, final_state, [F.pad(t, (0, 0, 0, 0, 0, 0, 0, spare)) if spare else t for t in kept]

    def stages(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(o, final states, [T, S, U]) before `forward` decides what of them is kept."""
        return chunked.forward(problem, x, self.arithmetic(problem))

    def fake_kept(self, problem: Problem, x: Operands) -> list[Tensor]:
        p = problem
        T, S, U = (p.chunk_size, p.chunk_size), (p.K, p.V), (p.chunk_size, p.V)
        shapes = [T] if p.recompute else [T, S, U]
        return [x.q.new_empty(_chunks(p), p.HV, *shape, dtype=p.work_dtype) for shape in shapes]

    def backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        return BACKWARDS[problem.algebra](problem, x, kept, do, dht, self.arithmetic(problem))

    def step(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
        o, final_state = recurrence(x, problem.scale, problem.work_dtype)
        return o.to(problem.dtype), final_state


def _chunks(p: Problem) -> int:
    """Room for the chunks of any offsets, so that what is kept has a shape that needs no offset to be read."""
    return p.T // p.chunk_size + p.N if p.varlen else p.B * (-(-p.T // p.chunk_size))
