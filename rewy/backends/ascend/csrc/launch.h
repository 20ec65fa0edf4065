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
// the first state, the row that each step or sequence starts at; results: the state that each chunk finds, U (dR), the
// last state, dU (conventional form only). What a pass lacks is null.
#define REWY_STATE_PASS_TENSORS(TYPE)                                                                            \
    TYPE X, TYPE K_, TYPE T_, TYPE A, TYPE Q, TYPE d_o, TYPE written, TYPE carry, TYPE first, TYPE starts_,      \
        TYPE states, TYPE solved, TYPE final, TYPE unsolved
#define REWY_STATE_PASS_NAMES X, K_, T_, A, Q, d_o, written, carry, first, starts_, states, solved, final, unsolved

namespace rewy {

constexpr int C = 64;  // tokens of a chunk

// Bytes of the buffers of an AI core: the unified buffer of a vector core, and those of the cube core.
struct Buffers {
    int64_t ub, l1, l0a, l0b, l0c;
};

// For which the kernels are compiled. They lay their buffers out in these, however much more a chip has.
constexpr Buffers DAV_3510{248 << 10, 512 << 10, 64 << 10, 64 << 10, 256 << 10};

// A chip as the host finds it at run time; 0 bytes where it is not told.
struct Chip {
    int64_t cores;  // AI cores
    Buffers buffers;
};

// What the kernels take of the buffers. A chunk that they load has one place in L1 or two in the chunk gradient, two in a
// state pass, whose tiles of 64 columns have room for 256 rows, those of 128 for 128.
constexpr int64_t CHUNK_GRADIENT_UB = 253440;
constexpr int64_t state_pass_ub(int64_t tile) { return tile == 64 ? 116480 : 142592; }

constexpr Buffers chunk_gradient_takes(int64_t K, int64_t V, bool conventional, int64_t places)
{
    const int64_t own = 5 * C * C + (conventional ? C * (2 * C + K) : 0);
    const int64_t loaded = 3 * C * V + 2 * K * V + (conventional ? C * (V + K + C) : 0);
    return {CHUNK_GRADIENT_UB, 2 * (own + places * loaded), 64 << 10, 64 << 10, 160 << 10};
}

constexpr Buffers state_pass_takes(int64_t K, int64_t tile)
{
    const int64_t rows = tile == 64 ? 256 : 128, own = (2 * C + rows) * tile, loaded = C * (tile + 2 * C + 3 * K);
    return {state_pass_ub(tile), 2 * (own + 2 * loaded), 64 << 10, 64 << 10, 128 << 10};
}

// A buffer of which a kernel takes more than there is; `buffer` is null where all fits.
struct Lack {
    const char *kernel, *buffer;
    int64_t taken, there;
};

inline Lack lack(const char *kernel, const Buffers &taken, const Buffers &there)
{
    const Lack each[] = {{kernel, "unified buffer", taken.ub, there.ub},
                         {kernel, "L1", taken.l1, there.l1},
                         {kernel, "L0A", taken.l0a, there.l0a},
                         {kernel, "L0B", taken.l0b, there.l0b},
                         {kernel, "L0C", taken.l0c, there.l0c}};
    for (const Lack &l : each) {
        if (l.taken > l.there) return l;
    }
    return {};
}

inline bool fits(const Buffers &taken, const Buffers &there) { return lack("", taken, there).buffer == nullptr; }

// Whether a chip has room for the least that a kernel can do with.
inline Lack chunk_gradient_lacks(int64_t K, int64_t V, bool conventional, const Buffers &there)
{
    return lack("the chunk gradient", chunk_gradient_takes(K, V, conventional, 1), there);
}
inline Lack state_pass_lacks(int64_t K, const Buffers &there)
{
    return lack("the state pass", state_pass_takes(K, 64), there);
}

struct ChunkGradientTiling {
    int32_t N;       // chunks × value heads
    int32_t K, V;    // multiples of 64 up to 256
    int32_t blocks;  // AI cores that share them; block i takes i, i + blocks, ...
    float scale;
    bool conventional;
    bool gram;       // conventional: dG's pairs from q kᵀ and b k kᵀ, in a part for each vector core
    bool shared;     // value heads share q and k: dq and dk stay in fp32, for the caller sums them
    bool ahead;      // L1 has places for two chunks: the next one is loaded while this one is multiplied
};

// No more blocks than work: an idle block would still cost its start.
inline ChunkGradientTiling chunk_gradient_tiling(int64_t N, int64_t K, int64_t V, const Chip &chip, double scale,
                                                  bool conventional, bool gram = false, bool shared = false)
{
    const Buffers two = chunk_gradient_takes(K, V, conventional, 2);
    return {static_cast<int32_t>(N), static_cast<int32_t>(K), static_cast<int32_t>(V),
            static_cast<int32_t>(N < chip.cores ? N : chip.cores), static_cast<float>(scale), conventional, gram, shared,
            fits(two, DAV_3510) && fits(two, chip.buffers)};
}

struct StatePassTiling {
    int32_t N;       // chunks × value heads
    int32_t P;       // sequences × value heads; by step longest first
    int32_t starts;  // chunks of the longest; by sequence the sequences
    int32_t heads;   // value heads of a sequence where rows go by sequence, 0 where they go by step
    int32_t K, V;    // multiples of 64 up to 256
    int32_t tile;    // value columns that a block takes at a time, 64 or 128
    int32_t tiles;   // V / tile
    int32_t blocks;  // AI cores that share the P × tiles scans
    bool reverse, conventional;
    bool first_v, final_v;  // the first or the last state is [P,V,K]
};

// Tiles of 128 columns load keys half as often, tiles of 64 keep twice the cores busy; states of more than 128 rows
// leave room for 64.
inline StatePassTiling state_pass_tiling(int64_t N, int64_t P, int64_t starts, int64_t K, int64_t V, const Chip &chip,
                                         bool reverse, bool conventional, bool first_v = false,
                                         bool final_v = false, bool by_sequence = false)
{
    const bool wide = K <= 128 && V % 128 == 0 && fits(state_pass_takes(K, 128), chip.buffers);
    const int64_t cores = chip.cores, tile = wide && P * (V / 128) >= cores ? 128 : 64, scans = P * (V / tile);
    return {static_cast<int32_t>(N), static_cast<int32_t>(P), static_cast<int32_t>(starts),
            static_cast<int32_t>(by_sequence ? P / starts : 0), static_cast<int32_t>(K), static_cast<int32_t>(V),
            static_cast<int32_t>(tile), static_cast<int32_t>(V / tile),
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
