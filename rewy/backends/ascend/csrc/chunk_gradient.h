// The gradient of one chunk: everything between the reverse state pass and the gradients of the operands, in one
// kernel, for every kind of gate. Letters: docs/derivation.md; formulas per chunk and value head, for each tile of 64
// key channels:
//
//   cube    do Uᵀ, dR Uᵀ  [C,C], once          do Sᵀ, dR Sᵀ, U dS⁺ᵀ  [C,D]
//   vector  M_A = scale · do Uᵀ, M_L = −dR Uᵀ below the diagonal, and k̂, q̂, b̂k, the operands of pairs
//   cube    M_A k̂, M_L k̂, M_Aᵀ q̂ + M_Lᵀ b̂k  [C,D]
//   vector  dq, dk, db and the gate gradient dG; besides, for each tile of value channels, dv and dw
//
// dR Uᵀ and dR Sᵀ are the second and third of the three products around T (the reverse state pass made dR); no
// inverse adjoint, no W, no Gram matrix. For comparison the kernel also has the conventional form, which makes what
// takes their place from dU: dW = −dU Sᵀ, dT = dW Xᵀ + dU (w ⊙ v)ᵀ, Tᵀ dT Tᵀ and Tᵀ dW, rounded on the way as operands
// are. Pairs then are those of that form too, `rewy.algebra.conventional`: under one decay per head their part of dG
// comes from q kᵀ and b k kᵀ once more (`gram`), weighted with M_A and M_L, row sums less column sums; under one per
// channel those inside blocks of 16 tokens are weighted one by one.
//
// Decay of pairs. With one decay per head, e^{G_i−G_j} weighs M_A and M_L, and the operands are q, k and b k. With one
// per channel it is split between the operands, e^{G_i−c} for rows and e^{c−G_j} for columns, and taken back from the
// products. A chunk whose range of G allows it takes the middle of that range as c, in one pass. Any other (`far`)
// takes six passes: pass l has the pairs whose halves of blocks of 2^(l+1) tokens meet, with c the last decay of the
// earlier half, so that no exponent is positive. Each pair is in exactly one pass (`masks`).
//
// Pairs enter dG from the operands that were multiplied, after rounding, so that their two signs cancel. Diagonal
// pairs carry no decay and stay out of dG. dG leaves out two terms that add up differently over tokens: k ⊙ dK̃, which
// leaves as `remaining`, and e^Γ Σ S ⊙ dS⁺, which wants S and dS⁺ in fp32.
//
// One cube core works with its two vector cores, which take 32 rows of the chunk each. OUTER_READY and OUTER_FREE
// are a pair, primed before the loop and drained after it. The other two flags need no FREE of their own: each
// implies through the pipes behind it that what it overwrites has been used. The tests drop every flag and see it
// missed. What the cube core loads of a chunk has two places in L1 where they fit: that of the block's next chunk
// arrives while this one's is multiplied.
#pragma once

#include "core.h"

namespace rewy {

// Cross-core flags (mode 2).
constexpr uint16_t OUTER_READY = 0;  // cube → vector: products with states (and scores) are in the unified buffers
constexpr uint16_t OUTER_FREE = 1;   // vector → cube: they have been used
constexpr uint16_t PAIRS_READY = 2;  // vector → cube: M_A, M_L, k̂, q̂ and b̂k are in L1
constexpr uint16_t INNER_READY = 3;  // cube → vector: their products are in the unified buffers

// Column sums cross the vector cores, so under `gram` each core has a part of dG, and the caller adds them.
//
// [N,C..K] is [N,C], or [N,C,K] where the gate has a number for each channel.
template <class T>
struct ChunkGradientOperands {
    GlobalTensor<T> q, k;            // [N,C,K]
    GlobalTensor<T> v, d_o, U, dR;   // [N,C,V]
    GlobalTensor<T> S, dS;           // [N,K,V] the state before the chunk, the gradient of the state after it
    GlobalTensor<float> b;           // [N,C..K] erase gate
    GlobalTensor<float> w;           // [N,C,V] write gate; none where it is b
    GlobalTensor<float> G;           // [N,C..K]
    GlobalTensor<int32_t> far;       // [N] for decay per channel
    GlobalTensor<float> masks;       // [8,C,C] all pairs, those of each of six passes, the diagonal
    GlobalTensor<T> dq, dk;          // [N,C,K], or, where value heads share q and k,
    GlobalTensor<float> dq_share, dk_share;
    GlobalTensor<T> dv;              // [N,C,V]
    GlobalTensor<float> db, dw;      // like b and w; db has dw's share where there is no w
    GlobalTensor<float> dG;          // like G; [N,2,C] under `gram`
    GlobalTensor<float> remaining;   // like G: k ⊙ dK̃ e^{Γ−G}
    GlobalTensor<T> dU, minus_X;     // [N,C,V], [N,C,K], the conventional form only, as are
    GlobalTensor<T> written, T_;     // [N,C,V] w ⊙ v, [N,C,C]
    ChunkGradientTiling tiling;
};

constexpr uint32_t TILE = R * D * 4;        // bytes of a tile of floats on a vector core: [R,D] or [R,C]
constexpr int PASSES = 6;                   // of a far chunk
constexpr int ALL_PAIRS = 0, DIAGONAL = 7;  // masks
constexpr int PAIR_BLOCK = 16;              // tokens whose pairs the conventional form weights one by one
constexpr int AROUND_BLOCKS = 5;            // the first mask of pairs of two such blocks

// Where the products that cross between cores lie in every unified buffer, and what vector cores write into L1.
struct Places {
    static constexpr uint32_t DO_U = 0 * TILE;   // [R,C] do Uᵀ, then M_A
    static constexpr uint32_t DR_U = 1 * TILE;   // [R,C] dR Uᵀ, then M_L
    static constexpr uint32_t DO_S = 2 * TILE;   // [R,D] do Sᵀ, then all of dq but the diagonal
    static constexpr uint32_t DR_S = 3 * TILE;   // [R,D] dR Sᵀ, then E
    static constexpr uint32_t U_DS = 4 * TILE;   // [R,D] U dS⁺ᵀ, then all of dk that does not pass through b k
    static constexpr uint32_t MA_K = 5 * TILE;   // [R,D] M_A k̂
    static constexpr uint32_t ML_K = 6 * TILE;   // [R,D] M_L k̂
    static constexpr uint32_t RIGHT = 7 * TILE;  // [R,D] M_Aᵀ q̂ + M_Lᵀ b̂k
    static constexpr uint32_t UB_OWN = 8 * TILE; // the vector core's own from here
    static constexpr uint32_t HATS = UB_OWN + 3 * TILE;         // which has q̂, k̂ and b̂k of decay per channel here, or
    static constexpr uint32_t QK = HATS, BKK = HATS + TILE;     // [R,C] q kᵀ, then their pairs, and b k kᵀ

