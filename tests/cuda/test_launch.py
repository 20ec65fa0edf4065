"""A launch is a value: refused where the card would refuse it, recorded on request."""

from __future__ import annotations

import pytest
import torch

from rewy.backends.cuda import prologue
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
