"""Bad input: the argument, what came, what is allowed. Nothing is computed, substituted or half done."""

from __future__ import annotations

import re

import pytest
import torch

import rewy
from rewy import dispatch
from rewy.problem import OPERATORS, Options, describe
from rewy.testing import Case, arguments, make


def call(operator: str = "kda", step: bool = False, case: dict | None = None, **changed):
    given = arguments(make(Case(operator, B=1, T=20, **(case or {})))[0])
    return (rewy.delta_attention_step if step else rewy.delta_attention)(**given | changed)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


PACKED = dict(lengths=(20,), initial_state=False)


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


REFUSED = [
    # tensors
    (dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    (dict(k="key"), TypeError, "k must be a torch.Tensor, got str"),
    (dict(v=3.0), TypeError, "v must be a torch.Tensor, got float"),
    (dict(g=0), TypeError, "g must be a torch.Tensor, got int"),
    (dict(beta=[1.0]), TypeError, "beta must be a torch.Tensor, got list"),
    (dict(initial_state=1.0), TypeError, "initial_state must be a torch.Tensor, got float"),
    (dict(cu_seqlens=[0, 20]), TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    (dict(q=randn(1, 20, 2, 16).to_sparse()), TypeError, "q must be a dense .*, got layout sparse_coo"),
    (dict(g=randn(1, 20, 4, 16).to_sparse()), TypeError, "g must be a dense .*, got layout sparse_coo"),
    (
        dict(q=torch.nested.nested_tensor([randn(20, 2, 16)], layout=torch.jagged)),
        TypeError,
        "q must be a dense torch.Tensor, got a nested tensor",
    ),
    # dtypes
    (
        dict(q=torch.ones(1, 20, 2, 16, dtype=torch.int64)),
        TypeError,
        "q must have dtype float64, float32, bfloat16, float16, got int64",
    ),
    (
        dict(v=torch.ones(1, 20, 4, 24, dtype=torch.complex64)),
        TypeError,
        "v must have dtype float64, float32, bfloat16, float16, got complex64",
    ),
    (dict(g=torch.ones(1, 20, 4, 16, dtype=torch.bool)), TypeError, "g must have dtype"),
    (
        dict(beta=torch.ones(1, 20, 4).to(torch.float8_e4m3fn)),
        TypeError,
        "beta must have dtype .*, got float8_e4m3fn",
    ),
    (dict(k=torch.ones(1, 20, 2, 16)), TypeError, "k must have q's dtype float64, got float32"),
    (
        dict(v=torch.ones(1, 20, 4, 24, dtype=torch.bfloat16)),
        TypeError,
        "v must have q's dtype float64, got bfloat16",
    ),
    # shapes
    (dict(q=randn(20, 2, 16)), ValueError, r"q must be \[B,T,H,K\], got 3 dimensions: \[20, 2, 16\]"),
    (dict(q=randn()), ValueError, r"q must be \[B,T,H,K\], got 0 dimensions: \[\]"),
    (dict(v=randn(1, 20, 4, 24, 1)), ValueError, r"v must be \[B,T,HV,V\], got 5 dimensions"),
    (
        dict(k=randn(1, 20, 2, 17)),
        ValueError,
        r"k must be \[B,T,H,K\] = \[1, 20, 2, 16\], got \[1, 20, 2, 17\]",
    ),
    (
        dict(k=randn(1, 20, 4, 16)),
        ValueError,
        r"k must be \[B,T,H,K\] = \[1, 20, 2, 16\], got \[1, 20, 4, 16\]",
    ),
    (
        dict(v=randn(1, 21, 4, 24)),
        ValueError,
        r"v must be \[B,T,HV,V\] = \[1, 20, 4, 24\], got \[1, 21, 4, 24\]",
    ),
    (dict(v=randn(2, 20, 4, 24)), ValueError, r"v must be \[B,T,HV,V\] = \[1, 20, 4, 24\]"),
    (dict(beta=randn(1, 20, 2)), ValueError, r"beta must be \[B,T,HV\] = \[1, 20, 4\], got \[1, 20, 2\]"),
    (dict(beta=randn(1, 4, 20)), ValueError, r"beta must be \[B,T,HV\] = \[1, 20, 4\], got \[1, 4, 20\]"),
    (
        dict(g=randn(1, 20, 4, 8)),
        ValueError,
        r"g must be \[B,T,HV,K\] = \[1, 20, 4, 16\], got \[1, 20, 4, 8\]",
    ),
    (dict(g=randn(1, 20, 2)), ValueError, r"g must be \[B,T,HV\] = \[1, 20, 4\], got \[1, 20, 2\]"),
    (
        dict(initial_state=randn(4, 16, 24)),
        ValueError,
        r"initial_state must be \[N,HV,K,V\] = \[1, 4, 16, 24\].*got \[4, 16, 24\]",
    ),
    (
        dict(initial_state=randn(1, 4, 24, 16)),
        ValueError,
        r"initial_state must be .*\[N,HV,V,K\] with state_v_first.*got \[1, 4, 24, 16\]",
    ),
    (
        dict(initial_state=randn(2, 4, 16, 24)),
        ValueError,
        r"initial_state must be \[N,HV,K,V\] = \[1, 4, 16, 24\]",
    ),
    (dict(initial_state=randn(1, 4, 16, 24), state_v_first=True), ValueError, "initial_state must be"),
    # gates
    (
        dict(beta=None),
        ValueError,
        r"these gates are no operator: g \[1, 20, 4, 16\]. Allowed: DeltaNet: beta \[B,T,HV\]; GDN: .*; KDA: .*; "
        r"GDN2: .*",
    ),
    (dict(beta=None, g=None), ValueError, "these gates are no operator: none given"),
    (
        dict(erase=randn(1, 20, 4, 16)),
        ValueError,
        r"no operator: beta \[1, 20, 4\], g \[1, 20, 4, 16\], erase \[1, 20, 4, 16\]",
    ),
    (dict(beta=None, erase=randn(1, 20, 4, 16)), ValueError, "no operator"),
    (
        dict(beta=None, erase=randn(1, 20, 4, 16), write=randn(1, 20, 4, 24), g=None),
        ValueError,
        "no operator",
    ),
    (
        dict(beta=None, erase=randn(1, 20, 4, 16), write=randn(1, 20, 4, 24), g=randn(1, 20, 4)),
        ValueError,
        "no operator",
    ),
    (
        dict(beta=None, erase=randn(1, 20, 4), write=randn(1, 20, 4)),
        ValueError,
        r"erase must be \[B,T,HV,K\] = \[1, 20, 4, 16\]",
    ),
    (dict(g=randn(20, 4)), ValueError, r"no operator: .*g \[20, 4\]"),
    # options
    (dict(chunk_size=48), ValueError, "chunk_size must be one of 16, 32, 64, got 48"),
    (dict(chunk_size=0), ValueError, "chunk_size must be one of 16, 32, 64, got 0"),
    (dict(chunk_size="64"), ValueError, "chunk_size must be one of 16, 32, 64, got '64'"),
    (
        dict(algebra="classic"),
        ValueError,
        "algebra must be one of rewy, conventional, autograd, got 'classic'",
    ),
    (dict(backend="tpu"), ValueError, "backend must be one of cuda.*, ascend.*, reference, got 'tpu'"),
    (
        dict(algebra="autograd", backend="cuda"),
        ValueError,
        "algebra='autograd' differentiates the reference backend, got backend='cuda'",
    ),
    (dict(scale="big"), TypeError, r"scale must be a number or None \(K\^-0.5\), got str"),
    (dict(scale=True), TypeError, "scale must be a number .* got bool"),
    (dict(scale=torch.ones(())), TypeError, "scale must be a number .* got a Tensor of dtype float32"),
    (dict(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (dict(scale=-float("inf")), ValueError, "scale must be finite, got -inf"),
    (dict(scale=10**400), ValueError, "scale must be finite, got 1000"),
    (dict(chunk_size=64.0), ValueError, "chunk_size must be one of 16, 32, 64, got 64.0"),
    (dict(algebra=["rewy"]), ValueError, r"algebra must be one of .*, got \['rewy'\]"),
    (dict(backend=3), TypeError, "backend must be a name or None, got int"),
    (dict(backend=""), ValueError, "backend must be a name or None, got ''"),
    (dict(output_final_state="no"), TypeError, "output_final_state must be True or False, got str"),
    (dict(state_v_first=1), TypeError, "state_v_first must be True or False, got int"),
    (dict(disable_recompute=[]), TypeError, "disable_recompute must be True or False, got list"),
    # in-kernel options
    (
        dict(use_qk_l2norm_in_kernel="yes"),
        TypeError,
        "use_qk_l2norm_in_kernel must be True or False, got str",
    ),
    (dict(use_gate_in_kernel=2.0), TypeError, "use_gate_in_kernel must be True or False, got float"),
    (
        dict(use_beta_sigmoid_in_kernel=torch.tensor(True)),
        TypeError,
        "use_beta_sigmoid_in_kernel must be True or False, got a Tensor of dtype bool",
    ),
    (dict(allow_neg_eigval=0), TypeError, "allow_neg_eigval must be True or False, got int"),
    (dict(safe_gate="no"), TypeError, "safe_gate must be True or False, got str"),
    (
        dict(use_gate_in_kernel=True, A_log=randn(2, 2)),
        ValueError,
        r"A_log must be \[HV\] = \[4\], got \[2, 2\]",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=randn(4), dt_bias=randn(16, 4)),
        ValueError,
        r"dt_bias must be .* or \[HV,K\] = \[4, 16\], got \[16, 4\]",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=torch.ones(4).to(torch.float8_e4m3fn)),
        TypeError,
        "A_log must be a torch.Tensor of dtype .*, got a Tensor of dtype float8_e4m3fn",
    ),
    (
        dict(lower_bound="-5", safe_gate=True),
        TypeError,
        r"lower_bound must be a number in \[-5, 0\) or None, got str",
    ),
    (dict(lower_bound=-6.0, safe_gate=True), ValueError, r"lower_bound must be in \[-5, 0\), got -6.0"),
    (dict(lower_bound=0.0, safe_gate=True), ValueError, r"lower_bound must be in \[-5, 0\), got 0.0"),
    (
        dict(lower_bound=float("nan"), safe_gate=True),
        ValueError,
        r"lower_bound must be in \[-5, 0\), got nan",
    ),
    (dict(lower_bound=-5.0), ValueError, "lower_bound needs use_gate_in_kernel=True or safe_gate=True"),
    (
        dict(use_gate_in_kernel=True),
        ValueError,
        r"use_gate_in_kernel=True needs A_log \[HV\] unless lower_bound is given",
    ),
    (
        dict(use_gate_in_kernel=True, safe_gate=True, A_log=randn(4)),
        ValueError,
        r"safe_gate=True with use_gate_in_kernel=True needs lower_bound in \[-5, 0\), got None",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=randn(2)),
        ValueError,
        r"A_log must be \[HV\] = \[4\], got \[2\]",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=randn(4), dt_bias=randn(4)),
        ValueError,
        r"dt_bias must be \[HV·K\] = \[64\] or \[HV,K\] = \[4, 16\], got \[4\]",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=[0.0] * 4),
        TypeError,
        "A_log must be a torch.Tensor of dtype float64, float32, bfloat16, float16, got list",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=torch.ones(4, dtype=torch.int64)),
        TypeError,
        "A_log must be a torch.Tensor of dtype .*, got a Tensor of dtype int64",
    ),
    (
        dict(A_log=randn(4)),
        ValueError,
        "A_log is a parameter of the in-kernel gate; it needs use_gate_in_kernel=True",
    ),
    (dict(dt_bias=randn(4)), ValueError, "dt_bias is a parameter of the in-kernel gate"),
    (dict(allow_neg_eigval=True), ValueError, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"),
    # offsets
    (
        dict(cu_seqlens=offsets(0, 20).float()),
        TypeError,
        "cu_seqlens must have dtype int32, int64, got float32",
    ),
    (
        dict(cu_seqlens=offsets(0, 20, dtype=torch.int16)),
        TypeError,
        "cu_seqlens must have dtype int32, int64, got int16",
    ),
    (dict(cu_seqlens=offsets(1, 20)), ValueError, "cu_seqlens must start at 0, got 1"),
    (
        dict(cu_seqlens=offsets(0, 12, 8, 16)),
        ValueError,
        "cu_seqlens must not decrease, got 12 before 8 at position 2",
    ),
    (dict(cu_seqlens=offsets(0, 21)), ValueError, "cu_seqlens must end at or before T = 20, got 21"),
    (dict(cu_seqlens=offsets(0, -1)), ValueError, "cu_seqlens must not decrease, got 0 before -1"),
    (
        dict(cu_seqlens=offsets()),
        ValueError,
        r"cu_seqlens must be \[N\+1\] with at least one offset, got shape \[0\]",
    ),
    (dict(cu_seqlens=offsets(0, 20)[None]), ValueError, r"cu_seqlens must be \[N\+1\]"),
    (
        dict(cu_seqlens=offsets(0, 10, 20)),
        ValueError,
        r"initial_state must be \[N,HV,K,V\] = \[2, 4, 16, 24\] \(one state per sequence",
    ),
    (
        dict(cu_seqlens_cpu=offsets(0, 20)),
        ValueError,
        "cu_seqlens_cpu is the host copy of cu_seqlens; pass cu_seqlens too",
    ),
    (
        dict(cu_seqlens=offsets(0, 20), cu_seqlens_cpu=offsets(0, 10, 20)),
        ValueError,
        r"cu_seqlens_cpu must have cu_seqlens' shape \[2\], got \[3\]",
    ),
    (
        dict(cu_seqlens=offsets(0, 20), cu_seqlens_cpu=offsets(1, 20)),
        ValueError,
        "cu_seqlens_cpu must start at 0, got 1",
    ),
    (
        dict(cu_seqlens=offsets(0, 20), cu_seqlens_cpu=offsets(0, 10)),
        ValueError,
        r"cu_seqlens_cpu must hold cu_seqlens' offsets \[0, 20\], got \[0, 10\]",
    ),
    # devices
    (
        dict(q=torch.empty(1, 20, 2, 16, dtype=torch.float64, device="meta")),
        ValueError,
        r"k must be on meta \(q is on meta\), got cpu",
    ),
    (
        dict(k=torch.empty(1, 20, 2, 16, dtype=torch.float64, device="meta")),
        ValueError,
        r"k must be on cpu \(q is on cpu\), got meta",
    ),
    (
        dict(initial_state=torch.empty(1, 4, 16, 24, device="meta")),
        ValueError,
        "initial_state must be on cpu .* got meta",
    ),
    (
        dict(cu_seqlens=torch.empty(2, dtype=torch.int64, device="meta")),
        ValueError,
        "cu_seqlens must be on cpu .* got meta",
    ),
    (
        dict(use_gate_in_kernel=True, A_log=torch.empty(4, device="meta")),
        ValueError,
        "A_log must be on q's device cpu, got meta",
    ),
]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    REFUSED,
    ids=[f"{'+'.join(c)}-{i}" for i, (c, _, _) in enumerate(REFUSED)],
)
def test_refused(changed, error, message):
    call()  # an accepted problem is remembered, its neighbours are not
    with pytest.raises(error, match=message):
        call(**changed)