    static constexpr uint32_t L1_TILE = C * D * 2;
    static constexpr Operand L1_MA{0 * L1_TILE, C, C};
    static constexpr Operand L1_ML{1 * L1_TILE, C, C};
    static constexpr Operand L1_K{2 * L1_TILE, C, D};
    static constexpr Operand L1_Q{3 * L1_TILE, C, D};
    static constexpr Operand L1_BK{4 * L1_TILE, C, D};
    static constexpr uint32_t L1_OWN = 5 * L1_TILE;  // the cube core's own from here
};

// The passes that the pairs of a chunk take.
template <bool CHANNEL_DECAY, class T>
__aicore__ inline int Passes(const ChunkGradientOperands<T> &x, int32_t i_n)
{
    if constexpr (CHANNEL_DECAY) {
        if (x.tiling.conventional) return DIAGONAL - AROUND_BLOCKS;
        return x.far.GetValue(i_n) ? PASSES : 1;
    }
    return 1;
}

template <class T, bool CHANNEL_DECAY>
class ChunkGradientCube : Cube<T> {
public:
    __aicore__ inline explicit ChunkGradientCube(const ChunkGradientOperands<T> &x)
        : x(x), K(x.tiling.K), V(x.tiling.V), L1_DT{P::L1_OWN, C, C}, L1_TDT{L1_DT.address + C * C * 2, C, C},
          L1_DW(L1_TDT.address + C * C * 2), loaded(x.tiling.conventional ? L1_DW + C * K * 2 : P::L1_OWN),
          loaded_size((3 * C * V + 2 * K * V + (x.tiling.conventional ? C * (V + K + C) : 0)) * 2),
          ahead(x.tiling.ahead)
    {
    }

    __aicore__ inline void Run()
    {
        this->Prime();
        if (ahead) Fetch(GetBlockIdx(), 0);
        for (int32_t i_n = GetBlockIdx(), slot = 0; i_n < x.tiling.N; i_n += GetBlockNum()) {
            const int32_t next = ahead ? i_n + GetBlockNum() : i_n, its_slot = ahead ? 1 - slot : slot;
            if (next < x.tiling.N) Fetch(next, its_slot);
            Chunk(i_n, slot);
            slot = its_slot;
        }
        CrossCoreWaitFlag<2, PIPE_FIX>(OUTER_FREE);
        this->Drain();
    }

private:
    using P = Places;

    // What is loaded of a chunk, in L1; states and X in tiles of keys.
    struct Loaded {
        Operand d_o, U, dR;   // dU in the conventional form, which alone has the last three
        uint32_t S, dS;
        Operand written, T_;
        uint32_t X;
    };

    __aicore__ inline Loaded In(int slot) const
    {
        const uint32_t begin = loaded + slot * loaded_size, value = C * V * 2, state = K * V * 2;
        const uint32_t S = begin + 3 * value, written = S + 2 * state, inverse = written + value;
        return {{begin, C, V},   {begin + value, C, V}, {begin + 2 * value, C, V}, S, S + state,
                {written, C, V}, {inverse, C, C},       inverse + C * C * 2};
    }

    // In three parts, each with an event of its own: a product waits for no more than it needs.
    __aicore__ inline void Fetch(int32_t i_n, int slot)
    {
        const uint64_t o_v = uint64_t(i_n) * C * V, o_s = uint64_t(i_n) * K * V;
        const Loaded l1 = In(slot);
        WaitFlag<HardEvent::MTE1_MTE2>(slot);
        this->Load(l1.d_o, x.d_o[o_v]);
        this->Load(l1.U, x.U[o_v]);
        SetFlag<HardEvent::MTE2_MTE1>(3 * slot);
        if (x.tiling.conventional) {
            this->Load(l1.dR, x.dU[o_v]);
            this->Load(l1.written, x.written[o_v]);
            this->Load(l1.T_, x.T_[uint64_t(i_n) * C * C]);
            for (int i_k = 0; i_k < K; i_k += D) {
                this->Load(TokenTile(l1.X, i_k), x.minus_X[uint64_t(i_n) * C * K + i_k], K);
            }
        } else {
            this->Load(l1.dR, x.dR[o_v]);
        }
        SetFlag<HardEvent::MTE2_MTE1>(3 * slot + 1);
        for (int i_k = 0; i_k < K; i_k += D) {
            this->Load(KeyTile(l1.S, i_k), x.S[o_s + i_k * V]);
            this->Load(KeyTile(l1.dS, i_k), x.dS[o_s + i_k * V]);
        }
        SetFlag<HardEvent::MTE2_MTE1>(3 * slot + 2);
    }

