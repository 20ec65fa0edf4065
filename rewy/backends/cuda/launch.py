"""One kernel launch as a value: it can run, be recorded, or be compiled for a card that is not here.

Every launcher of this backend describes its launch and runs it:

    Launch(
        kernel,
        grid=(B * HV * NT, ...),
        args=dict(q=q, k=k, cu_seqlens=cu_seqlens, T=T, H=H, ..., BK=64, BV=32),
        num_warps=4,
        num_stages=3,
    ).run()

`args` holds all parameters of the kernel by name: tensors, None, numbers and constexprs alike.
Allocate the outputs on the inputs' device (`q.new_empty`, `device=q.device`), so that the same
launcher works on meta tensors:

    with recording() as launches:
        backend.forward(problem, operands_on_meta)
    for launch in launches:
        launch.compile()        # for the active Triton driver's target; nothing is launched

The launch runs on the device of its first tensor, whichever device is current, and on that device's current
stream. Which compiled kernel it takes is remembered: Triton's own way to find one takes longer than many a kernel.

Triton compiles a kernel when it is launched, one after the other. Who knows what will be launched says so:

    with rehearsed(lambda: backend.forward(problem, operands_on_meta)):
        backend.forward(problem, operands)

There the first launch whose kernel is not compiled yet has all that the rehearsal launches compiled side by side.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import triton

MAX_GRID = (2**31 - 1, 65535, 65535)

_REMEMBERED = 4096
_compiled: dict[tuple[Any, ...], Any] = {}


class Recorder(Protocol):
    def append(self, launch: Launch, /) -> None: ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.bound: set[int | None] = set()  # devices whose context this thread has


_thread = _Thread()
_recorded: ContextVar[Recorder | None] = ContextVar("recorded_launches", default=None)
_rehearsal: ContextVar[Callable[[], object] | None] = ContextVar("rehearsal", default=None)
_one_pool = threading.Lock()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid, its arguments by name and its compile options."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None

    def __post_init__(self) -> None:
        for axis, (programs, most) in enumerate(zip(self.grid, MAX_GRID, strict=False)):
            if programs > most:
                raise ValueError(
                    f"grid axis {axis} of {self.name} is {programs}, CUDA allows {most}: put it on axis 0"
                )

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def device(self) -> torch.device:
        # A tensor descriptor has its tensor as its base.
        tensors = (getattr(arg, "base", arg) for arg in self.args.values())
        return next(t.device for t in tensors if isinstance(t, torch.Tensor))

    @property
    def options(self) -> dict[str, int]:
        # Fused by every Triton: 3.9 warns that from 3.10 on it will not be unless asked to.
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    @property
    def signature(self) -> tuple[Any, ...]:
        """What tells two compiled kernels apart, but for their tensors' alignment."""
        any_value = _unspecialized(self.kernel)
        args = (
            (name, _fits_32_bits(arg) if name in any_value else _type_of(arg))
            for name, arg in self.args.items()
        )
        return self.name, *sorted(args, key=str), *self.options.items()

    def run(self) -> None:
        """Launch on the tensors' device, or only note the launch inside `recording()`."""
        launches = _recorded.get()
        if launches is not None:
            launches.append(self)
        elif all(self.grid):
            device = self.device
            if device.type != "cuda":  # Triton's interpreter
                self.kernel[self.grid](**self.args, **self.options)
                return
            with on(device):
                self._run_compiled(device)

    def _run_compiled(self, device: torch.device) -> None:
        bind(device)
        self.compiled(device)[(*self.grid, 1, 1)[:3]](*[self.args[name] for name in self.kernel.arg_names])

    def compiled(self, device: torch.device) -> Any:
        """The compiled kernel for this device, which is the current one; remembered."""
        key = self._key(device)
        kernel = _compiled.get(key)
        if kernel is None:
            _compile_rehearsed(device)
            kernel = _compiled.get(key) or self._compile_as(key)
        return kernel

    def _key(self, device: torch.device) -> tuple[Any, ...]:
        kinds = _kinds_of(self.kernel, [self.args[name] for name in self.kernel.arg_names])
        return self.kernel, device.index, self.num_warps, self.num_stages, self.maxnreg, *kinds

    def _compile_as(self, key: tuple[Any, ...]) -> Any:
        if len(_compiled) >= _REMEMBERED:  # threads may pass the limit together
            _compiled.clear()
        kernel = _compiled[key] = self.compile()
        return kernel

    def _load(self, key: tuple[Any, ...], device: torch.device) -> None:
        """All that a first launch does before it: in a thread of a pool, which has no current device yet."""
        with on(device):
            bind(device)
            _ = self._compile_as(key).run  # makes its launcher, with a C compiler in Triton before 3.7

    def compile(self) -> Any:
        """The compiled kernel these arguments select; only their dtypes, sizes and alignment are read."""
        return self.kernel.warmup(grid=self.grid, **self.args, **self.options)