NOT_OF_STEPS = {"chunk_size", "algebra", "disable_recompute"}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [r for r in REFUSED if not NOT_OF_STEPS & r[0].keys()],
    ids=[f"{'+'.join(c)}-{i}" for i, (c, _, _) in enumerate(REFUSED) if not NOT_OF_STEPS & c.keys()],
)
def test_refused_by_steps(changed, error, message):
    with pytest.raises(error, match=message):
        call(step=True, **changed)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (dict(H=3, HV=4), "v must have a multiple of q's H = 3 heads, got HV = 4"),
        (dict(H=4, HV=2), "v must have a multiple of q's H = 4 heads, got HV = 2"),
        (dict(H=1, HV=0), "v must have a multiple of q's H = 1 heads, got HV = 0"),
        (dict(H=0, HV=2), "v must have a multiple of q's H = 0 heads, got HV = 2"),
        (dict(K=257, V=1), r"q and k must have 1 to 256 channels \(K\), got K = 257"),
        (dict(K=0), r"q and k must have 1 to 256 channels \(K\), got K = 0"),
        (dict(V=513, K=1), r"v must have 1 to 512 channels \(V\), got V = 513"),
        (dict(V=0), r"v must have 1 to 512 channels \(V\), got V = 0"),
    ],
    ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()) if isinstance(p, dict) else "",
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_refused_sizes(operator, case, message):
    with pytest.raises(ValueError, match=message):
        call(operator, case=case)