    __aicore__ inline void Chunk(int32_t i_n, int slot)
    {
        const int passes = Passes<CHANNEL_DECAY>(x, i_n);
        const Loaded l1 = In(slot);
        for (int i_k = 0; i_k < K; i_k += D) {
            CrossCoreWaitFlag<2, PIPE_FIX>(OUTER_FREE);
            if (i_k == 0) Scores(l1, slot);
            this->Multiply(l1.d_o, KeyTile(l1.S, i_k).T());
            this->ToVector(P::DO_S);
            if (x.tiling.conventional) {
                this->Multiply(l1.T_.T(), TokenTile(L1_DW, i_k));
            } else {
                this->Multiply(l1.dR, KeyTile(l1.S, i_k).T());
            }
            this->ToVector(P::DR_S);
            this->Multiply(l1.U, KeyTile(l1.dS, i_k).T());
            if (i_k + D == K) SetFlag<HardEvent::MTE1_MTE2>(slot);
            this->ToVector(P::U_DS);
            CrossCoreSetFlag<2, PIPE_FIX>(OUTER_READY);
            for (int pass = 0; pass < passes; ++pass) Contract(i_k);
        }
    }

    __aicore__ inline void Scores(const Loaded &l1, int slot)
    {
        WaitFlag<HardEvent::MTE2_MTE1>(3 * slot);
        this->Multiply(l1.d_o, l1.U.T());
        this->ToVector(P::DO_U);
        WaitFlag<HardEvent::MTE2_MTE1>(3 * slot + 1);
        if (!x.tiling.conventional) {
            this->Multiply(l1.dR, l1.U.T());
            this->ToVector(P::DR_U);
        }
        WaitFlag<HardEvent::MTE2_MTE1>(3 * slot + 2);
        if (x.tiling.conventional) ThroughInverse(l1);
    }

    // −dW and Tᵀ dT Tᵀ, dU being where dR would be.
    __aicore__ inline void ThroughInverse(const Loaded &l1)
    {
        for (int i_k = 0; i_k < K; i_k += D) {
            this->Multiply(l1.dR, KeyTile(l1.S, i_k).T());
            this->ToOperand(TokenTile(L1_DW, i_k));
        }
        this->Multiply(l1.dR, l1.written.T());
        for (int i_k = 0; i_k < K; i_k += D) this->MultiplyAdd(TokenTile(L1_DW, i_k), TokenTile(l1.X, i_k).T());
        this->ToOperand(L1_DT);
        this->Multiply(l1.T_.T(), L1_DT);
        this->ToOperand(L1_TDT);
        this->Multiply(L1_TDT, l1.T_.T());
        this->ToVector(P::DR_U);
    }

    __aicore__ inline void Contract(int i_k)
    {
        CrossCoreWaitFlag<2, PIPE_MTE1>(PAIRS_READY);
        if (x.tiling.gram) {
            this->Accumulate(P::L1_Q, P::L1_BK, P::L1_K.T(), i_k == 0);
            if (i_k + D == K) this->SumsToVector(P::QK, P::BKK);
        }
        this->Multiply(P::L1_MA, P::L1_K);
        this->ToVector(P::MA_K);
        this->Multiply(P::L1_ML, P::L1_K);
        this->ToVector(P::ML_K);
        this->Multiply(P::L1_MA.T(), P::L1_Q);
        this->MultiplyAdd(P::L1_ML.T(), P::L1_BK);
        this->ToVector(P::RIGHT);
        CrossCoreSetFlag<2, PIPE_FIX>(INNER_READY);
    }

    // Key channels i_k to i_k + D of a state or of a chunk's rows, each tile an operand of its own.
    __aicore__ inline Operand KeyTile(uint32_t address, int i_k) const { return {address + i_k * V * 2, D, V}; }
    __aicore__ inline Operand TokenTile(uint32_t address, int i_k) const { return {address + i_k * C * 2, C, D}; }

    const ChunkGradientOperands<T> &x;
    const int K, V;
    // The conventional form only.
    const Operand L1_DT, L1_TDT;
    const uint32_t L1_DW;
    // A chunk's place in L1, or two.
    const uint32_t loaded, loaded_size;
    const bool ahead;
};

template <class T, bool CHANNEL_DECAY, bool CHANNEL_GATES>
class ChunkGradientVector {
public:
    __aicore__ inline explicit ChunkGradientVector(const ChunkGradientOperands<T> &x)
        : x(x), K(x.tiling.K), V(x.tiling.V), sub(GetSubBlockIdx())
    {
    }

    __aicore__ inline void Run()
    {
        Arrive(At(EYE, R * C), Mask(DIAGONAL), R * C);
        if constexpr (!CHANNEL_DECAY) Arrive(At(MASK, R * C), Mask(ALL_PAIRS), R * C);
        Arrived(0);
        SetFlag<HardEvent::V_MTE2>(0);
        if constexpr (CHANNEL_DECAY) SetFlag<HardEvent::V_MTE2>(1);
        SetFlag<HardEvent::MTE3_V>(0);
        if constexpr (ROWS) SetFlag<HardEvent::MTE3_V>(1);
        CrossCoreSetFlag<2, PIPE_V>(OUTER_FREE);
        for (int32_t i_n = GetBlockIdx() / 2; i_n < x.tiling.N; i_n += GetBlockNum()) Chunk(i_n);
        WaitFlag<HardEvent::V_MTE2>(0);
        if constexpr (CHANNEL_DECAY) WaitFlag<HardEvent::V_MTE2>(1);
        WaitFlag<HardEvent::MTE3_V>(0);
        if constexpr (ROWS) WaitFlag<HardEvent::MTE3_V>(1);
    }

private:
    using P = Places;
    static constexpr float MASKED = -3.0e38f;  // e to that is 0
    static constexpr bool ROWS = !CHANNEL_DECAY || !CHANNEL_GATES;  // some gate has one number a token

