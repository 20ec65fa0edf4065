// The two scans over chunks, for every kind of gate: decays are in the operands already (docs/derivation.md):
// X = b ⊙ k ⊙ e^G, K̃ = k ⊙ e^{Γ−G}, Q̃ = scale · q ⊙ e^G, and the carry e^Γ, one factor a row of the state.
//
//   forward   R = w ⊙ v − X S        U = T R                  S ← e^Γ ⊙ S + K̃ᵀ U
//   reverse   dU = Aᵀ do + K̃ dS      dR = Tᵀ dU               dS ← e^Γ ⊙ dS + Q̃ᵀ do − Xᵀ dR
//
// dR is the first of the three products around T. The conventional form of the reverse pass, for comparison, has −W in
// place of −X and dU in place of dR in the last line, and hands both dR and dU on.
//
// No column of values meets another, so a block takes a tile of value columns of one sequence and head, chunk after
// chunk. The state stays in fp32 in the unified buffers, half of its rows in each vector core; the cube core gets it
// rounded.
//
// Cube and vector cores take turns, so a READY flag also tells its waiter that what it overwrites next has been used;
// there are no FREE flags. What a chunk loads has two places, in L1 and in the unified buffers: that of the next one
// arrives while this one is computed.
#pragma once

#include "core.h"

namespace rewy {

// Cross-core flags (mode 2).
constexpr uint16_t STATE_READY = 0;     // vector → cube: the state is in L1
constexpr uint16_t PREDICTED_READY = 1; // cube → vector: X S is in the unified buffers
constexpr uint16_t R_READY = 2;         // vector → cube: R is in L1
constexpr uint16_t UPDATE_READY = 3;    // cube → vector: what the chunk adds to the state

// P sequences of heads. By step, longest first: chunk i of sequence s is row starts[i] + s of what is per chunk, and the
// sequences that have a chunk i are the first starts[i+1] − starts[i]. By sequence, when the device alone knows lengths:
// chunk i of head h of sequence n is row starts[n] + i · heads + h, and rows past the last sequence are left alone.
template <class T>
struct StatePassOperands {
    GlobalTensor<T> X, K, T_, A, Q, d_o;  // [N,C,..]; forward: X, K̃, T; reverse: −X, K̃, T, A, Q̃, do
    GlobalTensor<float> written;          // forward: w ⊙ v [N,C,V]
    GlobalTensor<float> carry;            // [N,K]
    GlobalTensor<float> first;            // [P,K,V] the state that the scan starts with, or [P,V,K]
    GlobalTensor<int32_t> starts;         // [starts+1]
    GlobalTensor<float> states;           // [N,K,V] the state that each chunk finds
    GlobalTensor<float> solved;           // [N,C,V] U, or dR
    GlobalTensor<float> final;            // [P,K,V], or [P,V,K]
    GlobalTensor<float> unsolved;         // [N,C,V] dU, the conventional form only
    StatePassTiling tiling;

    // The chunks that sequence i_p has; by step a later one has no more.
    __aicore__ inline int32_t Length(int32_t i_p) const
    {
        int32_t n = 0;
        if (tiling.heads > 0) {
            n = i_p / tiling.heads;
            return (starts.GetValue(n + 1) - starts.GetValue(n)) / tiling.heads;
        }
        while (n < tiling.starts && starts.GetValue(n + 1) - starts.GetValue(n) > i_p) ++n;
        return n;
    }

