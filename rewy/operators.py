"""Operators of the library `rewy`, which torch.compile sees as opaque, and when a call may go past them.

An operator's way through torch's dispatcher takes the host longer than all checks of a call. In eager mode the
dispatcher usually has nothing to do there; then the function behind the operator is called at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_library = torch.library.Library("rewy", "DEF")

_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_UNWATCHED = (_INFERENCE, _INFERENCE.add(torch._C.DispatchKey.ADInplaceOrView))
"""The dispatcher's keys on a thread, in inference mode and out of it; modes, transforms and tracers add theirs."""


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operator for any device, with what it gives for fake tensors, and returns what calls it."""
    name = _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rewy::{name}", fake, lib=_library)

    def call(*args: Any) -> Any:
        return function(*args) if are_plain(args) else getattr(torch.ops.rewy, name)(*args)

    return call


def are_plain(args: Iterable[Any]) -> bool:
    """Whether the dispatcher would only call the function of an operator with these arguments.

    It would do more for compilers, modes, transforms, tracers and profilers, which are to see the operator.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._dispatch_tls_local_include_set() in _UNWATCHED
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._autograd._profiler_enabled()
        and all(not isinstance(t, Tensor) or _is_plain(t) for t in args)
    )


def _is_plain(t: Tensor) -> bool:
    """Not of a subclass, and what is in memory: not to be negated first, nor zeros or sizes alone without any."""
    return type(t) in (Tensor, Parameter) and not (t.is_meta or t.is_neg() or t._is_zerotensor())
