"""Rung a: the real torch_npu over a fake runtime on host memory. No NPU; see docs/ascend.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gaps import known_gaps

import rewy
from rewy.backends.ascend.arithmetic import CubeArithmetic, underflowing
from rewy.dispatch import backends
from rewy.problem import OPERATORS
from rewy.testing import Case, arguments, budgets, computed, error, errors, exact, leaves, make
from rewy.testing.budgets import FACTOR
from rewy.testing.verify import QUICK

torch_npu = pytest.importorskip(
    "torch_npu",
    reason="torch_npu has an environment of its own: scripts/ascend_ladder.sh",
    exc_type=ImportError,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_npu(case: Case, **options: object) -> dict[str, torch.Tensor]:
    x, do, dht = make(case)
    return computed(
        leaves(x, "npu"),
        do.npu(),
        None if dht is None else dht.npu(),
        case.scale,
        chunk_size=case.chunk_size,
        backend="ascend",
        **options,
    )


def assert_right(case: Case, **options: object) -> None:
    x, do, dht = make(case)
    expected = exact(x, do, dht, case.scale)
    allowed = budgets(x, do, dht, expected, case.scale)
    found = errors(on_npu(case, **options), expected)
    assert not {name: (e, allowed[name]) for name, e in found.items() if not e <= allowed[name]}


# torch_npu's threads do not always end in time when an interpreter does.
LEAVE = "\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code + LEAVE, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


def test_device() -> None:
    assert torch.npu.is_available()
    assert torch.npu.get_device_name().startswith("Ascend950DT")
    assert backends()["ascend"] is None
    other = python("import torch; print(torch.npu.get_device_name())", FAKE_ACL_SOC="Ascend910B1")
    assert "Ascend910B1" in other.stdout, other.stderr


def test_command_line() -> None:
    info = subprocess.run([sys.executable, "-m", "rewy", "info"], capture_output=True, text=True, timeout=120)
    assert info.returncode == 0, info.stderr
    assert "Ascend950DT" in info.stdout
    bench = [sys.executable, "-m", "rewy", "bench", "configs/ascend950dt.yaml", "--dry-run"]
    plan = subprocess.run(bench, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    for contestant in ("rewy", "rewy-conventional"):
        ours = [line for line in plan if re.search(rf" · {contestant}(:|$)", line)]
        assert all(f" · {operator} · " in "".join(ours) for operator in OPERATORS)
        assert all(line.endswith(f" · {contestant}") for line in ours)
    assert any("fla: not installed" in line for line in plan)


def test_streams_and_events() -> None:
    x = torch.arange(6.0).npu()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    side = torch.npu.Stream()
    start.record()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
        end.record()
    torch.npu.current_stream().wait_stream(side)
    torch.npu.synchronize()
    assert y.cpu().tolist() == [0, 2, 4, 6, 8, 10]
    assert start.elapsed_time(end) >= 0


PARITY = [(operator, title, dtype) for operator in OPERATORS for title in QUICK for dtype in DTYPES]


@pytest.mark.parametrize(("operator", "title", "dtype"), PARITY, ids=str)
def test_parity(operator: str, title: str, dtype: torch.dtype) -> None:
    """Every case of `rewy verify` in every dtype."""
    assert_right(replace(QUICK[title], operator=operator, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("title", [title for title, case in QUICK.items() if case.lengths is not None])
@pytest.mark.parametrize("operator", OPERATORS)
def test_offsets_on_the_host(operator: str, title: str, dtype: torch.dtype) -> None:
    assert_right(replace(QUICK[title], operator=operator, dtype=dtype, host_offsets=True))


@pytest.mark.parametrize("algebra", ["rewy", "conventional"])
@pytest.mark.parametrize(
    "lengths", [(0, 64, 0, 0, 36), (130, 0), (5, 130, 7, 60), (1, 1), (211,), ()], ids=str
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_packs(operator: str, lengths: tuple[int, ...], algebra: str) -> None:
    case = Case(operator, B=1, T=211, H=1, HV=2, lengths=lengths, dtype=torch.float32)
    assert_right(case, algebra=algebra)


def assert_state_layouts_agree(case: Case) -> None:
    """States as [V,K] are states as [K,V] transposed, bit for bit, and so are their gradients."""
    x, do, dht = make(case)
    assert dht is not None

    def results(v_first: bool) -> list[torch.Tensor]:
        named = {name: t for name, t in arguments(leaves(x, "npu")).items() if t is not None}
        first, last = (t.detach().mT.contiguous() if v_first else t for t in (named["initial_state"], dht))
        named["initial_state"] = first.requires_grad_()
        o, state = rewy.delta_attention(
            **named, output_final_state=True, backend="ascend", state_v_first=v_first
        )
        wanted = [t for name, t in named.items() if t.requires_grad and name != "initial_state"]
        *gradients, dh0 = torch.autograd.grad([o, state], [*wanted, first], [do.npu(), last.npu()])
        assert state.is_contiguous() and dh0.is_contiguous()
        state, dh0 = (t.mT if v_first else t for t in (state, dh0))
        return [t.detach().cpu() for t in (o, state, dh0, *gradients)]

    for keys_first, values_first in zip(results(False), results(True), strict=True):
        assert torch.equal(keys_first, values_first)


@pytest.mark.parametrize("host_offsets", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_state_layouts(operator: str, host_offsets: bool) -> None:
    case = Case(operator, B=1, T=140, lengths=(65, 0, 64, 3), dtype=torch.bfloat16)
    assert_state_layouts_agree(replace(case, host_offsets=host_offsets))


@pytest.mark.parametrize("spread", [0.01, 5.0, 1000.0])
def test_decays_of_fp32_lose_no_digits(spread: float) -> None:
    """Differences of their sums against fp64, beside what one fp32 sum keeps of them."""
    x, _, _ = make(Case("gated_delta_rule", B=4, T=64, dtype=torch.float32))
    g = -spread * torch.rand(4, 64, 2, generator=torch.Generator().manual_seed(0)) ** 8
    g = underflowing(x._replace(g=g)).g
    assert g is not None
    arithmetic = CubeArithmetic.of(torch.float32)

    def decays(G: torch.Tensor) -> torch.Tensor:
        return (G[..., :, None, :] - G[..., None, :, :]).movedim(-1, -3).tril(-1)

    expected = decays(g.double().cumsum(-2)).exp()
    one_sum = (decays(g.cumsum(-2)).exp() - expected).abs().amax()
    two_parts = (arithmetic.exp(decays(arithmetic.cumulative(g))) - expected).abs().amax()
    assert two_parts <= 2**-23
    assert spread < 1 or one_sum > 10 * two_parts


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_sequence_empty(operator: str) -> None:
    assert_right(Case(operator, B=1, T=7, lengths=(0, 0), dtype=torch.bfloat16))


def test_known_gaps_are_there() -> None:
    tests = {f"test_torch_npu.py::test_parity[{'-'.join(map(str, case))}]" for case in PARITY}
    assert known_gaps().keys() <= tests


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "options", [{"algebra": "conventional"}, {"disable_recompute": True}], ids=["conventional", "keep"]
)
def test_options(operator: str, options: dict[str, object]) -> None:
    assert_right(Case(operator, T=130, dtype=torch.bfloat16), **options)


@pytest.mark.parametrize("lower_bound", [None, -2.0])
@pytest.mark.parametrize("operator", OPERATORS)
def test_in_kernel_options(operator: str, lower_bound: float | None) -> None:
    """All of them, and the state as [V,K], within the usual factor of the reference backend's errors."""
    x, do, dht = make(Case(operator, T=70, K=64, V=64, dtype=torch.bfloat16))
    assert dht is not None
    operands = {name: t for name, t in arguments(x).items() if t is not None}
    operands["initial_state"] = operands["initial_state"].mT.contiguous()
    options: dict[str, object] = {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": x.write is None,
    }
    if x.g is not None:
        options |= {"use_gate_in_kernel": True, "lower_bound": lower_bound}
        operands["A_log"] = torch.linspace(-1, 1, x.g.shape[2])
        operands["dt_bias"] = torch.linspace(-1, 1, x.g[0, 0].numel())

    def results(device: str, backend: str, *dtype: torch.dtype) -> list[torch.Tensor]:
        named = {name: t.to(device, *dtype, copy=True).requires_grad_() for name, t in operands.items()}
        o, state = rewy.delta_attention(
            **named, **options, state_v_first=True, output_final_state=True, backend=backend
        )
        loss = [do.to(o), dht.mT.contiguous().to(state)]
        gradients = torch.autograd.grad([o, state], [*named.values()], loss)
        return [t.detach().cpu() for t in (o, state, *gradients)]

    expected = results("cpu", "reference", torch.float64)
    control, found = results("cpu", "reference"), results("npu", "ascend")
    for right, allowed, actual in zip(expected, control, found, strict=True):
        roundoff = torch.finfo(actual.dtype).eps / 2
        assert error(actual, right) <= FACTOR * (error(allowed, right) + roundoff)