    // The row of the chunk that comes as number i of `length`.
    __aicore__ inline uint64_t Row(int32_t i, int32_t length, int32_t i_p) const
    {
        const int32_t chunk = tiling.reverse ? length - 1 - i : i, heads = tiling.heads;
        if (heads > 0) return uint64_t(starts.GetValue(i_p / heads)) + uint64_t(chunk) * heads + i_p % heads;
        return uint64_t(starts.GetValue(chunk)) + i_p;
    }
};

// Where things lie, for states of K rows and tiles of V columns.
template <int V>
struct StatePlaces {
    static constexpr int MOST_KEYS = V == 64 ? 256 : 128;
    // unified buffers, bytes
    static constexpr uint32_t PREDICTED = 0;                                    // [R,V] X S
    static constexpr uint32_t WRITTEN = PREDICTED + R * V * 4;                  // [R,V], twice
    static constexpr uint32_t R16 = WRITTEN + 2 * R * V * 4;                    // [R,V] T
    static constexpr uint32_t UPDATE = R16 + R * V * 2;                         // [K/2,V] K̃ᵀ U, or Q̃ᵀ do − Xᵀ dR
    static constexpr uint32_t STATE = UPDATE + MOST_KEYS / 2 * V * 4;           // [K/2,V]
    static constexpr uint32_t STATE16 = STATE + MOST_KEYS / 2 * V * 4;          // [K/2,V] T
    static constexpr uint32_t CARRY = STATE16 + MOST_KEYS / 2 * V * 2;          // [K/2], twice
    static constexpr uint32_t CARRY_BLOCKS = CARRY + 2 * MOST_KEYS / 2 * 4;     // [K/2] broadcast
    static constexpr uint32_t VALUES = CARRY_BLOCKS + MOST_KEYS / 2 * BLOCK * 4;  // [V] where rows of [V,K/2] begin
    static constexpr uint32_t KEYS = VALUES + V * 4;                            // [K/2] and those of [K/2,V]
    static constexpr uint32_t END = KEYS + MOST_KEYS / 2 * 4;
    static_assert(END <= UB_SIZE, "the state must fit the unified buffers of two vector cores");
    static_assert(END == state_pass_ub(V), "the host has to know how much of them it takes");
    // L1
    static constexpr Operand L1_R{0, C, V};                                     // R, or dU
    static constexpr Operand L1_U{L1_R.address + C * V * 2, C, V};              // U, or dR
    static constexpr uint32_t L1_STATE = L1_U.address + C * V * 2;              // [K,V]
    static constexpr uint32_t L1_LOADED = L1_STATE + MOST_KEYS * V * 2;         // LoadedChunk<V>, twice
};

// What the cube core loads of a chunk, in L1.
template <int V>
struct LoadedChunk {
    const Operand d_o, T, A, X, K, Q;

    __aicore__ inline LoadedChunk(int keys, int slot)
        : d_o{StatePlaces<V>::L1_LOADED + slot * Size(keys), C, V}, T{d_o.address + C * V * 2, C, C},
          A{T.address + C * C * 2, C, C}, X{A.address + C * C * 2, C, keys}, K{X.address + C * keys * 2, C, keys},
          Q{K.address + C * keys * 2, C, keys}
    {
    }

    static constexpr uint32_t Size(int keys) { return C * (V + 2 * C + 3 * keys) * 2; }
    static_assert(StatePlaces<V>::L1_LOADED + 2 * Size(StatePlaces<V>::MOST_KEYS) <= L1_SIZE, "two chunks must fit L1");
};

template <class T, int V>
class StatePassCube : Cube<T> {
public:
    __aicore__ inline explicit StatePassCube(const StatePassOperands<T> &x)
        : x(x), K(x.tiling.K), pitch(x.tiling.V), state{P::L1_STATE, x.tiling.K, V},
          loaded{{x.tiling.K, 0}, {x.tiling.K, 1}}
    {
    }

    __aicore__ inline void Run()
    {
        int slot = 0;
        this->Prime();
        for (int32_t i_pv = GetBlockIdx(); i_pv < x.tiling.P * x.tiling.tiles; i_pv += GetBlockNum()) {
            const int32_t i_p = i_pv / x.tiling.tiles, length = x.Length(i_p);
            const int column = i_pv % x.tiling.tiles * V;
            if (length > 0) Fetch(x.Row(0, length, i_p), column, slot);
            for (int32_t i = 0; i < length; ++i) {
                if (i + 1 < length) Fetch(x.Row(i + 1, length, i_p), column, 1 - slot);
                if (x.tiling.reverse) {
                    Reverse(x.Row(i, length, i_p), column, slot);
                } else {
                    Forward(x.Row(i, length, i_p), column, slot);
                }
                slot = 1 - slot;
            }
        }
        this->Drain();
    }

private:
    using P = StatePlaces<V>;

    __aicore__ inline void Fetch(uint64_t i_n, int column, int slot)
    {
        const LoadedChunk<V> &l1 = loaded[slot];
        WaitFlag<HardEvent::MTE1_MTE2>(slot);
        if (x.tiling.reverse) {
            this->Load(l1.A, x.A[i_n * C * C]);
            this->Load(l1.d_o, x.d_o[i_n * C * pitch + column], pitch);
            this->Load(l1.Q, x.Q[i_n * C * K]);
        }
        this->Load(l1.X, x.X[i_n * C * K]);
        this->Load(l1.T, x.T_[i_n * C * C]);
        this->Load(l1.K, x.K[i_n * C * K]);
        SetFlag<HardEvent::MTE2_MTE1>(slot);
    }

    __aicore__ inline void Forward(uint64_t i_n, int column, int slot)
    {
        const LoadedChunk<V> &l1 = loaded[slot];
        WaitFlag<HardEvent::MTE2_MTE1>(slot);
        CrossCoreWaitFlag<2, PIPE_MTE1>(STATE_READY);
        this->Multiply(l1.X, state);
        this->ToVector(P::PREDICTED);
        CrossCoreSetFlag<2, PIPE_FIX>(PREDICTED_READY);

        CrossCoreWaitFlag<2, PIPE_MTE1>(R_READY);
        this->Multiply(l1.T, P::L1_R);
        this->ToOperand(P::L1_U, x.solved[i_n * C * pitch + column], pitch);
        this->Multiply(l1.K.T(), P::L1_U);
        SetFlag<HardEvent::MTE1_MTE2>(slot);
        this->ToVector(P::UPDATE);
        CrossCoreSetFlag<2, PIPE_FIX>(UPDATE_READY);
    }

