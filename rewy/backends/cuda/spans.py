"""Long sequences: a backward span by span, so that what it keeps in memory does not grow with the sequence.

Most of what a backward allocates lies between its passes and its gradients: S, U, dS and dR of every chunk. A
sequence is therefore cut into spans. The forward leaves the state that each begins with; the backward takes the spans
from the last to the first, each from its passes to its gradients. Nothing is computed twice, and every bit is as
without spans. What it costs is a few more launches: a second stream for the gradients would hide that, but gains
nothing else, for passes and gradients are both bound by memory (docs/performance-log.md).

The forward may leave more states than these: those of stretches of a span. The backward's pass for S and U then walks
the stretches side by side, where the heads alone would leave multiprocessors idle.
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
    return [span for span in _divided(problem, 0, chunk_count(problem), count) if span.first < span.last]


def stretches_of(problem: Problem, span: Span, count: int) -> list[Span]:
    """`count` stretches of a span of the problem, as a pass divides it into parts: the last ones may be empty."""
    return _divided(problem, span.first, span.last, count)


def _divided(problem: Problem, first: int, last: int, count: int) -> list[Span]:
    C, each = problem.chunk_size, triton.cdiv(last - first, count)
    bounds = [min(first + i * each, last) for i in range(count + 1)]
    tokens = [min(bound * C, problem.T) for bound in bounds]
    return [
        Span(
            tokens[i], tokens[i + 1], bounds[i], bounds[i + 1], replace(problem, T=tokens[i + 1] - tokens[i])
        )
        for i in range(count)
    ]


def starts_like(problem: Problem, x: Operands, tiles: Plan) -> Tensor:
    """Room for the states that all stretches of all spans begin with, [spans,stretches,HV,K,V].

    Of empty stretches, from which nothing comes, nothing is ever in it.
    """
    p, chunks = problem, chunk_count(problem)
    # as many as `spans_of` has, for lengths that are traced too
    spans = triton.cdiv(chunks, triton.cdiv(chunks, tiles.spans))
    return x.q.new_empty(spans, tiles.stretches, p.HV, p.K, p.V, dtype=torch.float32)


def outputs(
    problem: Problem, x: Operands, gated: Gated, A: Tensor, Ti: Tensor, tiles: Plan
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [1,T,HV,V], the final state [1,HV,K,V], and to keep, the states of `starts_like`."""
    p, o = problem, x.v.new_empty(x.v.shape)
    ht = x.v.new_empty(1, p.HV, p.K, p.V, dtype=torch.float32)
    starts = starts_like(p, x, tiles)
    if x.initial_state is None:
        starts[:1, 0].zero_()
    else:
        starts[:1, 0].copy_(x.initial_state)
    stretches = [
        (stretch, starts[i : i + 1, j])
        for i, span in enumerate(spans_of(p, tiles.spans))
        for j, stretch in enumerate(stretches_of(p, span, tiles.stretches))
        if stretch.first < stretch.last
    ]
    for (stretch, start), end in zip(stretches, [*(start for _, start in stretches[1:]), ht], strict=True):
        y = stretch.operands(x, start)
        state.forward(
            stretch.problem, y, stretch.gated(y, gated), stretch.by_chunk(A), stretch.by_chunk(Ti), None, None,
            stretch.tokens(o), end, chunks_of(stretch.problem, y), tiles.outputs,
        )  # fmt: skip
    return o, ht, [starts]


def backward(
    problem: Problem, x: Operands, gated: Gated | None, A: Tensor, Ti: Tensor, starts: Tensor,
    do: Tensor, dht: Tensor | None, tiles: Plan,
) -> Gradients:  # fmt: skip
    """Gradients of every operand; what `gates` makes by channel (None here) is made again span by span."""
    out = gradients.buffers(problem, x, tiles)
    for i, span in reversed([*enumerate(spans_of(problem, tiles.spans))]):
        y, p = span.operands(x, starts[i]), span.problem
        chunks, d = chunks_of(p, y), span.tokens(do)
        g = gates.gated(p, y, chunks, tiles.gates) if gated is None else span.gated(y, gated)
        A_span, Ti_span = span.by_chunk(A), span.by_chunk(Ti)
        s, u = state.states(p, y, g, Ti_span, replace(chunks, parts=tiles.stretches), tiles.states)
        # there is dh0 where there is h0
        y = y._replace(initial_state=starts[i, :1] if i > 0 else x.initial_state)
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
