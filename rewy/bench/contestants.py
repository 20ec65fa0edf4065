"""Who takes part: one small adaptor each, which imports its package only when it is asked whether it can run.

A contestant says why it is absent or declines, has a public differentiable call, and hands out its low-level
backward over saved forward results.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rewy import dispatch
from rewy.problem import OPERATORS, Algebra, Gradients, Operands, Options, Problem

if TYPE_CHECKING:
    from rewy.bench.workload import Case

Backward = Callable[[Tensor, "Tensor | None"], Gradients]
Mine = Callable[[str], bool]
"""Whether compiling what is described falls to this process, of several that share the work."""


def split_label(label: str) -> str:
    """The contestant's name in `NAME` or `NAME#2`, which repeats it under another label."""
    return label.split("#", 1)[0]


def leaves(x: Operands) -> Operands:
    """The operands as fresh leaves that ask for gradients."""

    def leaf(t: Tensor | None) -> Any:
        return None if t is None else t.detach().requires_grad_()

    fields = {name: leaf(t) for name, t in zip(Gradients._fields, x, strict=False)}
    return x._replace(**fields)


def gradients(
    x: Operands, o: Tensor, ht: Tensor | None, do: Tensor, dht: Tensor | None, **how: Any
) -> Gradients:
    """Autograd's gradients of the operands; without dht the final state is unused."""
    wanted = [t for t in x[:7] if t is not None and t.requires_grad]
    outputs, grads = ([o], [do]) if dht is None or ht is None else ([o, ht], [do, dht])
    found = iter(torch.autograd.grad(outputs, wanted, grads, **how))
    return Gradients(*(next(found) if t is not None and t.requires_grad else None for t in x[:7]))  # type: ignore[arg-type]


class Contestant(ABC):
    tunes = False
    """Whether it picks kernels by timing them on the first inputs it meets."""

    @abstractmethod
    def absent(self, device: torch.device) -> str | None:
        """Why this contestant cannot run on the device in this process, or None."""

    @abstractmethod
    def declines(self, case: Case) -> str | None:
        """Why it does not take this case, or None; asked only when it is not absent."""

    @abstractmethod
    def call(self, case: Case, x: Operands, final_state: bool) -> tuple[Tensor, Tensor | None]:
        """(o, final state if asked for) through the public function."""

    def kind(self, case: Case) -> Case:
        """A case, small if possible, that stands for this one: those of one kind share a cold start."""
        return replace(case.small(), B=1)

    def to_compile(self, case: Case) -> tuple[Case, ...]:
        """Cases that together compile what this one and its check need."""
        return self.kind(case), self.kind(case.small())

    def prepare(self, case: Case, x: Operands) -> Backward:
        """Runs the forward and returns the backward alone; it may be called again and again."""
        x = leaves(x)
        o, ht = self.call(case, x, case.initial_state)
        return lambda do, dht: gradients(x, o, ht, do, dht, retain_graph=True)

    def compile(self, case: Case, mine: Mine) -> None:
        """Fills the compiler's cache with what falls to this process; results are of no interest.

        Who cannot compile without running, or a part of it, runs the whole case as one thing.
        """
        if mine(f"{type(self).__name__} {case}"):
            x, do, dht = case.inputs(seed=0)
            self.prepare(case, x)(do, dht)
            traced = leaves(x)
            o, ht = self.call(case, traced, case.initial_state)
            gradients(traced, o, ht, do, dht)