def test_refused_batch_of_packed_rows():
    given = arguments(make(Case("kda", B=2, T=20, initial_state=False))[0])
    with pytest.raises(
        ValueError, match=r"cu_seqlens needs packed sequences in one batch row \(B = 1\), got B = 2"
    ):
        rewy.delta_attention(**given | dict(cu_seqlens=offsets(0, 20)))


def test_refused_sigmoid_of_two_gates():
    with pytest.raises(ValueError, match="use_beta_sigmoid_in_kernel=True needs beta"):
        call("gdn2", use_beta_sigmoid_in_kernel=True)


def test_refused_in_kernel_gate_without_gate():
    with pytest.raises(ValueError, match="use_gate_in_kernel=True needs g, the raw gate; got g=None"):
        call("delta_rule", use_gate_in_kernel=True, A_log=randn(4))


def test_steps_refuse_gradients():
    x = make(Case("kda", T=1))[0]
    with pytest.raises(NotImplementedError, match="the step functions have no gradients"):
        rewy.delta_attention_step(**arguments(x._replace(q=x.q.requires_grad_())))
    with torch.no_grad():
        rewy.delta_attention_step(**arguments(x._replace(q=x.q.requires_grad_())))


def test_an_explicit_backend_never_falls_back():
    if torch.cuda.is_available():
        pytest.skip("the refusal is about a machine without a GPU")
    for name in ("cuda", "ascend"):
        with pytest.raises(
            ValueError, match=f"backend='{name}' was asked for but cannot compute this call: "
        ):
            call(backend=name)


