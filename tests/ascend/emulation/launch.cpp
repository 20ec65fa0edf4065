// The launchers of csrc/launch.h over the emulation, in place of csrc/launch.asc: the same kernel sources.
#include "chunk_gradient.h"
#include "state_pass.h"

namespace rewy {

namespace {

// kernel(type, size<K>, size<V>) of the instance for these sizes, if there is one.
template <int n>
using Size = std::integral_constant<int, n>;

template <class F>
bool instance(Type type, int64_t K, int64_t V, F kernel)
{
#define REWY_INSTANCE(K_SIZE, V_SIZE)                         \
    if (K == K_SIZE && V == V_SIZE) {                         \
        if (type == Type::bf16) {                             \
            kernel(bfloat16_t{}, Size<K_SIZE>{}, Size<V_SIZE>{}); \
        } else {                                              \
            kernel(half{}, Size<K_SIZE>{}, Size<V_SIZE>{});   \
        }                                                     \
        return true;                                          \
    }
    REWY_SIZES(REWY_INSTANCE)
#undef REWY_INSTANCE
    return false;
}

}  // namespace

bool launch_chunk_gradient(Type type, int64_t K, int64_t V, void *, REWY_CHUNK_GRADIENT_TENSORS(uint8_t *),
                           ChunkGradientTiling tiling)
{
    return instance(type, K, V, [&]<class T, int K_, int V_>(T, Size<K_>, Size<V_>) {
        emulation::launch(tiling.blocks, [&] {
            ChunkGradient<T, K_, V_>(q, k, v, beta, G, d_o, U, dR, S, dS, dq, dk, dv, dbeta, dG, remaining, tiling);
        });
    });
}

bool launch_state_pass(Type type, int64_t K, int64_t V, void *, REWY_STATE_PASS_TENSORS(uint8_t *),
                       StatePassTiling tiling)
{
    return instance(type, K, V, [&]<class T, int K_S, int V_>(T, Size<K_S>, Size<V_>) {
        emulation::launch(tiling.blocks, [&] {
            StatePass<T, K_S, V_>(X, K_, T_, A, Q, d_o, written, carry, first, states, solved, final, tiling);
        });
    });
}

}  // namespace rewy
