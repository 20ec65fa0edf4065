"""What a call asks for: the operator, its shapes and options. This module is the only validator.

Everything past `describe` may rely on what it checked: backends never look at user input again.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_SIZES = (16, 32, 64)
MAX_K, MAX_V = 256, 512
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OFFSET_DTYPES = (torch.int32, torch.int64)
REMEMBERED = 1024


class Gate(enum.Enum):
    """How many numbers a gate has per token and value head."""

    NONE = "none"
    SCALAR = "scalar"
    CHANNEL = "channel"


class Algebra(enum.Enum):
    """How gradients are formed; all three are exact and agree to rounding."""

    REWY = "rewy"
    CONVENTIONAL = "conventional"
    AUTOGRAD = "autograd"


ALGEBRAS = tuple(algebra.value for algebra in Algebra)  # torch.compile does not trace through an enumeration


@dataclass(frozen=True, eq=False)  # a row is equal to itself alone, which is cheaper to look up
class Operator:
    """One row of the table: which kind of gate decays, erases and writes.

    `tied`: one tensor, `beta`, is both the erase and the write gate.
    """

    name: str
    title: str
    decay: Gate
    erase: Gate
    write: Gate
    tied: bool

    @property
    def gates(self) -> str:
        """The arguments that select this operator."""
        shape = {Gate.SCALAR: "[B,T,HV]", Gate.CHANNEL: "[B,T,HV,K]"}
        own = ["beta [B,T,HV]"] if self.tied else [f"erase {shape[self.erase]}", "write [B,T,HV,V]"]
        return " + ".join(own + ([f"g {shape[self.decay]}"] if self.decay is not Gate.NONE else []))

    @property
    def by_channel(self) -> bool:
        """Whether a gate on the key side has one number per channel."""
        return Gate.CHANNEL in (self.decay, self.erase)

    def __reduce__(self) -> tuple[Any, ...]:
        return _row, (self.name,)  # copied or sent to another process it is still the row of the table


def _row(name: str) -> Operator:
    return OPERATORS[name]


OPERATORS = {
    op.name: op
    for op in (
        Operator("delta_rule", "DeltaNet", Gate.NONE, Gate.SCALAR, Gate.SCALAR, tied=True),
        Operator("gated_delta_rule", "GDN", Gate.SCALAR, Gate.SCALAR, Gate.SCALAR, tied=True),
        Operator("kda", "KDA", Gate.CHANNEL, Gate.SCALAR, Gate.SCALAR, tied=True),
        Operator("gdn2", "GDN2", Gate.CHANNEL, Gate.CHANNEL, Gate.CHANNEL, tied=False),
    )
}


_ROWS = [(op.tied, op.decay) for op in OPERATORS.values()]


class Operands(NamedTuple):
    """The tensors of a call as every backend receives them.

    q, k [B,T,H,K]; v [B,T,HV,V]; g None, [B,T,HV] or [B,T,HV,K]; erase [B,T,HV] or [B,T,HV,K];
    write None (tied: the erase gate writes too) or [B,T,HV,V]; initial_state None or [N,HV,K,V];
    cu_seqlens None or [N+1] on the tensors' device; cu_seqlens_cpu None or the same offsets on the host.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    erase: Tensor
    write: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of `Operands`, in the dtypes and shapes of their inputs; None where the input is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    erase: Tensor
    write: Tensor | None
    initial_state: Tensor | None


class Options(NamedTuple):
    """Everything about a call that is not a tensor, as plain values that an operator schema can carry."""

    scale: float
    chunk_size: int
    recompute: bool
    algebra: str
    state_v_first: bool = False


