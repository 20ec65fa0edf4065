"""The custom operators: where their library is, whether it can be used, and for what.

`scripts/build_ascend.sh` builds `librewy_ascend.so` beside this file. REWY_ASCEND_OPS chooses: `auto` (the
default) uses the operators where they fit and torch_npu's elsewhere; `require` refuses a call that they do not fit;
`never` leaves everything to torch_npu; the path of a library requires that one.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

from rewy.problem import Algebra, Problem

LIBRARY = Path(__file__).with_name("librewy_ascend.so")
CHIPS = "Ascend950"
CANN = (9, 1)
CHUNK = 64
SIZES = (64, 128, 192, 256)


def choice() -> tuple[str, Path]:
    """REWY_ASCEND_OPS as (auto, require or never, the library)."""
    value = os.environ.get("REWY_ASCEND_OPS", "auto")
    if value in ("auto", "require", "never"):
        return value, LIBRARY
    if value.endswith(".so"):
        return "require", Path(value)
    raise ValueError(f"REWY_ASCEND_OPS must be auto, require, never or the path of a .so, got {value!r}")


def unfit(problem: Problem) -> str | None:
    """Why the custom operators do not compute a problem, or None when they do."""
    mode, library = choice()
    if mode == "never":
        return "REWY_ASCEND_OPS=never"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"they take bfloat16 and float16, got {str(problem.dtype).removeprefix('torch.')}"
    if problem.chunk_size != CHUNK or problem.K not in SIZES or problem.V not in SIZES:
        return (
            f"they take chunks of {CHUNK} and K and V of {', '.join(map(str, SIZES))}, "
            f"got {problem.chunk_size}, K = {problem.K} and V = {problem.V}"
        )
    return _unavailable(library) or _lacking(problem.K, problem.V, problem.algebra is Algebra.CONVENTIONAL)


@cache
def _unavailable(library: Path) -> str | None:
    chip = torch.npu.get_device_name()  # type: ignore[attr-defined]
    if not chip.startswith(CHIPS):
        return f"they are built for {CHIPS}, this is {chip}"
    version = torch.npu.utils.get_cann_version()  # type: ignore[attr-defined]
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < CANN:
        return f"they need CANN {CANN[0]}.{CANN[1]} or later, this is {version}"
    if not library.exists():
        return f"they are not built (scripts/build_ascend.sh makes {library})"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"they do not load: {error.__cause__ or error}"
    return None


@cache
def _lacking(K: int, V: int, conventional: bool) -> str | None:
    """The buffer that this chip has too little of, as CANN tells it."""
    return torch.ops.rewy_ascend.lacking(K, V, conventional) or None
