"""Calls that are made again and again: recorded once, replayed with new tensors.

What a stage does on the host (choose tiles, allocate, cut views, describe tiles to the copy engine, look up compiled
kernels) is the same for every call of one problem, and takes longer than the kernels of short sequences. So the second
call of a problem is recorded on tensors without memory: a list of torch's operators, most of which allocate, and of
kernel launches. From then on a call walks that list. Allocations are real ones at every call, in the order of the
recording, each freed after its last use.

    calls = Calls()
    o, ht, *kept = calls(key, function, tensors)      # as function(*tensors)

A function that is recorded must do everything on a device through torch's operators and `Launch`, and decide by its
tensors' shapes and dtypes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from rewy.backends.cuda.direct import Direct
from rewy.backends.cuda.launch import Launch, described, is_recording, recording

Function = Callable[..., Sequence[Tensor | None]]

_REMEMBERED = 512


class Calls:
    """Functions of tensors by key, each recorded when it is called with its key for the second time.

    Under one key, everything but the tensors' addresses and contents must be the same.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, Program | None] = {}

    def __call__(self, key: Hashable, function: Function, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        given = [t for t in tensors if t is not None]
        # The kernels that a recording chooses may count on alignment. What `recording` wants are the launches.
        if is_recording() or any(t.data_ptr() % 16 for t in given):
            return [*function(*tensors)]
        program = self._programs.get(key)
        if program is None:
            if key not in self._programs:  # first of all it compiles
                if len(self._programs) >= _REMEMBERED:
                    self._programs.clear()
                self._programs[key] = None
                return [*function(*tensors)]
            program = self._programs[key] = Program(function, tensors)
        return program(tensors)


@dataclass
class Operator:
    """One of torch's operators: `tensors` are the places of its arguments that are values, and their numbers."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    tensors: list[tuple[int, int]]
    results: list[int]
    many: bool
    """Whether it returns a list of tensors."""


@dataclass
class Kernel:
    """A launch, and of its arguments that are tensors, or describe one, the names and their values' numbers."""

    launch: Launch
    names: list[str]
    tensors: list[int]
    has_run: bool = False
    direct: Direct | None = None


class Program:
    """What a function does with its tensors: `steps`, and the numbers of the values that it returns."""

    def __init__(self, function: Function, tensors: Sequence[Tensor | None]) -> None:
        tape = _Tape([None if t is None else torch.empty_like(t, device="meta") for t in tensors])
        with recording(tape), tape:
            returned = function(*tape.inputs)
        self.steps = tape.steps
        self.count = len(tape.known)
        self.returned = [None if t is None else tape.number(t) for t in returned]
        self.dead = self._after_last_use()

    def _after_last_use(self) -> list[list[int]]:
        """For every step the values that nothing takes after it."""
        last: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            used = step.tensors if isinstance(step, Kernel) else [n for _, n in step.tensors] + step.results
            last |= dict.fromkeys(used, i)
        dead: list[list[int]] = [[] for _ in self.steps]
        for n, i in last.items():
            if n not in self.returned:
                dead[i].append(n)
        return dead

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        device = next(t.device for t in tensors if t is not None)
        cuda = device.type == "cuda"
        away = cuda and device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if away else nullcontext():
            stream = driver.active.get_current_stream(device.index) if cuda else None
            values: list[Any] = [*tensors, *[None] * (self.count - len(tensors))]
            for step, dead in zip(self.steps, self.dead, strict=True):
                if isinstance(step, Kernel):
                    _launch(step, [values[n] for n in step.tensors], stream)
                else:
                    _operate(step, values, device)
                for n in dead:
                    values[n] = None
        return [None if n is None else values[n] for n in self.returned]


def _operate(step: Operator, values: list[Any], device: torch.device) -> None:
    args = step.args.copy()
    for i, n in step.tensors:
        args[i] = values[n]
    if "device" in step.kwargs:
        step.kwargs["device"] = device
    result = step.function(*args, **step.kwargs)
    for n, t in zip(step.results, result if step.many else [result], strict=True):
        values[n] = t


def _launch(step: Kernel, tensors: list[Tensor], stream: int | None) -> None:
    if step.direct is not None and step.direct.usable():
        step.direct.run([t.data_ptr() for t in tensors], stream)
        return
    launch = step.launch
    args = {**launch.args}
    for name, t in zip(step.names, tensors, strict=True):
        args[name] = t if isinstance(args[name], Tensor) else described(args[name], t)
    launch = replace(launch, args=args)
    launch.run()
    if stream is not None and all(launch.grid) and not step.has_run:
        step.has_run, step.direct = True, Direct.of(launch)


class _Tape(TorchDispatchMode):
    """Torch's operators and, as the list that `recording` fills, kernel launches, in their order."""

    def __init__(self, inputs: list[Tensor | None]) -> None:
        super().__init__()
        self.inputs = inputs
        self.steps: list[Operator | Kernel] = []
        # The tensors are held, or one would take the identity of another that is gone.
        self.known: list[Tensor | None] = [*inputs]
        self._numbers = {id(t): n for n, t in enumerate(inputs) if t is not None}

    def number(self, t: Tensor) -> int:
        return self._numbers[id(t)]

    def _new(self, t: Tensor) -> int:
        self._numbers[id(t)] = len(self.known)
        self.known.append(t)
        return self._numbers[id(t)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        tensors = [(i, self.number(arg)) for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        many = isinstance(result, list | tuple)
        results = [self._new(t) for t in (result if many else [result])]
        plain = [None if isinstance(arg, Tensor) else arg for arg in args]
        self.steps.append(Operator(func, plain, kwargs, tensors, results, many))
        return result

    def append(self, launch: Launch) -> None:
        tensors = {name: getattr(launch.args[name], "base", launch.args[name]) for name in launch.kernel.arg_names}
        numbers = {name: self.number(t) for name, t in tensors.items() if isinstance(t, Tensor)}
        self.steps.append(Kernel(launch, [*numbers], [*numbers.values()]))
