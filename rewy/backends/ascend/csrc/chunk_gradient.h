// The ReWY gradient of one chunk, for scalar decay or none: everything between the reverse state pass and the
// gradients of the operands, in one kernel. Letters: docs/derivation.md; formulas per chunk and value head:
//
//   cube    do Uᵀ, dR Uᵀ                 [C,C]     do Sᵀ, dR Sᵀ, U dS⁺ᵀ      [C,K]
//   vector  M_A = scale · do Uᵀ ⊙ e^{G_i−G_j}      M_L = −dR Uᵀ ⊙ e^{G_i−G_j}    (i > j, rounded to T)
//   cube    M_A k, M_L k, M_Aᵀ q + M_Lᵀ (b k)      [C,K]
//   vector  dq, dk, dv, dβ and the gate gradient dG
//
// dR Uᵀ and dR Sᵀ are the second and third of the three products around T (the reverse state pass made dR); no
// inverse adjoint, no W, no Gram matrix. Pairs enter dG from the operands that were multiplied, after rounding,
// so that their two signs cancel. Diagonal pairs carry no decay and stay out of dG.
//
// dG leaves out two terms that add up differently over tokens: k · dK̃, which leaves as `remaining`, and
// e^Γ Σ S ⊙ dS⁺, which wants S and dS⁺ in fp32.
//
// One cube core works with its two vector cores, which take 32 rows of the chunk each. OUTER_READY and OUTER_FREE
// are a pair, primed before the loop and drained after it. The other two flags need no FREE of their own: each
// implies through the pipes behind it that what it overwrites has been used. The tests drop every flag and see it
// missed.
#pragma once

#include "core.h"

namespace rewy {

// Cross-core flags (mode 2).
constexpr uint16_t OUTER_READY = 0;  // cube → vector: the first five products are in the unified buffers
constexpr uint16_t OUTER_FREE = 1;   // vector → cube: they have been used
constexpr uint16_t PAIRS_READY = 2;  // vector → cube: M_A, M_L and b k are in L1
constexpr uint16_t INNER_READY = 3;  // cube → vector: the contractions with k and q are in the unified buffers

template <class T>
struct ChunkGradientOperands {
    GlobalTensor<T> q, k;           // [N,C,K]
    GlobalTensor<T> v, d_o, U, dR;  // [N,C,V]
    GlobalTensor<T> S, dS;          // [N,K,V] the state before the chunk, the gradient of the state after it
    GlobalTensor<float> beta, G;    // [N,C]
    GlobalTensor<float> dq, dk;     // [N,C,K]
    GlobalTensor<T> dv;             // [N,C,V]
    GlobalTensor<float> dbeta, dG;  // [N,C]
    GlobalTensor<float> remaining;  // [N,C] k · dK̃ e^{Γ−G}
    float scale;
    int32_t N;
};

// Where the products that cross between cores lie in every unified buffer, and the operands in L1.
template <int K, int V>
struct Places {
    // unified buffers, bytes
    static constexpr uint32_t DO_U = 0;                          // [R,C] do Uᵀ
    static constexpr uint32_t DR_U = DO_U + R * C * 4;           // [R,C] dR Uᵀ
    static constexpr uint32_t DO_S = DR_U + R * C * 4;           // [R,K] do Sᵀ
    static constexpr uint32_t DR_S = DO_S + R * K * 4;           // [R,K] dR Sᵀ
    static constexpr uint32_t U_DS = DR_S + R * K * 4;           // [R,K] U dS⁺ᵀ
    static constexpr uint32_t MA_K = U_DS + R * K * 4;           // [R,K] M_A k
    static constexpr uint32_t ML_K = MA_K + R * K * 4;           // [R,K] M_L k
    static constexpr uint32_t RIGHT = ML_K + R * K * 4;          // [R,K] M_Aᵀ q + M_Lᵀ (b k)
    static constexpr uint32_t UB_OWN = RIGHT + R * K * 4;        // the vector core's own from here
    // L1
    static constexpr Operand L1_DO{0, C, V};
    static constexpr Operand L1_U{L1_DO.address + C * V * 2, C, V};
    static constexpr Operand L1_DR{L1_U.address + C * V * 2, C, V};
    static constexpr Operand L1_S{L1_DR.address + C * V * 2, K, V};
    static constexpr Operand L1_DS{L1_S.address + K * V * 2, K, V};
    static constexpr Operand L1_K{L1_DS.address + K * V * 2, C, K};
    static constexpr Operand L1_Q{L1_K.address + C * K * 2, C, K};
    static constexpr Operand L1_MA{L1_Q.address + C * K * 2, C, C};
    static constexpr Operand L1_ML{L1_MA.address + C * C * 2, C, C};
    static constexpr Operand L1_BK{L1_ML.address + C * C * 2, C, K};
};

template <class T, int K, int V>
class ChunkGradientCube : Cube<T> {
public:
    __aicore__ inline explicit ChunkGradientCube(const ChunkGradientOperands<T> &x) : x(x) {}