    // Own part of the unified buffer: tiles of floats, tiles of T, which take half, and vectors.
    static constexpr uint32_t Q = P::UB_OWN, KEY = Q + TILE;                 // q, k
    static constexpr uint32_t BK = KEY + TILE;                               // b k, rounded to T
    static constexpr uint32_t Q_HAT = BK + TILE, K_HAT = Q_HAT + TILE;       // q̂, k̂ and b̂k, rounded to T,
    static constexpr uint32_t BK_HAT = K_HAT + TILE;                         // for decay per channel
    static_assert(Q_HAT == P::HATS, "the cube core has to know where they lie");
    static constexpr uint32_t LOG = BK_HAT + TILE;                           // G per channel
    static constexpr uint32_t GATE = LOG + TILE;                             // b or w per channel
    static constexpr uint32_t FROM = GATE + TILE, TO = FROM + TILE;          // e^{G_i−c}, e^{c−G_j}
    static constexpr uint32_t MASK = TO + TILE, EYE = MASK + TILE;           // [R,C]
    static constexpr uint32_t WEIGHT = CHANNEL_DECAY ? MASK : FROM;          // [R,C] of the pairs
    static constexpr uint32_t T0 = EYE + TILE, T1 = T0 + TILE;               // scratch, and results that leave
    static constexpr uint32_t PRODUCT = T1 + TILE;                           // scratch
    static constexpr uint32_t DG = PRODUCT + TILE, REST = DG + TILE;         // dG, remaining
    static constexpr uint32_t DB = REST + TILE;
    static constexpr uint32_t IN0 = DB + TILE, IN1 = IN0 + TILE / 2;         // T, arriving
    static constexpr uint32_t Q16 = IN1 + TILE / 2, K16 = Q16 + TILE / 2;    // T, leaving for L1
    static constexpr uint32_t BK16 = K16 + TILE / 2;
    static constexpr uint32_t MA16 = BK16 + TILE / 2, ML16 = MA16 + TILE / 2;
    static constexpr uint32_t DV16 = ML16 + TILE / 2;                        // T, leaving
    static constexpr uint32_t ROW = R * 4;                                   // bytes of an [R] vector
    static constexpr uint32_t BROADCAST = R * BLOCK * 4;                     // of one with a data block a row
    static constexpr uint32_t FIRST = DV16 + TILE / 2;                       // [D] rows 0, 31 and 63 of G, and c
    static constexpr uint32_t HALF = FIRST + D * 4, LAST = HALF + D * 4, CENTRE = LAST + D * 4;
    static constexpr uint32_t G_ALL = CENTRE + D * 4;                        // [C]
    static constexpr uint32_t G_BLOCKS = G_ALL + 2 * ROW;                    // [C] broadcast
    static constexpr uint32_t DECAYED = G_BLOCKS + 2 * BROADCAST;            // e^G broadcast
    static constexpr uint32_t REMAINING = DECAYED + BROADCAST;               // e^{Γ−G} broadcast
    static constexpr uint32_t B_BLOCKS = REMAINING + BROADCAST;              // b broadcast
    static constexpr uint32_t DA_BLOCKS = B_BLOCKS + BROADCAST;              // dA_ii broadcast
    static constexpr uint32_t B_ROW = DA_BLOCKS + BROADCAST;                 // [R] b
    static constexpr uint32_t SUM = B_ROW + ROW;                             // [R]
    static constexpr uint32_t UB_END = SUM + ROW;
    static constexpr uint32_t DG_PART = DG + ROW;                            // [C] under `gram`
    static constexpr uint32_t MA_BLOCKS = DECAYED, ML_BLOCKS = REMAINING;    // of a row, for decay per channel
    static_assert(UB_END <= UB_SIZE, "the tiles of a vector core must fit its unified buffer");
    static_assert(UB_END == CHUNK_GRADIENT_UB, "the host has to know how much of it they take");

    __aicore__ inline void Chunk(int32_t i_n)
    {
        const int passes = Passes<CHANNEL_DECAY>(x, i_n);
        const uint64_t row = uint64_t(i_n) * C + sub * R;
        RowGates(i_n);
        if constexpr (ROWS) WaitFlag<HardEvent::MTE3_V>(1);
        if constexpr (!CHANNEL_DECAY) {
            Duplicate(At(DG, R), 0.0f, R);
            Duplicate(At(REST, R), 0.0f, R);
        }
        if constexpr (!CHANNEL_GATES) Duplicate(At(DB, R), 0.0f, R);
        for (int i_v = 0; i_v < V; i_v += D) ValueTile(row * V + i_v);
        for (int i_k = 0; i_k < K; i_k += D) KeyTile(i_n, i_k, passes);
        if constexpr (ROWS) LeaveRowGates(row);
    }

