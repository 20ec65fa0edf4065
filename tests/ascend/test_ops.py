"""Rungs b and c: the custom operators' host code under torch_npu, their kernels over the emulation. No NPU."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gxx
import pytest
import torch

import rewy
from rewy.algebra import layout
from rewy.backends.ascend import ops
from rewy.backends.ascend.fused import _masks
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, budgets, computed, errors, exact, leaves, make

pytest.importorskip(
    "torch_npu",
    reason="torch_npu has an environment of its own: scripts/ascend_ladder.sh",
    exc_type=ImportError,
)
from test_torch_npu import assert_right, assert_state_layouts_agree, on_npu, python, torch_npu, waits

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
    "packed, every sequence empty": Case("", B=1, T=7, K=64, V=64, lengths=(0, 0)),
    "one token": Case("", B=3, T=1, K=64, V=64),
    "large heads": Case("", B=1, T=70, H=1, HV=1, K=256, V=256),
    "three tiles of key and of value channels": Case("", B=1, T=70, H=1, HV=2, K=192, V=192),
    "three tiles of key channels, from no decay to strong": Case("", B=1, T=70, K=192, V=64, gate="GQ"),
    "three tiles of value channels": Case("", B=1, T=70, H=1, HV=2, K=128, V=192, lengths=(3, 66)),
    "five cores, a scan for each": Case("", B=3, T=70, H=1, HV=2, K=64, V=128),
    "five cores, more chunks": Case("", B=2, T=250, H=1, HV=2, K=64, V=64),
    "packed, far and near side by side": Case("", B=1, T=200, K=64, V=64, lengths=(3, 130, 64), gate="GH300"),
}


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path means that the operators must take part."""
    torch.ops.load_library(LIBRARY)
    monkeypatch.setenv("REWY_ASCEND_OPS", str(LIBRARY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("title", CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_parity(operator: str, title: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both state passes and the gradient."""
    if title.startswith("five cores"):
        monkeypatch.setenv("FAKE_ACL_CORES", "5")
    assert_right(Case(**(vars(CASES[title]) | {"operator": operator, "dtype": dtype})))


PACKED = [title for title, case in CASES.items() if case.lengths is not None]


@pytest.mark.parametrize("title", PACKED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_offsets_on_the_host(operator: str, title: str) -> None:
    case = replace(CASES[title], operator=operator, dtype=torch.bfloat16, host_offsets=True)
    assert_right(case)


@pytest.mark.parametrize("algebra", ["rewy", "conventional"])
@pytest.mark.parametrize(
    "lengths", [(0, 64, 0, 0, 36), (130, 0), (5, 70, 1, 60), (1, 1), (100,), ()], ids=str
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_packs(operator: str, lengths: tuple[int, ...], algebra: str) -> None:
    """Empty sequences first, last and between, chunks of no sequence, one sequence, none."""
    T = sum(lengths) + (11 if 5 in lengths else 0)
    case = Case(operator, B=1, T=T, H=1, HV=2, K=64, V=64, lengths=lengths, dtype=torch.bfloat16)
    assert_right(case, algebra=algebra)


@pytest.mark.parametrize(
    "title",
    [
        "two chunks and a tail",
        "three value heads to a key head",
        "hard resets",
        "strong and no decay side by side",
        "from no decay to strong",
        "large heads",
        "three tiles of key and of value channels",
        "packed, far and near side by side",
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_conventional_form(operator: str, title: str) -> None:
    case = Case(**(vars(CASES[title]) | {"operator": operator, "dtype": torch.bfloat16}))
    assert_right(case, algebra="conventional")


SIZES = list(itertools.product(ops.SIZES, ops.SIZES))


@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("operator", ["gated_delta_rule", "gdn2"])
def test_sizes(operator: str, K: int, V: int) -> None:
    """Every size of key heads with every size of value heads, one number a head and one a channel."""
    assert_right(Case(operator, B=1, T=70, H=1, HV=1, K=K, V=V, dtype=torch.bfloat16))


@pytest.mark.parametrize(("K", "V"), SIZES)
def test_sizes_of_the_conventional_form(K: int, V: int) -> None:
    operator = "gdn2" if (K + V) % 128 else "gated_delta_rule"
    case = Case(operator, B=1, T=70, H=1, HV=1, K=K, V=V, dtype=torch.bfloat16)
    assert_right(case, algebra="conventional")


@pytest.mark.parametrize("operator", OPERATORS)
def test_kept_states(operator: str) -> None:
    assert_right(Case(operator, B=1, T=150, K=64, V=64, dtype=torch.bfloat16), disable_recompute=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_forms_round_differently(operator: str) -> None:
    """So that neither can be the other under its name."""
    case = Case(operator, B=1, T=150, H=1, HV=1, K=64, V=64, dtype=torch.bfloat16)
    rewy_form, conventional = (on_npu(case, algebra=name)["dk"].cpu() for name in ("rewy", "conventional"))
    assert not torch.equal(rewy_form, conventional)


@pytest.mark.parametrize("gate", ["GL10", "GX1000"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_accuracy_standard(operator: str, dtype: torch.dtype, gate: str) -> None:
    """Errors against the fp64 recurrence over those of the same products in plain torch: mean, rms and maximum."""
    case = Case(operator, B=1, T=150, H=1, HV=2, K=128, V=128, dtype=dtype, gate=gate)
    x, do, dht = make(case)
    expected = exact(x, do, dht)
    control = computed(x, do, dht, algebra="conventional", backend="reference")
    for name, result in on_npu(case).items():
        error, allowed = ((t.cpu().double() - expected[name]).abs() for t in (result, control[name]))
        assert error.mean() <= 3 * allowed.mean(), name
        assert error.square().mean() <= 9 * allowed.square().mean(), name
        assert error.max() <= 10 * allowed.max(), name


@pytest.mark.parametrize("algebra", ["rewy", "conventional"])
@pytest.mark.parametrize("lengths", [None, (65, 5)], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_who_computes(
    operator: str, lengths: tuple[int, ...] | None, algebra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward's states are not kept, so the backward makes them again."""
    called = []

    def counted(name: str, op: Callable[..., object]) -> Callable[..., object]:
        def call(*operands: object, **options: object) -> object:
            called.append(name)
            return op(*operands, **options)

        return call

    for name in ("state_forward", "state_reverse", "chunk_gradient"):
        op = getattr(torch.ops.rewy_ascend, name)
        monkeypatch.setattr(torch.ops.rewy_ascend, name, counted(name, op))
    on_npu(Case(operator, B=1, T=70, K=64, V=64, lengths=lengths, dtype=torch.bfloat16), algebra=algebra)
    assert called == ["state_forward", "state_forward", "state_reverse", "chunk_gradient"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_host_waits_for_nothing(operator: str, tmp_path: Path) -> None:
    assert waits(operator, tmp_path, REWY_ASCEND_OPS=str(LIBRARY)) == []


@pytest.mark.parametrize("offsets", [None, "host", "device"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_state_layouts(operator: str, offsets: str | None) -> None:
    lengths = None if offsets is None else (3, 0, 67)
    case = Case(operator, B=1, T=70, K=64, V=128, lengths=lengths, dtype=torch.bfloat16)
    assert_state_layouts_agree(replace(case, host_offsets=offsets == "host"))


@pytest.mark.parametrize("algebra", ["rewy", "conventional"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_repeats_are_bitwise_equal(operator: str, algebra: str) -> None:
    case = Case(operator, B=1, T=150, H=1, K=64, V=64, gate="GQ", dtype=torch.bfloat16)
    first, second = (on_npu(case, algebra=algebra) for _ in range(2))
    assert all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first)


LAUNCHES = """
import torch
from rewy.testing import Case, computed, leaves, make

x, do, dht = make(Case("kda", B=1, T=200, H=1, HV=2, K=64, V=64, dtype=torch.bfloat16))
x, do, dht = leaves(x, "npu"), do.npu(), dht.npu()
stream = torch.npu.Stream()
with torch.npu.stream(stream):
    computed(x, do, dht)
torch.npu.synchronize()
print(stream.npu_stream)
"""


def test_launches_on_the_current_stream_over_the_cores_there_are(tmp_path: Path) -> None:
    """Two scans, over the chunks of which there are eight."""
    blocks = {}
    for cores in (32, 3):
        log = tmp_path / str(cores)
        run = python(LAUNCHES, FAKE_ACL_LOG=str(log), FAKE_ACL_CORES=str(cores))
        assert run.returncode == 0, run.stderr
        words = [line.split() for line in log.read_text().splitlines() if line.startswith("launch")]
        assert {word[-1] for word in words} == {run.stdout.strip()}
        blocks[cores] = [int(word[2]) for word in words]
    assert blocks == {32: [2, 2, 2, 8], 3: [2, 2, 2, 3]}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("delta_rule", K=64, V=64, dtype=torch.float32), "they take bfloat16 and float16, got float32"),
        (Case("delta_rule", K=32, V=64, dtype=torch.bfloat16), "got 64, K = 32 and V = 64"),
    ],
    ids=lambda value: str(value),
)
def test_required_but_unfit(case: Case, reason: str) -> None:
    x, _, _ = make(case)
    for backend in (None, "ascend"):
        with pytest.raises(ValueError, match=f"custom operators are required, but .*({reason})"):
            rewy.delta_attention(**arguments(leaves(x, "npu")), backend=backend)


def test_the_automatic_choice_says_once_why_it_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case("kda", T=65, K=48, V=64, dtype=torch.bfloat16)
    reason = "KDA does without the custom operators: they take chunks of 64"
    for choice, said in (("never", []), ("auto", [reason])):
        monkeypatch.setenv("REWY_ASCEND_OPS", choice)
        with caplog.at_level(logging.WARNING, "rewy"):
            assert_right(case)
            on_npu(case)
        assert [record.message.split(" and K")[0] for record in caplog.records] == said


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"FAKE_ACL_SOC": "Ascend910B1"}, "they are built for Ascend950, this is Ascend910B1"),
        ({"FAKE_ACL_CANN": "8.5.0"}, "they need CANN 9.1 or later, this is 8.5.0"),
    ],
    ids=["chip", "CANN"],
)
def test_wrong_machine(environment: dict[str, str], reason: str) -> None:
    """An explicit choice refuses; the automatic one computes without the operators and says why."""
    code = LAUNCHES.replace("stream = ", "import logging; logging.basicConfig()\nstream = ")
    refused = python(code, **environment)
    assert refused.returncode != 0
    assert (
        f"backend 'ascend' cannot compute this call: the custom operators are required, but {reason}"
        in refused.stderr
    )
    automatic = python(code, **environment, REWY_ASCEND_OPS="auto")
    assert automatic.returncode == 0, automatic.stderr
    assert f"WARNING:rewy:KDA does without the custom operators: {reason}" in automatic.stderr


GRADIENT = (
    "the chunk gradient for K = 128 and V = 128 needs 253440 bytes of unified buffer, this chip has 253439"
)
STATE = "the state pass for K = 128 and V = 128 needs"
UNTOLD = "CANN does not tell how many this chip has"


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        ("UB=253439", GRADIENT),
        ("L1=196607", f"{STATE} 196608 bytes of L1, this chip has 196607"),
        ("L0_C=0", f"{STATE} 131072 bytes of L0C, {UNTOLD}"),
        ("unknown", f"{STATE} 116480 bytes of unified buffer, {UNTOLD}"),
    ],
)
def test_buffers_too_small_or_untold(platform: str, reason: str) -> None:
    """An explicit choice refuses; the automatic one computes rightly without the operators and says why, once."""
    built = (
        f"from pathlib import Path\nfrom rewy.backends.ascend import ops\nops.LIBRARY = Path({LIBRARY!r})\n"
    )
    code = "import logging; logging.basicConfig()\n" + built + COMPUTE
    environment = {"FAKE_PLATFORM": platform, "PYTHONPATH": str(gxx.HERE)}
    refused = python(code, **environment)
    assert refused.returncode != 0
    assert f"the custom operators are required, but {reason}\n" in refused.stderr
    automatic = python(code, **environment, REWY_ASCEND_OPS="auto")
    assert automatic.stdout == "wrong: []\n", automatic.stderr
    said = [line for line in automatic.stderr.splitlines() if line.startswith("WARNING:rewy:")]
    assert said == [f"WARNING:rewy:GDN does without the custom operators: {reason}"]


