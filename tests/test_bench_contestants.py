"""Adaptors to packages that are not installed here, over stand-ins with those packages' names and orders.

The stand-ins compute with rewy's reference backend, so what is tested is the wiring: arguments, gates, packed
offsets, and which gradient is which. Whether a real package is right is what the benchmark itself checks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

import rewy
from rewy import dispatch
from rewy.bench.check import Oracle, check
from rewy.bench.clock import HostClock
from rewy.bench.config import Config
from rewy.bench.contestants import CONTESTANTS
from rewy.bench.workload import Case
from rewy.problem import Operands, Options, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPERATORS = ("delta_rule", "gated_delta_rule", "kda", "gdn2")

# fla's low-level functions: modules of forward and backward, what each returns in its order.
KEPT = "o ht g Aqk kept w u qg kg v_new h h0"
FLA = {
    "delta_rule": ("chunk", "chunk", "o kept ht", "q k v erase initial_state"),
    "gated_delta_rule": ("chunk", "chunk", "g o kept ht h0 g_in", "q k v erase g initial_state - -"),
    "kda": ("chunk_fwd", "chunk_bwd", KEPT, "q k v erase g initial_state - -"),
    "gdn2": ("chunk_fwd", "chunk_bwd", KEPT, "q k v erase write g initial_state - -"),
}
QLA = ("g kept o h ht cache", "q k v erase g initial_state")


def operands(arguments: dict[str, Any]) -> Operands:
    a = arguments
    erase = a["b"] if "b" in a else a["beta"]
    cu = a["cu_seqlens"]
    return Operands(a["q"], a["k"], a["v"], a.get("g"), erase, a.get("w_gate"), a["initial_state"], cu, cu)


def low_level(returned: str, gradients: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    backend = dispatch.load("reference")

    def forward(**a: Any) -> tuple[Any, ...]:
        x = operands(a)
        problem = problem_of(x, Options(a["scale"], a.get("chunk_size", 64), True, "rewy"))
        o, ht, kept = backend.forward(problem, x, True)
        values = {"o": o, "ht": ht, "kept": kept, "g": a.get("g")}
        return tuple(values.get(name) for name in returned.split())

    def backward(**a: Any) -> tuple[Any, ...]:
        x = operands(a)
        problem = problem_of(x, Options(a["scale"], a.get("chunk_size", 64), True, "rewy"))
        kept = a["Akk"] if "Akk" in a else a["A"]
        grads = backend.backward(problem, x, kept, a["do"], a["dht"])._asdict()
        return tuple(grads.get(name) for name in gradients.split())

    return forward, backward


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """fla and flash_qla as modules that can be imported."""
    made: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in made:
            made[name] = ModuleType(name)
            made[name].__spec__ = ModuleSpec(name, None)
            made[name].__path__ = []
            monkeypatch.setitem(sys.modules, name, made[name])
        return made[name]

    for name in ("fla", "fla.ops", "fla.ops.utils"):
        module(name)
    module("fla.backends")._DISPATCH_DISABLED = True
    module("fla.ops.utils.index").prepare_chunk_indices = lambda cu, size, cu_seqlens_cpu: None
    for op, (forward_in, backward_in, returned, gradients) in FLA.items():
        folder = module(f"fla.ops.{op}")
        setattr(folder, f"chunk_{op}", getattr(rewy, f"chunk_{op}"))
        forward, backward = low_level(returned, gradients)
        setattr(module(f"fla.ops.{op}.{forward_in}"), f"chunk_{op}_fwd", forward)
        setattr(module(f"fla.ops.{op}.{backward_in}"), f"chunk_{op}_bwd", backward)
    qla = module("flash_qla")
    qla.chunk_gated_delta_rule = rewy.chunk_gated_delta_rule
    qla.chunk_gated_delta_rule_fwd, qla.chunk_gated_delta_rule_bwd = low_level(*QLA)
    return made


def case_of(operator: str, packed: bool, **changes: Any) -> Case:
    size = {"lengths": (60, 43)} if packed else {"B": 2, "T": 100}
    config = Config.model_validate({
        "title": "wiring", "device": "cpu", "dtype": "float32", "levels": ["backward"], "initial_state": True,
        "contestants": ["fla"], "baseline": "fla", "shapes": [size | {"H": 2, "K": 16, "V": 24} | changes],
    })  # fmt: skip
    return Case.of(config, operator, config.shapes[0], CPU)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["backward", "autograd"])
@pytest.mark.parametrize(
    ("name", "operator"), [*(("fla", op) for op in OPERATORS), *(("flashqla", op) for op in OPERATORS[:2])]
)
def test_wiring(name: str, operator: str, level: str, packed: bool) -> None:
    verdict = check(name, level, Oracle.of(case_of(operator, packed), seed=0), HostClock())
    assert (verdict.status, verdict.reason) == ("ok", "")


def test_fla_is_timed_without_its_dispatch(
    packages: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "0")
    assert CONTESTANTS["fla"].absent(CUDA) is None
    assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"
    packages["fla.backends"]._DISPATCH_DISABLED = False
    assert "imported before with another FLA_DISABLE_BACKEND_DISPATCH" in str(CONTESTANTS["fla"].absent(CUDA))


def test_a_package_that_fails_to_import_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec:
        return ModuleSpec(name, None)

    def load(name: str) -> ModuleType:
        raise OSError("libtvm.so: no such file\nmore")

    monkeypatch.setattr("importlib.util.find_spec", find)
    monkeypatch.setattr("importlib.import_module", load)
    reason = CONTESTANTS["flashqla"].absent(CUDA)
    assert reason == "cannot be imported: OSError: libtvm.so: no such file"


@pytest.mark.parametrize(
    ("name", "operator", "changes", "reason"),
    [
        ("fla", "delta_rule", {"HV": 4}, "DeltaNet has no grouped value heads"),
        ("fla", "gdn2", {"HV": 4}, "GDN2 has no grouped value heads"),
        ("fla", "kda", {"HV": 4}, None),
        ("fla", "delta_rule", {}, "DeltaNet takes 16-bit inputs only"),
        ("flashqla", "kda", {}, "has no KDA"),
        ("flashqla", "gated_delta_rule", {}, "takes 16-bit inputs only"),
        ("fla-npu", "gdn2", {}, "has no GDN2"),
        ("fla-npu", "gated_delta_rule", {"HV": 4}, "its GDN has no grouped value heads"),
    ],
)
def test_what_peers_decline(name: str, operator: str, changes: dict[str, int], reason: str | None) -> None:
    assert CONTESTANTS[name].declines(case_of(operator, packed=False, **changes)) == reason


@pytest.mark.usefixtures("packages")
def test_flashqla_compiles_once_for_its_two_operators() -> None:
    flashqla = CONTESTANTS["flashqla"]
    delta, gated = (case_of(op, packed=False, T=400) for op in OPERATORS[:2])
    assert flashqla.kind(delta) == flashqla.kind(gated) == gated


def test_rewy_plain_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CONTESTANTS["rewy-plain"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert plain.absent(CPU) == "no CUDA device is available"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert plain.declines(case_of("kda", packed=False)) == "it computes on cuda tensors, q is on cpu"


COMPILING = """
import torch
from rewy.backends.cuda import launch, plan
from rewy.bench.config import Config
from rewy.bench.contestants import CONTESTANTS
from rewy.bench.workload import Case