    // What has one number a token: b, and G with what follows from it.
    __aicore__ inline void RowGates(int32_t i_n)
    {
        Floats G = At(G_ALL, C), G_blocks = At(G_BLOCKS, C * BLOCK), sum = At(SUM, R);
        WaitFlag<HardEvent::V_MTE2>(0);
        if constexpr (!CHANNEL_DECAY) Arrive(G, x.G[uint64_t(i_n) * C], C);
        if constexpr (!CHANNEL_GATES) Arrive(At(B_ROW, R), x.b[uint64_t(i_n) * C + sub * R], R);
        Arrived(0);
        if constexpr (!CHANNEL_GATES) Brcb(At(B_BLOCKS, R * BLOCK), At(B_ROW, R), R / 8, {1, 8});
        if constexpr (!CHANNEL_DECAY) {
            Brcb(G_blocks, G, C / 8, {1, 8});
            Exp(sum, G[sub * R], R);
            Brcb(At(DECAYED, R * BLOCK), sum, R / 8, {1, 8});
            Sub(sum, G_blocks[(C - 1) * BLOCK], G[sub * R], R, 1, {1, 0, 1, 8, 8, 8});  // Γ − G_i
            Exp(sum, sum, R);
            Brcb(At(REMAINING, R * BLOCK), sum, R / 8, {1, 8});
            // e^{G_i − G_j} below the diagonal; the exponent is masked first, for above it it is positive.
            Floats pair = At(WEIGHT, R * C), mask = At(MASK, R * C);
            Sub(pair, G_blocks[sub * R * BLOCK], G, C, R, {1, 0, 1, C / BLOCK, 1, 0});
            Mul(pair, pair, mask, R * C);
            Exp(pair, pair, R * C);
            Mul(pair, pair, mask, R * C);
        }
        SetFlag<HardEvent::V_MTE2>(0);
    }

    // dv = w dR and dw = v dR, or v · dR as a part of db.
    __aicore__ inline void ValueTile(uint64_t o)
    {
        Floats v = At(T0, R * D), dR = At(T1, R * D), w = At(GATE, R * D);
        LocalTensor<T> dv = At16<T>(DV16, R * D);
        WaitFlag<HardEvent::V_MTE2>(0);
        ArriveTile(At16<T>(IN0, R * D), x.v[o], V);
        ArriveTile(At16<T>(IN1, R * D), x.dR[o], V);
        if constexpr (CHANNEL_GATES) ArriveTile(w, x.w[o], V);
        Arrived(0);
        WaitFlag<HardEvent::MTE3_V>(0);
        Widen(v, IN0);
        Widen(dR, IN1);
        if constexpr (CHANNEL_GATES) {
            Mul(v, v, dR, R * D);
            Mul(dR, dR, w, R * D);
        } else {
            Fold<false>(At(DB, R), v, dR);
            TimesRows(dR, dR, At(B_BLOCKS, R * BLOCK), R, D);
        }
        Cast(dv, dR, RoundMode::CAST_RINT, R * D);
        SetFlag<HardEvent::V_MTE2>(0);
        SetFlag<HardEvent::V_MTE3>(1);
        WaitFlag<HardEvent::V_MTE3>(1);
        LeaveTile(x.dv[o], dv, V);
        if constexpr (CHANNEL_GATES) LeaveTile(x.dw[o], v, V);
        SetFlag<HardEvent::MTE3_V>(0);
    }

    __aicore__ inline void KeyTile(int32_t i_n, int i_k, int passes)
    {
        const uint64_t chunk = uint64_t(i_n) * C * K + i_k, o = chunk + sub * R * K;
        Floats q = At(Q, R * D), k = At(KEY, R * D), bk = At(BK, R * D), G = At(LOG, R * D);
        Floats dq = At(P::DO_S, R * D), E = At(P::DR_S, R * D), right = At(P::U_DS, R * D);
        Floats dG = At(DG, R * D), rest = At(REST, R * D), db = At(DB, R * D);
        Floats t0 = At(T0, R * D), t1 = At(T1, R * D), diagonal = At(DA_BLOCKS, R * BLOCK);
        Floats b = Gate<CHANNEL_GATES>(GATE, B_BLOCKS), decayed = Gate<CHANNEL_DECAY>(FROM, DECAYED);
        Floats remaining = Gate<CHANNEL_DECAY>(TO, REMAINING);

        // Operands of this core's rows; b k rounded as the cube core will read it.
        WaitFlag<HardEvent::V_MTE2>(0);
        ArriveTile(At16<T>(IN0, R * D), x.q[o], K);
        ArriveTile(At16<T>(IN1, R * D), x.k[o], K);
        if constexpr (CHANNEL_GATES) ArriveTile(At(GATE, R * D), x.b[o], K);
        if constexpr (CHANNEL_DECAY) {
            ArriveTile(G, x.G[o], K);
            Arrive(At(FIRST, D), x.G[chunk], D);
            Arrive(At(HALF, D), x.G[chunk + (R - 1) * K], D);
            Arrive(At(LAST, D), x.G[chunk + (C - 1) * K], D);
        }
        Arrived(0);
        Widen(q, IN0);
        Widen(k, IN1);
        Times<CHANNEL_GATES>(bk, k, b);
        Round(bk, BK16);

        CrossCoreWaitFlag<2, PIPE_V>(OUTER_READY);
        if (i_k == 0) Scores();

        // What passes through the states.
        WaitFlag<HardEvent::MTE3_V>(0);
        if constexpr (CHANNEL_DECAY) {
            Duplicate(dG, 0.0f, R * D);
            Duplicate(rest, 0.0f, R * D);
            Exp(decayed, G, R * D);
            Sub(remaining, At(LAST, D), G, D, R, {1, 1, 1, 8, 0, 8});
            Exp(remaining, remaining, R * D);
        }
        if constexpr (CHANNEL_GATES) Duplicate(db, 0.0f, R * D);
        Muls(dq, dq, x.tiling.scale, R * D);
        Times<CHANNEL_DECAY>(dq, dq, decayed);
        Muls(E, E, -1.0f, R * D);
        Times<CHANNEL_DECAY>(E, E, decayed);
        Times<CHANNEL_DECAY>(right, right, remaining);
        Fold<CHANNEL_DECAY>(dG, q, dq);
        Fold<CHANNEL_DECAY>(dG, bk, E);
        Fold<CHANNEL_DECAY>(rest, k, right);

        if constexpr (CHANNEL_DECAY) {
            if (x.tiling.conventional) PairsInBlocks();
        }
        const int mask = x.tiling.conventional && CHANNEL_DECAY ? AROUND_BLOCKS : passes == 1 ? ALL_PAIRS : 1;
        for (int pass = 0; pass < passes; ++pass) Pairs(mask + pass);
        if constexpr (!CHANNEL_DECAY) {
            if (x.tiling.gram && i_k + D == K) GramPairs();
        }

        // The gradients of the operands, with the diagonal pairs.
        Fold<CHANNEL_GATES>(db, k, E);
        Times<CHANNEL_GATES>(t1, E, b);
        Add(t1, t1, right, R * D);
        TimesRows(t0, q, diagonal, R, D);
        Add(t1, t1, t0, R * D);
        TimesRows(t0, k, diagonal, R, D);
        Add(t0, t0, dq, R * D);
        CrossCoreSetFlag<2, PIPE_V>(OUTER_FREE);
        SetFlag<HardEvent::V_MTE2>(0);

        // In T they leave from where M_A and M_L were.
        LocalTensor<T> dq16 = At16<T>(MA16, R * D), dk16 = At16<T>(ML16, R * D);
        if (!x.tiling.shared) {
            Cast(dq16, t0, RoundMode::CAST_RINT, R * D);
            Cast(dk16, t1, RoundMode::CAST_RINT, R * D);
        }
        SetFlag<HardEvent::V_MTE3>(1);
        WaitFlag<HardEvent::V_MTE3>(1);
        if (x.tiling.shared) {
            LeaveTile(x.dq_share[o], t0, K);
            LeaveTile(x.dk_share[o], t1, K);
        } else {
            LeaveTile(x.dq[o], dq16, K);
            LeaveTile(x.dk[o], dk16, K);
        }
        if constexpr (CHANNEL_DECAY) {
            LeaveTile(x.dG[o], dG, K);
            LeaveTile(x.remaining[o], rest, K);
        }
        if constexpr (CHANNEL_GATES) LeaveTile(x.db[o], db, K);
        SetFlag<HardEvent::MTE3_V>(0);
    }