@dataclass(frozen=True)
class Rewy(Contestant):
    """One algebra on one backend. `backend` None means the one made for the device, never a fallback.

    Without `recompute` the forward keeps its states for the backward.
    """

    algebra: str = "rewy"
    backend: str | None = None
    recompute: bool = True

    def absent(self, device: torch.device) -> str | None:
        return dispatch.load(self._backend(device)).unusable()

    def declines(self, case: Case) -> str | None:
        return dispatch.refusal(dispatch.load(self._backend(case.device)), self._problem(case))

    def call(self, case: Case, x: Operands, final_state: bool) -> tuple[Tensor, Tensor | None]:
        from rewy.api import delta_attention

        tied = x.write is None
        return delta_attention(
            x.q,
            x.k,
            x.v,
            beta=x.erase if tied else None,
            g=x.g,
            erase=None if tied else x.erase,
            write=x.write,
            scale=case.scale,
            initial_state=x.initial_state,
            output_final_state=final_state,
            cu_seqlens=x.cu_seqlens,
            cu_seqlens_cpu=x.cu_seqlens_cpu,
            chunk_size=case.chunk_size,
            disable_recompute=not self.recompute,
            algebra=self.algebra,
            backend=self._backend(case.device),
        )

    def prepare(self, case: Case, x: Operands) -> Backward:
        if self.algebra == Algebra.AUTOGRAD.value:
            return super().prepare(case, x)
        problem, backend = self._problem(case), dispatch.load(self._backend(case.device))
        _, _, kept = backend.forward(problem, x, True)
        return lambda do, dht: backend.backward(problem, x, kept, do, dht)

    def to_compile(self, case: Case) -> tuple[Case, ...]:
        return case, case.small()  # what the plan takes for long sequences, a small case does not need

    def compile(self, case: Case, mine: Mine) -> None:
        backend = dispatch.load(self._backend(case.device))
        if backend.name != "cuda":
            return  # compiled when it was installed, or plain torch
        from rewy.backends.cuda.backend import CudaBackend
        from rewy.backends.cuda.launch import recording
        from rewy.backends.cuda.plan import limits_of

        planner, limits = cast(CudaBackend, backend).planner, limits_of(case.device)
        elsewhere = CudaBackend(planner=lambda problem, _: planner(problem, limits))
        case = replace(case, device=torch.device("meta"))  # where tensors of any size cost nothing
        problem, (x, do, dht) = self._problem(case), case.inputs(seed=0)
        with recording() as launches:
            *_, kept = elsewhere.forward(problem, x, True)
            elsewhere.backward(problem, x, kept, do, dht)
        for launch in launches:
            if mine(str(launch.signature)):
                launch.compile()

    def _backend(self, device: torch.device) -> str:
        return self.backend or dispatch.MADE_FOR.get(device.type, "reference")

    def _problem(self, case: Case) -> Problem:
        return case.problem(Options(case.scale, case.chunk_size, self.recompute, self.algebra))


class Package(Contestant):
    """A contestant from another package, installed or not."""

    tunes = True
    modules: tuple[str, ...]
    """What is imported, first the package itself."""
    hint: str
    """How to get it."""
    devices: tuple[str, ...]

    def absent(self, device: torch.device) -> str | None:
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device.type}"
        for module in self.modules:
            try:
                found = importlib.util.find_spec(module.split(".")[0])
            except (ImportError, ValueError):
                found = None
            if found is None:
                return f"not installed ({self.hint})"
            try:
                self._import(module, device)
            except Exception as e:  # whatever its import raises is the reason
                return f"cannot be imported: {type(e).__name__}: {first_line(e)}"
        return None

    def _import(self, module: str, device: torch.device) -> None:
        importlib.import_module(module)


