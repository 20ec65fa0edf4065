"""The public functions. `delta_attention` is the one entry; the others are its four operators under fla's names.

Every operator is the recurrence (per value head, state S [K,V], log decay g ≤ 0, erase gate b, write gate w)

    S̃_t = exp(g_t) ⊙ S_{t−1}
    S_t = S̃_t + k_t (w_t ⊙ v_t − S̃_tᵀ (b_t ⊙ k_t))ᵀ
    o_t = scale · S_tᵀ q_t

with gates that are absent, per head, or per channel.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewy import autograd, prologue
from rewy.problem import (
    Operands,
    Options,
    Problem,
    check_flags,
    check_in_kernel,
    check_scale,
    describe,
    gather,
)


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    algebra: str = "rewy",
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta-rule linear attention over whole sequences, for training and prefill. The gates select the operator:

    =====================  =============================================================
    DeltaNet               beta [B,T,HV]
    Gated DeltaNet         beta [B,T,HV], g [B,T,HV]
    Kimi Delta Attention   beta [B,T,HV], g [B,T,HV,K]
    Gated DeltaNet-2       erase [B,T,HV,K], write [B,T,HV,V], g [B,T,HV,K]
    =====================  =============================================================

    Args:
        q, k: queries and keys [B,T,H,K], K up to 256.
        v: values [B,T,HV,V], V up to 512. HV is a multiple of H; value head j reads query/key head j // (HV / H).
        beta: erase and write gate in one, usually in [0, 1]; up to 2 with negative eigenvalues.
        g: natural logarithm of the decay, finite and ≤ 0: not −inf, whose differences are NaN; −1000 forgets all.
        erase, write: the two gates of Gated DeltaNet-2.
        scale: finite factor of q; None means K^-0.5.
        initial_state: [N,HV,K,V], or [N,HV,V,K] with `state_v_first`; None means zeros.
        output_final_state: return the states after the last token, fp32, in the layout of `initial_state`.
        cu_seqlens: [N+1] int32 or int64 offsets of N sequences packed into one row (B = 1); empty sequences are
            allowed, tokens past the last offset give zeros. On a device the offsets are not read back for
            checking unless REWY_CHECK_OFFSETS=1.
        cu_seqlens_cpu: the same offsets on the host, for backends that plan there.
        use_qk_l2norm_in_kernel: normalise q and k, x / sqrt(Σ x² + 1e-6).
        use_gate_in_kernel: g is raw; the decay is −exp(A_log) · softplus(g + dt_bias), or with `lower_bound`
            lower_bound · sigmoid(exp(A_log) · (g + dt_bias)). A_log [HV], dt_bias [HV] or [HV·K].
        use_beta_sigmoid_in_kernel: beta holds logits; `allow_neg_eigval` doubles their sigmoid.
        safe_gate: g is known to stay in [lower_bound, 0); nothing here depends on that promise.
        lower_bound: in [-5, 0).
        chunk_size: 16, 32 or 64 tokens; the result does not depend on it beyond rounding.
        disable_recompute: keep the forward's states for the backward, which then takes less time and more memory.
        algebra: how gradients are formed, all exact: "rewy"; "conventional", the usual seven-product form; or
            "autograd", torch's derivative of the chunked forward (reference backend).
        backend: "cuda", "ascend" or "reference"; None chooses by device. An explicit choice never falls back.

    Returns:
        o [B,T,HV,V] in q's dtype, and the final states or None. Gradients come in the dtypes of their inputs.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is allowed.
    """
    check_flags(
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        disable_recompute=disable_recompute,
    )
    laid_out = state_v_first and (output_final_state or initial_state is not None)  # else nobody sees states
    problem, x, options = _prepare(
        gather(
            q=q, k=k, v=v, beta=beta, g=g, erase=erase, write=write,
            initial_state=_swap(initial_state, state_v_first),
            cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        ),
        InKernel(
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
            A_log, dt_bias, safe_gate, lower_bound,
        ),
        backend, scale, laid_out, chunk_size, not disable_recompute, algebra,
    )  # fmt: skip
    o, final_state = autograd.delta_attention(problem, x, options, backend)
    return o, _returned(final_state, output_final_state, state_v_first)