    // do Uᵀ and dR Uᵀ as M_A and M_L, not yet masked; the diagonal of dA.
    __aicore__ inline void Scores()
    {
        Floats MA = At(P::DO_U, R * C), ML = At(P::DR_U, R * C), sum = At(SUM, R), picked = At(PRODUCT, R * C);
        Muls(MA, MA, x.tiling.scale, R * C);
        Muls(ML, ML, -1.0f, R * C);
        Mul(picked, MA, At(EYE, R * C), R * C);
        SumRows(sum, picked);
        Brcb(At(DA_BLOCKS, R * BLOCK), sum, R / 8, {1, 8});
    }

    // One pass over the pairs of a mask: adds to dq, E, right and dG.
    __aicore__ inline void Pairs(int mask)
    {
        Floats t0 = At(T0, R * D), dq = At(P::MA_K, R * D), E = At(P::ML_K, R * D);
        Floats right = At(P::RIGHT, R * D), from = At(FROM, R * D), to = At(TO, R * D);
        Floats q = At(CHANNEL_DECAY ? Q_HAT : Q, R * D), k = At(CHANNEL_DECAY ? K_HAT : KEY, R * D);
        Floats bk = At(CHANNEL_DECAY ? BK_HAT : BK, R * D), weight = At(WEIGHT, R * C);
        if constexpr (CHANNEL_DECAY) {
            WaitFlag<HardEvent::V_MTE2>(1);
            Arrive(weight, Mask(mask), R * C);
            Factors(mask);
            Mul(q, At(Q, R * D), from, R * D);
            Mul(k, At(KEY, R * D), to, R * D);
            Mul(bk, At(BK, R * D), from, R * D);
            Round(q, Q16);
            Round(k, K16);
            Round(bk, BK16);
            Arrived(1);
        }
        Mul(t0, At(P::DO_U, R * C), weight, R * C);
        Cast(At16<T>(MA16, R * C), t0, RoundMode::CAST_RINT, R * C);
        Mul(t0, At(P::DR_U, R * C), weight, R * C);
        Cast(At16<T>(ML16, R * C), t0, RoundMode::CAST_RINT, R * C);
        if constexpr (CHANNEL_DECAY) SetFlag<HardEvent::V_MTE2>(1);

        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        ToCube(P::L1_K, At16<T>(CHANNEL_DECAY ? K16 : IN1, R * D), sub);
        ToCube(P::L1_Q, At16<T>(CHANNEL_DECAY ? Q16 : IN0, R * D), sub);
        ToCube(P::L1_BK, At16<T>(BK16, R * D), sub);
        ToCube(P::L1_MA, At16<T>(MA16, R * C), sub);
        ToCube(P::L1_ML, At16<T>(ML16, R * C), sub);
        CrossCoreSetFlag<2, PIPE_MTE3>(PAIRS_READY);

        CrossCoreWaitFlag<2, PIPE_V>(INNER_READY);
        if (!x.tiling.gram) FoldPairs(q, bk, k);
        if constexpr (CHANNEL_DECAY) {
            Mul(dq, dq, from, R * D);
            Mul(E, E, from, R * D);
            Mul(right, right, to, R * D);
        }
        AddPairs();
    }

