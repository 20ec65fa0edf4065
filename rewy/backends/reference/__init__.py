"""Plain torch on any device torch runs on, fp64 included: right everywhere, fast nowhere in particular."""

from __future__ import annotations

from rewy.algebra.backend import AlgebraBackend
from rewy.problem import DTYPES, Problem


class Reference(AlgebraBackend):
    name = "reference"
    dtypes = DTYPES

    def unusable(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> tuple[bool, str]:
        return True, ""


backend = Reference()