def test_a_backend_that_insists_is_not_replaced(monkeypatch):
    monkeypatch.setitem(dispatch.MADE_FOR, "cpu", "ascend")
    monkeypatch.delenv("REWY_ASCEND_OPS", raising=False)
    call()
    monkeypatch.setenv("REWY_ASCEND_OPS", "require")
    with pytest.raises(ValueError, match="backend 'ascend' cannot compute this call: "):
        call()


class TestFlaNames:
    x = make(Case("kda", B=1, T=8))[0]
    given = (x.q, x.k, x.v, x.g, x.erase)

    def test_misspelt_options(self):
        for function in (getattr(rewy, name) for name in rewy.__all__):
            with pytest.raises(TypeError, match="unexpected keyword argument 'output_final_states'"):
                function(*self.given[:3], output_final_states=True)

    def test_cp_context(self):
        with pytest.raises(
            NotImplementedError, match="cp_context is not implemented; leave it at its default"
        ):
            rewy.chunk_kda(*self.given, cp_context=object())
        with pytest.raises(NotImplementedError, match="cp_context is not implemented"):
            rewy.chunk_gated_delta_rule(*self.given[:3], self.x.g[..., 0], self.x.erase, cp_context=object())

    def test_return_intermediate_states(self):
        with pytest.raises(NotImplementedError, match="return_intermediate_states is not implemented"):
            rewy.chunk_kda(*self.given, return_intermediate_states=True)
        with pytest.raises(NotImplementedError, match="return_intermediate_states is not implemented"):
            x = make(Case("gdn2", B=1, T=8))[0]
            rewy.chunk_gdn2(x.q, x.k, x.v, x.g, x.erase, x.write, return_intermediate_states=True)

    def test_gate_of_another_operator(self):
        with pytest.raises(
            ValueError, match=re.escape("g must be [B,T,HV], got 4 dimensions: [1, 8, 4, 16]")
        ):
            rewy.chunk_gated_delta_rule(*self.given)
        with pytest.raises(ValueError, match=re.escape("g must be [B,T,HV,K], got 3 dimensions: [1, 8, 4]")):
            rewy.chunk_kda(*self.given[:3], self.x.g[..., 0], self.x.erase)
        with pytest.raises(TypeError, match=re.escape("g must be a torch.Tensor [B,T,HV,K], got NoneType")):
            rewy.chunk_kda(*self.given[:3], None, self.x.erase)

    def test_no_beta(self):
        with pytest.raises((TypeError, ValueError), match=r"beta|no operator"):
            rewy.chunk_kda(*self.given[:4], None)
        with pytest.raises((TypeError, ValueError), match=r"beta|no operator"):
            rewy.chunk_delta_rule(*self.given[:3], None)

    def test_old_name_of_the_layout(self):
        with pytest.warns(FutureWarning, match="transpose_state_layout is now called state_v_first"):
            _, ht = rewy.chunk_kda(*self.given, output_final_state=True, transpose_state_layout=True)
        assert ht.shape == (1, 4, 24, 16)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_both_names_of_the_layout(self):
        with pytest.raises(ValueError, match="got state_v_first=True and transpose_state_layout=False"):
            rewy.chunk_kda(*self.given, state_v_first=True, transpose_state_layout=False)
        with pytest.raises(TypeError, match="transpose_state_layout must be True or False, got str"):
            rewy.chunk_kda(*self.given, transpose_state_layout="yes")