    // The pairs inside blocks of tokens, each weighted on its own: row i with the n tokens of its block before it.
    __aicore__ inline void PairsInBlocks()
    {
        Floats q = At(Q, R * D), k = At(KEY, R * D), bk = At(BK, R * D), G = At(LOG, R * D);
        Floats dq = At(P::MA_K, R * D), E = At(P::ML_K, R * D), right = At(P::RIGHT, R * D);
        Floats MA = At(MA_BLOCKS, PAIR_BLOCK * BLOCK), ML = At(ML_BLOCKS, PAIR_BLOCK * BLOCK);
        Floats weight = At(FROM, PAIR_BLOCK * D), t0 = At(T0, PAIR_BLOCK * D), t1 = At(T1, PAIR_BLOCK * D);
        const BinaryRepeatParams row_times_rows{1, 1, 0, 8, 0, 1};
        Duplicate(dq, 0.0f, R * D);
        Duplicate(E, 0.0f, R * D);
        Duplicate(right, 0.0f, R * D);
        for (int i = 0; i < R; ++i) {
            const int n = i % PAIR_BLOCK, first = i - n, pairs = i * C + sub * R + first;
            if (n == 0) continue;
            Brcb(MA, At(P::DO_U, R * C)[pairs], PAIR_BLOCK / 8, {1, 8});
            Brcb(ML, At(P::DR_U, R * C)[pairs], PAIR_BLOCK / 8, {1, 8});
            Sub(weight, G[i * D], G[first * D], D, n, {1, 1, 1, 8, 0, 8});
            Exp(weight, weight, n * D);
            Mul(t0, weight, k[first * D], n * D);
            TimesRows(t1, t0, ML, n, D);
            AddTokens(E[i * D], t1, n);
            TimesRows(t0, t0, MA, n, D);
            AddTokens(dq[i * D], t0, n);
            Mul(t0, q[i * D], MA, D, n, row_times_rows);
            Mul(t1, bk[i * D], ML, D, n, row_times_rows);
            Add(t0, t0, t1, n * D);
            Mul(t0, t0, weight, n * D);
            Add(right[first * D], right[first * D], t0, n * D);
        }
        FoldPairs(q, bk, k);
        AddPairs();
    }

    // Adds the n rows of a tile to dst; the tile is used up.
    __aicore__ inline void AddTokens(const Floats &dst, const Floats &tile, int n)
    {
        for (int half = n / 2; half > 0; half = n / 2) {
            n -= half;
            Add(tile, tile, tile[n * D], half * D);
        }
        Add(dst, dst, tile, D);
    }

    // The pairs' part of dG from the scores once more: with P = M_A ⊙ q kᵀ + M_L ⊙ b k kᵀ, row sums less column sums.
    __aicore__ inline void GramPairs()
    {
        Floats pair = At(P::QK, R * C), other = At(P::BKK, R * C), sum = At(SUM, R);
        Floats dG = At(DG, R), part = At(DG_PART, C), own = part[sub * R];
        Mul(pair, pair, At(P::DO_U, R * C), R * C);
        Mul(other, other, At(P::DR_U, R * C), R * C);
        Add(pair, pair, other, R * C);
        Mul(pair, pair, At(WEIGHT, R * C), R * C);
        SumRows(sum, pair);
        Add(dG, dG, sum, R);
        Duplicate(part, 0.0f, C);
        Add(own, own, dG, R);
        for (int rows = R / 2; rows > 0; rows /= 2) Add(pair, pair, pair[rows * C], rows * C);
        Sub(part, part, pair, C);
    }

    // What the pairs at hand add to dG, from the operands as they were multiplied.
    __aicore__ inline void FoldPairs(const Floats &q, const Floats &bk, const Floats &k)
    {
        Floats dG = At(DG, R * D);
        Fold<CHANNEL_DECAY>(dG, q, At(P::MA_K, R * D));
        Fold<CHANNEL_DECAY>(dG, bk, At(P::ML_K, R * D));
        Fold<CHANNEL_DECAY, true>(dG, k, At(P::RIGHT, R * D));
    }

    // And to dq, E and right.
    __aicore__ inline void AddPairs()
    {
        Add(At(P::DO_S, R * D), At(P::DO_S, R * D), At(P::MA_K, R * D), R * D);
        Add(At(P::DR_S, R * D), At(P::DR_S, R * D), At(P::ML_K, R * D), R * D);
        Add(At(P::U_DS, R * D), At(P::U_DS, R * D), At(P::RIGHT, R * D), R * D);
    }

    // e^{G_i − c} and e^{c − G_j} of this core's rows; 0 for a row that is not in the pass as such.
    __aicore__ inline void Factors(int mask)
    {
        Floats G = At(LOG, R * D), from = At(FROM, R * D), to = At(TO, R * D), c = At(CENTRE, D);
        if (mask == ALL_PAIRS) {
            Add(c, At(FIRST, D), At(LAST, D), D);
            Muls(c, c, 0.5f, D);
            Sub(from, G, c, D, R, {1, 1, 1, 8, 8, 0});
            Sub(to, c, G, D, R, {1, 1, 1, 8, 0, 8});
        } else {
            Duplicate(from, MASKED, R * D);
            Duplicate(to, MASKED, R * D);
            const int m = 1 << (mask - 1);  // rows of half a block
            if (m == R) {
                if (sub == 0) {
                    Sub(to, At(HALF, D), G, D, R, {1, 1, 1, 8, 0, 8});
                } else {
                    Sub(from, G, At(HALF, D), D, R, {1, 1, 1, 8, 8, 0});
                }
            } else {
                for (int i = 0; i < R; i += 2 * m) {
                    Floats last = G[(i + m - 1) * D];
                    Sub(to[i * D], last, G[i * D], D, m, {1, 1, 1, 8, 0, 8});
                    Sub(from[(i + m) * D], G[(i + m) * D], last, D, m, {1, 1, 1, 8, 8, 0});
                }
            }
        }
        Exp(from, from, R * D);
        Exp(to, to, R * D);
    }