@dataclass(frozen=True)
class Problem:
    """A validated call. N counts states: sequences of the batch, or packed sequences when `varlen`."""

    operator: Operator
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    chunk_size: int
    varlen: bool
    recompute: bool
    algebra: Algebra
    state_v_first: bool = False
    """Final states and the gradient of initial ones, [N,HV,K,V], lie in memory as [N,HV,V,K]."""

    @property
    def group(self) -> int:
        """Value heads that read one query/key head."""
        return self.HV // self.H

    @property
    def work_dtype(self) -> torch.dtype:
        """States, gates, cumulative sums and accumulators."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


def problem_of(x: Operands, options: Options) -> Problem:
    """The problem of operands that `describe` has accepted."""
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    return Problem(
        operator=_operator_of(x.g, x.erase, x.write),
        B=B, T=T, H=H, HV=HV, K=K, V=V,
        N=B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1,
        dtype=x.q.dtype,
        device=x.q.device,
        scale=options.scale,
        chunk_size=options.chunk_size,
        varlen=x.cu_seqlens is not None,
        recompute=options.recompute,
        algebra=Algebra(options.algebra),
        state_v_first=options.state_v_first,
    )  # fmt: skip


def describe(x: Operands, options: Options) -> Problem:
    """Checks every tensor and option of a call and returns its problem.

    Raises TypeError or ValueError naming the argument, what came and what is allowed.
    """
    if not isinstance(options.chunk_size, int) or options.chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {_or(CHUNK_SIZES)}, got {options.chunk_size!r}")
    if options.algebra not in ALGEBRAS:
        raise ValueError(f"algebra must be one of {_or(ALGEBRAS)}, got {options.algebra!r}")
    if torch.compiler.is_compiling():
        problem = _checked(x, options)
    else:
        problem = _remembered(x, options)
        _check_offset_values(x)
    if x.initial_state is not None:
        expected = (problem.N, problem.HV, problem.K, problem.V)
        if tuple(x.initial_state.shape) != expected:
            raise ValueError(
                f"initial_state must be [N,HV,K,V] = {list(expected)} (one state per sequence; "
                f"[N,HV,V,K] with state_v_first), got {list(x.initial_state.shape)} in [N,HV,K,V] order"
            )
    return problem


_problems: dict[object, Problem] = {}


def _remembered(x: Operands, options: Options) -> Problem:
    """As `_checked`, which looks at nothing but the options and every tensor's shape, dtype and device."""
    if torch._C._is_tracing():  # sizes are tensors then
        return _checked(x, options)
    form = (options, *[None if t is None else (t.shape, t.dtype, t.device) for t in x])
    try:
        problem = _problems.get(form)
    except TypeError:  # a size that is being traced has no hash
        return _checked(x, options)
    if problem is None:
        problem = _checked(x, options)
        if len(_problems) >= REMEMBERED:
            _problems.clear()
        _problems[form] = problem
    return problem


def _checked(x: Operands, options: Options) -> Problem:
    _check_tensors(x)
    _check_shapes(x)
    if x.cu_seqlens is not None:
        _check_offsets(x)
    elif x.cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is the host copy of cu_seqlens; pass cu_seqlens too")
    return problem_of(x, options)