@pytest.mark.parametrize("operator", OPERATORS)
def test_repeats_are_bitwise_equal(operator: str) -> None:
    case = Case(operator, T=130, dtype=torch.bfloat16)
    first, second = on_npu(case), on_npu(case)
    assert all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first)


def test_checkpoint_and_module() -> None:
    x, do, _ = make(Case("kda", dtype=torch.bfloat16))
    x = leaves(x, "npu")

    def layer(q: torch.Tensor) -> torch.Tensor:
        return rewy.delta_attention(**{**arguments(x), "q": q})[0]

    plain = torch.autograd.grad(layer(x.q), x.q, do.npu())[0]
    again = torch.utils.checkpoint.checkpoint(layer, x.q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, x.q, do.npu())[0].cpu(), plain.cpu())


@pytest.mark.parametrize("host_offsets", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_step_of_packed_sequences(operator: str, host_offsets: bool) -> None:
    """In chunks when the host does not know where they begin, token by token when it does."""
    case = Case(operator, B=1, T=6, lengths=(2, 0, 3), dtype=torch.bfloat16, host_offsets=host_offsets)
    x, do, dht = make(case)
    expected = exact(x, do, dht)
    allowed = budgets(x, do, dht, expected)
    with torch.no_grad():
        named = arguments(leaves(x, "npu"))
        o, state = rewy.delta_attention_step(**named, output_final_state=True, backend="ascend")
    assert state is not None
    found = errors({"o": o, "ht": state}, {name: expected[name] for name in ("o", "ht")})
    assert all(e <= allowed[name] for name, e in found.items())


@pytest.mark.parametrize("operator", OPERATORS)
def test_step(operator: str) -> None:
    x, _, _ = make(Case(operator, T=1, dtype=torch.bfloat16))
    expected, _ = rewy.delta_attention_step(**arguments(x))
    on_device = {name: None if t is None else t.npu() for name, t in arguments(x).items()}
    actual, _ = rewy.delta_attention_step(**on_device, backend="ascend")
    assert torch.equal(actual.cpu(), expected)


def test_refusals() -> None:
    x, _, _ = make(Case("delta_rule", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="backend='ascend' was asked for but cannot compute this call"):
        rewy.delta_attention(**arguments(x), backend="ascend")
    with pytest.raises(ValueError, match="autograd"):
        rewy.delta_attention(**arguments(leaves(x, "npu")), algebra="autograd", backend="ascend")


INDEXED = {"aclnnIndexSelect", "aclnnIndexCopy", "aclnnIndex"}


@pytest.mark.parametrize("offsets", [None, "host", "device"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_reaches_the_device(operator: str, offsets: str | None, tmp_path: Path) -> None:
    """Products of 16-bit operands with fp32 results; integers that name rows, and no arithmetic on them.

    Where the offsets of packed sequences are on the device alone there is some, in 32 bits.
    """
    lengths = None if offsets is None else (3, 127)
    log = tmp_path / "log"
    run = python(
        "import torch\n"
        "from rewy.testing import Case, arguments, leaves, make\n"
        "import rewy, sys\n"
        f"case = Case({operator!r}, B=1, T=130, K=64, V=64, lengths={lengths}, dtype=torch.bfloat16,\n"
        f"            host_offsets={offsets == 'host'})\n"
        "x, do, _ = make(case)\n"
        "x, do = leaves(x, 'npu'), do.npu()\n"
        "torch.npu.synchronize()\n"
        f"open({str(log)!r}, 'w').close()\n"
        "o, _ = rewy.delta_attention(**arguments(x), backend='ascend')\n"
        "o.backward(do)\n"
        "torch.npu.synchronize()\n",
        FAKE_ACL_LOG=str(log),
        REWY_ASCEND_OPS="never",
    )
    assert run.returncode == 0, run.stderr
    lines = log.read_text().splitlines()
    assert not [line for line in lines if "Double" in line]
    in_32_bits, in_64_bits = (
        {line.split()[0] for line in lines if f" {kind}[" in line} for kind in ("Int", "Long")
    )
    if offsets == "device":
        assert in_64_bits <= INDEXED | {"aclnnInplaceIndexCopy", "aclnnInplaceCopy"}
        assert "aclnnFloorDivides" in in_32_bits
    else:
        assert in_32_bits | in_64_bits <= (INDEXED if lengths else set())
    products = [re.findall(r"(\w+)\[", line) for line in lines if line.startswith("aclnnBatchMatMul")]
    assert products and all(types == ["BFloat16", "BFloat16", "Float"] for types in products)
    # What remains in fp32 is the inverse of each chunk's unit triangle, in blocks of at most 32.
    shapes = [re.search(r"(\d+)\]", line) for line in lines if line.startswith("aclnnMatmul")]
    assert all(shape is not None and int(shape[1]) <= 32 for shape in shapes)


WAITS = """
import os, sys, torch, rewy
from rewy.testing import Case, arguments, computed, leaves, make

operator, log = sys.argv[1:]

def logged(what, call):
    torch.npu.synchronize()
    open(log, "w").close()
    call()
    lines = open(log).read().splitlines()
    assert any(line.startswith("aclnn") for line in lines), what
    for line in lines:
        if line.startswith(("wait", "copy to host")):
            print(what, line, sep=": ")

def offsets(x, where):
    if where == "host":
        return leaves(x, "npu")._replace(cu_seqlens=x.cu_seqlens)
    return leaves(x._replace(cu_seqlens_cpu=x.cu_seqlens if where == "both" else None), "npu")

packed = [((65, 0, 64, 3), where) for where in ("device", "both", "host")]
for lengths, where in ((None, None), *packed, ((3, 130), "device"), ((3, 130), "both")):
    case = Case(operator, B=1, T=140, H=1, HV=2, K=64, V=64, lengths=lengths, dtype=torch.bfloat16)
    x, do, dht = make(case)
    x, do, dht = offsets(x, where), do.npu(), dht.npu()
    in_kernel = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=x.write is None)
    if x.g is not None:
        in_kernel |= dict(use_gate_in_kernel=True, A_log=torch.zeros(x.g.shape[2]).npu())
    for options in ({}, {"algebra": "conventional"}, {"disable_recompute": True}, in_kernel):
        logged(f"{lengths} {where} {[*options]}", lambda: computed(x, do, dht, backend="ascend", **options))
    with torch.no_grad():
        logged(f"{lengths} {where} step", lambda: rewy.delta_attention_step(**arguments(x), backend="ascend"))
torch.npu.synchronize()
"""


def waits(operator: str, folder: Path, before: str = "", **environment: str) -> list[str]:
    """Where the host waits for the device: forward and backward in every form, decoding; dense and packed.

    The offsets of packed sequences are on the device, on the host, or both.
    """
    log = folder / "log"
    run = python(before + WAITS, operator, str(log), FAKE_ACL_LOG=str(log), **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_host_waits_for_nothing(operator: str, tmp_path: Path) -> None:
    assert waits(operator, tmp_path, REWY_ASCEND_OPS="never") == []


@pytest.mark.parametrize(
    "before",
    [
        "from rewy.algebra import layout\nlayout.sent = lambda x, device: x.to(device)\n",
        "import torch\n"
        "from rewy.backends.ascend.arithmetic import CubeArithmetic\n"
        "CubeArithmetic.of = lambda dtype: CubeArithmetic(torch.float32, dtype, torch.float32)\n",
        "from rewy.algebra.layout import Layout\n"
        "of = Layout.of\n"
        "Layout.of = lambda problem, x, waits: of(problem, x)\n",
    ],
    ids=["copy from pageable memory", "decays that are read", "offsets that are read"],
)
def test_a_wait_is_noticed(before: str, tmp_path: Path) -> None:
    found = waits("kda", tmp_path, before)
    assert any("wait for a stream" in line for line in found)


def test_an_operator_that_is_not_there_fails_loudly() -> None:
    with pytest.raises(RuntimeError, match="not found"):
        torch.erfinv(torch.ones(3).npu())


def test_a_runtime_call_that_is_not_there_ends_the_process() -> None:
    run = python("import ctypes, torch\nctypes.CDLL('libascendcl.so').aclrtMapMem()")
    assert run.returncode != 0
    assert "fake acl: aclrtMapMem is not implemented" in run.stderr
