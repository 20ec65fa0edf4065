"""What is measured: one operator at one shape, its inputs, and the least a backward must move and multiply."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.bench.config import Config, Shape
from rewy.problem import OPERATORS, Algebra, Gate, Gradients, Operands, Operator, Options, Problem


@dataclass(frozen=True)
class Case:
    """An operator at a shape. `lengths` packs sequences into one row of T tokens."""

    operator: Operator
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    chunk_size: int
    initial_state: bool

    @classmethod
    def of(cls, config: Config, operator: str, shape: Shape, device: torch.device) -> Case:
        return cls(
            operator=OPERATORS[operator],
            B=shape.B,
            T=shape.T or shape.tokens,
            H=shape.H,
            HV=shape.value_heads,
            K=shape.K,
            V=shape.V,
            lengths=shape.lengths,
            dtype=getattr(torch, config.dtype),
            device=device,
            chunk_size=config.chunk_size,
            initial_state=config.initial_state,
        )

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def tokens(self) -> int:
        return self.B * self.T

    @property
    def scale(self) -> float:
        return self.K**-0.5

    def small(self) -> Case:
        """The same kind of case, short enough for the fp64 recurrence: a few chunks and a partial one."""
        C = self.chunk_size
        if self.lengths is not None:
            lengths = (C + C // 4, 2 * C - C // 8)
            return replace(self, T=sum(lengths), lengths=lengths)
        return replace(self, B=min(self.B, 2), T=min(self.T, 3 * C - C // 4))

    def problem(self, options: Options) -> Problem:
        """What `rewy.problem.describe` makes of this case's operands."""
        return Problem(
            operator=self.operator,
            B=self.B,
            T=self.T,
            H=self.H,
            HV=self.HV,
            K=self.K,
            V=self.V,
            N=self.N,
            dtype=self.dtype,
            device=self.device,
            scale=options.scale,
            chunk_size=options.chunk_size,
            varlen=self.lengths is not None,
            recompute=options.recompute,
            algebra=Algebra(options.algebra),
        )

    def operands(self, seed: int) -> Operands:
        """Unit keys and queries, gates near 1 and a non-zero state if any, so that the state stays alive."""
        generator = self._generator(seed)

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(dtype)

        def gate(kind: Gate, channels: int) -> Tensor:
            return randn(B, T, HV, *([channels] if kind is Gate.CHANNEL else []))

        B, T, H, HV, K, V, op = self.B, self.T, self.H, self.HV, self.K, self.V, self.operator
        q, k = (F.normalize(randn(B, T, H, K), dim=-1).to(self.dtype) for _ in range(2))
        offsets = None
        if self.lengths is not None:
            offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        return Operands(
            q=q,
            k=k,
            v=randn(B, T, HV, V, dtype=self.dtype),
            g=None if op.decay is Gate.NONE else F.logsigmoid(gate(op.decay, K) + 3),
            erase=gate(op.erase, K).sigmoid().to(self.dtype),
            write=None if op.tied else gate(op.write, V).sigmoid().to(self.dtype),
            initial_state=0.5 * randn(self.N, HV, K, V) if self.initial_state else None,
            cu_seqlens=None if offsets is None else offsets.to(self.device),
            cu_seqlens_cpu=offsets,
        )

    def output_gradient(self, seed: int) -> Tensor:
        generator = self._generator(seed)
        shape = (self.B, self.T, self.HV, self.V)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def _generator(self, seed: int) -> torch.Generator | None:
        return None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def inputs(self, seed: int) -> tuple[Operands, Tensor, Tensor | None]:
        """Operands, the gradient of o, and that of the final states where the case has states."""
        x = self.operands(seed)
        dht = None if x.initial_state is None else 0.5 * torch.ones_like(x.initial_state)
        return x, self.output_gradient(seed + 1), dht

    @property
    def floor_bytes(self) -> int:
        """Operands and dO read once, gradients written once: no backward moves less."""
        op, width = self.operator, self.dtype.itemsize

        def elements(kind: Gate, channels: int) -> int:
            return {Gate.NONE: 0, Gate.SCALAR: 1, Gate.CHANNEL: channels}[kind]

        gates = elements(op.erase, self.K) + (0 if op.tied else elements(op.write, self.V))
        per_head = (self.V + gates) * width + elements(op.decay, self.K) * torch.float32.itemsize
        per_token = 2 * self.H * self.K * width + self.HV * per_head
        state = self.N * self.HV * self.K * self.V * 4 if self.initial_state else 0
        return self.tokens * (2 * per_token + self.HV * self.V * width) + 2 * state

    @property
    def floor_flops(self) -> int:
        """Products of the ReWY backward, the states recomputed: eight C·K·V, five C·C·V and five C·C·K a chunk."""
        C, K, V = self.chunk_size, self.K, self.V
        chunks = sum(math.ceil(n / C) for n in self.lengths or [self.T] * self.B)
        return chunks * self.HV * 2 * (8 * C * K * V + 5 * C * C * V + 5 * C * C * K)


def nbytes(tensors: Operands | Gradients) -> int:
    return sum(t.nbytes for t in tensors if t is not None)