def gather(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> Operands:
    """The operands of a call, once they are all tensors and their gates are those of one of the operators.

    Offsets given on the host for tensors on a device are copied there and serve as the host copy too.
    """
    given = {"q": q, "k": k, "v": v, "beta": beta, "g": g, "erase": erase, "write": write}
    given |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    for name, t in given.items():
        if t is None and name not in ("q", "k", "v"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            kind = "a nested tensor" if t.is_nested else f"layout {_or([t.layout])}"
            raise TypeError(f"{name} must be a dense torch.Tensor, got {kind}")
    _check_gates(beta=beta, g=g, erase=erase, write=write)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and q.device.type != "cpu":
        cu_seqlens_cpu = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        if q.device.type == "npu" and not torch.compiler.is_compiling():
            # From pageable memory the copy would wait for all that an NPU has to do yet.
            cu_seqlens = cu_seqlens.pin_memory()
        cu_seqlens = cu_seqlens.to(q.device, non_blocking=True)
    own = beta if erase is None else erase
    assert own is not None
    return Operands(q, k, v, g, own, write, initial_state, cu_seqlens, cu_seqlens_cpu)


def _check_gates(**gates: Tensor | None) -> None:
    tied = gates["beta"] is not None and gates["erase"] is None and gates["write"] is None
    untied = gates["beta"] is None and gates["erase"] is not None and gates["write"] is not None
    if (tied or untied) and (tied, _kind(gates["g"])) in _ROWS:
        return
    given = ", ".join(f"{name} {list(t.shape)}" for name, t in gates.items() if t is not None)
    table = "; ".join(f"{op.title}: {op.gates}" for op in OPERATORS.values())
    raise ValueError(f"these gates are no operator: {given or 'none given'}. Allowed: {table}")


def _operator_of(g: Tensor | None, erase: Tensor, write: Tensor | None) -> Operator:
    kinds = (_kind(g), _kind(erase), _kind(erase if write is None else write), write is None)
    for op in OPERATORS.values():
        if kinds == (op.decay, op.erase, op.write, op.tied):
            return op
    raise ValueError(f"no operator has gates of kinds {kinds}")


def _kind(gate: Tensor | None) -> Gate | None:
    return Gate.NONE if gate is None else {3: Gate.SCALAR, 4: Gate.CHANNEL}.get(gate.dim())


def _or(allowed: object) -> str:
    return ", ".join(str(a).removeprefix("torch.") for a in allowed)  # type: ignore[attr-defined]


def _named(x: Operands) -> Iterator[tuple[str, Tensor]]:
    names = x._asdict()
    if x.write is None:
        names["beta"] = names.pop("erase")
    return ((name, t) for name, t in names.items() if t is not None)


def _check_tensors(x: Operands) -> None:
    for name, t in _named(x):
        if name.startswith("cu_seqlens"):
            if t.dtype not in OFFSET_DTYPES:
                raise TypeError(f"{name} must have dtype {_or(OFFSET_DTYPES)}, got {_or([t.dtype])}")
        elif not t.is_floating_point() or t.dtype not in DTYPES:
            raise TypeError(f"{name} must have dtype {_or(DTYPES)}, got {_or([t.dtype])}")
        expected = torch.device("cpu") if name == "cu_seqlens_cpu" else x.q.device
        if t.device != expected:
            raise ValueError(f"{name} must be on {expected} (q is on {x.q.device}), got {t.device}")
    for name, t in (("k", x.k), ("v", x.v)):
        if t.dtype != x.q.dtype:
            raise TypeError(f"{name} must have q's dtype {_or([x.q.dtype])}, got {_or([t.dtype])}")


def _check_shapes(x: Operands) -> None:
    if x.q.dim() != 4:
        raise ValueError(f"q must be [B,T,H,K], got {x.q.dim()} dimensions: {list(x.q.shape)}")
    if x.v.dim() != 4:
        raise ValueError(f"v must be [B,T,HV,V], got {x.v.dim()} dimensions: {list(x.v.shape)}")
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    sizes = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
    expected = {"k": "B T H K", "v": "B T HV V"}
    if x.g is not None:
        expected["g"] = "B T HV K" if x.g.dim() == 4 else "B T HV"
    if x.write is None:
        expected["beta"] = "B T HV"
    else:
        expected |= {"erase": "B T HV K", "write": "B T HV V"}
    for name, t in _named(x):
        if name in expected:
            letters = expected[name].split()
            shape = [sizes[letter] for letter in letters]
            if list(t.shape) != shape:
                raise ValueError(f"{name} must be [{','.join(letters)}] = {shape}, got {list(t.shape)}")
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"v must have a multiple of q's H = {H} heads, got HV = {HV}")
    if not 1 <= K <= MAX_K:
        raise ValueError(f"q and k must have 1 to {MAX_K} channels (K), got K = {K}")
    if not 1 <= V <= MAX_V:
        raise ValueError(f"v must have 1 to {MAX_V} channels (V), got V = {V}")


def _check_offsets(x: Operands) -> None:
    assert x.cu_seqlens is not None
    B, cu, host = x.q.shape[0], x.cu_seqlens, x.cu_seqlens_cpu
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [N+1] with at least one offset, got shape {list(cu.shape)}")
    if B != 1:
        raise ValueError(f"cu_seqlens needs packed sequences in one batch row (B = 1), got B = {B}")
    if host is not None and host.shape != cu.shape:
        raise ValueError(
            f"cu_seqlens_cpu must have cu_seqlens' shape {list(cu.shape)}, got {list(host.shape)}"
        )


def _check_offset_values(x: Operands) -> None:
    if x.cu_seqlens is None:
        return
    T, cu, host = x.q.shape[1], x.cu_seqlens, x.cu_seqlens_cpu
    # Reading offsets that live on a device would stall it, so that check is asked for by the environment.
    if cu.device.type == "cpu":
        _check_ascending("cu_seqlens", cu, T)
    elif os.environ.get("REWY_CHECK_OFFSETS", "0") == "1":
        _check_ascending("cu_seqlens", cu.cpu(), T)
    if host is not None:
        _check_ascending("cu_seqlens_cpu", host, T)
        if cu.device.type == "cpu" and host.tolist() != cu.tolist():
            raise ValueError(
                f"cu_seqlens_cpu must hold cu_seqlens' offsets {cu.tolist()}, got {host.tolist()}"
            )


def _check_ascending(name: str, cu: Tensor, T: int) -> None:
    offsets = cu.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise ValueError(
                f"{name} must not decrease, got {offsets[i - 1]} before {offsets[i]} at position {i}"
            )
    if offsets[-1] > T:
        raise ValueError(f"{name} must end at or before T = {T}, got {offsets[-1]}")


def check_in_kernel(
    x: Operands,
    *,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    safe_gate: bool,
    lower_bound: float | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> None:
    """Checks the options that transform the operands of a described call."""
    check_flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
    )
    if use_gate_in_kernel:
        if x.g is None:
            raise ValueError("use_gate_in_kernel=True needs g, the raw gate; got g=None")
        if safe_gate and lower_bound is None:
            raise ValueError(
                "safe_gate=True with use_gate_in_kernel=True needs lower_bound in [-5, 0), got None"
            )
        if A_log is None and lower_bound is None:
            raise ValueError(
                "use_gate_in_kernel=True needs A_log [HV] unless lower_bound is given, got A_log=None"
            )
        heads, K = x.v.shape[2], x.q.shape[3]
        _check_gate_parameter(x, "A_log", A_log, {"HV": (heads,)})
        per_channel = {"HV·K": (heads * K,), "HV,K": (heads, K)}
        _check_gate_parameter(x, "dt_bias", dt_bias, {"HV": (heads,)} if x.g.dim() == 3 else per_channel)
    else:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(
                    f"{name} is a parameter of the in-kernel gate; it needs use_gate_in_kernel=True"
                )
        if lower_bound is not None and not safe_gate:
            raise ValueError("lower_bound needs use_gate_in_kernel=True or safe_gate=True, got neither")
    if lower_bound is not None and not isinstance(lower_bound, (int, float)):
        raise TypeError(f"lower_bound must be a number in [-5, 0) or None, got {_type(lower_bound)}")
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound must be in [-5, 0), got {lower_bound!r}")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; a beta given as such may be in [0, 2]"
        )
    if use_beta_sigmoid_in_kernel and x.write is not None:
        raise ValueError(
            "use_beta_sigmoid_in_kernel=True needs beta; erase and write gates are taken as given"
        )


