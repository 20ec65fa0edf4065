// The two scans over chunks, for every kind of gate: decays are in the operands already (docs/derivation.md):
// X = b ⊙ k ⊙ e^G, K̃ = k ⊙ e^{Γ−G}, Q̃ = scale · q ⊙ e^G, and the carry e^Γ, one factor a row of the state.
//
//   forward   R = w ⊙ v − X S        U = T R                  S ← e^Γ ⊙ S + K̃ᵀ U
//   reverse   dU = Aᵀ do + K̃ dS      dR = Tᵀ dU               dS ← e^Γ ⊙ dS + Q̃ᵀ do − Xᵀ dR
//
// dR is the first of the three products around T. A block takes whole sequences of one head, chunk after chunk. The
// state stays in fp32 in the unified buffers, half of its rows in each vector core; the cube core gets it rounded.
//
// Cube and vector cores take turns, so a READY flag also tells its waiter that what it overwrites next has been used;
// there are no FREE flags.
#pragma once

#include "core.h"

namespace rewy {

// Cross-core flags (mode 2).
constexpr uint16_t STATE_READY = 0;     // vector → cube: the state is in L1
constexpr uint16_t PREDICTED_READY = 1; // cube → vector: X S is in the unified buffers
constexpr uint16_t R_READY = 2;         // vector → cube: R is in L1
constexpr uint16_t UPDATE_READY = 3;    // cube → vector: what the chunk adds to the state

// P sequences of heads with `steps` chunks each; chunk i of sequence s is row i·P + s of what is per chunk.
template <class T>
struct StatePassOperands {
    GlobalTensor<T> X, K, T_, A, Q, d_o;  // [steps·P,C,..]; forward: X, K̃, T; reverse: −X, K̃, T, A, Q̃, do
    GlobalTensor<float> written;          // forward: w ⊙ v [steps·P,C,V]
    GlobalTensor<float> carry;            // [steps·P,K]
    GlobalTensor<float> first;            // [P,K,V] the state that the scan starts with
    GlobalTensor<float> states;           // [steps·P,K,V] the state that each chunk finds
    GlobalTensor<float> solved;           // [steps·P,C,V] U, or dR
    GlobalTensor<float> final;            // [P,K,V]
    int32_t P, steps;
    bool reverse;

    // The chunk that step i comes to.
    __aicore__ inline uint64_t Row(int32_t i, int32_t i_p) const
    {
        return uint64_t(reverse ? steps - 1 - i : i) * P + i_p;
    }
};

template <int K, int V>
struct StatePlaces {
    // unified buffers, bytes
    static constexpr uint32_t PREDICTED = 0;                             // [R,V] X S
    static constexpr uint32_t UPDATE = PREDICTED + R * V * 4;            // [K/2,V] K̃ᵀ U, or Q̃ᵀ do − Xᵀ dR
    static constexpr uint32_t STATE = UPDATE + K / 2 * V * 4;            // [K/2,V]
    static constexpr uint32_t STATE16 = STATE + K / 2 * V * 4;           // [K/2,V] T
    static constexpr uint32_t WRITTEN = STATE16 + K / 2 * V * 2;         // [R,V]
    static constexpr uint32_t R16 = WRITTEN + R * V * 4;                 // [R,V] T
    static constexpr uint32_t CARRY = R16 + R * V * 2;                   // [K/2]
    static constexpr uint32_t CARRY_BLOCKS = CARRY + K / 2 * 4;          // [K/2] broadcast
    static constexpr uint32_t END = CARRY_BLOCKS + K / 2 * BLOCK * 4;
    static_assert(END <= UB_SIZE, "the state must fit the unified buffers of two vector cores");
    // L1
    static constexpr Operand L1_STATE{0, K, V};
    static constexpr Operand L1_R{L1_STATE.address + K * V * 2, C, V};   // R, or dU
    static constexpr Operand L1_U{L1_R.address + C * V * 2, C, V};       // U, or dR
    static constexpr Operand L1_DO{L1_U.address + C * V * 2, C, V};
    static constexpr Operand L1_X{L1_DO.address + C * V * 2, C, K};
    static constexpr Operand L1_K{L1_X.address + C * K * 2, C, K};
    static constexpr Operand L1_Q{L1_K.address + C * K * 2, C, K};
    static constexpr Operand L1_T{L1_Q.address + C * K * 2, C, C};
    static constexpr Operand L1_A{L1_T.address + C * C * 2, C, C};
};

template <class T, int K, int V>
class StatePassCube : Cube<T> {
public:
    __aicore__ inline explicit StatePassCube(const StatePassOperands<T> &x) : x(x) {}