    __aicore__ inline void Run()
    {
        this->Prime();
        for (int32_t i_n = GetBlockIdx(); i_n < x.N; i_n += GetBlockNum()) Chunk(i_n);
        CrossCoreWaitFlag<2, PIPE_FIX>(OUTER_FREE);
        this->Drain();
    }

private:
    using P = Places<K, V>;

    __aicore__ inline void Chunk(int32_t i_n)
    {
        const uint64_t o_k = uint64_t(i_n) * C * K, o_v = uint64_t(i_n) * C * V, o_s = uint64_t(i_n) * K * V;
        WaitFlag<HardEvent::MTE1_MTE2>(0);
        this->Load(P::L1_DO, x.d_o[o_v]);
        this->Load(P::L1_U, x.U[o_v]);
        SetFlag<HardEvent::MTE2_MTE1>(0);
        this->Load(P::L1_DR, x.dR[o_v]);
        SetFlag<HardEvent::MTE2_MTE1>(1);
        this->Load(P::L1_S, x.S[o_s]);
        SetFlag<HardEvent::MTE2_MTE1>(2);
        this->Load(P::L1_DS, x.dS[o_s]);
        SetFlag<HardEvent::MTE2_MTE1>(3);
        this->Load(P::L1_K, x.k[o_k]);
        this->Load(P::L1_Q, x.q[o_k]);
        SetFlag<HardEvent::MTE2_MTE1>(4);

        WaitFlag<HardEvent::MTE2_MTE1>(0);
        this->Multiply(P::L1_DO, P::L1_U.T());
        CrossCoreWaitFlag<2, PIPE_FIX>(OUTER_FREE);
        this->ToVector(P::DO_U);
        WaitFlag<HardEvent::MTE2_MTE1>(1);
        this->Multiply(P::L1_DR, P::L1_U.T());
        this->ToVector(P::DR_U);
        WaitFlag<HardEvent::MTE2_MTE1>(2);
        this->Multiply(P::L1_DO, P::L1_S.T());
        this->ToVector(P::DO_S);
        this->Multiply(P::L1_DR, P::L1_S.T());
        this->ToVector(P::DR_S);
        WaitFlag<HardEvent::MTE2_MTE1>(3);
        this->Multiply(P::L1_U, P::L1_DS.T());
        this->ToVector(P::U_DS);
        CrossCoreSetFlag<2, PIPE_FIX>(OUTER_READY);

        WaitFlag<HardEvent::MTE2_MTE1>(4);
        CrossCoreWaitFlag<2, PIPE_MTE1>(PAIRS_READY);
        this->Multiply(P::L1_MA, P::L1_K);
        this->ToVector(P::MA_K);
        this->Multiply(P::L1_ML, P::L1_K);
        this->ToVector(P::ML_K);
        this->Multiply(P::L1_MA.T(), P::L1_Q);
        SetFlag<HardEvent::MTE1_MTE2>(0);
        this->MultiplyAdd(P::L1_ML.T(), P::L1_BK);
        this->ToVector(P::RIGHT);
        CrossCoreSetFlag<2, PIPE_FIX>(INNER_READY);
    }

    const ChunkGradientOperands<T> &x;
};

template <class T, int K, int V>
class ChunkGradientVector {
public:
    __aicore__ inline explicit ChunkGradientVector(const ChunkGradientOperands<T> &x) : x(x), sub(GetSubBlockIdx()) {}

    __aicore__ inline void Run()
    {
        Masks();
        SetFlag<HardEvent::V_MTE2>(0);
        SetFlag<HardEvent::MTE3_V>(0);
        CrossCoreSetFlag<2, PIPE_V>(OUTER_FREE);
        for (int32_t i_n = GetBlockIdx() / 2; i_n < x.N; i_n += GetBlockNum()) Chunk(i_n);
        WaitFlag<HardEvent::V_MTE2>(0);
        WaitFlag<HardEvent::MTE3_V>(0);
    }

private:
    using P = Places<K, V>;
    static constexpr int D = K > V ? K : V;
    static constexpr float MASKED = -3.0e38f;  // plus any difference of decays: e to that is 0

