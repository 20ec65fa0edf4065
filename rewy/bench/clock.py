"""Time and memory on a device: events where work is asynchronous, a monotonic clock where it is not."""

from __future__ import annotations

import gc
import importlib
import math
import os
import time
from collections.abc import Callable
from functools import cached_property
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

LONGEST_LEAD = 50.0
"""Milliseconds: some 400 entries of the about 1024 that a launch queue holds. Whoever has more to launch than fits
beside them waits for the device anyway."""


class Clock(Protocol):
    device: torch.device
    asynchronous: bool
    """Whether calls return before their work is done."""

    def mark(self) -> Any:
        """A point in the order of the device's work."""

    def wait(self) -> None:
        """Returns when all work so far is done."""

    def between(self, start: Any, stop: Any) -> float:
        """Milliseconds from one mark to another; only after `wait`."""

    def lead(self, ms: float) -> None:
        """Gives the device other work for at least `ms` and does not wait for it, so that the host gets ahead.

        What is launched meanwhile then runs without a gap, and marks around it show the device's time, not the
        host's. Nothing where calls return with their work done. The first lead allocates and waits; one of 0 ms
        does no more than that.
        """

    def peak(self, prepare: Callable[[], tuple[Any, ...]], call: Callable[..., Any]) -> tuple[Any, int]:
        """The result of call(*prepare()), and the most bytes that were allocated during it on top of before."""

    def free(self) -> int:
        """Bytes that can still be allocated."""

    def cache_bytes(self) -> int:
        """Size of the last-level cache."""


class DeviceClock:
    """CUDA and NPU: torch gives both modules the same names."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        self.module.synchronize()

    def between(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop))

    def lead(self, ms: float) -> None:
        buffer, each = self._reading
        for _ in range(math.ceil(ms / each)):
            buffer.sum()

    @cached_property
    def _reading(self) -> tuple[Tensor, float]:
        """A buffer, of 1 GiB on large devices, and the milliseconds in which it is read.

        Read and not written, for the cache would write it back while others are timed; large, so that a lead takes
        few launches.
        """
        size = min(1 << 30, int(self.module.mem_get_info()[1]) // 64)
        buffer = torch.zeros(size // 4, device=self.device)
        for _ in range(2):  # the second keeps the device busy up to the first mark
            buffer.sum()
        start = self.mark()
        for _ in range(4):
            buffer.sum()
        stop = self.mark()
        self.wait()
        return buffer, self.between(start, stop) / 4

    def peak(self, prepare: Callable[[], tuple[Any, ...]], call: Callable[..., Any]) -> tuple[Any, int]:
        arguments = prepare()
        self.wait()
        self.module.reset_peak_memory_stats()
        before = self.module.memory_allocated()
        result = call(*arguments)
        self.wait()
        return result, int(self.module.max_memory_allocated()) - before

    def free(self) -> int:
        gc.collect()
        self.module.empty_cache()
        return int(self.module.mem_get_info()[0])

    def cache_bytes(self) -> int:
        properties = self.module.get_device_properties(self.device)
        return int(getattr(properties, "L2_cache_size", 192 << 20))


class HostClock:
    """The CPU: work is done when the call returns; memory is what the profiler sees allocated."""

    asynchronous = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # its start and stop lines would break the progress display

    def mark(self) -> int:
        return time.perf_counter_ns()

    def wait(self) -> None:
        pass

    def between(self, start: int, stop: int) -> float:
        return (stop - start) / 1e6

    def lead(self, ms: float) -> None:
        pass

    def peak(self, prepare: Callable[[], tuple[Any, ...]], call: Callable[..., Any]) -> tuple[Any, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            arguments = prepare()
            with record_function("rewy::peak"):
                result = call(*arguments)
        events = seen.profiler.kineto_results.events()
        start = next(e.start_ns() for e in events if e.name() == "rewy::peak")
        allocations = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        live = sum(size for at, size in allocations if at < start)
        before = top = live
        for at, size in allocations:
            if at >= start:
                live += size
                top = max(top, live)
        return result, top - before

    def free(self) -> int:
        try:
            with open("/proc/meminfo") as lines:
                return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def cache_bytes(self) -> int:
        return 64 << 20


def device_of(kind: str) -> torch.device:
    """The current device of a kind; ValueError when torch has none of it here."""
    if kind == "cpu":
        return torch.device(kind)
    module = module_of(kind)
    if not module.is_available():
        raise ValueError(f"device {kind} is not available here")
    return torch.device(kind, module.current_device())


def module_of(kind: str) -> Any:
    """torch.cuda or torch.npu, whether or not there is such a device; ValueError when torch_npu is missing."""
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")  # which gives torch the name
        except Exception as e:
            raise ValueError(f"device npu needs torch_npu, which cannot be imported: {e}") from None
    return torch.get_device_module(kind)


def clock_for(kind: str) -> Clock:
    return HostClock() if kind == "cpu" else DeviceClock(device_of(kind))


def lead_for(clock: Clock, issue: Callable[[], float]) -> float:
    """Milliseconds of a lead behind which the host stays ahead: half more than what `issue` returns, the host's own.

    Each time the device is idle before. Who waits for it inside `issue` waits for the lead too, and gets no help.
    """
    host_ms = []
    for _ in range(5):
        clock.wait()
        host_ms.append(issue())
    return min(LONGEST_LEAD, 1.5 * median(host_ms))


def survived(clock: Clock, error: Exception, who: str) -> None:
    """Raises when the failure has taken the device with it: what anybody computes after that says nothing."""
    try:
        clock.wait()
    except Exception:
        raise RuntimeError(f"{who} broke the device: {type(error).__name__}: {error}") from error


def ceilings(clock: Clock, dtype: torch.dtype) -> dict[str, float]:
    """What this device reaches on a large copy (bytes read and written a second) and matrix product (FLOP/s)."""
    small = clock.device.type == "cpu"
    source = torch.empty((256 << 20) if small else (2 << 30), dtype=torch.uint8, device=clock.device).fill_(1)
    target = torch.empty_like(source)
    n = 1024 if small else 8192
    a, b = (torch.randn(n, n, device=clock.device).to(dtype) for _ in range(2))

    def seconds(call: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(3):
            call()
        for _ in range(10):
            start = clock.mark()
            call()
            stop = clock.mark()
            clock.wait()
            times.append(clock.between(start, stop) / 1e3)
        return sorted(times)[len(times) // 2]

    return {
        "copy_bytes_per_s": 2 * source.nbytes / seconds(lambda: target.copy_(source)),
        "matmul_flops_per_s": 2 * n**3 / seconds(lambda: a @ b),
    }
