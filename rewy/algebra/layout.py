"""Where each chunk lies: [B,T,H,D] tensors as stacks of chunks [M,H,C,D], step by step.

Chunks are stacked step-major: first the first chunk of every sequence, then the second of those that have
one, and so on, longest sequences first. Step i of the scan over chunks is then one contiguous slice whose rows
are the first states of the (sorted) stack of states.

That takes lengths on the host. Packed sequences whose offsets are on a device, for which the host is not to wait, form
a chain: they are stacked one after the other, a step for each chunk, and which sequence that is the device knows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.algebra.scan import Beginning, Chained, Ending, Scan
from rewy.problem import Operands, Problem


@dataclass(frozen=True)
class Layout:
    """M chunks of C tokens each. Positions past a sequence's end hold zeros in every operand."""

    steps: list[slice]
    """Rows of the stack that step i computes."""
    tokens: Tensor | None
    """[M*C] row of each position in the flattened [B*T], B*T where there is no token; None for dense sequences."""
    order: Tensor | None
    """[N] the packed sequences, longest first; None when they stand in that order already."""
    B: int
    T: int
    C: int
    chain: Chain | None = None

    @classmethod
    def of(cls, problem: Problem, x: Operands, waits: bool = True) -> Layout:
        """The layout of a problem; without `waits` no offset is read from a device."""
        B, T, C = problem.B, problem.T, problem.chunk_size
        if x.cu_seqlens is None:
            steps = [slice(i * B, (i + 1) * B) for i in range(-(-T // C))]
            return cls(steps, tokens=None, order=None, B=B, T=T, C=C)

        if x.cu_seqlens_cpu is None and not waits:
            tokens, chain = _chained(x.cu_seqlens, T, C)
            steps = [slice(i, i + 1) for i in range(len(chain.sequences))]
            return cls(steps, tokens, order=None, B=B, T=T, C=C, chain=chain)

        offsets = (x.cu_seqlens if x.cu_seqlens_cpu is None else x.cu_seqlens_cpu).tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        steps, chunks = [], list[tuple[int, int]]()
        for i in range(-(-max(lengths, default=0) // C)):
            active = [n for n in order if lengths[n] > i * C]
            steps.append(slice(len(chunks), len(chunks) + len(active)))
            chunks += [(offsets[n] + i * C, offsets[n + 1]) for n in active]
        first, end = torch.tensor(chunks, dtype=torch.long).view(-1, 2, 1).unbind(1)
        tokens = first + torch.arange(C)
        tokens = sent(torch.where(tokens < end, tokens, T).flatten(), x.q.device)
        sorted_already = order == list(range(len(order)))
        return cls(steps, tokens, None if sorted_already else sent(torch.tensor(order), x.q.device), B, T, C)

    def stack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B,T,H,...] as chunks [M,H,C,...] in `dtype`."""
        x = x.to(dtype)
        if self.tokens is None:
            x = _padded(x, len(self.steps) * self.C)
            return (
                x.unflatten(1, (len(self.steps), self.C))
                .transpose(0, 1)
                .flatten(0, 1)
                .transpose(1, 2)
                .contiguous()
            )
        rows = _padded(x, self.T + 1)[0]
        return rows.index_select(0, self.tokens).unflatten(0, (-1, self.C)).transpose(1, 2).contiguous()

    def unstack(self, chunks: Tensor) -> Tensor:
        """Chunks [M,H,C,...] as [B,T,H,...]; rows of no sequence are zero."""
        rows = chunks.transpose(1, 2)
        if self.tokens is None:
            steps = rows.unflatten(0, (len(self.steps), self.B)).transpose(0, 1)
            return steps.flatten(1, 2)[:, : self.T].contiguous()
        rows = rows.flatten(0, 1)
        return rows.new_zeros(self.T + 1, *rows.shape[1:]).index_copy(0, self.tokens, rows)[None, : self.T]

    def sort(self, states: Tensor) -> Tensor:
        """Per-sequence states in the order of the stack."""
        return states if self.order is None else states[self.order]

    def unsort(self, states: Tensor) -> Tensor:
        """The inverse of `sort`."""
        return states if self.order is None else torch.empty_like(states).index_copy(0, self.order, states)

    def scan(self, states: Tensor) -> Scan:
        """Of a pass over the steps that starts with these sorted states."""
        return Ending(states) if self.chain is None else Chained(states.clone(), self.chain.sequences)

    def scan_back(self, states: Tensor) -> Scan:
        """Of a pass from the last step to the first, which overwrites them."""
        return Beginning(states) if self.chain is None else Chained(states, self.chain.sequences)


@dataclass(frozen=True)
class Chain:
    """N packed sequences one after the other, as the device knows them."""

    sequences: Tensor
    """[M] int64, the sequence of each chunk. Those past the last one hold no token of the last sequence."""
    starts: Tensor
    """[N+1] int32, the first chunk of each sequence, and their number."""


def _chained(offsets: Tensor, T: int, C: int) -> tuple[Tensor, Chain]:
    """`Layout.tokens` of a chain, made on the device in 32 bits from offsets [N+1].

    Whatever the lengths are, T // C + N chunks have room for them.
    """
    N, count = len(offsets) - 1, partial(torch.arange, dtype=torch.int32, device=offsets.device)
    offsets = offsets.to(torch.int32)
    lengths = offsets[1:] - offsets[:-1]
    starts = F.pad(((lengths + (C - 1)) // C).cumsum(0, dtype=torch.int32), (1, 0))
    chunks = count(T // C + N if N else 0)
    # The last sequence that starts no later. A search would do with less, which not every NPU has.
    n = (starts[:-1] <= chunks[:, None]).sum(1, dtype=torch.int32) - 1
    first = offsets.index_select(0, n) + (chunks - starts.index_select(0, n)) * C
    end = offsets.index_select(0, n + 1)
    tokens = first[:, None] + count(C)
    tokens = tokens.masked_fill(tokens >= end[:, None], T)
    return tokens.flatten().to(torch.int64), Chain(n.to(torch.int64), starts)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. From pageable memory the copy would wait for all that the device has to do yet."""
    if device.type in ("cpu", "meta"):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _padded(x: Tensor, T: int) -> Tensor:
    """[B,T,...] with zero rows appended up to T."""
    missing = T - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x