    // Own part of the unified buffer, bytes.
    static constexpr uint32_t Q = P::UB_OWN;               // [R,K] q
    static constexpr uint32_t KEY = Q + R * K * 4;         // [R,K] k
    static constexpr uint32_t BK = KEY + R * K * 4;        // [R,K] b k, rounded to T
    static constexpr uint32_t T0 = BK + R * K * 4;         // [R,D] scratch
    static constexpr uint32_t T1 = T0 + R * D * 4;         // [R,D] scratch
    static constexpr uint32_t IN0 = T1 + R * D * 4;        // [R,D] T, arriving
    static constexpr uint32_t IN1 = IN0 + R * D * 2;       // [R,D] T, arriving
    static constexpr uint32_t BK16 = IN1 + R * D * 2;      // [R,K] T, leaving for L1
    static constexpr uint32_t MA16 = BK16 + R * K * 2;     // [R,C] T
    static constexpr uint32_t ML16 = MA16 + R * C * 2;     // [R,C] T
    static constexpr uint32_t STRICT = ML16 + R * C * 2;   // [R,C] 0 below the diagonal, MASKED elsewhere
    static constexpr uint32_t ROWS = STRICT + R * C * 4;   // vectors of [C] and [R], and their broadcasts
    static constexpr uint32_t DV16 = T1;                   // dv leaves from the scratch that made it

    static constexpr uint32_t ROW = R * 4;                 // bytes of an [R] vector
    static constexpr uint32_t BROADCAST = R * BLOCK * 4;   // bytes of an [R] vector, a data block a row
    static constexpr uint32_t G_ALL = ROWS;                         // [C]
    static constexpr uint32_t G_BLOCKS = G_ALL + 2 * ROW;           // [C] broadcast
    static constexpr uint32_t BETA = G_BLOCKS + 2 * BROADCAST;      // [R]
    static constexpr uint32_t BETA_BLOCKS = BETA + ROW;
    static constexpr uint32_t DIAGONAL = BETA_BLOCKS + BROADCAST;   // [R] dA_ii
    static constexpr uint32_t ROW_BLOCKS = DIAGONAL + ROW;          // the broadcast in use
    static constexpr uint32_t GATE = ROW_BLOCKS + BROADCAST;        // [R] dG
    static constexpr uint32_t DBETA = GATE + ROW;                   // [R]
    static constexpr uint32_t REMAINING = DBETA + ROW;              // [R]
    static constexpr uint32_t SUM = REMAINING + ROW;                // [R]
    static constexpr uint32_t PART = SUM + ROW;                     // [R]
    static constexpr uint32_t EYE = PART + ROW;                     // [8,8] the identity
    static constexpr uint32_t UB_END = EYE + BLOCK * BLOCK * 4;
    static_assert(UB_END <= UB_SIZE, "the tiles of a vector core must fit its unified buffer");

    __aicore__ inline void Masks()
    {
        Floats strict = At(STRICT, R * C);
        Duplicate(strict, MASKED, R * C);
        for (int i = 0; i < R; ++i) {
            const int row = sub * R + i;
            if (row > 0) Duplicate(strict[i * C], 0.0f, row);
        }
        Floats eye = At(EYE, BLOCK * BLOCK);
        Duplicate(eye, 0.0f, BLOCK * BLOCK);
        for (int i = 0; i < BLOCK; ++i) {
            Duplicate(eye[i * BLOCK], 1.0f, i + 1);
            if (i > 0) Duplicate(eye[i * BLOCK], 0.0f, i);
        }
    }

