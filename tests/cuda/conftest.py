"""The kernels run on the GPU where there is one, else under Triton's interpreter on the CPU.

Most of a first run on a GPU goes into compiling. With REWY_COMPILE_PART=I/N in the environment the tests are only
walked: of all different kernels that they launch, every N-th from the I-th is compiled, and none runs. N such
processes at a time fill Triton's cache on N cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
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

COMPILE_PART = os.environ.get("REWY_COMPILE_PART")

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


if COMPILE_PART:

    def pytest_sessionstart() -> None:
        import rewy.testing  # imported once the interpreter is settled
        from rewy.backends.cuda.launch import Launch
        from rewy.problem import Operands

        part, of = map(int, COMPILE_PART.split("/"))
        seen: dict[str, int] = {}

        def compile_part(launch: Launch) -> None:
            which = seen.setdefault(str(launch.signature), len(seen))
            if which % of == part and all(launch.grid):
                _ = launch.compile().run  # which makes its launcher, with a C compiler

        def no_recurrence(x: Operands, scale: float) -> tuple[Tensor, Tensor]:
            N = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
            state = torch.zeros(N, *x.v.shape[2:3], x.q.shape[-1], x.v.shape[-1], dtype=torch.float64)
            return x.v.double(), state.requires_grad_()

        Launch.run = compile_part
        modules = sys.modules  # functions of the package hide modules of the same name
        modules["rewy.testing.oracle"].recurrence = no_recurrence
        modules["rewy.testing.budgets"].computed = lambda x, do, dht, scale, **_: rewy.testing.exact(
            x, do, dht, scale
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        with suppress(Exception, pytest.fail.Exception):  # no kernel ran, so what a test looks at is unset
            pyfuncitem.obj(**arguments)
        return True


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """Fresh memory is NaN, so that an element nobody wrote, or a lane nobody masked, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    if HAS_GPU:
        _survived()


def _survived() -> None:
    """Ends a process whose device a kernel has broken: all that follows would fail with it.

    pytest-xdist names the test and goes on in a new process.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        message = f"{os.environ.get('PYTEST_CURRENT_TEST')} broke the device: {error}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(message, returncode=1)
        print(message, file=sys.stderr, flush=True)
        os._exit(1)


@pytest.fixture(scope="session")
def fenced() -> Callable[[Tensor], Tensor]:
    """A copy of a tensor with NaN on both sides of it in memory."""
    from rewy.testing import fenced  # imported once the interpreter is settled

    return fenced