    __aicore__ inline void Run()
    {
        this->Prime();
        for (int32_t i_p = GetBlockIdx(); i_p < x.P; i_p += GetBlockNum()) {
            for (int32_t i = 0; i < x.steps; ++i) {
                if (x.reverse) {
                    Reverse(x.Row(i, i_p));
                } else {
                    Forward(x.Row(i, i_p));
                }
            }
        }
        this->Drain();
    }

private:
    using P = StatePlaces<K, V>;

    __aicore__ inline void Forward(uint64_t i_n)
    {
        WaitFlag<HardEvent::MTE1_MTE2>(0);
        this->Load(P::L1_X, x.X[i_n * C * K]);
        this->Load(P::L1_T, x.T_[i_n * C * C]);
        this->Load(P::L1_K, x.K[i_n * C * K]);
        SetFlag<HardEvent::MTE2_MTE1>(0);
        WaitFlag<HardEvent::MTE2_MTE1>(0);

        CrossCoreWaitFlag<2, PIPE_MTE1>(STATE_READY);
        this->Multiply(P::L1_X, P::L1_STATE);
        this->ToVector(P::PREDICTED);
        CrossCoreSetFlag<2, PIPE_FIX>(PREDICTED_READY);

        CrossCoreWaitFlag<2, PIPE_MTE1>(R_READY);
        this->Multiply(P::L1_T, P::L1_R);
        this->ToOperand(P::L1_U, x.solved[i_n * C * V]);
        this->Multiply(P::L1_K.T(), P::L1_U);
        SetFlag<HardEvent::MTE1_MTE2>(0);
        this->ToVector(P::UPDATE);
        CrossCoreSetFlag<2, PIPE_FIX>(UPDATE_READY);
    }

    __aicore__ inline void Reverse(uint64_t i_n)
    {
        WaitFlag<HardEvent::MTE1_MTE2>(0);
        this->Load(P::L1_A, x.A[i_n * C * C]);
        this->Load(P::L1_DO, x.d_o[i_n * C * V]);
        this->Load(P::L1_K, x.K[i_n * C * K]);
        this->Load(P::L1_T, x.T_[i_n * C * C]);
        this->Load(P::L1_Q, x.Q[i_n * C * K]);
        this->Load(P::L1_X, x.X[i_n * C * K]);
        SetFlag<HardEvent::MTE2_MTE1>(0);
        WaitFlag<HardEvent::MTE2_MTE1>(0);

        this->Multiply(P::L1_A.T(), P::L1_DO);
        CrossCoreWaitFlag<2, PIPE_MTE1>(STATE_READY);
        this->MultiplyAdd(P::L1_K, P::L1_STATE);
        this->ToOperand(P::L1_R);
        this->Multiply(P::L1_T.T(), P::L1_R);
        this->ToOperand(P::L1_U, x.solved[i_n * C * V]);
        this->Multiply(P::L1_Q.T(), P::L1_DO);
        this->MultiplyAdd(P::L1_X.T(), P::L1_U);
        SetFlag<HardEvent::MTE1_MTE2>(0);
        this->ToVector(P::UPDATE);
        CrossCoreSetFlag<2, PIPE_FIX>(UPDATE_READY);
    }

    const StatePassOperands<T> &x;
};

template <class T, int K, int V>
class StatePassVector {
public:
    __aicore__ inline explicit StatePassVector(const StatePassOperands<T> &x) : x(x), sub(GetSubBlockIdx()) {}

    __aicore__ inline void Run()
    {
        SetFlag<HardEvent::MTE3_MTE2>(0);
        SetFlag<HardEvent::V_MTE2>(0);
        for (int32_t i_p = GetBlockIdx() / 2; i_p < x.P; i_p += GetBlockNum()) Sequence(i_p);
        WaitFlag<HardEvent::MTE3_MTE2>(0);
        WaitFlag<HardEvent::V_MTE2>(0);
    }

private:
    using P = StatePlaces<K, V>;
    static constexpr int HALF = K / 2;

    __aicore__ inline uint64_t Share(uint64_t row) const { return (row * K + sub * HALF) * V; }

