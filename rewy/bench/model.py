"""The level `model`: training steps of a decoder whose mixer is the measured operator.

Plain torch around it, the same for every contestant: pre-norm blocks of delta attention (output gate, per-head
norm) and a SwiGLU, tied embedding, AdamW, autocast for 16-bit dtypes. It reads the bytes of Python's standard
library. Short convolutions are left out: torch's depthwise one would hide the operator.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewy.bench.clock import Clock
from rewy.bench.config import ModelGrid, ModelRun
from rewy.bench.contestants import Contestant
from rewy.bench.results import ModelFigures, Spread
from rewy.bench.workload import Case
from rewy.problem import OPERATORS, Gate, Operands, Operator

CHANNELS = 128
"""Channels of a head, key and value alike."""
CORPUS_BYTES = 8 << 20

Attend = Callable[[Operands], Tensor]


@dataclass(frozen=True)
class Layout:
    layers: int
    heads: int

    @property
    def width(self) -> int:
        return self.heads * CHANNELS


SIZES = {"30M": Layout(9, 3), "130M": Layout(14, 6), "370M": Layout(24, 8), "1.3B": Layout(23, 16)}


def case_of(operator: str, run: ModelRun, dtype: torch.dtype, device: torch.device) -> Case:
    """The operator's call inside the model."""
    heads = SIZES[run.size].heads
    return Case(
        operator=OPERATORS[operator],
        B=run.B,
        T=run.T,
        H=heads,
        HV=heads,
        K=CHANNELS,
        V=CHANNELS,
        lengths=None,
        dtype=dtype,
        device=device,
        chunk_size=64,
        initial_state=False,
    )


def low_rank(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, CHANNELS, bias=False), nn.Linear(CHANNELS, out, bias=False))


class Mixer(nn.Module):
    """Delta attention with its projections; `attend` is the operator under test."""

    def __init__(self, operator: Operator, heads: int, attend: Attend) -> None:
        super().__init__()
        width = heads * CHANNELS
        self.heads, self.operator, self.attend = heads, operator, attend
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(CHANNELS)

        def projection(kind: Gate) -> nn.Module | None:
            if kind is Gate.NONE:
                return None
            return nn.Linear(width, heads, bias=False) if kind is Gate.SCALAR else low_rank(width, width)

        self.decay = projection(operator.decay)
        self.erase = projection(operator.erase)
        self.write = None if operator.tied else projection(operator.write)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, CHANNELS).unbind(2)
        q, k = (F.normalize(F.silu(t).float(), dim=-1).to(v.dtype) for t in (q, k))

        def gate(projection: nn.Module, kind: Gate) -> Tensor:
            y = projection(x)
            return y if kind is Gate.SCALAR else y.view(B, T, self.heads, CHANNELS)

        op = self.operator
        o = self.attend(
            Operands(
                q=q,
                k=k,
                v=F.silu(v).contiguous(),
                g=None if self.decay is None else F.logsigmoid(gate(self.decay, op.decay).float() + 3),
                erase=gate(self.erase, op.erase).sigmoid(),  # type: ignore[arg-type]
                write=None if self.write is None else gate(self.write, op.write).sigmoid(),
                initial_state=None,
            )
        )
        return self.out(self.norm(o.float()).view(B, T, -1) * F.silu(self.gate(x)))


