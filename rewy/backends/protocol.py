"""What a backend is: one object with these members. Backends never import each other."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rewy.problem import Gradients, Operands, Problem


class Backend(Protocol):
    """Computes validated problems on some kinds of device.

    Operands arrive checked (`rewy.problem.describe`), with the state as [N,HV,K,V] and all in-kernel
    options (l2norm, gate activation, sigmoid) applied.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of q, k and v that it computes in."""

    @property
    def prologue(self) -> Prologue:
        """Its functions for in-kernel options."""

    def unusable(self) -> str | None:
        """Why this backend cannot run in this process, or None when it can."""

    def supports(self, problem: Problem) -> tuple[bool, str]:
        """Whether this problem can be computed here, and the reason when it cannot."""

    def insists(self) -> bool:
        """Whether its own settings ask for what `supports` refuses, so that no other backend may compute it instead."""

    def forward(self, problem: Problem, x: Operands, training: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(o [B,T,HV,V] in q's dtype, final state [N,HV,K,V] in the work dtype, tensors kept for backward).

        Nothing is kept unless `training`; `problem.recompute` asks to keep little. With `problem.state_v_first` a final
        state that lies in memory as [N,HV,V,K] saves a copy, and so does the gradient of an initial one.
        """

    def fake_kept(self, problem: Problem, x: Operands) -> list[Tensor]:
        """Empty tensors of the shapes and dtypes that `forward` keeps in training (for tracing)."""

    def backward(
        self, problem: Problem, x: Operands, kept: list[Tensor], do: Tensor, dht: Tensor | None
    ) -> Gradients:
        """Gradients of all operands, each in its input's dtype; `dht` is None when the final state is unused."""

    def step(self, problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
        """(o, final state) token by token, for decoding; no gradients."""


class Prologue(Protocol):
    """The functions of `rewy.algebra.prologue`, which says what they compute."""

    def l2norm_forward(self, x: Tensor) -> Tensor: ...

    def l2norm_backward(self, x: Tensor, dy: Tensor) -> Tensor: ...

    def gate_forward(
        self, x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
    ) -> Tensor: ...

    def gate_backward(
        self, x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, dg: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...

    def sigmoid_forward(self, x: Tensor, factor: float = 1.0) -> Tensor: ...

    def sigmoid_backward(self, x: Tensor, dy: Tensor, factor: float = 1.0) -> Tensor: ...