    __aicore__ inline void Sequence(int32_t i_p)
    {
        Floats state = At(P::STATE, HALF * V), update = At(P::UPDATE, HALF * V);
        Floats blocks = At(P::CARRY_BLOCKS, HALF * BLOCK);
        WaitFlag<HardEvent::MTE3_MTE2>(0);
        WaitFlag<HardEvent::V_MTE2>(0);
        Arrive(state, x.first[Share(i_p)], HALF * V);
        SetFlag<HardEvent::MTE2_V>(0);
        WaitFlag<HardEvent::MTE2_V>(0);
        SetFlag<HardEvent::V_MTE2>(0);

        for (int32_t i = 0; i < x.steps; ++i) {
            const uint64_t i_n = x.Row(i, i_p);
            LocalTensor<T> rounded = At16<T>(P::STATE16, HALF * V);
            Cast(rounded, state, RoundMode::CAST_RINT, HALF * V);
            SetFlag<HardEvent::V_MTE3>(0);
            WaitFlag<HardEvent::V_MTE3>(0);
            ToCube(P::L1_STATE, rounded, sub);
            CrossCoreSetFlag<2, PIPE_MTE3>(STATE_READY);
            Leave(x.states[Share(i_n)], state, HALF * V);
            SetFlag<HardEvent::MTE3_V>(0);

            WaitFlag<HardEvent::V_MTE2>(0);
            Arrive(At(P::CARRY, HALF), x.carry[i_n * K + sub * HALF], HALF);
            if (!x.reverse) Arrive(At(P::WRITTEN, R * V), x.written[(i_n * C + sub * R) * V], R * V);
            SetFlag<HardEvent::MTE2_V>(0);
            WaitFlag<HardEvent::MTE2_V>(0);
            if (!x.reverse) Residual();

            CrossCoreWaitFlag<2, PIPE_V>(UPDATE_READY);
            WaitFlag<HardEvent::MTE3_V>(0);
            Brcb(blocks, At(P::CARRY, HALF), HALF / 8, {1, 8});
            TimesRows(state, state, blocks, HALF, V);
            Add(state, state, update, HALF * V);
            SetFlag<HardEvent::V_MTE2>(0);
        }
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        Leave(x.final[Share(i_p)], state, HALF * V);
        SetFlag<HardEvent::MTE3_MTE2>(0);
    }

    // R = w ⊙ v − X S, in fp32 and rounded once: where the state predicts v, what is left is small.
    __aicore__ inline void Residual()
    {
        Floats written = At(P::WRITTEN, R * V);
        LocalTensor<T> rounded = At16<T>(P::R16, R * V);
        CrossCoreWaitFlag<2, PIPE_V>(PREDICTED_READY);
        Sub(written, written, At(P::PREDICTED, R * V), R * V);
        Cast(rounded, written, RoundMode::CAST_RINT, R * V);
        SetFlag<HardEvent::V_MTE3>(1);
        WaitFlag<HardEvent::V_MTE3>(1);
        ToCube(P::L1_R, rounded, sub);
        CrossCoreSetFlag<2, PIPE_MTE3>(R_READY);
    }

    const StatePassOperands<T> &x;
    const int sub;
};

template <class T, int K, int V>
__aicore__ inline void StatePass(REWY_STATE_PASS_TENSORS(GM_ADDR), StatePassTiling tiling)
{
    const uint64_t P = tiling.P, N = P * tiling.steps, reverse = tiling.reverse ? 1 : 0, forward = 1 - reverse;
    const StatePassOperands<T> x{
        Global<T>(X, N * C * K), Global<T>(K_, N * C * K), Global<T>(T_, N * C * C), Global<T>(A, reverse * N * C * C),
        Global<T>(Q, reverse * N * C * K), Global<T>(d_o, reverse * N * C * V),
        Global<float>(written, forward * N * C * V), Global<float>(carry, N * K), Global<float>(first, P * K * V),
        Global<float>(states, N * K * V), Global<float>(solved, N * C * V), Global<float>(final, P * K * V),
        tiling.P, tiling.steps, tiling.reverse};

    InitSocState();
    if ASCEND_IS_AIC { StatePassCube<T, K, V>(x).Run(); }
    if ASCEND_IS_AIV { StatePassVector<T, K, V>(x).Run(); }
    PipeBarrier<PIPE_ALL>();
}

}  // namespace rewy