class SwiGlu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.up, self.gate, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, inner), (width, inner), (inner, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, operator: Operator, heads: int, attend: Attend) -> None:
        super().__init__()
        width = heads * CHANNELS
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mixer, self.mlp = Mixer(operator, heads, attend), SwiGlu(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, operator: Operator, layout: Layout, vocabulary: int, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, layout.width)
        self.blocks = nn.ModuleList(Block(operator, layout.heads, attend) for _ in range(layout.layers))
        self.norm = nn.RMSNorm(layout.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Stopwatch:
    """Marks where the operator starts and ends, forward and backward, while it is on."""

    def __init__(self, attend: Attend, clock: Clock) -> None:
        self.attend, self.clock, self.on = attend, clock, False
        self.spans: list[list[Any]] = []

    def __call__(self, x: Operands) -> Tensor:
        if not self.on:
            return self.attend(x)
        start = self.clock.mark()
        o = self.attend(x)
        self.spans.append([start, self.clock.mark()])
        backward: list[Any] = []
        self.spans.append(backward)

        def begin(_: Tensor) -> None:
            backward.append(self.clock.mark())

        def end(_: Tensor) -> None:
            if len(backward) == 1:  # the first input to get its gradient: the operator's backward has run
                backward.append(self.clock.mark())

        o.register_hook(begin)
        for t in x[:7]:
            if t is not None and t.requires_grad:
                t.register_hook(end)
        return o

    def total(self) -> float:
        return sum(self.clock.between(start, stop) for start, stop in self.spans)


class Trainer:
    """A decoder with one contestant as its operator, its optimiser and its data, all from one seed."""

    def __init__(
        self, contestant: Contestant, case: Case, run: ModelRun, grid: ModelGrid, clock: Clock, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.case, self.run, self.clock, self.seed = case, run, clock, seed
        self.stopwatch = Stopwatch(lambda x: contestant.call(case, x, False)[0], clock)
        with case.device:  # made there: a host's core takes seconds to draw so many numbers
            self.model = Decoder(case.operator, SIZES[run.size], grid.vocabulary, self.stopwatch)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=case.device.type == "cuda")
        self.corpus = corpus().to(case.device)  # no copy of a batch that the host would wait for
        self.losses: list[Tensor] = []

    def step(self) -> None:
        tokens, targets = self._batch(len(self.losses))
        with self._autocast():
            logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.losses.append(loss.detach())

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def resident_bytes(self) -> int:
        """Parameters and optimiser state, which outlive a step."""
        state = (t for s in self.optimiser.state.values() for t in s.values() if isinstance(t, Tensor))
        return sum(t.nbytes for t in (*self.model.parameters(), *state))

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + index)
        T = self.run.T
        starts = torch.randint(len(self.corpus) - T - 1, (self.run.B,), generator=generator)
        text = torch.stack([self.corpus[s : s + T + 1] for s in starts.tolist()]).long()
        return text[:, :-1], text[:, 1:]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.case.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.case.device.type, self.case.dtype)


def measure(trainer: Trainer, grid: ModelGrid) -> tuple[Spread, float, ModelFigures]:
    """(time of a step, host time of a step, figures): timed steps first, then one that marks the operator."""
    clock = trainer.clock
    for _ in range(grid.warmup):
        trainer.step()
    clock.wait()
    marks, host = [clock.mark()], time.perf_counter()
    for _ in range(grid.steps):
        trainer.step()
        marks.append(clock.mark())
    host_ms = (time.perf_counter() - host) * 1e3 / grid.steps
    clock.wait()
    spread = Spread.of([clock.between(a, b) for a, b in pairwise(marks)])

    trainer.stopwatch.on = True
    start = clock.mark()
    trainer.step()
    stop = clock.mark()
    clock.wait()
    trainer.stopwatch.on = False
    share = trainer.stopwatch.total() / clock.between(start, stop)

    _, peak = clock.peak(tuple, trainer.step)
    figures = ModelFigures(
        parameters=trainer.parameters(),
        tokens_per_s=trainer.case.tokens / spread.median * 1e3,
        peak_bytes=trainer.resident_bytes() + peak,
        operator_share=share,
        losses=[loss.item() for loss in trainer.losses[: grid.warmup + grid.steps]],
    )
    return spread, host_ms, figures


def estimate(case: Case, run: ModelRun, grid: ModelGrid, operator_bytes: float) -> int:
    """Bytes a run needs: weights with their optimiser state, activations, the operator's own, logits."""
    layout = SIZES[run.size]
    weights = layout.width * (grid.vocabulary + 13 * layout.layers * layout.width)
    activations = layout.layers * (34 * layout.width * case.dtype.itemsize + operator_bytes)
    return int(16 * weights + case.tokens * (activations + 10 * grid.vocabulary))


def corpus() -> Tensor:
    """Bytes of the standard library's modules in the order of their names: text that every machine has."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(path.read_bytes())
        size += len(found[-1])
        if size >= CORPUS_BYTES:
            break
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8)
