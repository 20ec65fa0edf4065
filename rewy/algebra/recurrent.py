"""The token-by-token recurrence: the definition of every operator, and the oracle of every test.

S̃_t = exp(g_t) ⊙ S_{t−1}
S_t = S̃_t + k_t (w_t ⊙ v_t − S̃_tᵀ (b_t ⊙ k_t))ᵀ
o_t = scale · S_tᵀ q_t
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rewy.problem import Operands


def recurrence(x: Operands, scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Outputs o [B,T,HV,V] and final states [N,HV,K,V], computed and returned in `dtype`.

    Differentiable by autograd. Packed sequences (`cu_seqlens`) run one after the other; rows past the last
    offset are zero.
    """
    B, T, H, _ = x.q.shape
    HV, V = x.v.shape[2:]
    q, k = (t.to(dtype).repeat_interleave(HV // H, dim=2) for t in (x.q, x.k))
    v = x.v.to(dtype)
    b = _columns(x.erase.to(dtype))
    w = b if x.write is None else x.write.to(dtype)
    decay = None if x.g is None else _columns(x.g.to(dtype)).exp()

    cu_seqlens = x.cu_seqlens if x.cu_seqlens_cpu is None else x.cu_seqlens_cpu
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    spans = [(0, T)] if offsets is None else list(itertools.pairwise(offsets))
    outputs, finals = [], []
    for n, (start, stop) in enumerate(spans):
        if x.initial_state is None:
            S = q.new_zeros(B, HV, q.shape[-1], V)
        else:
            S = (x.initial_state if offsets is None else x.initial_state[n : n + 1]).to(dtype)
        for t in range(start, stop):
            if decay is not None:
                S = decay[:, t, :, :, None] * S
            error = w[:, t] * v[:, t] - torch.einsum("bhkv,bhk->bhv", S, b[:, t] * k[:, t])
            S = S + k[:, t, :, :, None] * error[:, :, None, :]
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        finals.append(S)
    outputs += [q.new_zeros(B, HV, V)] * (T - len(outputs))
    o = torch.stack(outputs, dim=1) if outputs else q.new_zeros(B, 0, HV, V)
    return o, torch.cat(finals) if finals else q.new_zeros(0, HV, q.shape[-1], V)


def _columns(gate: Tensor) -> Tensor:
    """A gate as [B,T,HV,1] or [B,T,HV,D], ready to broadcast over channels."""
    return gate[..., None] if gate.dim() == 3 else gate