@pytest.mark.parametrize(("platform", "size"), [("L1=196608", 128), ("UB=1000000 L1=1000000", 256)])
def test_buffers_of_other_sizes(platform: str, size: int) -> None:
    """Where L1 is too small for two chunks, one is loaded at a time; what the kernels do not know of is left alone."""
    code = COMPUTE.replace("K=128, V=128", f"K={size}, V={size}")
    run = python(code, FAKE_PLATFORM=platform, FAKE_ACL_CORES="1", PYTHONPATH=str(gxx.HERE))
    assert run.stdout == "wrong: []\n", run.stderr


def test_operator_refuses_a_chip_with_too_little() -> None:
    code = "from test_ops import *\ntorch.ops.load_library(LIBRARY)\n"
    code += "torch.ops.rewy_ascend.chunk_gradient(**operands('npu', K=128, V=128))"
    run = python(code, FAKE_PLATFORM="UB=253439", PYTHONPATH=str(gxx.HERE))
    assert f"ValueError: {GRADIENT}" in run.stderr


def test_library_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWY_ASCEND_OPS", "/nowhere/librewy_ascend.so")
    x, _, _ = make(Case("delta_rule", K=64, V=64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="not built"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), backend="ascend")


def test_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setenv("REWY_ASCEND_OPS", str(broken))
    x, _, _ = make(Case("delta_rule", K=64, V=64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"they do not load: .*broken\.so: file too short"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), backend="ascend")


