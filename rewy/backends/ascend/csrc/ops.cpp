// Host side of the custom operators: checks, tiling, launch on torch_npu's current stream.
// What they compute: state_pass.h and chunk_gradient.h. Who calls them: ../fused.py.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "acl/acl.h"
#include "launch.h"
#include "tiling/platform/platform_ascendc.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Optional = const std::optional<Tensor> &;
using States = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr int64_t CHUNK = rewy::C;

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
    TORCH_CHECK_VALUE(rewy::takes_sizes(K, V), "K and V must be multiples of 64 up to 256, got K = ", K, ", V = ", V);
    TORCH_CHECK_VALUE(N <= std::numeric_limits<int32_t>::max(), "N must fit 32 bits, got ", N);
}

uint8_t *address(const Tensor &t) { return t.defined() ? static_cast<uint8_t *>(t.data_ptr()) : nullptr; }
Tensor or_none(Optional t) { return t.value_or(Tensor()); }

// Enqueues launch(stream) in torch_npu's order; what it captures lives until it has run.
template <class F>
void enqueue(const char *name, F launch)
{
    void *stream = c10_npu::getCurrentNPUStream().stream(false);
    at_npu::native::OpCommand::RunOpApiV2(name, [=]() -> int { return launch(stream) ? 0 : -1; });
}

// dq, dk, dv, db, dw (empty without a w), dG (under `gram` in two parts [N,2,C,1]), remaining.
Gradients empty_gradients(const Tensor &q, const Tensor &v, const Tensor &b, const Tensor &w, const Tensor &G,
                          bool shared, bool gram)
{
    const at::TensorOptions fp32 = q.options().dtype(at::kFloat), keys = shared ? fp32 : q.options();
    return {at::empty(q.sizes(), keys), at::empty(q.sizes(), keys), at::empty_like(v), at::empty_like(b),
            w.defined() ? at::empty_like(w) : at::empty({0}, fp32),
            gram ? at::empty({G.size(0), 2, CHUNK, 1}, fp32) : at::empty_like(G), at::empty_like(G)};
}

int64_t cube_cores(int device)
{
    int64_t cores = 0;
    const aclError error = aclrtGetDeviceInfo(device, ACL_DEV_ATTR_CUBE_CORE_NUM, &cores);
    TORCH_CHECK(error == ACL_SUCCESS && cores > 0, "the runtime does not tell the number of cube cores: error ", error);
    return cores;
}

// How large the buffers are, read once. A call that has no answer leaves the 0.
// doc: CANN 9.1, Ascend C API, 平台信息获取/{PlatformAscendCManager, PlatformAscendC/GetCoreMemSize}
const rewy::Buffers &buffers()
{
    static const rewy::Buffers told = [] {
        using platform_ascendc::CoreMemType;
        const auto *platform = platform_ascendc::PlatformAscendCManager::GetInstance();
        const auto bytes = [=](CoreMemType type) {
            uint64_t size = 0;
            if (platform != nullptr) platform->GetCoreMemSize(type, size);
            return static_cast<int64_t>(size);
        };
        return rewy::Buffers{bytes(CoreMemType::UB), bytes(CoreMemType::L1), bytes(CoreMemType::L0_A),
                             bytes(CoreMemType::L0_B), bytes(CoreMemType::L0_C)};
    }();
    return told;
}

std::string reason(const rewy::Lack &lack, int64_t K, int64_t V)
{
    if (lack.buffer == nullptr) return "";
    const std::string needs = c10::str(lack.kernel, " for K = ", K, " and V = ", V, " needs ", lack.taken, " bytes of ",
                                       lack.buffer, ", ");
    return needs + (lack.there > 0 ? c10::str("this chip has ", lack.there) : "CANN does not tell how many this chip has");
}

// Why this chip has no room for the kernels; empty where it has. ../ops.py asks before it calls one.
std::string lacking(int64_t K, int64_t V, bool conventional)
{
    const std::string state = reason(rewy::state_pass_lacks(K, buffers()), K, V);
    return state.empty() ? reason(rewy::chunk_gradient_lacks(K, V, conventional, buffers()), K, V) : state;
}

void check_room(const rewy::Lack &lack, int64_t K, int64_t V)
{
    TORCH_CHECK_VALUE(lack.buffer == nullptr, reason(lack, K, V));
}