    // The gradients of gates that have one number a token.
    __aicore__ inline void LeaveRowGates(uint64_t row)
    {
        SetFlag<HardEvent::V_MTE3>(1);
        WaitFlag<HardEvent::V_MTE3>(1);
        if constexpr (!CHANNEL_DECAY) {
            if (x.tiling.gram) {
                Leave(x.dG[2 * row], At(DG_PART, C), C);
            } else {
                Leave(x.dG[row], At(DG, R), R);
            }
            Leave(x.remaining[row], At(REST, R), R);
        }
        if constexpr (!CHANNEL_GATES) Leave(x.db[row], At(DB, R), R);
        SetFlag<HardEvent::MTE3_V>(1);
    }

    // A gate as it multiplies: a tile, or a vector broadcast.
    template <bool CHANNEL>
    __aicore__ inline Floats Gate(uint32_t tile, uint32_t blocks)
    {
        return CHANNEL ? At(tile, R * D) : At(blocks, R * BLOCK);
    }

    // dst = a ⊙ gate.
    template <bool CHANNEL>
    __aicore__ inline void Times(const Floats &dst, const Floats &a, const Floats &gate)
    {
        if constexpr (CHANNEL) {
            Mul(dst, a, gate, R * D);
        } else {
            TimesRows(dst, a, gate, R, D);
        }
    }

    // Adds to a gate's gradient that of its broadcast, ± a ⊙ b: the tile itself, or its rows' sums.
    template <bool CHANNEL, bool MINUS = false>
    __aicore__ inline void Fold(const Floats &gradient, const Floats &a, const Floats &b)
    {
        Floats product = At(PRODUCT, R * D), sum = At(SUM, R);
        Mul(product, a, b, R * D);
        constexpr int size = CHANNEL ? R * D : R;
        if constexpr (!CHANNEL) SumRows(sum, product);
        if constexpr (MINUS) {
            Sub(gradient, gradient, CHANNEL ? product : sum, size);
        } else {
            Add(gradient, gradient, CHANNEL ? product : sum, size);
        }
    }

    __aicore__ inline void SumRows(const Floats &dst, const Floats &tile)
    {
        ReduceRepeat<ReduceType::SUM, float, float>(dst, tile, D, R, 1, 1, D / BLOCK);
    }

    // A tile of floats as T has it, and in T at `address`.
    __aicore__ inline void Round(const Floats &tile, uint32_t address)
    {
        LocalTensor<T> rounded = At16<T>(address, R * D);
        Cast(rounded, tile, RoundMode::CAST_RINT, R * D);
        Cast(tile, rounded, RoundMode::CAST_NONE, R * D);
    }

    __aicore__ inline void Widen(const Floats &tile, uint32_t address)
    {
        Cast(tile, At16<T>(address, R * D), RoundMode::CAST_NONE, R * D);
    }

    // A tile [R,D] from or to rows that are `pitch` apart.
    template <class U>
    __aicore__ inline void ArriveTile(const LocalTensor<U> &dst, const GlobalTensor<U> &src, int pitch)
    {
        ArriveRows(dst, src, R, D, pitch);
    }
    template <class U>
    __aicore__ inline void LeaveTile(const GlobalTensor<U> &dst, const LocalTensor<U> &src, int pitch)
    {
        LeaveRows(dst, src, R, D, pitch);
    }

    __aicore__ inline void Arrived(int32_t id)
    {
        SetFlag<HardEvent::MTE2_V>(id);
        WaitFlag<HardEvent::MTE2_V>(id);
    }

    // This core's rows of a mask.
    __aicore__ inline GlobalTensor<float> Mask(int i) const { return x.masks[(i * C + sub * R) * C]; }

    const ChunkGradientOperands<T> &x;
    const int K, V;
    const int sub;
};

template <class T, bool CHANNEL_DECAY, bool CHANNEL_GATES>
__aicore__ inline void ChunkGradient(REWY_CHUNK_GRADIENT_TENSORS(GM_ADDR), ChunkGradientTiling tiling)
{
    const uint64_t rows = uint64_t(tiling.N) * C, state = uint64_t(tiling.N) * tiling.K * tiling.V;
    const uint64_t keys = rows * tiling.K, values = rows * tiling.V, masks = (DIAGONAL + 1) * C * C;
    const uint64_t decay = CHANNEL_DECAY ? keys : rows, erase = CHANNEL_GATES ? keys : rows;
    const uint64_t write = CHANNEL_GATES ? values : 0, far = CHANNEL_DECAY ? tiling.N : 0;
    const uint64_t conventional = tiling.conventional ? 1 : 0, shared = tiling.shared ? keys : 0;
    const ChunkGradientOperands<T> x{
        Global<T>(q, keys), Global<T>(k, keys), Global<T>(v, values), Global<T>(d_o, values), Global<T>(U, values),
        Global<T>(dR, values), Global<T>(S, state), Global<T>(dS, state), Global<float>(b, erase),
        Global<float>(w, write), Global<float>(G, decay), Global<int32_t>(far_, far), Global<float>(masks_, masks),
        Global<T>(dq, keys - shared), Global<T>(dk, keys - shared), Global<float>(dq, shared),
        Global<float>(dk, shared), Global<T>(dv, values), Global<float>(db, erase), Global<float>(dw, write),
        Global<float>(dG, tiling.gram ? 2 * decay : decay), Global<float>(remaining, decay),
        Global<T>(dU, conventional * values), Global<T>(minus_X, conventional * keys),
        Global<T>(written, conventional * values), Global<T>(T_, conventional * rows * C), tiling};

    InitSocState();
    if ASCEND_IS_AIC { ChunkGradientCube<T, CHANNEL_DECAY>(x).Run(); }
    if ASCEND_IS_AIV { ChunkGradientVector<T, CHANNEL_DECAY, CHANNEL_GATES>(x).Run(); }
    PipeBarrier<PIPE_ALL>();
}

}  // namespace rewy
