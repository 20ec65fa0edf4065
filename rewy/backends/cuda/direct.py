"""A compiled kernel launched through CUDA's driver, its parameters kept in place from one launch to the next.

Triton's launcher builds all parameters of a kernel anew at every launch; what describes a tile to the copy engine alone
takes it some microseconds each. Between launches of one problem only addresses change, and those are written here.

The parameters are laid out as Triton's launcher has them, its two pointers to scratch memory last. The driver tells
what sizes the kernel expects: where they differ, as with a Triton that does otherwise, there is no direct launch.
"""

from __future__ import annotations

import ctypes as c
from functools import cache
from threading import Lock
from typing import Any

from torch import Tensor
from triton import knobs

from rewy.backends.cuda.launch import Launch

_MAP = 128
"""Bytes of a CUtensorMap, which wants half that alignment."""
_MAP_AT = (64, 128)
"""Where it may begin in Triton's object, which ends with it: in 3.7, in 3.6."""
_NUMBERS = {
    "i1": c.c_int8, "i8": c.c_int8, "i16": c.c_int16, "i32": c.c_int32, "i64": c.c_int64,
    "u1": c.c_uint8, "u8": c.c_uint8, "u16": c.c_uint16, "u32": c.c_uint32, "u64": c.c_uint64,
    "fp32": c.c_float, "fp64": c.c_double,
}  # fmt: skip


class _Config(c.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c.c_uint * 3),
        ("block", c.c_uint * 3),
        ("shared", c.c_uint),
        ("stream", c.c_void_p),
        ("attributes", c.c_void_p),
        ("attribute_count", c.c_uint),
    )


class _Driver:
    def __init__(self) -> None:
        library = c.CDLL("libcuda.so.1")  # lets other threads run meanwhile
        held = c.PyDLL("libcuda.so.1")  # does not, and is faster for what never waits
        self.launch = library.cuLaunchKernelEx
        self.launch.argtypes = (c.c_void_p,) * 4
        self.move = held.cuTensorMapReplaceAddress
        self.move.argtypes = (c.c_void_p,) * 2
        self.parameter = held.cuFuncGetParamInfo
        self.parameter.argtypes = (c.c_void_p, c.c_size_t, c.c_void_p, c.c_void_p)
        self.error_name = held.cuGetErrorName
        self.error_name.argtypes = (c.c_int, c.c_void_p)

    def check(self, result: int, what: str) -> None:
        if result:
            name = c.c_char_p()
            self.error_name(result, c.byref(name))
            raise RuntimeError(f"{what}: {(name.value or b'CUDA error %d' % result).decode()}")


@cache
def _driver() -> _Driver | None:
    try:
        return _Driver()
    except (OSError, AttributeError):  # no driver, or one before CUDA 12.4
        return None


class Direct:
    """One launch whose addresses may change. `of` makes it, where it can be made."""

    def __init__(self, driver: _Driver, launch: Launch, kernel: Any, parameters: list[Any]) -> None:
        self._driver, self._name, self._lock = driver, launch.name, Lock()
        self._kernel = kernel  # lives as long as its function is called
        self._function = kernel.function
        self._parameters = (c.c_void_p * len(parameters))(*map(c.addressof, parameters))
        self._held = parameters
        self._config = _Config(
            (c.c_uint * 3)(*(*launch.grid, 1, 1)[:3]),
            (c.c_uint * 3)(32 * kernel.metadata.num_warps, 1, 1),
            kernel.metadata.shared,
        )
        self._at = c.addressof(self._config), c.addressof(self._parameters)
        tensors = [p for p in parameters if isinstance(p, _Address | _Map)]
        self._moved = [(p, isinstance(p, _Map), c.addressof(p)) for p in tensors]
        self._last: list[int | None] = [None] * len(tensors)

    @classmethod
    def of(cls, launch: Launch) -> Direct | None:
        """The launch, which has run before, for tensors like its own; None where only Triton can launch it."""
        driver, kernel = _driver(), launch.compiled(launch.device)
        plain = not any(
            getattr(kernel.metadata, name, 0)
            for name in (
                "launch_pdl",
                "launch_cooperative_grid",
                "global_scratch_size",
                "profile_scratch_size",
            )
        )
        if driver is None or not plain or kernel.metadata.num_ctas != 1:
            return None
        parameters = _parameters(launch, kernel)
        if parameters is None or not _expected(driver, kernel.function, [*map(c.sizeof, parameters)]):
            return None
        return cls(driver, launch, kernel, parameters)

    def run(self, addresses: list[int], stream: int | None) -> None:
        """Launch on tensors at these addresses, in the order of the kernel's parameters.

        Raises RuntimeError with the driver's name of what went wrong.
        """
        driver, last = self._driver, self._last
        with self._lock:
            for i, address in enumerate(addresses):
                if address != last[i]:
                    parameter, is_map, at = self._moved[i]
                    last[i] = None  # until the new one is there, if this is interrupted
                    if is_map:
                        driver.check(
                            driver.move(at, address), f"address of a tile's descriptor, {self._name}"
                        )
                    else:
                        parameter.value = address
                    last[i] = address
            self._config.stream = stream
            driver.check(driver.launch(self._at[0], self._function, self._at[1], None), self._name)


class _Address(c.c_uint64):
    """A tensor's address."""


class _Map(c.Structure):
    """CUtensorMap."""

    _fields_ = (("bytes", c.c_byte * _MAP),)


def _parameters(launch: Launch, kernel: Any) -> list[Any] | None:
    """All parameters in the kernel's order, as ctypes objects with their values; None where they are not known."""
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError:  # a Triton that has it elsewhere
        return None
    args = [launch.args[name] for name in launch.kernel.arg_names]
    described = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    parameters: list[Any] = []
    for kind, arg in zip(kernel.src.signature.values(), args, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(arg, Tensor):
            parameters.append(_Address(arg.data_ptr()))
        elif hasattr(arg, "base"):
            made, *sizes = make_tensordesc_arg(arg, next(described, None))
            rank = len(arg.shape)
            if type(made).__basicsize__ - _MAP not in _MAP_AT or len(sizes) != 2 * rank:
                return None  # the kernel makes its descriptor itself, or Triton's object is another
            parameters.append(_copied(made))
            parameters += [c.c_int32(n) for n in sizes[:rank]] + [c.c_int64(n) for n in sizes[rank:]]
        elif kind in _NUMBERS:
            parameters.append(_NUMBERS[kind](arg))
        else:
            return None
    return [*parameters, c.c_uint64(0), c.c_uint64(0)]


def _copied(made: Any) -> _Map:
    """What Triton has encoded, which is the end of its object, in memory that is aligned as the driver wants."""
    room = c.create_string_buffer(2 * _MAP)
    copy = _Map.from_buffer(room, -c.addressof(room) % _MAP)
    c.memmove(c.addressof(copy), id(made) + type(made).__basicsize__ - _MAP, _MAP)
    return copy


def _expected(driver: _Driver, function: int, sizes: list[int]) -> bool:
    """Whether these are the sizes of the kernel's parameters."""
    offset, size = c.c_size_t(), c.c_size_t()
    found: list[int] = []
    while driver.parameter(function, len(found), c.byref(offset), c.byref(size)) == 0:
        found.append(size.value)
    return found == sizes


def hooked() -> bool:
    """Whether someone asked Triton to be told of launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
