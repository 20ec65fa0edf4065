// Host side of the custom operators: checks, tiling, launch on torch_npu's current stream.
// What they compute: state_pass.h and chunk_gradient.h. Who calls them: ../fused.py.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "acl/acl.h"
#include "launch.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using States = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t CHUNK = 64;

void check(const Tensor &t, const char *name, at::ScalarType type, at::IntArrayRef sizes)
{
    TORCH_CHECK_TYPE(t.scalar_type() == type, name, " must be ", type, ", got ", t.scalar_type());
    TORCH_CHECK_VALUE(t.sizes() == sizes, name, " must be ", sizes, ", got ", t.sizes());
    TORCH_CHECK_VALUE(t.is_contiguous(), name, " must be contiguous, got strides ", t.strides());
}

rewy::Type type_of(at::ScalarType type)
{
    TORCH_CHECK_TYPE(type == at::kBFloat16 || type == at::kHalf, "q must be bfloat16 or float16, got ", type);
    return type == at::kBFloat16 ? rewy::Type::bf16 : rewy::Type::fp16;
}

void check_sizes(int64_t N, int64_t K, int64_t V)
{
    TORCH_CHECK_VALUE(rewy::has_kernels(K, V), "K and V must each be 64 or 128, got K = ", K, ", V = ", V);
    TORCH_CHECK_VALUE(N <= std::numeric_limits<int32_t>::max(), "N must fit 32 bits, got ", N);
}

uint8_t *address(const Tensor &t) { return t.defined() ? static_cast<uint8_t *>(t.data_ptr()) : nullptr; }

// Enqueues launch(stream) in torch_npu's order; what it captures lives until it has run.
template <class F>
void enqueue(const char *name, F launch)
{
    void *stream = c10_npu::getCurrentNPUStream().stream(false);
    at_npu::native::OpCommand::RunOpApiV2(name, [=]() -> int { return launch(stream) ? 0 : -1; });
}

// dq, dk, dv, dbeta, dG, remaining.
Gradients empty_gradients(const Tensor &q, const Tensor &v)
{
    const int64_t N = q.size(0);
    const at::TensorOptions fp32 = q.options().dtype(at::kFloat);
    return {at::empty(q.sizes(), fp32), at::empty(q.sizes(), fp32),     at::empty_like(v),
            at::empty({N, CHUNK}, fp32), at::empty({N, CHUNK}, fp32), at::empty({N, CHUNK}, fp32)};
}

int64_t cube_cores(int device)
{
    int64_t cores = 0;
    const aclError error = aclrtGetDeviceInfo(device, ACL_DEV_ATTR_CUBE_CORE_NUM, &cores);
    TORCH_CHECK(error == ACL_SUCCESS && cores > 0, "the runtime does not tell the number of cube cores: error ", error);
    return cores;
}

Gradients chunk_gradient(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &beta, const Tensor &G,
                         const Tensor &d_o, const Tensor &U, const Tensor &dR, const Tensor &S, const Tensor &dS,
                         double scale)
{
    TORCH_CHECK_VALUE(q.dim() == 3 && v.dim() == 3, "q and v must be [N,", CHUNK, ",K] and [N,", CHUNK, ",V], got ",
                      q.sizes(), " and ", v.sizes());
    const int64_t N = q.size(0), K = q.size(2), V = v.size(2);
    const at::ScalarType scalar = q.scalar_type();
    const rewy::Type type = type_of(scalar);
    check_sizes(N, K, V);
    check(q, "q", scalar, {N, CHUNK, K});
    check(k, "k", scalar, {N, CHUNK, K});
    check(v, "v", scalar, {N, CHUNK, V});
    check(d_o, "do", scalar, {N, CHUNK, V});
    check(U, "U", scalar, {N, CHUNK, V});
    check(dR, "dR", scalar, {N, CHUNK, V});
    check(S, "S", scalar, {N, K, V});
    check(dS, "dS", scalar, {N, K, V});
    check(beta, "beta", at::kFloat, {N, CHUNK});
    check(G, "G", at::kFloat, {N, CHUNK});

    const Gradients gradients = empty_gradients(q, v);
    if (N == 0) return gradients;
    const rewy::ChunkGradientTiling tiling = rewy::chunk_gradient_tiling(N, cube_cores(q.get_device()), scale);
    enqueue("RewyChunkGradient", [=](void *stream) {
        const auto &[dq, dk, dv, dbeta, dG, remaining] = gradients;
        return rewy::launch_chunk_gradient(type, K, V, stream, address(q), address(k), address(v), address(beta),
                                           address(G), address(d_o), address(U), address(dR), address(S), address(dS),
                                           address(dq), address(dk), address(dv), address(dbeta), address(dG),
                                           address(remaining), tiling);
    });
    return gradients;
}