    __aicore__ inline void Chunk(int32_t i_n)
    {
        const uint64_t row = uint64_t(i_n) * C + sub * R;
        Floats q = At(Q, R * K), k = At(KEY, R * K), bk = At(BK, R * K), t0 = At(T0, R * D), t1 = At(T1, R * D);
        Floats G = At(G_ALL, C), G_blocks = At(G_BLOCKS, C * BLOCK), beta = At(BETA, R);
        Floats beta_blocks = At(BETA_BLOCKS, R * BLOCK), blocks = At(ROW_BLOCKS, R * BLOCK);
        Floats gate = At(GATE, R), dbeta = At(DBETA, R), remaining = At(REMAINING, R);
        Floats sum = At(SUM, R);

        // Operands of this core's rows.
        WaitFlag<HardEvent::V_MTE2>(0);
        Arrive(G, x.G[uint64_t(i_n) * C], C);
        Arrive(beta, x.beta[row], R);
        Arrive(At16<T>(IN0, R * K), x.q[row * K], R * K);
        Arrive(At16<T>(IN1, R * K), x.k[row * K], R * K);
        Widen(q, k, R * K);
        Brcb(G_blocks, G, C / 8, {1, 8});
        Brcb(beta_blocks, beta, R / 8, {1, 8});

        // b k, rounded as the cube core will read it.
        TimesRows(bk, k, beta_blocks, R, K);
        Cast(At16<T>(BK16, R * K), bk, RoundMode::CAST_RINT, R * K);
        Cast(bk, At16<T>(BK16, R * K), RoundMode::CAST_NONE, R * K);

        // e^{G_i − G_j} below the diagonal, the exponent masked first.
        Sub(t0, G_blocks[sub * R * BLOCK], G, C, R, {1, 0, 1, C / BLOCK, 1, 0});
        Add(t0, t0, At(STRICT, R * C), R * C);
        Exp(t0, t0, R * C);

        // M_A and M_L; the diagonal of dA apart.
        CrossCoreWaitFlag<2, PIPE_V>(OUTER_READY);
        Floats MA = At(P::DO_U, R * C), ML = At(P::DR_U, R * C);
        Muls(MA, MA, x.scale, R * C);
        Diagonal(MA);
        Mul(MA, MA, t0, R * C);
        Cast(At16<T>(MA16, R * C), MA, RoundMode::CAST_RINT, R * C);
        Muls(ML, ML, -1.0f, R * C);
        Mul(ML, ML, t0, R * C);
        Cast(At16<T>(ML16, R * C), ML, RoundMode::CAST_RINT, R * C);
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        ToCube(P::L1_BK, At16<T>(BK16, R * K), sub);
        ToCube(P::L1_MA, At16<T>(MA16, R * C), sub);
        ToCube(P::L1_ML, At16<T>(ML16, R * C), sub);
        CrossCoreSetFlag<2, PIPE_MTE3>(PAIRS_READY);

        // While the cube core contracts: what passes through the states.
        Floats dQ = At(P::DO_S, R * K), dX = At(P::DR_S, R * K), dK = At(P::U_DS, R * K);
        Exp(sum, G[sub * R], R);
        Brcb(blocks, sum, R / 8, {1, 8});
        Muls(dQ, dQ, x.scale, R * K);
        TimesRows(dQ, dQ, blocks, R, K);
        Muls(dX, dX, -1.0f, R * K);
        TimesRows(dX, dX, blocks, R, K);
        Sub(sum, G_blocks[(C - 1) * BLOCK], G[sub * R], R, 1, {1, 0, 1, 8, 8, 8});  // Γ − G_i
        Exp(sum, sum, R);
        Brcb(blocks, sum, R / 8, {1, 8});
        TimesRows(dK, dK, blocks, R, K);

        WaitFlag<HardEvent::MTE3_V>(0);
        Dots(gate, q, dQ, K, t0);
        Dots(dbeta, k, dX, K, t0);
        Mul(sum, dbeta, beta, R);
        Add(gate, gate, sum, R);
        Dots(remaining, k, dK, K, t0);

        // dv = β dR, and v · dR for dβ.
        Stage(x.v[row * V], x.dR[row * V], t0, t1);
        Dots(sum, t0, t1, V, t0);
        Add(dbeta, dbeta, sum, R);
        TimesRows(t0, t1, beta_blocks, R, V);
        LocalTensor<T> dv = At16<T>(DV16, R * V);
        Cast(dv, t0, RoundMode::CAST_RINT, R * V);

        // The contractions: gate gradient from what was multiplied, then dq and dk.
        CrossCoreWaitFlag<2, PIPE_V>(INNER_READY);
        Floats dq = At(P::MA_K, R * K), E = At(P::ML_K, R * K), right = At(P::RIGHT, R * K);
        Dots(sum, q, dq, K, t0);
        Add(gate, gate, sum, R);
        Dots(sum, bk, E, K, t0);
        Add(gate, gate, sum, R);
        Dots(sum, k, right, K, t0);
        Sub(gate, gate, sum, R);
        Dots(sum, k, E, K, t0);
        Add(dbeta, dbeta, sum, R);

        Brcb(blocks, At(DIAGONAL, R), R / 8, {1, 8});
        Add(dq, dq, dQ, R * K);
        TimesRows(t0, k, blocks, R, K);
        Add(dq, dq, t0, R * K);
        Add(E, E, dX, R * K);
        TimesRows(E, E, beta_blocks, R, K);
        Floats dk = E;
        Add(dk, dk, right, R * K);
        Add(dk, dk, dK, R * K);
        TimesRows(t0, q, blocks, R, K);
        Add(dk, dk, t0, R * K);
        CrossCoreSetFlag<2, PIPE_V>(OUTER_FREE);

        SetFlag<HardEvent::V_MTE3>(1);
        WaitFlag<HardEvent::V_MTE3>(1);
        Leave(x.dq[row * K], dq, R * K);
        Leave(x.dk[row * K], dk, R * K);
        Leave(x.dv[row * V], dv, R * V);
        Leave(x.dbeta[row], dbeta, R);
        Leave(x.dG[row], gate, R);
        Leave(x.remaining[row], remaining, R);
        SetFlag<HardEvent::MTE3_V>(0);
    }