def delta_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same operators token by token, for decoding: usually T = 1 with the state of the step before.

    Arguments, results and errors are those of `delta_attention`. No gradients: with inputs that require them it
    raises NotImplementedError.
    """
    check_flags(output_final_state=output_final_state, state_v_first=state_v_first)
    problem, x, options = _prepare(
        gather(
            q=q, k=k, v=v, beta=beta, g=g, erase=erase, write=write,
            initial_state=_swap(initial_state, state_v_first),
            cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        ),
        InKernel(
            use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
            A_log, dt_bias, safe_gate, lower_bound,
        ),
        backend, scale, state_v_first and output_final_state,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(t.requires_grad for t in x if t is not None):
        raise NotImplementedError(
            "the step functions have no gradients; use delta_attention or a chunk_* function, or torch.no_grad()"
        )
    o, final_state = autograd.step(problem, x, options, backend)
    return o, _returned(final_state, output_final_state, state_v_first)


class InKernel(NamedTuple):
    """What to do to the operands first; see `delta_attention`."""

    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    safe_gate: bool
    lower_bound: float | None


def _prepare(
    x: Operands,
    flags: InKernel,
    backend: str | None,
    scale: float | None,
    state_v_first: bool,
    chunk_size: int = 64,
    recompute: bool = True,
    algebra: str = "rewy",
) -> tuple[Problem, Operands, Options]:
    """The checked problem, its operands with all in-kernel options applied, and its options."""
    x = _under_autocast(x)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a name or None, got {type(backend).__name__}")
    if backend == "":
        raise ValueError("backend must be a name or None, got ''")
    options = Options(check_scale(scale, x.q), chunk_size, recompute, algebra, state_v_first)
    problem = describe(x, options)
    check_in_kernel(x, **flags._asdict())
    if flags.use_qk_l2norm_in_kernel:
        x = x._replace(q=prologue.l2norm(x.q, backend), k=prologue.l2norm(x.k, backend))
    if flags.use_gate_in_kernel:
        assert x.g is not None
        x = x._replace(g=prologue.log_decay(x.g, flags.A_log, flags.dt_bias, flags.lower_bound, backend))
    if flags.use_beta_sigmoid_in_kernel:
        x = x._replace(erase=prologue.sigmoid_beta(x.erase, flags.allow_neg_eigval, backend))
    return problem, x, options


def _under_autocast(x: Operands) -> Operands:
    """q, k and v in the autocast dtype, as for any matrix product; gates and states keep theirs."""
    kind = x.q.device.type
    # which torch 2.11 cannot trace
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return x
    dtype = torch.get_autocast_dtype(kind)
    cast = {
        name: t.to(dtype)
        for name, t in (("q", x.q), ("k", x.k), ("v", x.v))
        if t.is_floating_point() and t.dtype is not torch.float64
    }
    return x._replace(**cast)


def _swap(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """A state given as [N,HV,V,K] read as [N,HV,K,V]."""
    return state.mT if state_v_first and isinstance(state, Tensor) and state.dim() >= 2 else state


def _returned(state: Tensor, wanted: bool, state_v_first: bool) -> Tensor | None:
    if not wanted:
        return None
    return state.mT.contiguous() if state_v_first else state


# fla's names. Arguments keep fla's order, defaults and meaning.


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    *,
    state_v_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet; see `delta_attention` for shapes, options and errors."""
    return delta_attention(
        q, k, v, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
        chunk_size=chunk_size, backend=backend,
    )  # fmt: skip


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet, g [B,T,HV] (None: no decay); see `delta_attention` for shapes, options and errors.

    `chunk_indices`, fla's table of chunks, may be given and is not needed: chunks follow from `cu_seqlens`.
    """
    _refuse(cp_context=cp_context)
    return delta_attention(
        q, k, v, beta=beta, g=_decay(g, "[B,T,HV]"), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        A_log=A_log, dt_bias=dt_bias, state_v_first=_v_first(state_v_first, transpose_state_layout),
        chunk_size=chunk_size, backend=backend,
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, g [B,T,HV,K]; see `delta_attention` for shapes, options and errors."""
    _refuse(cp_context=cp_context, return_intermediate_states=return_intermediate_states or None)
    return delta_attention(
        q, k, v, beta=beta, g=_decay(g, "[B,T,HV,K]"), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        A_log=A_log, dt_bias=dt_bias, safe_gate=safe_gate, lower_bound=lower_bound,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        chunk_size=chunk_size, disable_recompute=disable_recompute, backend=backend,
    )  # fmt: skip


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, g and b [B,T,HV,K], w [B,T,HV,V]; see `delta_attention` for shapes, options and errors.

    b and w are its erase and write gates, and errors call them so.
    """
    _refuse(return_intermediate_states=return_intermediate_states or None)
    return delta_attention(
        q, k, v, g=_decay(g, "[B,T,HV,K]"), erase=b, write=w, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log, dt_bias=dt_bias, safe_gate=safe_gate, lower_bound=lower_bound,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        chunk_size=chunk_size, disable_recompute=disable_recompute, backend=backend,
    )  # fmt: skip


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet token by token, without gradients; see `delta_attention_step`."""
    return delta_attention_step(
        q, k, v, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
        backend=backend,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token, without gradients; see `delta_attention_step`."""
    return delta_attention_step(
        q, k, v, beta=beta, g=_decay(g, "[B,T,HV]"), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        A_log=A_log, dt_bias=dt_bias, state_v_first=_v_first(state_v_first, transpose_state_layout),
        backend=backend,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token, without gradients; see `delta_attention_step`."""
    return delta_attention_step(
        q, k, v, beta=beta, g=_decay(g, "[B,T,HV,K]"), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        A_log=A_log, dt_bias=dt_bias, safe_gate=safe_gate, lower_bound=lower_bound,
        state_v_first=_v_first(state_v_first, transpose_state_layout), backend=backend,
    )  # fmt: skip


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2 token by token, without gradients; see `delta_attention_step`."""
    return delta_attention_step(
        q, k, v, g=_decay(g, "[B,T,HV,K]"), erase=b, write=w, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log, dt_bias=dt_bias, safe_gate=safe_gate, lower_bound=lower_bound,
        state_v_first=_v_first(state_v_first, transpose_state_layout), backend=backend,
    )  # fmt: skip


def _decay(g: Tensor | None, shape: str) -> Tensor | None:
    """g, when it has the number of dimensions that the called operator's decay has."""
    if g is None and shape == "[B,T,HV]":
        return None
    if not isinstance(g, Tensor):
        raise TypeError(f"g must be a torch.Tensor {shape}, got {type(g).__name__}")
    if g.dim() != shape.count(",") + 1:
        raise ValueError(f"g must be {shape}, got {g.dim()} dimensions: {list(g.shape)}")
    return g


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    if transpose_state_layout is None:
        return state_v_first
    check_flags(transpose_state_layout=transpose_state_layout)
    warnings.warn("transpose_state_layout is now called state_v_first", FutureWarning, stacklevel=3)
    if state_v_first and not transpose_state_layout:
        raise ValueError(
            "transpose_state_layout is the old name of state_v_first; got state_v_first=True and "
            "transpose_state_layout=False, give one of them"
        )
    return transpose_state_layout


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not implemented; leave it at its default (got {value!r})")
