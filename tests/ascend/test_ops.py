"""Rungs b and c: the custom operators' host code under torch_npu, their kernels over the emulation. No NPU."""

from __future__ import annotations

import os

import pytest
import torch

import rewy
from rewy.testing import Case, arguments, leaves, make

pytest.importorskip(
    "torch_npu",
    reason="torch_npu has an environment of its own: scripts/ascend_ladder.sh",
    exc_type=ImportError,
)
from test_torch_npu import assert_right, on_npu

LIBRARY = os.environ.get("REWY_ASCEND_TEST_LIBRARY")
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="scripts/ascend_ladder.sh builds the operators")

CASES = {
    "two chunks and a tail": Case("", B=1, T=150, K=64, V=64),
    "packed, one sequence empty, rows past the end": Case(
        "", B=1, T=140, K=128, V=64, lengths=(65, 0, 64, 3)
    ),
    "three value heads to a key head": Case(
        "", B=1, T=64, H=1, HV=3, K=64, V=128, initial_state=False, gate="GM"
    ),
    "hard resets": Case("", B=1, T=100, K=128, V=128, gate="GX1000"),
    "strong and no decay side by side": Case("", B=1, T=80, K=64, V=64, gate="GB25.8", dht=False),
    "from no decay to strong": Case("", B=1, T=130, K=64, V=64, gate="GQ"),
    "saturated at -5": Case("", B=1, T=128, K=64, V=64, gate="G5"),
    "no tokens": Case("", T=0, K=64, V=64),
    "one token": Case("", B=3, T=1, K=64, V=64),
    "more chunks than cores": Case("", B=2, T=600, H=1, HV=2, K=64, V=64),
}


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path means that the operators must take part."""
    torch.ops.load_library(LIBRARY)
    monkeypatch.setenv("REWY_ASCEND_OPS", str(LIBRARY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("title", CASES)
@pytest.mark.parametrize("operator", ["delta_rule", "gated_delta_rule"])
def test_parity(operator: str, title: str, dtype: torch.dtype) -> None:
    """Both state passes (but for packed sequences) and the gradient."""
    assert_right(Case(**(vars(CASES[title]) | {"operator": operator, "dtype": dtype})))


@pytest.mark.parametrize("title", [title for title, case in CASES.items() if case.lengths is None and case.T])
@pytest.mark.parametrize("operator", ["kda", "gdn2"])
def test_parity_per_channel(operator: str, title: str) -> None:
    """Both state passes; the gradient is the algebra layer's."""
    assert_right(Case(**(vars(CASES[title]) | {"operator": operator, "dtype": torch.bfloat16})))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            Case("gated_delta_rule", B=1, T=70),
            ["state_forward", "state_forward", "state_reverse", "chunk_gradient"],
        ),
        (Case("gated_delta_rule", B=1, T=70, lengths=(65, 5)), ["chunk_gradient"]),
        (Case("kda", B=1, T=70), ["state_forward", "state_forward", "state_reverse"]),
    ],
    ids=["dense", "packed", "per channel"],
)
def test_who_computes(case: Case, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's states are not kept, so the backward makes them again."""
    called = []
    for name in ("state_forward", "state_reverse", "chunk_gradient"):

        def counting(
            *operands: object, name: str = name, op: object = getattr(torch.ops.rewy_ascend, name)
        ) -> object:
            called.append(name)
            return op(*operands)

        monkeypatch.setattr(torch.ops.rewy_ascend, name, counting)
    on_npu(Case(**(vars(case) | {"K": 64, "V": 64, "dtype": torch.bfloat16})))
    assert called == expected


def test_repeats_are_bitwise_equal() -> None:
    case = Case("gated_delta_rule", B=1, T=150, K=64, V=64, dtype=torch.bfloat16)
    first, second = on_npu(case), on_npu(case)
    assert all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (
            Case("kda", B=1, K=64, V=64, lengths=(65, 5), dtype=torch.bfloat16),
            "decays per channel; .* takes sequences of one length",
        ),
        (Case("delta_rule", K=64, V=64, dtype=torch.float32), "they take bfloat16 and float16, got float32"),
        (Case("delta_rule", K=32, V=64, dtype=torch.bfloat16), "got 64, K = 32 and V = 64"),
    ],
    ids=lambda value: str(value),
)
def test_required_but_unfit(case: Case, reason: str) -> None:
    x, _, _ = make(case)
    with pytest.raises(ValueError, match=f"custom operators are required, but .*({reason})"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), backend="ascend")