Gradients chunk_gradient_meta(const Tensor &q, const Tensor &, const Tensor &v, const Tensor &, const Tensor &,
                              const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &, double)
{
    return empty_gradients(q, v);
}

// The states that the chunks find, U or dR, the last states.
States empty_states(const Tensor &K, const Tensor &first)
{
    return {at::empty({K.size(0), first.size(1), first.size(2)}, first.options()),
            at::empty({K.size(0), CHUNK, first.size(2)}, first.options()), at::empty_like(first)};
}

// What both passes have; undefined tensors are those of the other pass.
States state_pass(const Tensor &X, const Tensor &K, const Tensor &T, const Tensor &A, const Tensor &Q,
                  const Tensor &d_o, const Tensor &written, const Tensor &carry, const Tensor &first, int64_t steps,
                  bool reverse)
{
    TORCH_CHECK_VALUE(first.dim() == 3, "first must be [P,K,V], got ", first.sizes());
    const int64_t P = first.size(0), N = P * steps, k = first.size(1), v = first.size(2);
    const at::ScalarType scalar = K.scalar_type();
    const rewy::Type type = type_of(scalar);
    TORCH_CHECK_VALUE(steps >= 1, "steps must be at least 1, got ", steps);
    check_sizes(N, k, v);
    check(X, "X", scalar, {N, CHUNK, k});
    check(K, "K", scalar, {N, CHUNK, k});
    check(T, "T", scalar, {N, CHUNK, CHUNK});
    if (reverse) {
        check(A, "A", scalar, {N, CHUNK, CHUNK});
        check(Q, "Q", scalar, {N, CHUNK, k});
        check(d_o, "do", scalar, {N, CHUNK, v});
    } else {
        check(written, "written", at::kFloat, {N, CHUNK, v});
    }
    check(carry, "carry", at::kFloat, {N, k});
    check(first, "first", at::kFloat, {P, k, v});

    const States results = empty_states(K, first);
    if (P == 0) return results;
    const rewy::StatePassTiling tiling = rewy::state_pass_tiling(P, steps, cube_cores(K.get_device()), reverse);
    enqueue(reverse ? "RewyStateReverse" : "RewyStateForward", [=](void *stream) {
        const auto &[states, solved, last] = results;
        return rewy::launch_state_pass(type, k, v, stream, address(X), address(K), address(T), address(A), address(Q),
                                       address(d_o), address(written), address(carry), address(first), address(states),
                                       address(solved), address(last), tiling);
    });
    return results;
}

States state_forward(const Tensor &X, const Tensor &K, const Tensor &T, const Tensor &written, const Tensor &carry,
                     const Tensor &first, int64_t steps)
{
    return state_pass(X, K, T, {}, {}, {}, written, carry, first, steps, false);
}
States state_forward_meta(const Tensor &, const Tensor &K, const Tensor &, const Tensor &, const Tensor &,
                          const Tensor &first, int64_t)
{
    return empty_states(K, first);
}

States state_reverse(const Tensor &minus_X, const Tensor &K, const Tensor &T, const Tensor &A, const Tensor &Q,
                     const Tensor &d_o, const Tensor &carry, const Tensor &first, int64_t steps)
{
    return state_pass(minus_X, K, T, A, Q, d_o, {}, carry, first, steps, true);
}
States state_reverse_meta(const Tensor &, const Tensor &K, const Tensor &, const Tensor &, const Tensor &,
                          const Tensor &, const Tensor &, const Tensor &first, int64_t)
{
    return empty_states(K, first);
}

}  // namespace

TORCH_LIBRARY(rewy_ascend, library)
{
    library.def(
        "chunk_gradient(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor G, Tensor do, Tensor U, Tensor dR, Tensor S, "
        "Tensor dS, float scale) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dG, Tensor remaining)");
    library.def(
        "state_forward(Tensor X, Tensor K, Tensor T, Tensor written, Tensor carry, Tensor first, int steps) -> "
        "(Tensor states, Tensor U, Tensor last)");
    library.def(
        "state_reverse(Tensor minus_X, Tensor K, Tensor T, Tensor A, Tensor Q, Tensor do, Tensor carry, Tensor first, "
        "int steps) -> (Tensor states, Tensor dR, Tensor last)");
}
TORCH_LIBRARY_IMPL(rewy_ascend, PrivateUse1, library)
{
    library.impl("chunk_gradient", &chunk_gradient);
    library.impl("state_forward", &state_forward);
    library.impl("state_reverse", &state_reverse);
}
TORCH_LIBRARY_IMPL(rewy_ascend, Meta, library)
{
    library.impl("chunk_gradient", &chunk_gradient_meta);
    library.impl("state_forward", &state_forward_meta);
    library.impl("state_reverse", &state_reverse_meta);
}
