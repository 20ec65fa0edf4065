"""Outputs and gradients by name: as they are by definition, and as a backend computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewy.algebra.recurrent import recurrence
from rewy.api import delta_attention
from rewy.problem import Operands, check_scale

Results = dict[str, Tensor]
"""o, ht, and the gradients dq, dk, dv, dg, dbeta (or derase and dwrite) and dh0 of the operands that are given."""


def exact(x: Operands, do: Tensor, dht: Tensor | None, scale: float | None = None) -> Results:
    """The recurrence in fp64 and autograd of it, from the operands as they are rounded.

    Autograd rounds a gradient to its leaf's dtype: these are in fp64.
    """
    x = Operands(*(t.double() if t is not None and t.is_floating_point() else t for t in x))  # type: ignore[arg-type]
    x = leaves(x)
    o, ht = recurrence(x, check_scale(scale, x.q))
    return results(x, o, ht, do.to(o.dtype), None if dht is None else dht.to(ht.dtype))


def computed(
    x: Operands, do: Tensor, dht: Tensor | None, scale: float | None = None, **options: Any
) -> Results:
    """The same from `rewy.delta_attention`."""
    x = leaves(x)
    o, ht = delta_attention(**arguments(x), scale=scale, output_final_state=True, **options)
    assert ht is not None
    return results(x, o, ht, do, dht)


def arguments(x: Operands) -> dict[str, Any]:
    """The operands as `rewy.delta_attention` names them."""
    named = x._asdict()
    if x.write is None:
        named["beta"] = named.pop("erase")
    return named


def leaves(x: Operands, device: torch.device | str | None = None) -> Operands:
    """Copies that ask for gradients, on the device if one is given."""

    def leaf(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.detach().to(device, copy=True).requires_grad_(t.is_floating_point())

    return Operands(*map(leaf, x[:-1]), x.cu_seqlens_cpu)  # type: ignore[arg-type, call-arg]


def results(x: Operands, o: Tensor, ht: Tensor, do: Tensor, dht: Tensor | None) -> Results:
    """o, ht and the gradients of the operands; without dht the loss does not see the final states."""
    inputs = {name: t for name, t in arguments(x).items() if t is not None and t.requires_grad}
    pairs = [(o, do)] if dht is None else [(o, do), (ht, dht)]
    # With no token in any sequence the recurrence leaves constants.
    outputs, gradients = ([pair[i] for pair in pairs if pair[0].requires_grad] for i in (0, 1))
    if outputs:
        found = torch.autograd.grad(outputs, list(inputs.values()), gradients, materialize_grads=True)
    else:
        found = tuple(torch.zeros_like(t) for t in inputs.values())
    names = ("dh0" if name == "initial_state" else f"d{name}" for name in inputs)
    return {"o": o.detach(), "ht": ht.detach()} | dict(zip(names, found, strict=True))