class Fla(Package):
    """flash-linear-attention: its own Triton kernels on CUDA, its Ascend backend on NPU."""

    modules = ("fla", "fla.ops.delta_rule", "fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.gdn2")
    hint = "pip install fla-core>=0.6"
    devices = ("cuda", "npu")

    def _import(self, module: str, device: torch.device) -> None:
        # With dispatch on, an importable tilelang or flash_qla would be timed under fla's name.
        if device.type == "cuda":
            os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        importlib.import_module(module)
        backends = importlib.import_module("fla.backends")
        pure = bool(backends._DISPATCH_DISABLED)
        if pure != (device.type == "cuda"):
            raise RuntimeError("fla was imported before with another FLA_DISABLE_BACKEND_DISPATCH")

    def kind(self, case: Case) -> Case:
        return replace(case.small(), B=case.B)  # B is compiled into its cumulative sums

    def compile(self, case: Case, mine: Mine) -> None:
        x, do, dht = case.inputs(seed=0)
        with compiling_only(mine):
            self.prepare(case, x)(do, dht)

    def declines(self, case: Case) -> str | None:
        name = case.operator.name
        if case.HV != case.H and name in ("delta_rule", "gdn2"):
            return f"{case.operator.title} has no grouped value heads"
        if case.dtype is torch.float32 and name == "delta_rule":
            return f"{case.operator.title} takes 16-bit inputs only"
        chunk_sizes = {"kda": (32, 64), "gdn2": (64,)}.get(name, (16, 32, 64))
        if case.chunk_size not in chunk_sizes:
            return f"{case.operator.title} takes chunks of {' or '.join(map(str, chunk_sizes))}"
        return None

    def call(self, case: Case, x: Operands, final_state: bool) -> tuple[Tensor, Tensor | None]:
        name = case.operator.name
        chunk = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
        gates = (x.g, x.erase, x.write)
        o, ht = chunk(
            x.q,
            x.k,
            x.v,
            *(gate for gate in gates if gate is not None),
            scale=case.scale,
            initial_state=x.initial_state,
            output_final_state=final_state,
            cu_seqlens=x.cu_seqlens,
            cu_seqlens_cpu=x.cu_seqlens_cpu,
            chunk_size=case.chunk_size,
        )
        return o, ht

    def prepare(self, case: Case, x: Operands) -> Backward:
        from fla.ops.utils.index import prepare_chunk_indices

        indices = None
        if x.cu_seqlens is not None:
            indices = prepare_chunk_indices(x.cu_seqlens, case.chunk_size, cu_seqlens_cpu=x.cu_seqlens_cpu)
        common = dict(
            scale=case.scale,
            initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens,
            chunk_indices=indices,
            chunk_size=case.chunk_size,
        )
        low_level = {
            "delta_rule": self._delta_rule,
            "gated_delta_rule": self._gated_delta_rule,
            "kda": self._kda,
            "gdn2": self._gdn2,
        }
        return low_level[case.operator.name](case, x, common)

    def _delta_rule(self, case: Case, x: Operands, common: dict[str, Any]) -> Backward:
        from fla.ops.delta_rule.chunk import chunk_delta_rule_bwd, chunk_delta_rule_fwd

        inputs = dict(q=x.q, k=x.k, v=x.v, beta=x.erase, **common)
        _, A, _ = chunk_delta_rule_fwd(**inputs, output_final_state=case.initial_state)

        def backward(do: Tensor, dht: Tensor | None) -> Gradients:
            dq, dk, dv, db, dh0 = chunk_delta_rule_bwd(**inputs, A=A, do=do, dht=dht)
            return Gradients(dq, dk, dv, None, db, None, dh0)

        return backward

    def _gated_delta_rule(self, case: Case, x: Operands, common: dict[str, Any]) -> Backward:
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

        inputs = dict(q=x.q, k=x.k, v=x.v, beta=x.erase, **common)
        G, _, A, *_ = chunk_gated_delta_rule_fwd(**inputs, g=x.g, output_final_state=case.initial_state)

        def backward(do: Tensor, dht: Tensor | None) -> Gradients:
            dq, dk, dv, db, dg, dh0, *_ = chunk_gated_delta_rule_bwd(**inputs, g=G, A=A, do=do, dht=dht)
            return Gradients(dq, dk, dv, dg, db, None, dh0)

        return backward

    def _kda(self, case: Case, x: Operands, common: dict[str, Any]) -> Backward:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd
        from fla.ops.kda.chunk_fwd import chunk_kda_fwd

        inputs = dict(q=x.q, k=x.k, v=x.v, beta=x.erase, **common)
        _, _, G, Aqk, Akk, *_ = chunk_kda_fwd(**inputs, g=x.g, output_final_state=case.initial_state)

        def backward(do: Tensor, dht: Tensor | None) -> Gradients:
            dq, dk, dv, db, dg, dh0, *_ = chunk_kda_bwd(**inputs, g=G, Aqk=Aqk, Akk=Akk, do=do, dht=dht)
            return Gradients(dq, dk, dv, dg, db, None, dh0)

        return backward

    def _gdn2(self, case: Case, x: Operands, common: dict[str, Any]) -> Backward:
        from fla.ops.gdn2.chunk_bwd import chunk_gdn2_bwd
        from fla.ops.gdn2.chunk_fwd import chunk_gdn2_fwd

        inputs = dict(q=x.q, k=x.k, v=x.v, b=x.erase, w_gate=x.write, **common)
        _, _, G, Aqk, Akk, *_ = chunk_gdn2_fwd(**inputs, g=x.g, output_final_state=case.initial_state)

        def backward(do: Tensor, dht: Tensor | None) -> Gradients:
            dq, dk, dv, db, dw, dg, dh0, *_ = chunk_gdn2_bwd(**inputs, g=G, Aqk=Aqk, Akk=Akk, do=do, dht=dht)
            return Gradients(dq, dk, dv, dg, db, dw, dh0)

        return backward


