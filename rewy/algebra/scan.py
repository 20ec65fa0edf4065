"""The states of all sequences during a scan over steps: which of them a step finds, and where it leaves them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Scan(Protocol):
    def find(self, step: slice) -> Tensor:
        """The states before the chunks of a step, [chunks,HV,K,V]."""

    def leave(self, step: slice, states: Tensor) -> None:
        """The states after them."""

    def last(self) -> Tensor:
        """[N,HV,K,V] when all steps are done."""


class Ending:
    """Longest sequences first: those that a step does not compute have ended. Autograd may differentiate it."""

    def __init__(self, states: Tensor) -> None:
        self.states, self.ended = states, list[Tensor]()

    def find(self, step: slice) -> Tensor:
        active = step.stop - step.start
        self.ended.append(self.states[active:])
        self.states = self.states[:active]
        return self.states

    def leave(self, step: slice, states: Tensor) -> None:
        self.states = states

    def last(self) -> Tensor:
        return torch.cat([self.states, *reversed(self.ended)])


class Beginning:
    """The same steps from last to first: those that a step does not compute have not begun. Overwrites `states`."""

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def find(self, step: slice) -> Tensor:
        return self.states[: step.stop - step.start]

    def leave(self, step: slice, states: Tensor) -> None:
        self.states[: step.stop - step.start] = states

    def last(self) -> Tensor:
        return self.states


class Chained:
    """One chunk a step, in either direction, of a sequence that the device knows. Overwrites `states`."""

    def __init__(self, states: Tensor, sequences: Tensor) -> None:
        self.states, self.sequences = states, sequences

    def find(self, step: slice) -> Tensor:
        return self.states.index_select(0, self.sequences[step])

    def leave(self, step: slice, states: Tensor) -> None:
        self.states.index_copy_(0, self.sequences[step], states)

    def last(self) -> Tensor:
        return self.states
