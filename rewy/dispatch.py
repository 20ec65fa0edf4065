"""Which backend computes a problem: a table of names, and one rule.

An explicit choice runs there or raises; it never falls back. The automatic choice is the backend made for the
device; where that cannot compute the problem the reference does, and the reason is logged once under the
logger `rewy`, unless that backend's own settings insist.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from typing import cast

from torch import Tensor

from rewy.backends.protocol import Backend, Prologue
from rewy.problem import Problem

log = logging.getLogger("rewy")

MODULES = {
    "cuda": "rewy.backends.cuda",
    "ascend": "rewy.backends.ascend",
    "reference": "rewy.backends.reference",
}
UNLISTED: dict[str, str] = {}
"""More of them, that a program adds for itself: asked for by name they compute, but no list or message has them."""
MADE_FOR = {"cuda": "cuda", "npu": "ascend"}
"""Device types and the backend made for them."""
_DEVICES = {backend: device for device, backend in MADE_FOR.items()}


@cache
def load(name: str) -> Backend:
    """The backend of this name; its heavy dependencies are imported when it first computes."""
    if name not in MODULES | UNLISTED:
        known = ", ".join(f"{other} ({reason})" if reason else other for other, reason in backends().items())
        raise ValueError(f"backend must be one of {known}, got {name!r}")
    try:
        module = importlib.import_module((MODULES | UNLISTED)[name])
    except ImportError as error:
        return cast(Backend, Unimportable(name, str(error)))
    return cast(Backend, module.backend)


@dataclass(frozen=True)
class Unimportable:
    """Stands for a backend whose module does not import: never usable, and says why."""

    name: str
    error: str

    def unusable(self) -> str:
        return f"it does not import: {self.error}"

    def insists(self) -> bool:
        return False


def backends() -> dict[str, str | None]:
    """Every backend with the reason why it cannot run in this process, or None when it can."""
    return {name: load(name).unusable() for name in MODULES}


def resolve(problem: Problem, requested: str | None = None) -> Backend:
    """The backend that computes this problem."""
    if requested:
        backend = load(requested)
        reason = refusal(backend, problem)
        if reason is not None:
            raise ValueError(f"backend={requested!r} was asked for but cannot compute this call: {reason}")
        return backend
    name = MADE_FOR.get(problem.device.type)
    if name is None:
        return load("reference")
    backend = load(name)
    reason = refusal(backend, problem)
    if reason is None:
        return backend
    if backend.insists():
        raise ValueError(f"backend {name!r} cannot compute this call: {reason}")
    _log_once(
        f"{problem.operator.title} on {problem.device.type} takes the reference backend, not {name}: {reason}"
    )
    return load("reference")


def prologue_of(x: Tensor, requested: str) -> Prologue:
    """The functions that activate x: the chosen or the device's backend's, if it can take x at all."""
    name = requested or MADE_FOR.get(x.device.type, "reference")
    backend = load(name)
    if backend.unusable() is None and x.dtype in backend.dtypes:
        return backend.prologue
    return load("reference").prologue


def refusal(backend: Backend, problem: Problem) -> str | None:
    """Why this backend does not compute this problem, or None when it does."""
    reason = backend.unusable()
    if reason is not None:
        return reason
    kind = problem.device.type
    if backend.name in MADE_FOR.values() and MADE_FOR.get(kind) != backend.name:
        return f"it computes on {_DEVICES[backend.name]} tensors, q is on {kind}"
    ok, reason = backend.supports(problem)
    return None if ok else reason


@cache
def _log_once(message: str) -> None:
    log.warning(message)