def test_unknown_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWY_ASCEND_OPS", "maybe")
    x, _, _ = make(Case("delta_rule", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"auto, require, never or the path of a .so, got 'maybe'"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), backend="ascend")


def operands(device: str, N: int = 2, K: int = 64, V: int = 64) -> dict[str, torch.Tensor | float | None]:
    wide = dict.fromkeys(("q", "k"), (N, 64, K)) | dict.fromkeys(("v", "do", "U", "dR"), (N, 64, V))
    wide |= dict.fromkeys(("S", "dS"), (N, K, V))
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in wide.items()}
    tensors |= {name: torch.zeros(N, 64, 1, device=device) for name in ("b", "G")}
    tensors |= {"masks": torch.zeros(8, 64, 64, device=device)}
    return tensors | {"w": None, "far": None, "scale": 1.0, "shared": False}


def states(device: str, *names: str) -> dict[str, torch.Tensor]:
    shapes = {name: (4, 64, 128 if name == "do" else 64) for name in names}
    half = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    fp32 = {"carry": torch.zeros(4, 64, device=device), "first": torch.zeros(2, 64, 128, device=device)}
    return half | fp32 | {"starts": torch.tensor([0, 2, 4], dtype=torch.int32, device=device)}


def test_meta_of_the_state_passes() -> None:
    forward, reverse = torch.ops.rewy_ascend.state_forward, torch.ops.rewy_ascend.state_reverse
    for op, operands in (
        (forward, lambda d: states(d, "X", "K", "T") | {"written": torch.zeros(4, 64, 128, device=d)}),
        (reverse, lambda d: states(d, "minus_X", "K", "T", "A", "Q", "do")),
        (reverse, lambda d: states(d, "minus_X", "K", "T", "A", "Q", "do") | {"conventional": True}),
        (reverse, lambda d: states(d, "minus_X", "K", "T", "A", "Q", "do") | {"v_first": True}),
        (reverse, lambda d: states(d, "minus_X", "K", "T", "A", "Q", "do") | {"by_sequence": True}),
    ):
        real, meta = op(**operands("npu")), op(**operands("meta"))
        assert [(t.shape, t.dtype, t.stride()) for t in meta] == [
            (t.shape, t.dtype, t.stride()) for t in real
        ]
    with pytest.raises(ValueError, match=r"carry must be \[4, 64\], got \[3, 64\]"):
        reverse(**states("npu", "minus_X", "K", "T", "A", "Q", "do") | {"carry": torch.zeros(3, 64).npu()})


