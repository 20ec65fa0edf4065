"""How a backend multiplies matrices: the one thing the algebra leaves open."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arithmetic:
    """Products of operands rounded to `operand`, accumulated and returned in `work`.

    This is what matrix units do with 16-bit inputs, so that the result on a CPU predicts theirs. With
    `operand == work` nothing is rounded.
    """

    work: torch.dtype
    operand: torch.dtype
    log: torch.dtype = torch.float64
    """Cumulative log decays. A chunk of strong decays sums to thousands, and what counts are differences between
    neighbours: in fp32 they would keep three digits."""

    waits: bool = True
    """Whether the host may wait for the device: to read decays, for the cheapest products, and the offsets of packed
    sequences, for the fewest steps."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> Arithmetic:
        """fp64 and fp32 inputs compute in their own dtype; 16-bit ones with fp32 accumulation."""
        return cls(work=dtype if dtype is torch.float64 else torch.float32, operand=dtype)

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b over the last two dimensions."""
        return self.rounded(a) @ self.rounded(b)

    def mm_work(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of working matrices, which are not rounded: what gate gradients are differences of."""
        return a @ b

    def rounded(self, a: Tensor) -> Tensor:
        return a if self.operand == self.work else a.to(self.operand).to(self.work)

    def cumulative(self, g: Tensor) -> Tensor:
        """Inclusive sums of log decays g [..,C,D] over tokens, as `exp` takes them and their differences."""
        return g.cumsum(-2)

    def exp(self, difference: Tensor) -> Tensor:
        """e^difference of two log decays, in `work`."""
        return difference.to(self.work).exp()

    @property
    def span(self) -> float:
        """The largest |G − c| for which e^(G − c) and products of two such factors' operands keep their precision.

        e^60 · e^-60 fits fp32 and bf16 with room for the values it multiplies; fp16 ends at 2^16 and loses
        precision under 2^-14.
        """
        return 8.0 if self.operand is torch.float16 else 60.0
