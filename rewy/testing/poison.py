"""Memory that shows when it is read without having been written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FENCE = 512


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, `torch.empty` and its like hand out NaN (and the largest integers), on every device."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    # torch fills fresh memory only in this mode; its warnings about its own operators are beside the point.
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def fenced(x: Tensor) -> Tensor:
    """A copy of x with NaN (or the largest integers) before and after it in memory."""
    bad = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    buffer = x.new_full((x.numel() + 2 * FENCE,), bad)
    return buffer[FENCE : FENCE + x.numel()].view(x.shape).copy_(x)
