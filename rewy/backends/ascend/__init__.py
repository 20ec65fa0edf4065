"""Huawei Ascend NPUs: the algebra layer on torch_npu's operators, with products shaped for cube cores, and custom
operators for the state passes and the gradient of a chunk where they are built and fit.

What this has been checked with, and that no NPU was among it: docs/ascend.md.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

from rewy.algebra import chunked
from rewy.algebra.backend import BACKWARDS, AlgebraBackend
from rewy.backends.ascend import fused, ops
from rewy.backends.ascend.arithmetic import CubeArithmetic, underflowing
from rewy.problem import Gradients, Operands, Problem

log = logging.getLogger("rewy")


class Ascend(AlgebraBackend):
    name = "ascend"
    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def unusable(self) -> str | None:
        return _unusable()

    def supports(self, problem: Problem) -> tuple[bool, str]:
        if problem.dtype not in self.dtypes:
            return False, f"q must be bfloat16, float16 or float32 on an npu, got {problem.dtype}"
        if self.insists() and (reason := ops.unfit(problem)) is not None:
            return False, f"the custom operators are required, but {reason}"
        return True, ""

    def insists(self) -> bool:
        return ops.choice()[0] == "require"

    def arithmetic(self, problem: Problem) -> CubeArithmetic:
        return CubeArithmetic.of(problem.dtype)

    def stages(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor, list[Tensor]]:
        stages = fused.forward if _fits(problem) else chunked.forward
        return stages(problem, underflowing(x), self.arithmetic(problem))

    def backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        backward = fused.backward if _fits(problem) else BACKWARDS[problem.algebra]
        return backward(problem, underflowing(x), kept, do, dht, self.arithmetic(problem))

    def step(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
        """Token by token; packed sequences whose lengths the host does not know in chunks, for it is not to wait."""
        if x.cu_seqlens is None or x.cu_seqlens_cpu is not None:
            return super().step(problem, x)
        o, final_state, _ = chunked.forward(problem, underflowing(x), self.arithmetic(problem))
        return o, final_state


def _fits(problem: Problem) -> bool:
    """Whether the custom operators compute it; why not is logged once, unless they were not to."""
    reason = ops.unfit(problem)
    if reason is not None and ops.choice()[0] != "never":
        _log_once(f"{problem.operator.title} does without the custom operators: {reason}")
    return reason is None


@cache
def _unusable() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install 'rewy[ascend]')"
    try:
        import torch_npu  # noqa: F401
    except Exception as error:  # whatever its libraries throw says why it cannot be used
        return f"torch_npu does not import: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if not torch.npu.is_available():  # type: ignore[attr-defined]
        return "torch_npu finds no NPU"
    return None


@cache
def _log_once(message: str) -> None:
    log.warning(message)


backend = Ascend()