    __aicore__ inline void Reverse(uint64_t i_n, int column, int slot)
    {
        const LoadedChunk<V> &l1 = loaded[slot];
        WaitFlag<HardEvent::MTE2_MTE1>(slot);
        this->Multiply(l1.A.T(), l1.d_o);
        CrossCoreWaitFlag<2, PIPE_MTE1>(STATE_READY);
        this->MultiplyAdd(l1.K, state);
        if (x.tiling.conventional) {
            this->ToOperand(P::L1_R, x.unsolved[i_n * C * pitch + column], pitch);
        } else {
            this->ToOperand(P::L1_R);
        }
        this->Multiply(l1.T.T(), P::L1_R);
        this->ToOperand(P::L1_U, x.solved[i_n * C * pitch + column], pitch);
        this->Multiply(l1.Q.T(), l1.d_o);
        this->MultiplyAdd(l1.X.T(), x.tiling.conventional ? P::L1_R : P::L1_U);
        SetFlag<HardEvent::MTE1_MTE2>(slot);
        this->ToVector(P::UPDATE);
        CrossCoreSetFlag<2, PIPE_FIX>(UPDATE_READY);
    }

    const StatePassOperands<T> &x;
    const int K, pitch;
    const Operand state;
    const LoadedChunk<V> loaded[2];
};

template <class T, int V>
class StatePassVector {
public:
    __aicore__ inline explicit StatePassVector(const StatePassOperands<T> &x)
        : x(x), K(x.tiling.K), pitch(x.tiling.V), half_keys(K / 2), sub(GetSubBlockIdx())
    {
    }

    __aicore__ inline void Run()
    {
        if (x.tiling.first_v || x.tiling.final_v) {
            Rows(At32(P::VALUES, V), V, half_keys);
            Rows(At32(P::KEYS, half_keys), half_keys, V);
            SetFlag<HardEvent::S_V>(0);
            WaitFlag<HardEvent::S_V>(0);
        }
        SetFlag<HardEvent::MTE3_MTE2>(0);
        for (int s = 0; s < 2; ++s) SetFlag<HardEvent::V_MTE2>(s);
        for (int32_t i_pv = GetBlockIdx() / 2; i_pv < x.tiling.P * x.tiling.tiles; i_pv += GetBlockNum()) {
            Sequence(i_pv / x.tiling.tiles, i_pv % x.tiling.tiles * V);
        }
        WaitFlag<HardEvent::MTE3_MTE2>(0);
        for (int s = 0; s < 2; ++s) WaitFlag<HardEvent::V_MTE2>(s);
    }

private:
    using P = StatePlaces<V>;
    static constexpr int32_t FIRST = 2;  // the first state's event, after those of the chunks' two places

    // Where this core's half of a state's tile begins.
    __aicore__ inline uint64_t Share(uint64_t row, int column) const
    {
        return (row * K + sub * half_keys) * pitch + column;
    }
    __aicore__ inline uint64_t ShareV(uint64_t row, int column) const
    {
        return (row * pitch + column) * K + sub * half_keys;
    }

    __aicore__ inline static LocalTensor<uint32_t> At32(uint32_t address, int size)
    {
        return LocalTensor<uint32_t>(TPosition::VECCALC, address, size);
    }

    // In bytes, where the rows of a matrix [rows,columns] of floats begin.
    __aicore__ inline static void Rows(const LocalTensor<uint32_t> &begins, int rows, int columns)
    {
        for (int i = 0; i < rows; ++i) begins.SetValue(i, i * columns * 4);
    }

    // dst [rows,columns] from src [columns,rows], whose rows begin so.
    __aicore__ inline static void Transpose(const Floats &dst, const Floats &src, const LocalTensor<uint32_t> &begins,
                                            int rows, int columns)
    {
        for (int i = 0; i < rows; ++i) Gather(dst[i * columns], src, begins, i * 4, columns);
    }