    // dA_ii of this core's rows: rows i to i + 7 have theirs in one column of data blocks.
    __aicore__ inline void Diagonal(const Floats &dA)
    {
        Floats eye = At(EYE, BLOCK * BLOCK), picked = At(ROW_BLOCKS, R * BLOCK);
        for (int i = 0; i < R; i += BLOCK) {
            Mul(picked[i * BLOCK], dA[i * C + sub * R + i], eye, BLOCK, BLOCK, {1, 1, 1, 1, C / BLOCK, 1});
        }
        ReduceRepeat<ReduceType::SUM, float, float>(At(DIAGONAL, R), picked, BLOCK, R, 1, 1, 1);
    }

    // Two tiles [R,V] of T from global memory as floats.
    __aicore__ inline void Stage(const GlobalTensor<T> &a, const GlobalTensor<T> &b, const Floats &fa, const Floats &fb)
    {
        WaitFlag<HardEvent::V_MTE2>(0);
        Arrive(At16<T>(IN0, R * V), a, R * V);
        Arrive(At16<T>(IN1, R * V), b, R * V);
        Widen(fa, fb, R * V);
    }

    __aicore__ inline void Widen(const Floats &fa, const Floats &fb, int size)
    {
        SetFlag<HardEvent::MTE2_V>(0);
        WaitFlag<HardEvent::MTE2_V>(0);
        Cast(fa, At16<T>(IN0, size), RoundMode::CAST_NONE, size);
        Cast(fb, At16<T>(IN1, size), RoundMode::CAST_NONE, size);
        SetFlag<HardEvent::V_MTE2>(0);
    }

    // dst[i] = a[i, :] · b[i, :]
    __aicore__ inline void Dots(const Floats &dst, const Floats &a, const Floats &b, int columns, const Floats &scratch)
    {
        Mul(scratch, a, b, R * columns);
        ReduceRepeat<ReduceType::SUM, float, float>(dst, scratch, REPEAT, R, 1, 1, columns / BLOCK);
        Floats part = At(PART, R);
        for (int c = REPEAT; c < columns; c += REPEAT) {
            ReduceRepeat<ReduceType::SUM, float, float>(part, scratch[c], REPEAT, R, 1, 1, columns / BLOCK);
            Add(dst, dst, part, R);
        }
    }

    const ChunkGradientOperands<T> &x;
    const int sub;
};

template <class T, int K, int V>
__aicore__ inline void ChunkGradient(REWY_CHUNK_GRADIENT_TENSORS(GM_ADDR), ChunkGradientTiling tiling)
{
    const uint64_t rows = uint64_t(tiling.N) * C, state = uint64_t(tiling.N) * K * V;
    const ChunkGradientOperands<T> x{
        Global<T>(q, rows * K), Global<T>(k, rows * K), Global<T>(v, rows * V), Global<T>(d_o, rows * V),
        Global<T>(U, rows * V), Global<T>(dR, rows * V), Global<T>(S, state), Global<T>(dS, state),
        Global<float>(beta, rows), Global<float>(G, rows), Global<float>(dq, rows * K), Global<float>(dk, rows * K),
        Global<T>(dv, rows * V), Global<float>(dbeta, rows), Global<float>(dG, rows), Global<float>(remaining, rows),
        tiling.scale, tiling.N};

    InitSocState();
    if ASCEND_IS_AIC { ChunkGradientCube<T, K, V>(x).Run(); }
    if ASCEND_IS_AIV { ChunkGradientVector<T, K, V>(x).Run(); }
    PipeBarrier<PIPE_ALL>();
}

}  // namespace rewy
