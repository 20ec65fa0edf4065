"""Calls that are made again and again: recorded once, replayed with new tensors.

What a stage does on the host (choose tiles, allocate, cut views, describe tiles to the copy engine, look up compiled
kernels) is the same for every call of one problem, and takes longer than the kernels of short sequences. So the second
call of a problem is recorded on tensors without memory: which buffers it takes, which kernels it launches on them,
and the few of torch's operators between. From then on a call walks that list. Its buffers are new ones every time,
each freed after its last use.

    calls = Calls()
    o, ht, *kept = calls(key, function, tensors)      # as function(*tensors)

A function that is recorded does everything on a device through torch's operators, which take tensors one by one, and
`Launch`, and decides by its tensors' shapes and dtypes alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from rewy.backends.cuda.direct import Direct, hooked
from rewy.backends.cuda.launch import Launch, bind, described, is_recording, on, recorded_by, rehearsed

Function = Callable[..., Sequence[Tensor | None]]

_REMEMBERED = 256
_ROOM = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
)


class Calls:
    """Functions of tensors by key, each recorded when it is called with its key for the second time.

    Under one key everything but the tensors' addresses and contents must be the same. The keys that were called last
    are remembered.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Program | None] = OrderedDict()
        self._lock = Lock()

    def __call__(
        self,
        key: Hashable,
        function: Function,
        tensors: Sequence[Tensor | None],
        rehearsal: Callable[..., object] | None = None,
    ) -> list[Any]:
        """What function(*tensors) returns. Raises what it raises, and RuntimeError where a replayed launch fails.

        If a kernel has to be compiled, so are all of the function, or those of another `rehearsal` of such tensors.
        """
        if _must_not_replay(tensors):
            return [*function(*tensors)]
        with self._lock:
            again = key in self._programs
            program = self._programs.setdefault(key, None)
            self._programs.move_to_end(key)
            if len(self._programs) > _REMEMBERED:
                self._programs.popitem(last=False)
        if not again:  # not worth recording yet, unless to compile
            with rehearsed(lambda: (rehearsal or function)(*_on_meta(tensors))):
                return [*function(*tensors)]
        if program is None:
            program = self._programs[key] = Program(function, tensors)
        return program(tensors)