    __aicore__ inline void Sequence(int32_t i_p, int column)
    {
        Floats state = At(P::STATE, half_keys * V), update = At(P::UPDATE, half_keys * V);
        Floats blocks = At(P::CARRY_BLOCKS, half_keys * BLOCK);
        WaitFlag<HardEvent::MTE3_MTE2>(0);
        if (x.tiling.first_v) {
            ArriveRows(update, x.first[ShareV(i_p, column)], V, half_keys, K);
        } else {
            ArriveRows(state, x.first[Share(i_p, column)], half_keys, V, pitch);
        }
        SetFlag<HardEvent::MTE2_V>(FIRST);
        WaitFlag<HardEvent::MTE2_V>(FIRST);
        if (x.tiling.first_v) Transpose(state, update, At32(P::VALUES, V), half_keys, V);

        const int32_t length = x.Length(i_p);
        if (length > 0) Fetch(x.Row(0, length, i_p), column, slot);
        for (int32_t i = 0; i < length; ++i) {
            const uint64_t i_n = x.Row(i, length, i_p);
            if (i + 1 < length) Fetch(x.Row(i + 1, length, i_p), column, 1 - slot);
            LocalTensor<T> rounded = At16<T>(P::STATE16, half_keys * V);
            Cast(rounded, state, RoundMode::CAST_RINT, half_keys * V);
            SetFlag<HardEvent::V_MTE3>(0);
            WaitFlag<HardEvent::V_MTE3>(0);
            ToCube(Operand{P::L1_STATE, K, V}, rounded, sub);
            CrossCoreSetFlag<2, PIPE_MTE3>(STATE_READY);
            LeaveRows(x.states[Share(i_n, column)], state, half_keys, V, pitch);
            SetFlag<HardEvent::MTE3_V>(0);

            WaitFlag<HardEvent::MTE2_V>(slot);
            if (!x.tiling.reverse) Residual();

            CrossCoreWaitFlag<2, PIPE_V>(UPDATE_READY);
            WaitFlag<HardEvent::MTE3_V>(0);
            Brcb(blocks, Carry(slot), half_keys / 8, {1, 8});
            TimesRows(state, state, blocks, half_keys, V);
            Add(state, state, update, half_keys * V);
            SetFlag<HardEvent::V_MTE2>(slot);
            slot = 1 - slot;
        }
        if (x.tiling.final_v) Transpose(update, state, At32(P::KEYS, half_keys), V, half_keys);
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        if (x.tiling.final_v) {
            LeaveRows(x.final[ShareV(i_p, column)], update, V, half_keys, K);
        } else {
            LeaveRows(x.final[Share(i_p, column)], state, half_keys, V, pitch);
        }
        SetFlag<HardEvent::MTE3_MTE2>(0);
    }

    __aicore__ inline Floats Carry(int slot) const { return At(P::CARRY + slot * P::MOST_KEYS / 2 * 4, half_keys); }
    __aicore__ inline Floats Written(int slot) const { return At(P::WRITTEN + slot * R * V * 4, R * V); }

    __aicore__ inline void Fetch(uint64_t i_n, int column, int slot)
    {
        WaitFlag<HardEvent::V_MTE2>(slot);
        Arrive(Carry(slot), x.carry[i_n * K + sub * half_keys], half_keys);
        if (!x.tiling.reverse) {
            ArriveRows(Written(slot), x.written[(i_n * C + sub * R) * pitch + column], R, V, pitch);
        }
        SetFlag<HardEvent::MTE2_V>(slot);
    }

    // R = w ⊙ v − X S, in fp32 and rounded once: where the state predicts v, what is left is small.
    __aicore__ inline void Residual()
    {
        Floats written = Written(slot);
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
    const int K, pitch, half_keys;
    const int sub;
    int slot = 0;  // of the chunk at hand
};

template <class T, int V>
__aicore__ inline void StatePass(REWY_STATE_PASS_TENSORS(GM_ADDR), StatePassTiling tiling)
{
    const uint64_t N = tiling.N, reverse = tiling.reverse ? 1 : 0, forward = 1 - reverse;
    const uint64_t keys = N * C * tiling.K, values = N * C * tiling.V, scores = N * C * C;
    const uint64_t state = uint64_t(tiling.K) * tiling.V;
    const StatePassOperands<T> x{
        Global<T>(X, keys), Global<T>(K_, keys), Global<T>(T_, scores), Global<T>(A, reverse * scores),
        Global<T>(Q, reverse * keys), Global<T>(d_o, reverse * values), Global<float>(written, forward * values),
        Global<float>(carry, N * tiling.K), Global<float>(first, tiling.P * state),
        Global<int32_t>(starts_, uint64_t(tiling.starts) + 1),
        Global<float>(states, N * state), Global<float>(solved, values), Global<float>(final, tiling.P * state),
        Global<float>(unsolved, tiling.conventional ? values : 0), tiling};

    InitSocState();
    if ASCEND_IS_AIC { StatePassCube<T, V>(x).Run(); }
    if ASCEND_IS_AIV { StatePassVector<T, V>(x).Run(); }
    PipeBarrier<PIPE_ALL>();
}

}  // namespace rewy
