"""Where each chunk lies: [B,T,H,D] tensors as stacks of chunks [M,H,C,D], step by step.

Chunks are stacked step-major: first the first chunk of every sequence, then the second of those that have
one, and so on, longest sequences first. Step i of the scan over chunks is then one contiguous slice whose rows
are the first states of the (sorted) stack of states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewy.problem import Operands, Problem


@dataclass(frozen=True)
class Layout:
    """M chunks of C tokens each. Positions past a sequence's end hold zeros in every operand."""

    steps: list[slice]
    """Rows of the stack that step i computes."""
    tokens: Tensor
    """[M*C] row of each position in the flattened [B*T]; B*T where there is no token."""
    order: Tensor | None
    """[N] the sequences, longest first; None when they stand in that order already."""
    B: int
    T: int
    C: int

    @classmethod
    def of(cls, problem: Problem, x: Operands) -> Layout:
        B, T, C = problem.B, problem.T, problem.chunk_size
        if x.cu_seqlens is None:
            starts, lengths = [n * T for n in range(B)], [T] * B
        else:
            host = x.cu_seqlens if x.cu_seqlens_cpu is None else x.cu_seqlens_cpu
            offsets = host.tolist()
            starts, lengths = offsets[:-1], [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        counts = [-(-lengths[n] // C) for n in order]
        steps, row = [], 0
        for step in range(max(counts, default=0)):
            active = sum(count > step for count in counts)
            steps.append(slice(row, row + active))
            row += active
        chunks = [(n, i) for i, s in enumerate(steps) for n in order[: s.stop - s.start]]
        first = torch.tensor([starts[n] + i * C for n, i in chunks], dtype=torch.long)
        valid = torch.tensor([lengths[n] - i * C for n, i in chunks], dtype=torch.long)
        position = torch.arange(C)
        tokens = torch.where(position < valid[:, None], first[:, None] + position, B * T).flatten()
        device = x.q.device
        return cls(
            steps=steps,
            tokens=tokens.to(device),
            order=None if order == list(range(len(order))) else torch.tensor(order, device=device),
            B=B,
            T=T,
            C=C,
        )

    def stack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B,T,H,...] as chunks [M,H,C,...] in `dtype`."""
        rows = x.flatten(0, 1).to(dtype)
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return rows[self.tokens].unflatten(0, (-1, self.C)).transpose(1, 2).contiguous()

    def unstack(self, chunks: Tensor) -> Tensor:
        """Chunks [M,H,C,...] as [B,T,H,...]; rows of no sequence are zero."""
        rows = chunks.transpose(1, 2).flatten(0, 1)
        x = rows.new_zeros(self.B * self.T + 1, *rows.shape[1:]).index_copy(0, self.tokens, rows)
        return x[:-1].unflatten(0, (self.B, self.T)) if self.B * self.T else x[:-1].view(self.B, self.T, *x.shape[1:])

    def sort(self, states: Tensor) -> Tensor:
        """Per-sequence states in the order of the stack."""
        return states if self.order is None else states[self.order]

    def unsort(self, states: Tensor) -> Tensor:
        """The inverse of `sort`."""
        return states if self.order is None else torch.empty_like(states).index_copy(0, self.order, states)