def _on_meta(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    # Of torch's operators on meta those in Python, as empty_like, first import for a second.
    return [None if t is None else t.new_empty(t.shape, device="meta") for t in tensors]


def _must_not_replay(tensors: Sequence[Tensor | None]) -> bool:
    """Where someone wants the launches, or hides operators from a recording, or kernels may not count on alignment."""
    hidden = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    return is_recording() or hidden or any(t.data_ptr() % 16 for t in tensors if t is not None)


@dataclass
class Operator:
    """One of torch's operators: `places` of its arguments that are tensors, and in that order their numbers, `uses`."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    places: list[int]
    uses: list[int]
    results: list[int]
    many: bool
    """Whether it returns a list of tensors."""

    def __call__(self, values: list[Any], device: torch.device) -> None:
        args = self.args.copy()
        for place, n in zip(self.places, self.uses, strict=True):
            args[place] = values[n]
        kwargs = self.kwargs | {"device": device} if "device" in self.kwargs else self.kwargs
        result = self.function(*args, **kwargs)
        for n, t in zip(self.results, result if self.many else [result], strict=True):
            values[n] = t


@dataclass
class Kernel:
    """A launch; the `names` of its arguments that are tensors, or describe one, and in that order their numbers."""

    launch: Launch
    names: list[str]
    uses: list[int]
    results: ClassVar[tuple[int, ...]] = ()
    has_run: bool = False
    direct: Direct | None = None

    def __call__(self, values: list[Any], device: torch.device, stream: int | None) -> None:
        if self.direct is not None and not hooked():  # a hook of Triton's is told by its own launcher
            self.direct.run([values[n].data_ptr() for n in self.uses], stream)
            return
        args = {**self.launch.args}
        for name, n in zip(self.names, self.uses, strict=True):
            t = values[n]
            args[name] = t if isinstance(args[name], Tensor) else described(args[name], t)
        launch = replace(self.launch, args=args)
        launch.run()
        if device.type == "cuda" and all(launch.grid) and not self.has_run:
            self.has_run, self.direct = True, Direct.of(launch)


@dataclass
class Stage:
    """Up to a launch: `room` for buffers (number, shape, dtype), operators, the launch, and what is not used again."""

    room: list[tuple[int, torch.Size, torch.dtype]] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    kernel: Kernel | None = None
    dead: list[int] = field(default_factory=list)


class Program:
    """What a function does with its tensors. They and all others it makes have numbers, the given ones the first."""

    def __init__(self, function: Function, tensors: Sequence[Tensor | None]) -> None:
        tape = _Tape(_on_meta(tensors))
        with recorded_by(tape), tape:
            returned = function(*tape.inputs)
        self._count = len(tape.known)
        self._returned = [None if t is None else tape.number(t) for t in returned]
        self.stages = self._stages(tape)

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        device = next(t.device for t in tensors if t is not None)
        cuda = device.type == "cuda"
        stream = None
        if cuda:
            bind(device)
            stream = driver.active.get_current_stream(device.index)
        values: list[Any] = [*tensors, *[None] * (self._count - len(tensors))]
        empty = torch.empty
        with on(device) if cuda else nullcontext():
            for stage in self.stages:
                for n, shape, dtype in stage.room:
                    values[n] = empty(shape, dtype=dtype, device=device)
                for operator in stage.operators:
                    operator(values, device)
                if stage.kernel is not None:
                    stage.kernel(values, device, stream)
                for n in stage.dead:
                    values[n] = None
        return [None if n is None else values[n] for n in self._returned]

    def _stages(self, tape: _Tape) -> list[Stage]:
        stages = [Stage()]
        last: dict[int, int] = {}
        for step in self._needed(tape.steps):
            last |= dict.fromkeys([*step.uses, *step.results], len(stages) - 1)
            if isinstance(step, Kernel):
                stages[-1].kernel = step
                stages.append(Stage())
            elif step.function in _ROOM:
                made = tape.known[step.results[0]]
                stages[-1].room.append((step.results[0], made.shape, made.dtype))
            else:
                stages[-1].operators.append(step)
        for n, i in last.items():
            if n not in self._returned:
                stages[i].dead.append(n)
        return stages

    def _needed(self, steps: list[Operator | Kernel]) -> list[Operator | Kernel]:
        """All that launch, change a tensor, or make one that is used."""
        needed: list[Operator | Kernel] = []
        used = {*self._returned}
        for step in reversed(steps):
            if (
                isinstance(step, Kernel)
                or step.function._schema.is_mutable
                or not used.isdisjoint(step.results)
            ):
                needed.append(step)
                used.update(step.uses)
        return needed[::-1]


class _Tape(TorchDispatchMode):
    """Torch's operators and, as their recorder, kernel launches, in their order."""

    def __init__(self, inputs: list[Tensor | None]) -> None:
        super().__init__()
        self.inputs = inputs
        self.steps: list[Operator | Kernel] = []
        # The tensors are held, or one would take the identity of another that is gone.
        self.known: list[Any] = [*inputs]
        self._held: list[Tensor] = []
        self._numbers = {id(t): n for n, t in enumerate(inputs) if t is not None}

    def number(self, t: Tensor) -> int:
        return self._numbers[id(t)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        if len(places) < sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            raise TypeError(f"{func} has tensors in a list or by name, which is not recorded")
        if "device" in kwargs and torch.device(kwargs["device"]).type != "meta":
            raise TypeError(f"{func} makes a tensor on {kwargs['device']}, not where the others are")
        result = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:  # how torch.empty hands over what it has made
            self._held.append(result)
            self._numbers[id(result)] = self.number(args[0])
            return result
        many = isinstance(result, list | tuple)
        results = [self._new(t) for t in (result if many else [result])]
        others = [None if i in places else arg for i, arg in enumerate(args)]
        # What only makes room does not look at the tensor that is like it.
        uses = [] if func in _ROOM else [self.number(args[i]) for i in places]
        self.steps.append(Operator(func, others, kwargs, places, uses, results, many))
        return result

    def append(self, launch: Launch) -> None:
        args = [(name, launch.args[name]) for name in launch.kernel.arg_names]
        tensors = [(name, getattr(arg, "base", arg)) for name, arg in args]
        numbers = {name: self.number(t) for name, t in tensors if isinstance(t, Tensor)}
        self.steps.append(Kernel(launch, [*numbers], [*numbers.values()]))

    def _new(self, t: Tensor) -> int:
        if id(t) not in self._numbers:  # an operator that changes a tensor returns it
            self._numbers[id(t)] = len(self.known)
            self.known.append(t)
        return self._numbers[id(t)]
