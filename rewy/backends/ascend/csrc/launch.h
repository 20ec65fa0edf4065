// What host code hands to a kernel, and the launchers it calls. Plain C++: device code, host code and the tests'
// emulation all include it.
#pragma once

#include <cstdint>

// The tensors of the chunk gradient, each preceded by TYPE: device pointers, all contiguous. w and dw are null where b
// is both gates, far where decay is one number a token, the last four but in the conventional form.
#define REWY_CHUNK_GRADIENT_TENSORS(TYPE)                                                                         \
    TYPE q, TYPE k, TYPE v, TYPE b, TYPE w, TYPE G, TYPE d_o, TYPE U, TYPE dR, TYPE S, TYPE dS, TYPE far_,        \
        TYPE masks_, TYPE dq, TYPE dk, TYPE dv, TYPE db, TYPE dw, TYPE dG, TYPE remaining, TYPE dU, TYPE minus_X, \
        TYPE written, TYPE T_
#define REWY_CHUNK_GRADIENT_NAMES                                                                                 \
    q, k, v, b, w, G, d_o, U, dR, S, dS, far_, masks_, dq, dk, dv, db, dw, dG, remaining, dU, minus_X, written, T_

// The tensors of a state pass: X (−X in reverse), K̃, T, then A, Q̃ and do (reverse only), w ⊙ v (forward only), e^Γ,
// the first state, the row that each step starts at; results: the state that each chunk finds, U (dR), the last state,
// dU (conventional form only). What a pass lacks is null.
#define REWY_STATE_PASS_TENSORS(TYPE)                                                                            \
    TYPE X, TYPE K_, TYPE T_, TYPE A, TYPE Q, TYPE d_o, TYPE written, TYPE carry, TYPE first, TYPE starts_,      \
        TYPE states, TYPE solved, TYPE final, TYPE unsolved
#define REWY_STATE_PASS_NAMES X, K_, T_, A, Q, d_o, written, carry, first, starts_, states, solved, final, unsolved

namespace rewy {

struct ChunkGradientTiling {
    int32_t N;       // chunks × value heads
    int32_t K, V;    // multiples of 64 up to 256
    int32_t blocks;  // AI cores that share them; block i takes i, i + blocks, ...
    float scale;
    bool conventional;
    bool gram;       // conventional: dG's pairs from q kᵀ and b k kᵀ, in a part for each vector core
    bool shared;     // value heads share q and k: dq and dk stay in fp32, for the caller sums them
};

// No more blocks than work: an idle block would still cost its start.
inline ChunkGradientTiling chunk_gradient_tiling(int64_t N, int64_t K, int64_t V, int64_t cores, double scale,
                                                  bool conventional, bool gram = false, bool shared = false)
{
    return {static_cast<int32_t>(N), static_cast<int32_t>(K), static_cast<int32_t>(V),
            static_cast<int32_t>(N < cores ? N : cores), static_cast<float>(scale), conventional, gram, shared};
}

struct StatePassTiling {
    int32_t N;       // chunks × value heads
    int32_t P;       // sequences × value heads, longest first
    int32_t steps;   // chunks of the longest
    int32_t K, V;    // multiples of 64 up to 256
    int32_t tile;    // value columns that a block takes at a time, 64 or 128
    int32_t tiles;   // V / tile
    int32_t blocks;  // AI cores that share the P × tiles scans
    bool reverse, conventional;
    bool first_v, final_v;  // the first or the last state is [P,V,K]
};

// Tiles of 128 columns load keys half as often, tiles of 64 keep twice the cores busy; states of more than 128 rows
// leave room for 64.
inline StatePassTiling state_pass_tiling(int64_t N, int64_t P, int64_t steps, int64_t K, int64_t V, int64_t cores,
                                         bool reverse, bool conventional, bool first_v = false,
                                         bool final_v = false)
{
    const int64_t tile = K <= 128 && V % 128 == 0 && P * (V / 128) >= cores ? 128 : 64, scans = P * (V / tile);
    return {static_cast<int32_t>(N), static_cast<int32_t>(P), static_cast<int32_t>(steps), static_cast<int32_t>(K),
            static_cast<int32_t>(V), static_cast<int32_t>(tile), static_cast<int32_t>(V / tile),
            static_cast<int32_t>(scans < cores ? scans : cores), reverse, conventional, first_v, final_v};
}

inline bool takes_sizes(int64_t K, int64_t V)
{
    return K % 64 == 0 && V % 64 == 0 && 64 <= K && K <= 256 && 64 <= V && V <= 256;
}

enum class Type { bf16, fp16 };

// Which gates have a number for each channel. `gates`: the erase gate, and a write gate of its own.
struct Channels {
    bool decay, gates;
};

// The instances of the chunk gradient, as INSTANCE(decay per channel, gates per channel).
#define REWY_GATES(INSTANCE) INSTANCE(false, false) INSTANCE(true, false) INSTANCE(true, true)

inline bool takes_gates(Channels c)
{
#define REWY_INSTANCE(DECAY, GATES) || (c.decay == DECAY && c.gates == GATES)
    return false REWY_GATES(REWY_INSTANCE);
#undef REWY_INSTANCE
}

// The instances of the state passes, as INSTANCE(columns of a tile).
#define REWY_TILES(INSTANCE) INSTANCE(64) INSTANCE(128)

// Each enqueues its kernel on `stream`; false when there is no instance for these gates or tiles.
bool launch_chunk_gradient(Type type, Channels channels, void *stream, REWY_CHUNK_GRADIENT_TENSORS(uint8_t *),
                           ChunkGradientTiling tiling);
bool launch_state_pass(Type type, void *stream, REWY_STATE_PASS_TENSORS(uint8_t *), StatePassTiling tiling);

}  // namespace rewy