plan.limits_of = lambda device: plan.Limits(shared=227 * 1024, capability=(9, 0))
compiled = []
launch.Launch.compile = lambda one: compiled.append(one)
config = Config.model_validate({
    "title": "offline", "device": "cuda", "dtype": "bfloat16", "levels": ["backward"],
    "contestants": ["rewy"], "baseline": "rewy", "shapes": [{"T": T, "H": 32} for T in (176, 1 << 20)],
})
gluon = {}
for name in ("rewy", "rewy-plain", "rewy-conventional"):
    small, large = (Case.of(config, "kda", shape, torch.device("cuda")) for shape in config.shapes)
    contestant, met = CONTESTANTS[name], {}
    assert contestant.to_compile(large) == (large, small)
    compiled.clear()
    contestant.compile(large, lambda what: met.setdefault(what, len(met)) % 2 == 0)
    half = len(compiled)
    contestant.compile(large, lambda what: met.setdefault(what, len(met)) % 2 == 1)
    assert 0 < half < len(compiled)
    gluon[name] = {one.name for one in compiled if one.kernel.is_gluon()}
assert gluon["rewy"] == {"forward_pass", "reverse_pass", "channel_chunks"}
assert gluon["rewy-plain"] == set()
assert gluon["rewy-conventional"] == {"forward_pass"}  # which is not in its backward
"""


def test_rewy_compiles_for_any_size_without_a_device_and_rewy_plain_without_gluon() -> None:
    pytest.importorskip("triton.experimental.gluon")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_devices_of_peers() -> None:
    assert CONTESTANTS["fla-npu"].absent(CUDA) == "runs on npu, not on cuda"
    assert CONTESTANTS["flashqla"].absent(CPU) == "runs on cuda, not on cpu"
