"""The kernels run on the GPU where there is one, else under Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    # Triton reads this when it is imported and when a kernel is defined.
    if "triton" in sys.modules:
        raise pytest.UsageError("Triton was imported before tests/cuda could ask for its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
# Asked for by torch where deterministic algorithms are on (below); read when cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

IGNORED_WARNINGS = (
    "ignore:Conversion of an array:DeprecationWarning",  # the interpreter's `range` over a run-time bound
    "ignore:.*does not have a deterministic implementation:UserWarning",  # torch's own operators in oracles
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU all of this folder is a `cuda` test; without one the tests that ask for a GPU are skipped."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for warning in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if HAS_GPU:
                item.add_marker(pytest.mark.cuda)
            elif item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody wrote, or a lane nobody masked, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def fenced() -> Callable[[Tensor], Tensor]:
    """A copy of a tensor with NaN on both sides of it in memory."""
    from rewy.testing import fenced  # imported once the interpreter is settled

    return fenced
