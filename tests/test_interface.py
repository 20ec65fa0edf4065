"""Names and signatures that users rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import rewy

NAMES = {
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "delta_attention",
    "delta_attention_step",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
}

# What fla takes by position, in its order; `name=default` where it has one.
FLA = {
    "chunk_delta_rule": (
        "q k v beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "cu_seqlens=None cu_seqlens_cpu=None"
    ),
    "chunk_gated_delta_rule": (
        "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens=None "
        "cu_seqlens_cpu=None chunk_indices=None cp_context=None"
    ),
    "chunk_kda": (
        "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False safe_gate=False "
        "lower_bound=None disable_recompute=False return_intermediate_states=False state_v_first=False "
        "cu_seqlens=None cu_seqlens_cpu=None cp_context=None"
    ),
    "chunk_gdn2": (
        "q k v g b w scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_gate_in_kernel=False cu_seqlens=None cu_seqlens_cpu=None safe_gate=False lower_bound=None "
        "disable_recompute=False return_intermediate_states=False state_v_first=False"
    ),
}
# What fla takes through **kwargs.
FLA_KEYWORDS = {
    "chunk_delta_rule": {"chunk_size"},
    "chunk_gated_delta_rule": {
        "use_gate_in_kernel",
        "A_log",
        "dt_bias",
        "chunk_size",
        "transpose_state_layout",
    },
    "chunk_kda": {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"},
    "chunk_gdn2": {"A_log", "dt_bias", "transpose_state_layout"},
}


def test_public_names():
    assert set(rewy.__all__) == NAMES
    assert all(callable(getattr(rewy, name)) and getattr(rewy, name).__doc__ for name in NAMES)


@pytest.mark.parametrize("name", FLA)
def test_calls_of_fla_move_over(name):
    parameters = inspect.signature(getattr(rewy, name)).parameters
    spelled = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters.values()]
    expected = FLA[name].split()
    assert spelled[: len(expected)] == expected
    assert all(parameters[p.split("=")[0]].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in expected)
    assert FLA_KEYWORDS[name] <= parameters.keys()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_no_option_is_swallowed(name):
    kinds = {p.kind for p in inspect.signature(getattr(rewy, name)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "gdn2"])
def test_steps_are_twins(name):
    """They take what the chunked functions take, but for what only training needs."""
    chunked, steps = (
        list(inspect.signature(getattr(rewy, f"{kind}_{name}")).parameters)
        for kind in ("chunk", "fused_recurrent")
    )
    training = {
        "chunk_size", "cu_seqlens_cpu", "chunk_indices", "cp_context", "disable_recompute",
        "return_intermediate_states",
    }  # fmt: skip
    assert steps == [p for p in chunked if p not in training]


BLOCKED = """
import sys
sys.modules |= dict.fromkeys({blocked!r})  # None: not found
{code}
"""
OPTIONAL = ["triton", "yaml", "pydantic", "matplotlib", "rich", "typer", "torch_npu", "fla", "numpy"]
USE = """
import torch, rewy
x = torch.randn(1, 5, 1, 8)
o, _ = rewy.chunk_kda(x.requires_grad_(), x, x, -x.abs(), x[..., 0].sigmoid())
o.sum().backward()
from rewy.dispatch import backends
assert backends()["reference"] is None
"""


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_works_without_anything_optional():
    done = python(BLOCKED.format(blocked=OPTIONAL, code=USE))
    assert done.returncode == 0, done.stderr
    assert python(BLOCKED.format(blocked=OPTIONAL, code="import yaml")).returncode == 1


def test_import_loads_nothing_optional():
    blocked = [name for name in OPTIONAL if name != "numpy"]  # torch itself imports numpy where it is
    loaded = f"import rewy, sys; print(*(m for m in {blocked} if m in sys.modules))"
    assert python(loaded).stdout.split() == []


def test_version():
    assert rewy.__version__.count(".") == 2
    assert torch.ops.rewy.forward.default and torch.ops.rewy.backward.default and torch.ops.rewy.step.default