def test_library_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWY_ASCEND_OPS", "/nowhere/librewy_ascend.so")
    x, _, _ = make(Case("delta_rule", K=64, V=64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="not built"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), backend="ascend")


def test_unknown_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWY_ASCEND_OPS", "maybe")
    x, _, _ = make(Case("delta_rule", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"auto, require, never or the path of a .so, got 'maybe'"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), backend="ascend")


def operands(device: str, N: int = 2, K: int = 64, V: int = 64) -> dict[str, torch.Tensor | float]:
    wide = dict.fromkeys(("q", "k"), (N, 64, K)) | dict.fromkeys(("v", "do", "U", "dR"), (N, 64, V))
    wide |= dict.fromkeys(("S", "dS"), (N, K, V))
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in wide.items()}
    return tensors | {name: torch.zeros(N, 64, device=device) for name in ("beta", "G")} | {"scale": 1.0}


def states(device: str, *names: str) -> dict[str, torch.Tensor | int]:
    shapes = {name: (4, 64, 128 if name == "do" else 64) for name in names}
    half = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    fp32 = {"carry": torch.zeros(4, 64, device=device), "first": torch.zeros(2, 64, 128, device=device)}
    return half | fp32 | {"steps": 2}


def test_meta_of_the_state_passes() -> None:
    forward, reverse = torch.ops.rewy_ascend.state_forward, torch.ops.rewy_ascend.state_reverse
    for op, operands in (
        (forward, lambda d: states(d, "X", "K", "T") | {"written": torch.zeros(4, 64, 128, device=d)}),
        (reverse, lambda d: states(d, "minus_X", "K", "T", "A", "Q", "do")),
    ):
        real, meta = op(**operands("npu")), op(**operands("meta"))
        assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in real]
    with pytest.raises(ValueError, match=r"carry must be \[4, 64\], got \[3, 64\]"):
        reverse(**states("npu", "minus_X", "K", "T", "A", "Q", "do") | {"carry": torch.zeros(3, 64).npu()})


def test_meta() -> None:
    real = torch.ops.rewy_ascend.chunk_gradient(**operands("npu"))
    meta = torch.ops.rewy_ascend.chunk_gradient(**operands("meta"))
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 64, 64)}, TypeError, "k must be BFloat16, got Float"),
        ({"beta": torch.zeros(2, 63)}, ValueError, r"beta must be \[2, 64\], got \[2, 63\]"),
        (
            {"S": torch.zeros(4, 64, 64, dtype=torch.bfloat16)},
            ValueError,
            r"S must be \[2, 64, 64\], got \[4",
        ),
    ],
    ids=["dtype", "shape", "count"],
)
def test_operator_refuses(change: dict[str, torch.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch.ops.rewy_ascend.chunk_gradient(
            **operands("npu") | {name: t.npu() for name, t in change.items()}
        )


def test_operator_refuses_strides() -> None:
    strided = torch.zeros(4, 64, 64, dtype=torch.bfloat16).npu()[::2]
    with pytest.raises(ValueError, match="S must be contiguous"):
        torch.ops.rewy_ascend.chunk_gradient(**operands("npu") | {"S": strided})


def test_operator_refuses_sizes() -> None:
    with pytest.raises(ValueError, match="K and V must each be 64 or 128, got K = 32, V = 64"):
        torch.ops.rewy_ascend.chunk_gradient(**operands("npu", K=32))
