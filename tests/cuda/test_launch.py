"""A launch is a value: refused where the card would refuse it, recorded on request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rewy.backends.cuda import launch, prologue
from rewy.backends.cuda.launch import Launch, recording


def test_refuses_a_grid_past_the_limit():
    Launch(prologue.sigmoid_fwd, (70_000, 1), {})
    with pytest.raises(ValueError, match="axis 1 of sigmoid_fwd is 70000, CUDA allows 65535"):
        Launch(prologue.sigmoid_fwd, (1, 70_000), {})


def test_recording_runs_nothing_and_ends(device):
    x = torch.zeros(5, device=device)
    with recording() as launches:
        y = prologue.sigmoid_forward(x)
    assert [launch.name for launch in launches] == ["sigmoid_fwd"]
    assert launches[0].device == x.device
    assert y.isnan().all()
    launches[0].run()
    assert torch.equal(y, torch.full_like(y, 0.5))
    assert torch.equal(prologue.sigmoid_forward(x), y)
    assert len(launches) == 1


def test_records_meta_tensors():
    with recording() as launches:
        dx = prologue.l2norm_backward(*torch.empty(2, 3, 4, 1, 64, device="meta"))
    assert dx.is_meta and launches[0].args["D"] == 64


def rows(t: torch.Tensor, columns: int):
    """A stand-in for a tensor descriptor, which older versions of Triton do not have."""
    return SimpleNamespace(base=t, block_shape=[64, columns])


def test_a_signature_tells_compiled_kernels_apart():
    def signature(x, **options):
        return Launch(prologue.sigmoid_fwd, (1,), dict(x=x, BT=64), **options).signature

    x = torch.empty(128, 64, device="meta")
    same = [signature(t) for t in (x, torch.empty_like(x), x[:64])]
    assert len(set(same)) == 1
    described = [signature(rows(t, 64)) for t in (x, torch.empty_like(x))]
    assert len(set(described)) == 1
    others = {
        same[0],
        described[0],
        signature(rows(x, 32)),
        signature(x.half()),
        signature(rows(x.half(), 64)),
    }
    assert len(others | {signature(x, maxnreg=64)}) == 6


def test_a_descriptors_device_is_its_tensors():
    assert Launch(prologue.sigmoid_fwd, (1,), dict(scale=1.0, x=rows(torch.empty(1), 1))).device.type == "cpu"


def test_a_compiled_kernel_serves_all_arguments_of_its_kind(monkeypatch: pytest.MonkeyPatch):
    compiled, run = [], []

    def compile_(self: Launch):
        compiled.append(self)
        return {grid: lambda *args: run.append(args) for grid in [(1, 1, 1)]}

    monkeypatch.setattr(Launch, "compile", compile_)
    monkeypatch.setattr(launch, "bind", lambda device: None)
    monkeypatch.setattr(launch, "_compiled", {})
    x = torch.empty(64)

    class kernel:
        arg_names, do_not_specialize = ["x", "T", "K"], ["T"]

    def compiles(device: int = 0, **changes) -> bool:
        before, args = len(compiled), dict(x=x, T=100, K=16) | changes
        Launch(kernel, (1,), args)._run_compiled(torch.device("cuda", device))
        return len(compiled) > before

    assert compiles() and compiles(device=1)
    assert not any(compiles(**same) for same in (dict(x=torch.empty(8)), dict(T=1), dict(K=16)))
    others = dict(x=x.half()), dict(x=x[1:]), dict(T=2**31), dict(K=32), dict(K=1), dict(K=True), dict(x=None)
    assert all(compiles(**other) for other in (*others, dict(x=rows(x, 64)), dict(x=rows(x, 32))))
    assert [len(args) for args in run] == [3] * 14
