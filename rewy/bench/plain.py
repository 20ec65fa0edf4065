"""The CUDA backend with no kernel in Gluon: ReWY by the same means as the conventional form it is measured against."""

from __future__ import annotations

from dataclasses import replace

from rewy.backends.cuda.backend import CudaBackend
from rewy.backends.cuda.plan import Limits, Plan, plan
from rewy.problem import Problem


def plain(problem: Problem, limits: Limits) -> Plan:
    return replace(plan(problem, limits).portable(), spans=1, parts=1)  # as the conventional form goes


backend = CudaBackend(planner=plain)