def test_parameters_of_the_gate_may_carry_dimensions_of_size_one():
    A_log, dt_bias = randn(4), randn(64)
    flat = call(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)[0]
    shaped = call(use_gate_in_kernel=True, A_log=A_log.view(1, 1, 4, 1), dt_bias=dt_bias.view(1, 4, 16))[0]
    assert torch.equal(flat, shaped)


def test_none_turns_a_switch_off():
    assert call(output_final_state=None, use_qk_l2norm_in_kernel=None)[1] is None


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("step", [False, True])
def test_meta_tensors_give_shapes(operator, step):
    x = make(Case(operator, B=1, T=20))[0]
    given = {name: t.to("meta") for name, t in arguments(x).items() if isinstance(t, torch.Tensor)}
    o, state = call(operator, step, **given, output_final_state=True)
    assert (o.device.type, o.shape) == ("meta", x.v.shape)
    assert (state.device.type, state.shape) == ("meta", x.initial_state.shape)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch.func itself
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", ["q", "g", "initial_state"])
def test_tangents_are_refused(name, step):
    t = {"q": randn(1, 20, 2, 16), "g": -randn(1, 20, 4, 16).abs(), "initial_state": randn(1, 4, 16, 24)}[
        name
    ]
    with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
        torch.func.jvp(lambda t: call(step=step, **{name: t})[0], (t,), (t,))


def test_refusals_touch_nothing():
    x = make(Case("kda", B=1, T=20))[0]
    before = [t.clone() for t in x if t is not None]
    with pytest.raises(ValueError):
        describe(x, Options(1.0, 17, True, "rewy"))
    assert all(torch.equal(a, b) for a, b in zip(before, (t for t in x if t is not None), strict=True))