def _compile_rehearsed(device: torch.device) -> None:
    """Compiles and loads what the rehearsal launches, if there is one, and this process has not compiled yet."""
    rehearsal = _rehearsal.get()
    if rehearsal is None or torch.cuda.is_current_stream_capturing():  # no thread may disturb a capture
        return
    _rehearsal.set(None)
    # What cannot be recorded or compiled is left to the call itself, which raises it where it comes to it.
    with recording() as launches, suppress(Exception):
        rehearsal()
    _know_triton()
    with _one_pool:
        pool = ThreadPoolExecutor(_cores())
        loading: dict[tuple[Any, ...], Future[None]] = {}
        try:
            for launch in launches:
                key = launch._key(device)
                if all(launch.grid) and key not in _compiled and key not in loading:
                    loading[key] = pool.submit(launch._load, key, device)
            wait(loading.values())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # not even an interrupt waits for compilers


def _know_triton() -> None:
    """Has Triton hash itself, half a second that every thread would take that comes before one is done."""
    for module in triton.runtime.cache, triton.compiler.compiler:  # the latter in Triton 3.4
        getattr(module, "triton_key", lambda: None)()


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where this CUDA device is the current one."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def bind(device: torch.device) -> None:
    """Gives a thread that has done nothing but launch, as autograd's may, the CUDA context that descriptors need."""
    if device.index not in _thread.bound:
        torch.cuda.mem_get_info(device)  # as any call of the runtime does
        _thread.bound.add(device.index)


def _kinds_of(kernel: Any, args: list[Any]) -> list[Any]:
    """All of the arguments that a compiled kernel may rest on: of tensors their dtype and alignment."""
    any_value = _unspecialized(kernel)
    kinds: list[Any] = []
    for name, arg in zip(kernel.arg_names, args, strict=True):
        if issubclass(type(arg), torch.Tensor):  # isinstance is torch's own, and slow
            kinds += arg.dtype, arg.data_ptr() % 16
        elif (base := getattr(arg, "base", None)) is not None:
            kinds += base.dtype, *arg.block_shape
        elif name in any_value:
            kinds.append(_fits_32_bits(arg))
        else:
            kinds += type(arg), arg
    return kinds


@cache
def _unspecialized(kernel: Any) -> frozenset[str]:
    """Of a kernel's parameters those, all integers, that it is compiled for any value of."""
    return frozenset(getattr(kernel, "do_not_specialize", ()))  # the interpreter's kernels have none


def _fits_32_bits(x: int) -> bool:
    return -(2**31) <= x < 2**31


def _type_of(arg: Any) -> Any:
    """Of a tensor its dtype, of a tensor descriptor that of its tensor and its block; all else is its value."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype
    base = getattr(arg, "base", None)
    return arg if base is None else (base.dtype, *arg.block_shape)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches made inside instead of running them."""
    launches: list[Launch] = []
    with recorded_by(launches):
        yield launches


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Give the launches made inside to the recorder; without one they run."""
    token = _recorded.set(recorder)
    try:
        yield
    finally:
        _recorded.reset(token)


@contextmanager
def rehearsed(rehearsal: Callable[[], object]) -> Iterator[None]:
    """Has the kernels that `rehearsal` launches on meta tensors compiled together, once one has to be."""
    token = _rehearsal.set(rehearsal)
    try:
        yield
    finally:
        _rehearsal.reset(token)


def is_recording() -> bool:
    return _recorded.get() is not None


def described(like: Any, t: torch.Tensor) -> Any:
    """The descriptor of t that `like` is of another tensor."""
    made = object.__new__(type(like))
    made.__dict__.update(vars(like), base=t)
    return made
