"""Long sequences: a backward span by span, so that what it keeps in memory does not grow with the sequence.

Most of what a backward allocates lies between its passes and its gradients: S, U, dS and dR of every chunk. A
sequence is therefore cut into spans. The forward leaves the state that each begins with; the backward takes the spans
from the last to the first, each from its passes to its gradients. Nothing is computed twice, and every bit is as
without spans. What it costs is a few more launches: a second stream for the gradients would hide that, but gains
nothing else, for passes and gradients are both bound by memory (docs/performance-log.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rewy.backends.cuda import gates, gradients, state
from rewy.backends.cuda.chunks import chunk_count, chunks_of
from rewy.backends.cuda.gates import Gated
from rewy.backends.cuda.plan import Plan
from rewy.problem import Gradients, Operands, Problem


class Span(NamedTuple):
    """Tokens [begin, end) of a problem's one sequence, which are chunks [first, last), as a problem of their own."""

    begin: int
    end: int
    first: int
    last: int
    problem: Problem

    def tokens(self, t: Tensor) -> Tensor:
        return t[:, self.begin : self.end]

    def by_chunk(self, t: Tensor) -> Tensor:
        return t[self.first : self.last]

    def operands(self, x: Operands, start: Tensor | None) -> Operands:
        cut = {
            name: self.tokens(t)
            for name, t in x._asdict().items()
            if t is not None and name != "initial_state"
        }
        return x._replace(**cut, initial_state=start)

    def gated(self, x: Operands, gated: Gated) -> Gated:
        """Of the whole sequence's what belongs to the span, whose operands are x."""
        names = Gated._fields if gates.by_channel(self.problem) else gates.kept(self.problem)
        tensors = {name: getattr(gated, name) for name in names}
        return gates.restored(x, {name: self.by_chunk(t) for name, t in tensors.items() if t is not None})


def spans_of(problem: Problem, count: int) -> list[Span]:
    """At most `count` spans of as many chunks each, but for the last."""
    C, T = problem.chunk_size, problem.T
    chunks, each = _divided(problem, count)
    firsts = range(0, chunks, each)
    ends = [(first, min(first + each, chunks)) for first in firsts]
    bounds = [(first * C, min(last * C, T), first, last) for first, last in ends]
    return [Span(*b, replace(problem, T=b[1] - b[0])) for b in bounds]


def starts_like(problem: Problem, x: Operands, count: int) -> Tensor:
    """Room for the states that all spans but the first begin with, [spans-1,1,HV,K,V]."""
    p, (chunks, each) = problem, _divided(problem, count)
    return x.q.new_empty(triton.cdiv(chunks, each) - 1, 1, p.HV, p.K, p.V, dtype=torch.float32)


def _divided(problem: Problem, count: int) -> tuple[int, int]:
    """Chunks of the sequence, and of a span."""
    chunks = chunk_count(problem)
    return chunks, triton.cdiv(chunks, count)


def outputs(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, tiles: Plan
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [1,T,HV,V], the final state [1,HV,K,V], and to keep, the states that all spans but the first begin with."""
    p, o = problem, x.v.new_empty(x.v.shape)
    ht = x.v.new_empty(1, p.HV, p.K, p.V, dtype=torch.float32)
    starts = starts_like(p, x, tiles.spans)
    start = x.initial_state
    for span, end in zip(spans_of(p, tiles.spans), [*starts, ht], strict=True):
        y = span.operands(x, start)
        state.forward(
            span.problem, y, span.gated(y, gated), span.by_chunk(A), span.by_chunk(Ti), None, None,
            span.tokens(o), end, chunks_of(span.problem, y), tiles.outputs,
        )  # fmt: skip
        start = end
    return o, ht, [starts]


def backward(
    problem: Problem, x: Operands, gated: Gated | None, A: Tensor, Ti: Tensor, starts: Tensor,
    do: Tensor, dht: Tensor | None, tiles: Plan,
) -> Gradients:  # fmt: skip
    """Gradients of every operand; what `gates` makes by channel (None here) is made again span by span."""
    out = gradients.buffers(problem, x, tiles)
    spans = zip(spans_of(problem, tiles.spans), [x.initial_state, *starts], strict=True)
    for span, start in reversed([*spans]):
        y, p = span.operands(x, start), span.problem
        chunks, d = chunks_of(p, y), span.tokens(do)
        g = gates.gated(p, y, chunks, tiles.gates) if gated is None else span.gated(y, gated)
        A_span, Ti_span = span.by_chunk(A), span.by_chunk(Ti)
        s, u = state.states(p, y, g, Ti_span, chunks, tiles.states)
        ds, dr, dht = state.reverse(p, y, g, A_span, Ti_span, d, dht, chunks, tiles.reverse)
        gradients.write(p, y, g, d, u, dr, s, ds, _slices(out, span, tiles), chunks, tiles)
        del s, u, ds, dr, g  # the next span's take their place
    return gradients.finished(problem, x, out, dht, tiles)


def _slices(out: gradients.Buffers, span: Span, tiles: Plan) -> gradients.Buffers:
    """The span's part of every buffer; fp32 parts of one number a token have these before their tokens."""
    numbers = {"g", "erase"}.intersection(gradients.in_parts(span.problem, tiles))
    return out._replace(
        **{
            name: t[:, :, span.begin : span.end] if name in numbers else span.tokens(t)
            for name, t in out._asdict().items()
            if t is not None
        }
    )
