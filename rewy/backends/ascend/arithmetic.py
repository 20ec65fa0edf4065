"""Arithmetic as an NPU has it: 16-bit products with fp32 results, and nothing in fp64."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from rewy.algebra.arithmetic import Arithmetic
from rewy.problem import Operands

# e^-104 is less than half the smallest fp32 number.
UNDERFLOW = -104.0


class CubeArithmetic(Arithmetic):
    """One batched product a call: operands of 16 bits (fp32 for fp32 inputs), fp32 accumulation and result."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> CubeArithmetic:
        return cls(work=torch.float32, operand=dtype, log=torch.float32, waits=False)

    def cumulative(self, g: Tensor) -> Tensor:
        """Between fp32 operands in two parts [2,..,C,D], which keep what one fp32 sum would round off.

        The leading parts are multiples of 2^-10 and over a chunk stay within 2^13 (`underflowing`), so their sums are
        exact; the sums of the others stay below 2^-4.
        """
        if self.operand is not self.work:
            return g.cumsum(-2)
        leading = (g * 1024).round() / 1024
        return torch.stack([leading, g - leading]).cumsum(-2)

    def exp(self, difference: Tensor) -> Tensor:
        return (difference if self.operand is not self.work else difference.sum(0)).exp()

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        return _product(a.to(self.operand), b.to(self.operand))

    def mm_work(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of fp32 matrices, right to 2^-16: as pairs of bfloat16, for fp32 products take 16 times as long."""
        if self.operand is self.work:
            return _product(a, b)
        (a, a_rest), (b, b_rest) = _pair(a), _pair(b)
        return _product(torch.cat([a, a, a_rest], -1), torch.cat([b, b_rest, b], -2))


def _product(a: Tensor, b: Tensor) -> Tensor:
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.expand(*lead, *t.shape[-2:]).reshape(prod(lead), *t.shape[-2:]) for t in (a, b))
    # A cube core adds up in fp32 anyway; without out_dtype a 16-bit product would be rounded on its way.
    product = torch.bmm(a, b) if a.dtype is torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)
    return product.view(*lead, *product.shape[-2:])


def _pair(t: Tensor) -> tuple[Tensor, Tensor]:
    """t as a sum of two bfloat16 matrices."""
    high = t.to(torch.bfloat16)
    return high, (t - high).to(torch.bfloat16)


def underflowing(x: Operands) -> Operands:
    """The operands with log decays no lower than what fp32 tells from zero.

    It changes no result, but keeps sums of decays small: one token at -1000 would cost the differences between its
    neighbours three digits, and here there is no fp64 to sum in. A chunk's stay above -2^13.
    """
    return x if x.g is None else x._replace(g=x.g.clamp(min=UNDERFLOW))
