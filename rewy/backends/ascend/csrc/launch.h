// What host code hands to a kernel, and the launchers it calls. Plain C++: device code, host code and the tests'
// emulation all include it.
#pragma once

#include <cstdint>

// The tensors of the chunk gradient, each preceded by TYPE: device pointers, all contiguous.
#define REWY_CHUNK_GRADIENT_TENSORS(TYPE)                                                                  \
    TYPE q, TYPE k, TYPE v, TYPE beta, TYPE G, TYPE d_o, TYPE U, TYPE dR, TYPE S, TYPE dS, TYPE dq, TYPE dk, \
        TYPE dv, TYPE dbeta, TYPE dG, TYPE remaining

// The tensors of a state pass: X (−X in reverse), K̃, T, then A, Q̃ and do (reverse only), w ⊙ v (forward only), e^Γ,
// the first state; results: the state that each chunk finds, U (dR), the last state. What a pass lacks is null.
#define REWY_STATE_PASS_TENSORS(TYPE)                                                                            \
    TYPE X, TYPE K_, TYPE T_, TYPE A, TYPE Q, TYPE d_o, TYPE written, TYPE carry, TYPE first, TYPE states,       \
        TYPE solved, TYPE final

namespace rewy {

struct ChunkGradientTiling {
    int32_t N;       // chunks × value heads
    int32_t blocks;  // AI cores that share them; block i takes i, i + blocks, ...
    float scale;
};

// No more blocks than work: an idle block would still cost its start.
inline ChunkGradientTiling chunk_gradient_tiling(int64_t N, int64_t cores, double scale)
{
    return {static_cast<int32_t>(N), static_cast<int32_t>(N < cores ? N : cores), static_cast<float>(scale)};
}

struct StatePassTiling {
    int32_t P;       // sequences × value heads
    int32_t steps;   // chunks of each
    int32_t blocks;  // AI cores
    bool reverse;
};

inline StatePassTiling state_pass_tiling(int64_t P, int64_t steps, int64_t cores, bool reverse)
{
    return {static_cast<int32_t>(P), static_cast<int32_t>(steps), static_cast<int32_t>(P < cores ? P : cores), reverse};
}

enum class Type { bf16, fp16 };

// The kernel instances there are, as INSTANCE(K, V).
#define REWY_SIZES(INSTANCE) INSTANCE(64, 64) INSTANCE(64, 128) INSTANCE(128, 64) INSTANCE(128, 128)

inline bool has_kernels(int64_t K, int64_t V)
{
#define REWY_INSTANCE(K_, V_) || (K == K_ && V == V_)
    return false REWY_SIZES(REWY_INSTANCE);
#undef REWY_INSTANCE
}

// Each enqueues its kernel on `stream`; false when there is no instance for these sizes.
bool launch_chunk_gradient(Type type, int64_t K, int64_t V, void *stream, REWY_CHUNK_GRADIENT_TENSORS(uint8_t *),
                           ChunkGradientTiling tiling);
bool launch_state_pass(Type type, int64_t K, int64_t V, void *stream, REWY_STATE_PASS_TENSORS(uint8_t *),
                       StatePassTiling tiling);

}  // namespace rewy