def _check_gate_parameter(
    x: Operands, name: str, t: Tensor | None, allowed: dict[str, tuple[int, ...]]
) -> None:
    if t is None:
        return
    if not isinstance(t, Tensor) or t.dtype not in DTYPES:
        raise TypeError(f"{name} must be a torch.Tensor of dtype {_or(DTYPES)}, got {_type(t)}")
    if t.device != x.q.device:
        raise ValueError(f"{name} must be on q's device {x.q.device}, got {t.device}")
    # Layers keep these parameters with dimensions of size 1 for broadcasting; those say nothing.
    if _without_ones(t.shape) not in map(_without_ones, allowed.values()):
        shapes = " or ".join(f"[{letters}] = {list(shape)}" for letters, shape in allowed.items())
        raise ValueError(f"{name} must be {shapes}, got {list(t.shape)}")


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def check_flags(**flags: object) -> None:
    """Nothing passes for a switch because it is truthy; None is off, as in layers that hand theirs through."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {_type(value)}")


def check_scale(scale: float | None, q: Tensor) -> float:
    """The scale as a float; None means K^-0.5."""
    if scale is None:
        return float(max([1, *q.shape[-1:]])) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None (K^-0.5), got {_type(scale)}")
    if not abs(scale) <= sys.float_info.max:
        raise ValueError(f"scale must be finite, got {scale!r}")
    return float(scale)


def _type(value: object) -> str:
    return f"a Tensor of dtype {_or([value.dtype])}" if isinstance(value, Tensor) else type(value).__name__