def filled(operands: dict[str, torch.Tensor | float | None]) -> dict[str, torch.Tensor | float | None]:
    """Random numbers for zeros, at most 0.1."""
    random = torch.Generator().manual_seed(0)
    return {
        name: t.copy_(torch.rand(t.shape, generator=random) / 10) if isinstance(t, torch.Tensor) else t
        for name, t in operands.items()
    }


def test_shared_keys_keep_fp32() -> None:
    """dq and dk are those of heads that share nothing, before their rounding."""
    x = filled(operands("npu"))
    own = torch.ops.rewy_ascend.chunk_gradient(**x)
    shared = torch.ops.rewy_ascend.chunk_gradient(**x | {"shared": True})
    for rounded, t in zip(own[:2], shared[:2], strict=True):
        assert t.dtype is torch.float32 and t.abs().max() > 0
        assert torch.equal(t.cpu().to(torch.bfloat16), rounded.cpu())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(own[2:], shared[2:], strict=True))


def conventional(device: str) -> dict[str, torch.Tensor | float | None]:
    shapes = {"dU": (2, 64, 64), "minus_X": (2, 64, 64), "written": (2, 64, 64), "T": (2, 64, 64)}
    own = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    return operands(device) | own


def test_gram() -> None:
    """dG's pairs from the scores are those from the gradients of q and k, in two parts; nothing else differs."""
    x = filled(conventional("npu"))
    x["masks"] = _masks(torch.device("npu"))
    folded, gram = (torch.ops.rewy_ascend.chunk_gradient(**x, gram=gram) for gram in (False, True))
    assert gram[5].shape == (2, 2, 64, 1)
    first, second = gram[5].cpu().unbind(1)
    assert not first[:, 32:].any() and second[:, :32].any()
    dG = folded[5].cpu()
    torch.testing.assert_close(first + second, dG, rtol=0, atol=5e-3 * float(dG.abs().max()))
    others = [i for i in range(7) if i != 5]
    assert all(torch.equal(folded[i].cpu(), gram[i].cpu()) for i in others)
    meta = torch.ops.rewy_ascend.chunk_gradient(**conventional("meta"), gram=True)
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in gram]