Gradients chunk_gradient(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &b, Optional write,
                         const Tensor &G, const Tensor &d_o, const Tensor &U, const Tensor &dR, const Tensor &S,
                         const Tensor &dS, Optional far_chunks, const Tensor &masks, double scale, bool shared,
                         Optional unsolved, Optional keys, Optional values, Optional inverse, bool gram)
{
    TORCH_CHECK_VALUE(q.dim() == 3 && v.dim() == 3, "q and v must be [N,", CHUNK, ",K] and [N,", CHUNK, ",V], got ",
                      q.sizes(), " and ", v.sizes());
    const Tensor w = or_none(write), far = or_none(far_chunks);
    const Tensor dU = or_none(unsolved), minus_X = or_none(keys), written = or_none(values), T = or_none(inverse);
    const bool conventional = dU.defined();
    const int64_t N = q.size(0), K = q.size(2), V = v.size(2);
    const at::ScalarType scalar = q.scalar_type();
    const rewy::Type type = type_of(scalar);
    const rewy::Channels channels{far.defined(), w.defined()};
    check_sizes(N, K, V);
    TORCH_CHECK_VALUE(rewy::takes_gates(channels), "gates per channel come with decay per channel");
    check(q, "q", scalar, {N, CHUNK, K});
    check(k, "k", scalar, {N, CHUNK, K});
    check(v, "v", scalar, {N, CHUNK, V});
    check(d_o, "do", scalar, {N, CHUNK, V});
    check(U, "U", scalar, {N, CHUNK, V});
    check(dR, "dR", scalar, {N, CHUNK, V});
    check(S, "S", scalar, {N, K, V});
    check(dS, "dS", scalar, {N, K, V});
    check(b, "b", at::kFloat, {N, CHUNK, channels.gates ? K : 1});
    if (channels.gates) check(w, "w", at::kFloat, {N, CHUNK, V});
    check(G, "G", at::kFloat, {N, CHUNK, channels.decay ? K : 1});
    if (channels.decay) check(far, "far", at::kInt, {N});
    check(masks, "masks", at::kFloat, {8, CHUNK, CHUNK});
    TORCH_CHECK_VALUE(minus_X.defined() == conventional && written.defined() == conventional &&
                          T.defined() == conventional,
                      "dU, minus_X, written and T come together");
    TORCH_CHECK_VALUE(!gram || (conventional && !channels.decay),
                      "gram is for the conventional form with one decay a token");
    if (conventional) {
        check(dU, "dU", scalar, {N, CHUNK, V});
        check(minus_X, "minus_X", scalar, {N, CHUNK, K});
        check(written, "written", scalar, {N, CHUNK, V});
        check(T, "T", scalar, {N, CHUNK, CHUNK});
    }

    const Gradients gradients = empty_gradients(q, v, b, w, G, shared, gram);
    if (N == 0) return gradients;
    check_room(rewy::chunk_gradient_lacks(K, V, conventional, buffers()), K, V);
    const rewy::ChunkGradientTiling tiling = rewy::chunk_gradient_tiling(
        N, K, V, {cube_cores(q.get_device()), buffers()}, scale, conventional, gram, shared);
    enqueue("RewyChunkGradient", [=](void *stream) {
        const auto &[dq, dk, dv, db, dw, dG, remaining] = gradients;
        return rewy::launch_chunk_gradient(type, channels, stream, address(q), address(k), address(v), address(b),
                                           address(w), address(G), address(d_o), address(U), address(dR), address(S),
                                           address(dS), address(far), address(masks), address(dq), address(dk),
                                           address(dv), address(db), address(dw), address(dG), address(remaining),
                                           address(dU), address(minus_X), address(written), address(T), tiling);
    });
    return gradients;
}

Gradients chunk_gradient_meta(const Tensor &q, const Tensor &, const Tensor &v, const Tensor &b, Optional w,
                              const Tensor &G, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                              const Tensor &, Optional, const Tensor &, double, bool shared, Optional, Optional,
                              Optional, Optional, bool gram)
{
    return empty_gradients(q, v, b, or_none(w), G, shared, gram);
}

// The states that the chunks find, U or dR, the last states (with v_first in memory as [P,V,K]), dU (empty but in the
// conventional form).
States empty_states(const Tensor &K, const Tensor &first, bool v_first, bool conventional)
{
    const int64_t N = K.size(0), P = first.size(0), k = first.size(1), v = first.size(2);
    const at::TensorOptions fp32 = first.options();
    return {at::empty({N, k, v}, fp32), at::empty({N, CHUNK, v}, fp32),
            v_first ? at::empty({P, v, k}, fp32).mT() : at::empty({P, k, v}, fp32),
            at::empty({conventional ? N : 0, CHUNK, v}, fp32)};
}

