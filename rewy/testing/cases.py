"""Seeded inputs that keep the state alive: unit keys, decays near 1 as well as strong, a non-zero initial state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rewy.problem import OPERATORS, Gate, Operands


@dataclass(frozen=True)
class Case:
    """One operator at one shape. `lengths` packs sequences into one row of T tokens and may end before T; where
    they begin is given on the device, with `host_offsets` on the host too.

    `gate` names a distribution of log decays:

    =======  ====================================================================
    GL<n>    logsigmoid(U(0,1)) / n
    GM       GL1 with half of the entries 0
    GX<a>    GL1 with half of the entries -a (hard resets at 1000)
    GB<a>    half of the entries -a, half 0
    GH<a>    0, but for one token (and channel) of each head at -a
    GQ       -A softplus(N(0,1)/2 + 1), A ~ U(0,16) a head, from 0 in the first to 16 in the last
    G<a>     -a everywhere
    =======  ====================================================================
    """

    operator: str
    B: int = 2
    T: int = 70
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    dtype: torch.dtype = torch.float64
    gate: str = "GL10"
    lengths: tuple[int, ...] | None = None
    initial_state: bool = True
    dht: bool = True
    scale: float | None = None
    chunk_size: int = 64
    host_offsets: bool = False
    seed: int = 0

    @property
    def N(self) -> int:
        """Sequences, each with a state of its own."""
        return self.B if self.lengths is None else len(self.lengths)

    def __str__(self) -> str:
        """The short name of a test: what differs from the defaults."""
        shape = f"{self.B}x{self.T}x{self.H}-{self.HV}x{self.K}-{self.V}"
        parts = [self.operator, shape, self.gate, str(self.dtype).removeprefix("torch.")]
        if self.lengths is not None:
            parts.append("packed-" + "-".join(map(str, self.lengths)))
        if self.host_offsets:
            parts.append("host-offsets")
        if not self.initial_state:
            parts.append("no-state")
        if not self.dht:
            parts.append("no-dht")
        if self.chunk_size != 64:
            parts.append(f"chunk{self.chunk_size}")
        return "-".join(parts)


def make(case: Case) -> tuple[Operands, Tensor, Tensor | None]:
    """The operands on the CPU, the gradient of o, and that of the final states if the case has one."""
    generator = torch.Generator().manual_seed(case.seed)
    op = OPERATORS[case.operator]
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    work = torch.float64 if case.dtype is torch.float64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def gate_shape(kind: Gate, channels: int) -> tuple[int, ...]:
        return (B, T, HV, channels) if kind is Gate.CHANNEL else (B, T, HV)

    q, k = (F.normalize(randn(B, T, H, K), dim=-1) for _ in range(2))
    v, do = randn(B, T, HV, V), randn(B, T, HV, V)
    erase = randn(*gate_shape(op.erase, K)).sigmoid()
    write = None if op.tied else randn(*gate_shape(op.write, V)).sigmoid()
    state, dht = (0.5 * randn(case.N, HV, K, V) for _ in range(2))
    g = None if op.decay is Gate.NONE else log_decay(case.gate, gate_shape(op.decay, K), generator)
    offsets = None
    if case.lengths is not None:
        offsets = torch.tensor([0, *case.lengths]).cumsum(0)
    x = Operands(
        q=q.to(case.dtype),
        k=k.to(case.dtype),
        v=v.to(case.dtype),
        g=None if g is None else g.to(work),
        erase=erase.to(case.dtype),
        write=None if write is None else write.to(case.dtype),
        initial_state=state.to(work) if case.initial_state else None,
        cu_seqlens=offsets,
        cu_seqlens_cpu=offsets if case.host_offsets else None,
    )
    return x, do.to(case.dtype), dht.to(work) if case.dht else None


def log_decay(gate: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decays [B,T,HV] or [B,T,HV,K] of a named distribution, in fp64."""

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    name = gate.rstrip("0123456789.")
    amount = float(gate.removeprefix(name) or "nan")
    if name in ("GL", "GX", "GB", "GH", "G") and math.isnan(amount):
        raise ValueError(f"gate {name!r} needs a number after it, got {gate!r}")
    coin = uniform(*shape) < 0.5
    slow = F.logsigmoid(uniform(*shape))
    if name == "G":
        return torch.full(shape, -amount, dtype=torch.float64)
    if name == "GL":
        return slow / amount
    if name == "GM":
        return slow.masked_fill(coin, 0.0)
    if name == "GX":
        return slow.masked_fill(coin, -amount)
    if name == "GB":
        return torch.zeros(shape, dtype=torch.float64).masked_fill(coin, -amount)
    if name == "GH":
        g = torch.zeros(shape, dtype=torch.float64)
        if shape[1]:
            token = g[:, shape[1] // 2]
            (token if token.dim() == 2 else token[..., 0]).fill_(-amount)
        return g
    if name == "GQ":
        rate = 16 * uniform(shape[2])
        rate[0], rate[-1] = 0.0, 16.0
        raw = torch.randn(shape, generator=generator, dtype=torch.float64)
        return -rate.view(-1, *[1] * (len(shape) - 3)) * F.softplus(raw / 2 + 1)
    raise ValueError(f"gate must be GL<n>, GM, GX<a>, GB<a>, GH<a>, GQ or G<a>, got {gate!r}")