def test_states_in_either_layout() -> None:
    """The first state is read, the last one written as [P,K,V] or as [P,V,K]."""
    x = filled(states("npu", "X", "K", "T") | {"written": torch.zeros(4, 64, 128, device="npu")})
    x |= {"starts": torch.tensor([0, 2, 4], dtype=torch.int32, device="npu")}
    expected = torch.ops.rewy_ascend.state_forward(**x)
    transposed = x | {"first": x["first"].mT.contiguous().mT}
    for operands, v_first in ((x, True), (transposed, False), (transposed, True)):
        found = torch.ops.rewy_ascend.state_forward(**operands, v_first=v_first)
        assert found[2].is_contiguous() != v_first and found[2].mT.is_contiguous() == v_first
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="first, as it is or transposed, must be contiguous"):
        torch.ops.rewy_ascend.state_forward(**x | {"first": torch.zeros(4, 64, 128, device="npu")[::2]})


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_by_sequence(reverse: bool, v_first: bool) -> None:
    """Sequences of one chunk, of none and of two, with two heads: the bits that they have by step.

    A fourth chunk is no sequence's: whatever it holds, it touches nothing.
    """
    random = torch.Generator().manual_seed(0)

    def some(chunks: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.rand(chunks, 2, *shape, generator=random) / 10).to(dtype)

    names = ("minus_X", "K", "T", "A", "Q", "do") if reverse else ("X", "K", "T")
    x = {name: some(4, 64, 128 if name == "do" else 64) for name in names}
    x["carry"] = some(4, 64, dtype=torch.float32)
    if not reverse:
        x["written"] = some(4, 64, 128, dtype=torch.float32)
    for t in x.values():
        t[3] = float("nan")
    first = some(3, 64, 128, dtype=torch.float32)

    def ran(order: list[int], chunks: list[int], starts: list[int], **options: bool) -> list[torch.Tensor]:
        """The states before the chunks, U or dR, the last states, by chunk and by sequence as they are in `x`."""
        given = {name: t[chunks].flatten(0, 1).npu() for name, t in x.items()}
        states = first[order].flatten(0, 1).npu()
        given["first"] = states.mT.contiguous().mT if v_first else states
        given["starts"] = torch.tensor(starts, dtype=torch.int32).npu()
        op = torch.ops.rewy_ascend.state_reverse if reverse else torch.ops.rewy_ascend.state_forward
        found = op(**given, v_first=v_first, **options)[:3]
        states, solved, last = (t.cpu().unflatten(0, (-1, 2)) for t in found)
        placed = torch.tensor(chunks).argsort()[:3]
        return [states[placed], solved[placed], last[torch.tensor(order).argsort()]]

    by_sequence = ran([0, 1, 2], [0, 1, 2, 3], [0, 2, 2, 6], by_sequence=True)
    by_step = ran([2, 0, 1], [1, 0, 2], [0, 4, 6])
    for found, expected in zip(by_sequence, by_step, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(by_sequence[2][1], first[1])


def test_operator_refuses_heads_that_do_not_divide() -> None:
    x = states("npu", "X", "K", "T") | {"written": torch.zeros(4, 64, 128, device="npu")}
    x |= {"starts": torch.tensor([0, 1, 2, 4], dtype=torch.int32, device="npu")}
    with pytest.raises(ValueError, match="as many heads of each of 3 sequences, got 2 states"):
        torch.ops.rewy_ascend.state_forward(**x, by_sequence=True)


def per_channel(device: str) -> dict[str, torch.Tensor | float | None]:
    gates = {name: torch.zeros(2, 64, 64, device=device) for name in ("b", "w", "G")}
    return operands(device) | gates | {"far": torch.zeros(2, dtype=torch.int32, device=device)}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make_operands", [operands, per_channel])
def test_meta(make_operands: Callable[[str], dict[str, torch.Tensor | float | None]], shared: bool) -> None:
    real = torch.ops.rewy_ascend.chunk_gradient(**make_operands("npu") | {"shared": shared})
    meta = torch.ops.rewy_ascend.chunk_gradient(**make_operands("meta") | {"shared": shared})
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 64, 64)}, TypeError, "k must be BFloat16, got Float"),
        ({"b": torch.zeros(2, 63, 1)}, ValueError, r"b must be \[2, 64, 1\], got \[2, 63, 1\]"),
        ({"w": torch.zeros(2, 64, 64)}, ValueError, "gates per channel come with decay per channel"),
        ({"gram": True}, ValueError, "gram is for the conventional form with one decay a token"),
        (
            {"S": torch.zeros(4, 64, 64, dtype=torch.bfloat16)},
            ValueError,
            r"S must be \[2, 64, 64\], got \[4",
        ),
    ],
    ids=["dtype", "shape", "gates", "gram", "count"],
)
def test_operator_refuses(
    change: dict[str, torch.Tensor | bool], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torch.ops.rewy_ascend.chunk_gradient(
            **operands("npu") | {name: t if t is True else t.npu() for name, t in change.items()}
        )


def test_operator_refuses_strides() -> None:
    strided = torch.zeros(4, 64, 64, dtype=torch.bfloat16).npu()[::2]
    with pytest.raises(ValueError, match="S must be contiguous"):
        torch.ops.rewy_ascend.chunk_gradient(**operands("npu") | {"S": strided})


def test_operator_refuses_sizes() -> None:
    with pytest.raises(ValueError, match="K and V must be multiples of 64 up to 256, got K = 32, V = 64"):
        torch.ops.rewy_ascend.chunk_gradient(**operands("npu", K=32))


# ---- planted faults, from the public function --------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, (65, 5)], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tail_that_is_not_masked_is_noticed(
    operator: str, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels take whole chunks: past its end a sequence has zeros in every operand."""

    def unmasked(x: torch.Tensor, T: int) -> torch.Tensor:
        rest = x[:, :1].expand(-1, T - x.shape[1], *x.shape[2:])
        return torch.cat([x, rest], 1)

    case = Case(operator, B=1, T=70, K=64, V=64, lengths=lengths, dtype=torch.bfloat16)
    x, do, dht = make(case)
    expected = exact(x, do, dht)
    allowed = budgets(x, do, dht, expected)
    monkeypatch.setattr(layout, "_padded", unmasked)
    found = errors(on_npu(case), expected)
    assert {name for name, e in found.items() if not e <= allowed[name]} >= {"ht", "dk", "dv"}


# In one kernel's source: what stands there, what is planted, what tells.
FAULTS = {
    "a missing wait": (
        "state_pass.h",
        "        WaitFlag<HardEvent::MTE2_MTE1>(slot);\n        CrossCoreWaitFlag<2, PIPE_MTE1>(STATE_READY);\n",
        "        CrossCoreWaitFlag<2, PIPE_MTE1>(STATE_READY);\n",
        "with no wait between",
    ),
    "a wrong stride": ("chunk_gradient.h", "x.v[o], V);", "x.v[o], D);", "'dbeta'"),
    "a mask left out": (
        "chunk_gradient.h",
        "            Mul(pair, pair, mask, R * C);\n        }\n",
        "        }\n",
        "'dk'",
    ),
    "an overflowing buffer": ("core.h", "SLOT = 32 << 10", "SLOT = 60 << 10", "of L0A, which has 65536"),
    "a wait that nothing ends": (
        "state_pass.h",
        "        CrossCoreSetFlag<2, PIPE_FIX>(PREDICTED_READY);\n",
        "",
        "deadlock: waits for cross-core flag",
    ),
    "packed, a head's chunks at another's": (
        "state_pass.h",
        "+ uint64_t(chunk) * heads + i_p % heads;",
        "+ uint64_t(chunk) * heads + (i_p + 1) % heads;",
        "'ht'",
    ),
    "packed, the chunks of a sequence without its last": (
        "state_pass.h",
        "return (starts.GetValue(n + 1) - starts.GetValue(n)) / tiling.heads;",
        "return (starts.GetValue(n + 1) - starts.GetValue(n)) / tiling.heads - (n == 0);",
        "'ht'",
    ),
    "packed, the states of another sequence": (
        "state_pass.h",
        "if (heads > 0) return uint64_t(starts.GetValue(i_p / heads))",
        "if (heads > 0) return uint64_t(starts.GetValue(0))",
        "'ht'",
    ),
}
COMPUTE = """
import torch
from rewy.testing import Case, budgets, errors, exact, make
from test_torch_npu import on_npu

case = Case("gated_delta_rule", B=1, T=150, H=1, HV=2, K=128, V=128, dtype=torch.bfloat16)
x, do, dht = make(case)
expected = exact(x, do, dht)
allowed = budgets(x, do, dht, expected)
print("wrong:", [name for name, e in errors(on_npu(case), expected).items() if not e <= allowed[name]])
"""


def with_fault(fault: tuple[str, str, str], folder: Path) -> Path:
    """The operators of scalar gates with one text of the kernels' sources replaced."""
    assert LIBRARY is not None
    name, there, wrong = fault
    sources = {path.name: path.read_text() for path in gxx.CSRC.iterdir() if path.suffix in (".h", ".asc")}
    assert sources[name].count(there) == 1
    sources[name] = sources[name].replace(there, wrong)
    one = {" INSTANCE(true, false) INSTANCE(true, true)": "", "INSTANCE(64) INSTANCE(128)": "INSTANCE(64)"}
    for text, fewer in one.items():
        assert sources["launch.h"].count(text) == 1
        sources["launch.h"] = sources["launch.h"].replace(text, fewer)
    for file, text in sources.items():
        (folder / file).write_text(text)
    host = Path(LIBRARY).parents[3] / "build/ascend_ops/CMakeFiles/rewy_ascend.dir/ops.cpp.o"
    launch = subprocess.run(
        ["sed", "-E", "-f", gxx.EMULATION / "launch.sed", folder / "launch.asc"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "launch.cpp").write_text(launch.stdout)
    library = folder / "librewy_ascend.so"
    where = [Path(package.__file__).parent / "lib" for package in (torch, torch_npu)]
    where.append(Path(os.environ["ASCEND_HOME_PATH"]) / "lib64")
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *gxx.SANITIZERS]
    command += [
        f"-I{folder}",
        f"-I{gxx.EMULATION}",
        folder / "launch.cpp",
        host,
        "-o",
        library,
        *(f"-L{path}" for path in where),
    ]
    command += ["-ltorch_cpu", "-lc10", "-ltorch_npu", "-ltiling_api", "-lplatform"]
    command += ["-Wl,--allow-shlib-undefined"]
    subprocess.run(command, check=True, env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"})
    return library


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_a_kernel_is_noticed(fault: str, tmp_path: Path) -> None:
    """As an error that says where, or as a result that is wrong; never as a hang."""
    *change, tells = FAULTS[fault]
    library = with_fault((change[0], change[1], change[2]), tmp_path)
    code = COMPUTE.replace("V=128,", "V=128, lengths=(70, 0, 65),") if fault.startswith("packed") else COMPUTE
    run = python(code, REWY_ASCEND_OPS=str(library), PYTHONPATH=str(gxx.HERE))
    assert tells in run.stdout + run.stderr