def _described(kernel: str, args: Mapping[str, Any], options: object) -> str:
    """What tells two compiled kernels apart, or more than that."""
    sizes = {name: arg.dtype if isinstance(arg, Tensor) else arg for name, arg in args.items()}
    return f"{kernel} {sizes} {options}"


@contextmanager
def compiling_only(mine: Mine) -> Iterator[None]:
    """Kernels that Triton tunes are compiled, those configurations of them that are `mine`, and not run.

    Which one is fastest shows on an idle device only, so the measuring process tunes, among compiled ones.
    """
    from triton.runtime.autotuner import Autotuner

    def compile_all(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        sizes = self.nargs | {name: arg for name, arg in kwargs.items() if name in self.arg_names}
        for config in _left_to_try(self, sizes, self.prune_configs(kwargs)):
            if mine(_described(self.base_fn.__name__, sizes, config)):
                with suppress(Exception):  # tuning meets it again, and passes over it
                    self.fn.run(*args, **kwargs | config.all_kwargs() | {"warmup": True})

    tune, Autotuner.run = Autotuner.run, compile_all
    try:
        yield
    finally:
        Autotuner.run = tune


class _Untuned(Exception):
    pass


def _left_to_try(tuner: Any, sizes: Mapping[str, Any], configs: list[Any]) -> list[Any]:
    """All configurations, or the one that Triton remembers on disk from tuning the same kernel on such a device."""

    def untuned() -> None:
        raise _Untuned

    key = [sizes[name] for name in tuner.keys if name in sizes]
    key += [str(arg.dtype) for arg in sizes.values() if hasattr(arg, "dtype")]
    if getattr(tuner, "cache_results", False):
        with suppress(_Untuned):
            tuner.check_disk_cache(tuple(key), configs, untuned)
            return [tuner.cache.pop(tuple(key))]
    return configs


class FlashQla(Package):
    """FlashQLA's fused GDN; DeltaNet is GDN with a decay of zero."""

    modules = ("flash_qla",)
    hint = "pip install flash-qla"
    devices = ("cuda",)

    def kind(self, case: Case) -> Case:
        # Whether it splits a sequence, with kernels of their own, depends on the length.
        return replace(case, operator=OPERATORS["gated_delta_rule"])

    def declines(self, case: Case) -> str | None:
        if case.operator.name not in ("delta_rule", "gated_delta_rule"):
            return f"has no {case.operator.title}"
        if case.dtype is torch.float32:
            return "takes 16-bit inputs only"
        if case.chunk_size != 64:
            return "takes chunks of 64 only"
        return None

    def call(self, case: Case, x: Operands, final_state: bool) -> tuple[Tensor, Tensor | None]:
        from flash_qla import chunk_gated_delta_rule

        o, ht = chunk_gated_delta_rule(
            x.q,
            x.k,
            x.v,
            _decay(x),
            x.erase,
            scale=case.scale,
            initial_state=x.initial_state,
            output_final_state=final_state,
            cu_seqlens=x.cu_seqlens,
        )
        return o, ht

    def prepare(self, case: Case, x: Operands) -> Backward:
        from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

        inputs = dict(
            q=x.q,
            k=x.k,
            v=x.v,
            beta=x.erase,
            scale=case.scale,
            initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens,
        )
        G, A, *_, cache = chunk_gated_delta_rule_fwd(**inputs, g=_decay(x), enable_fwd_cp_cache=True)

        def backward(do: Tensor, dht: Tensor | None) -> Gradients:
            dq, dk, dv, db, dg, dh0 = chunk_gated_delta_rule_bwd(
                **inputs, g=G, A=A, do=do, dht=dht, cp_cache=cache
            )
            return Gradients(dq, dk, dv, None if x.g is None else dg, db, None, dh0)

        return backward


def _decay(x: Operands) -> Tensor:
    return x.erase.new_zeros(x.erase.shape, dtype=torch.float32) if x.g is None else x.g


class FlaNpu(Package):
    """flash-linear-attention-npu: kernels in a package, joined into GDN by the repository's own example."""

    example = "flash_gated_delta_rule"
    modules = ("fla_npu", example)
    hint = "install flash-linear-attention-npu and put the examples folder of its repository on PYTHONPATH"
    devices = ("npu",)

    def declines(self, case: Case) -> str | None:
        if case.operator.name != "gated_delta_rule":
            return f"has no {case.operator.title}"
        if case.HV != case.H:
            return "its GDN has no grouped value heads"
        if case.dtype is torch.float32:
            return "takes 16-bit inputs only"
        if case.initial_state:
            return "has no gradient of the initial state"
        if case.lengths is not None:
            return "packed sequences are not wired into this adaptor"
        return None

    def call(self, case: Case, x: Operands, final_state: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
        o, ht = importlib.import_module(self.example).flash_gated_delta_rule(
            q,
            k,
            v,
            x.g,
            x.erase,
            scale=case.scale,
            output_final_state=final_state,
            chunk_size=case.chunk_size,
        )
        return o, ht

    def prepare(self, case: Case, x: Operands) -> Backward:
        example = importlib.import_module(self.example)
        q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
        inputs = dict(
            q=q, k=k, v=v, beta=x.erase, scale=case.scale, initial_state=None, chunk_size=case.chunk_size
        )
        G, _, A, _ = example.flash_chunk_gated_delta_rule_fwd(**inputs, g=x.g, output_final_state=False)

        def backward(do: Tensor, dht: Tensor | None) -> Gradients:
            dq, dk, dv, db, dg, _ = example.flash_chunk_gated_delta_rule_bwd(
                **inputs, g=G, A=A, do=do, dht=dht
            )
            dq, dk, dv = (t.transpose(1, 2) for t in (dq, dk, dv))
            return Gradients(dq, dk, dv, dg, db, None, None)

        return backward


dispatch.UNLISTED["cuda-plain"] = "rewy.bench.plain"

CONTESTANTS: dict[str, Contestant] = {
    "rewy": Rewy(),
    "rewy-kept": Rewy(recompute=False),
    "rewy-conventional": Rewy(algebra="conventional"),
    "rewy-plain": Rewy(backend="cuda-plain"),
    "reference": Rewy(backend="reference"),
    "reference-conventional": Rewy(algebra="conventional", backend="reference"),
    "reference-autograd": Rewy(algebra="autograd", backend="reference"),
    "fla": Fla(),
    "flashqla": FlashQla(),
    "fla-npu": FlaNpu(),
}

PACKAGES = (
    "torch",
    "triton",
    "torch_npu",
    "triton-ascend",
    "numpy",
    "fla-core",
    "flash-linear-attention",
    "flash-qla",
    "tilelang",
    "flash-linear-attention-npu",
)


def versions() -> dict[str, str]:
    """Every package here that can change a figure, as installed."""
    from rewy import __version__

    found = {"rewy": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def switches() -> dict[str, str]:
    """Environment variables that steer the contestants; folders do not."""
    prefixes = ("FLA_", "TRITON_", "TILELANG_", "REWY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    names = (name for name in sorted(os.environ) if name.startswith(prefixes))
    return {name: os.environ[name] for name in names if not name.endswith(("_DIR", "_HOME", "_PATH"))}


def first_line(e: BaseException) -> str:
    return next(iter(str(e).strip().splitlines()), "")
