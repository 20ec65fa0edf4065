"""Every output and gradient against the fp64 recurrence and autograd of it."""

from __future__ import annotations

import pytest
import torch
from checks import EXACT, GATED, assert_close, assert_exact, assert_within_budget
from torch.autograd import gradcheck

import rewy
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, computed, errors, exact, leaves, make

SHAPES = [
    dict(T=1),
    dict(T=2, B=3),
    dict(T=17),
    dict(T=39),
    dict(T=63),
    dict(T=64),
    dict(T=65),
    dict(B=1, T=128, H=1, HV=1),
    dict(B=1, T=200, H=1, HV=2),
    dict(B=1, T=515, H=1, HV=1, K=8, V=8),
    dict(T=40, H=3, HV=3),
    dict(T=40, H=3, HV=9, B=1),
    dict(T=70, K=1, V=1),
    dict(T=70, K=48, V=100),
    dict(T=70, K=100, V=17, H=1, HV=1),
    dict(T=20, B=1, K=256, V=512, H=1, HV=1),
]
DECAYS = [
    "G0", "GL0.01", "GL0.1", "GL1", "GL10", "GM", "GX1000", "GQ", "G1", "G2.5", "G5", "G5.9", "G8", "G11", "G16",
    "G20", "G25.8", "G32", "G1000", "GB20", "GB25.8", "GB1000", "GH3", "GH32", "GH1000",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
@pytest.mark.parametrize("operator", OPERATORS)
def test_shapes(operator, shape):
    """Head sizes that are no power of two or no multiple of a tile, grouped heads, tails, one to many chunks."""
    assert_exact(Case(operator, **shape))


@pytest.mark.parametrize("gate", DECAYS)
@pytest.mark.parametrize("operator", GATED)
def test_decays(operator, gate):
    """From none to a reset, everywhere, mixed, and in one channel of one token."""
    assert_exact(Case(operator, B=1, T=140, H=1, HV=2, gate=gate))


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("dht", [True, False], ids=["dht", "no-dht"])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_states_and_chunk_sizes(operator, chunk_size, dht, initial_state):
    case = Case(operator, T=100, initial_state=initial_state, dht=dht, chunk_size=chunk_size, scale=0.7)
    assert_exact(case)


@pytest.mark.parametrize("algebra", ["rewy", "conventional", "autograd"])
@pytest.mark.parametrize("disable_recompute", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_algebras_agree(operator, disable_recompute, algebra):
    assert_exact(
        Case(operator, T=100, lengths=(30, 0, 67), B=1, gate="GM"),
        algebra=algebra,
        disable_recompute=disable_recompute,
    )


@pytest.mark.parametrize("erase", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gates_at_their_ends(operator, erase):
    """beta 0 (nothing may divide by it), 1 and 2 (negative eigenvalues)."""
    case = Case(operator, T=70)
    x, do, dht = make(case)
    x = x._replace(erase=torch.full_like(x.erase, erase))
    assert_close(computed(x, do, dht), exact(x, do, dht), EXACT)


LOW_PRECISION = [
    ("several chunks", dict(B=1, T=150, K=32, V=48)),
    ("grouped heads", dict(T=64, H=1, HV=4, K=48, V=20)),
    ("packed", dict(B=1, T=150, lengths=(65, 0, 1, 70))),
    ("chunks of 16", dict(T=70, chunk_size=16, initial_state=False)),
    ("only o", dict(T=100, dht=False, gate="GQ")),
    ("resets", dict(T=100, gate="GX1000")),
    ("lower bound", dict(B=1, T=256, K=64, V=64, gate="G5", dht=False)),
    ("mixed decay", dict(T=70, gate="GB25.8")),
]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("shape", [s for _, s in LOW_PRECISION], ids=[name for name, _ in LOW_PRECISION])
@pytest.mark.parametrize("operator", OPERATORS)
def test_error_budgets(operator, shape, dtype):
    assert_within_budget(Case(operator, dtype=dtype, **shape))


@pytest.mark.parametrize("operator", OPERATORS)
def test_fp32_is_fp32(operator):
    """No TF32, no 16-bit operand: errors of 1e-6, not of 1e-3."""
    case = Case(operator, B=1, T=256, K=32, V=32, dtype=torch.float32, gate="GL1", scale=0.1)
    x, do, dht = make(case)
    assert max(errors(computed(x, do, dht, 0.1), exact(x, do, dht, 0.1)).values()) < 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradcheck(operator, packed):
    """Finite differences know nothing of the recurrence or of autograd."""
    lengths = (5, 0, 16) if packed else None
    x, _, _ = make(Case(operator, B=1, T=22, H=1, HV=2, K=3, V=2, lengths=lengths, chunk_size=16))
    x = leaves(x)
    inputs = {name: t for name, t in arguments(x).items() if t is not None and t.requires_grad}

    def call(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = arguments(x) | dict(zip(inputs, values, strict=True))
        return rewy.delta_attention(**given, output_final_state=True, chunk_size=16)

    assert gradcheck(call, tuple(inputs.values()), fast_mode=True)