// What both passes have; undefined tensors are those of the other pass. `starts` has a number for each step, or for each
// sequence, and the end.
States state_pass(const Tensor &X, const Tensor &K, const Tensor &T, const Tensor &A, const Tensor &Q,
                  const Tensor &d_o, const Tensor &written, const Tensor &carry, const Tensor &first,
                  const Tensor &starts, bool v_first, bool by_sequence, bool reverse, bool conventional = false)
{
    TORCH_CHECK_VALUE(first.dim() == 3, "first must be [P,K,V], got ", first.sizes());
    TORCH_CHECK_VALUE(starts.dim() == 1 && starts.size(0) >= 1, "starts must be [n + 1], got ", starts.sizes());
    const int64_t N = K.size(0), P = first.size(0), n = starts.size(0) - 1, k = first.size(1), v = first.size(2);
    const at::ScalarType scalar = K.scalar_type();
    const rewy::Type type = type_of(scalar);
    check_sizes(N, k, v);
    check_sizes(P, k, v);
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
    const bool first_v = !first.is_contiguous();
    check(first_v ? first.mT() : first, "first, as it is or transposed,", at::kFloat,
          first_v ? at::IntArrayRef{P, v, k} : at::IntArrayRef{P, k, v});
    check(starts, "starts", at::kInt, {n + 1});
    TORCH_CHECK_VALUE(!by_sequence || (n > 0 ? P % n == 0 : P == 0), "first must have as many heads of each of ", n,
                      " sequences, got ", P, " states");

    const States results = empty_states(K, first, v_first, conventional);
    if (P == 0) return results;
    check_room(rewy::state_pass_lacks(k, buffers()), k, v);
    const rewy::StatePassTiling tiling = rewy::state_pass_tiling(
        N, P, n, k, v, {cube_cores(K.get_device()), buffers()}, reverse, conventional, first_v, v_first, by_sequence);
    enqueue(reverse ? "RewyStateReverse" : "RewyStateForward", [=](void *stream) {
        const auto &[states, solved, last, unsolved] = results;
        return rewy::launch_state_pass(type, stream, address(X), address(K), address(T), address(A), address(Q),
                                       address(d_o), address(written), address(carry), address(first), address(starts),
                                       address(states), address(solved), address(last), address(unsolved), tiling);
    });
    return results;
}

std::tuple<Tensor, Tensor, Tensor> without_dU(const States &results)
{
    return {std::get<0>(results), std::get<1>(results), std::get<2>(results)};
}

std::tuple<Tensor, Tensor, Tensor> state_forward(const Tensor &X, const Tensor &K, const Tensor &T,
                                                 const Tensor &written, const Tensor &carry, const Tensor &first,
                                                 const Tensor &starts, bool v_first, bool by_sequence)
{
    return without_dU(state_pass(X, K, T, {}, {}, {}, written, carry, first, starts, v_first, by_sequence, false));
}
std::tuple<Tensor, Tensor, Tensor> state_forward_meta(const Tensor &, const Tensor &K, const Tensor &, const Tensor &,
                                                      const Tensor &, const Tensor &first, const Tensor &,
                                                      bool v_first, bool)
{
    return without_dU(empty_states(K, first, v_first, false));
}

States state_reverse(const Tensor &minus_X, const Tensor &K, const Tensor &T, const Tensor &A, const Tensor &Q,
                     const Tensor &d_o, const Tensor &carry, const Tensor &first, const Tensor &starts,
                     bool v_first, bool by_sequence, bool conventional)
{
    return state_pass(minus_X, K, T, A, Q, d_o, {}, carry, first, starts, v_first, by_sequence, true, conventional);
}
States state_reverse_meta(const Tensor &, const Tensor &K, const Tensor &, const Tensor &, const Tensor &,
                          const Tensor &, const Tensor &, const Tensor &first, const Tensor &, bool v_first,
                          bool, bool conventional)
{
    return empty_states(K, first, v_first, conventional);
}

}  // namespace

TORCH_LIBRARY(rewy_ascend, library)
{
    library.def(
        "chunk_gradient(Tensor q, Tensor k, Tensor v, Tensor b, Tensor? w, Tensor G, Tensor do, Tensor U, Tensor dR, "
        "Tensor S, Tensor dS, Tensor? far, Tensor masks, float scale, bool shared, Tensor? dU=None, "
        "Tensor? minus_X=None, Tensor? written=None, Tensor? T=None, bool gram=False) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor db, Tensor dw, Tensor dG, Tensor remaining)");
    library.def(
        "state_forward(Tensor X, Tensor K, Tensor T, Tensor written, Tensor carry, Tensor first, Tensor starts, "
        "bool v_first=False, bool by_sequence=False) -> (Tensor states, Tensor U, Tensor last)");
    library.def(
        "state_reverse(Tensor minus_X, Tensor K, Tensor T, Tensor A, Tensor Q, Tensor do, Tensor carry, Tensor first, "
        "Tensor starts, bool v_first=False, bool by_sequence=False, bool conventional=False) -> "
        "(Tensor states, Tensor dR, Tensor last, Tensor dU)");
    library.def("lacking(int K, int V, bool conventional) -> str", &lacking);
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
