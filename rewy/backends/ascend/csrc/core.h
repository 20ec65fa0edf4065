// What the kernels share: products on the cube core, rows on the vector cores, and the ways between them.
#pragma once

#include "kernel_operator.h"

#include "launch.h"

namespace rewy {

using namespace AscendC;

constexpr int R = C / 2;      // rows of a chunk on one vector core
constexpr int D = 64;         // channels of a tile
constexpr int REPEAT = 64;    // floats of a vector repeat (256 bytes)
constexpr int BLOCK = 8;      // floats of a data block (32 bytes)
constexpr int FRACTAL = 16;   // rows and 16-bit columns of a cube fractal
constexpr uint32_t UB_SIZE = DAV_3510.ub;
constexpr uint32_t L1_SIZE = DAV_3510.l1;

constexpr FixpipeConfig ROWS_TO_UB{CO2Layout::ROW_MAJOR, true};

using Floats = LocalTensor<float>;

__aicore__ inline Floats At(uint32_t address, int size) { return Floats(TPosition::VECCALC, address, size); }

template <class T>
__aicore__ inline LocalTensor<T> At16(uint32_t address, int size)
{
    return LocalTensor<T>(TPosition::VECCALC, address, size);
}

// ---- cube core --------------------------------------------------------------------------------------------------

// A matrix in L1 in strips of 16 columns (NZ), as it is stored or transposed.
struct Operand {
    uint32_t address;
    int rows, columns;
    bool transposed = false;

    __aicore__ inline Operand T() const { return {address, rows, columns, !transposed}; }
};

// Products of operands in L1. Operand pairs alternate between the halves of L0A and L0B, results between the
// halves of the first part of L0C, so that loading, multiplying and emitting overlap. Sums that grow over several
// steps lie behind them.
template <class T>
class Cube {
public:
    __aicore__ inline void Prime()
    {
        for (int s = 0; s < 2; ++s) {
            SetFlag<HardEvent::M_MTE1>(s);
            SetFlag<HardEvent::FIX_M>(s);
            SetFlag<HardEvent::MTE1_MTE2>(s);
        }
    }

    __aicore__ inline void Drain()
    {
        for (int s = 0; s < 2; ++s) {
            WaitFlag<HardEvent::MTE1_MTE2>(s);
            WaitFlag<HardEvent::FIX_M>(s);
            WaitFlag<HardEvent::M_MTE1>(s);
        }
    }

    __aicore__ inline void Load(const Operand &dst, const GlobalTensor<T> &src) { Load(dst, src, dst.columns); }
    // From rows that are `pitch` apart.
    __aicore__ inline void Load(const Operand &dst, const GlobalTensor<T> &src, int pitch)
    {
        Nd2NzParams p;
        p.ndNum = 1;
        p.nValue = dst.rows;
        p.dValue = dst.columns;
        p.srcDValue = pitch;
        p.dstNzC0Stride = dst.rows;
        p.dstNzNStride = 1;
        DataCopy(Tensor(dst), src, p);
    }

    // Starts a result with a b.
    __aicore__ inline void Multiply(const Operand &a, const Operand &b)
    {
        WaitFlag<HardEvent::FIX_M>(result & 1);
        Product(a, b, true, Slot());
    }
    // Adds a b to the result.
    __aicore__ inline void MultiplyAdd(const Operand &a, const Operand &b) { Product(a, b, false, Slot()); }

    // Adds the [C,C] products a k and b k to the two sums; the `first` ones start them, on operands that the vector
    // cores send after they have got the sums before.
    __aicore__ inline void Accumulate(const Operand &a, const Operand &b, const Operand &k, bool first)
    {
        Product(a, k, first, SUM);
        Product(b, k, first, SUM + C * C * 4);
    }
    __aicore__ inline void SumsToVector(uint32_t address_a, uint32_t address_b)
    {
        SetFlag<HardEvent::M_FIX>(SUMS);
        WaitFlag<HardEvent::M_FIX>(SUMS);
        Split(address_a, SUM);
        Split(address_b, SUM + C * C * 4);
    }

    // The result to the unified buffers, upper half of the rows to vector core 0, lower half to 1.
    __aicore__ inline void ToVector(uint32_t address)
    {
        Finish();
        Split(address, Slot());
        Free();
    }

    // The result to global memory as it is, rows `pitch` apart, and to L1 in 16 bits as an operand; waits until it is
    // there.
    __aicore__ inline void ToOperand(const Operand &dst, const GlobalTensor<float> &copy, int pitch)
    {
        Finish();
        FixpipeParamsArch3510<CO2Layout::ROW_MAJOR> rows = Whole<CO2Layout::ROW_MAJOR>();
        rows.dstStride = pitch;
        Fixpipe<float, float, CFG_ROW_MAJOR>(copy, Result(), rows);
        Round(dst);
    }
    __aicore__ inline void ToOperand(const Operand &dst)
    {
        Finish();
        Round(dst);
    }

private:
    static constexpr uint32_t SLOT = 32 << 10;
    static constexpr uint32_t RESULT = 64 << 10;
    static constexpr uint32_t SUM = 2 * RESULT;
    static constexpr int32_t SUMS = 2;  // their event, after those of the two results

    __aicore__ inline static LocalTensor<T> Tensor(const Operand &x)
    {
        return LocalTensor<T>(TPosition::A1, x.address, x.rows * x.columns);
    }
    __aicore__ inline uint32_t Slot() const { return (result & 1) * RESULT; }
    __aicore__ inline Floats Result() { return Floats(TPosition::CO1, Slot(), m * n); }

    // The left factor goes to L0A as NZ of [m,k]; the right one to L0B as Zn of [k,n], which is NZ of its
    // transpose. So a right factor that is stored transposed is loaded as it is.
    __aicore__ inline void Product(const Operand &a, const Operand &b, bool first, uint32_t to)
    {
        m = a.transposed ? a.columns : a.rows;
        n = b.transposed ? b.rows : b.columns;
        const int k = a.transposed ? a.rows : a.columns;
        const int slot = step & 1;
        ++step;
        LocalTensor<T> l0a(TPosition::A2, slot * SLOT, m * k), l0b(TPosition::B2, slot * SLOT, k * n);
        WaitFlag<HardEvent::M_MTE1>(slot);
        Fetch(l0a, a, m, a.transposed);
        Fetch(l0b, b, n, !b.transposed);
        SetFlag<HardEvent::MTE1_M>(slot);
        WaitFlag<HardEvent::MTE1_M>(slot);
        MmadParams p;
        p.m = m;
        p.n = n;
        p.k = k;
        p.cmatrixInitVal = first;
        Mmad(Floats(TPosition::CO1, to, m * n), l0a, l0b, p);
        SetFlag<HardEvent::M_MTE1>(slot);
    }

    __aicore__ inline void Fetch(const LocalTensor<T> &dst, const Operand &src, int outer, bool transpose)
    {
        LoadData2DParamsV2 p;
        p.mStep = src.rows / FRACTAL;
        p.kStep = src.columns / FRACTAL;
        p.srcStride = src.rows / FRACTAL;
        p.dstStride = outer / FRACTAL;
        p.ifTranspose = transpose;
        LoadData(dst, Tensor(src), p);
    }

    __aicore__ inline void Split(uint32_t address, uint32_t from)
    {
        FixpipeParamsArch3510<CO2Layout::ROW_MAJOR> p = Whole<CO2Layout::ROW_MAJOR>();
        p.dstStride = n;
        p.dualDstCtl = 1;
        const Floats halves(TPosition::VECIN, address, m / 2 * n);
        Fixpipe<float, float, ROWS_TO_UB>(halves, Floats(TPosition::CO1, from, m * n), p);
    }

    __aicore__ inline void Finish()
    {
        SetFlag<HardEvent::M_FIX>(result & 1);
        WaitFlag<HardEvent::M_FIX>(result & 1);
    }
    __aicore__ inline void Free()
    {
        SetFlag<HardEvent::FIX_M>(result & 1);
        ++result;
    }
    __aicore__ inline void Round(const Operand &dst)
    {
        FixpipeParamsArch3510<CO2Layout::NZ> strips = Whole<CO2Layout::NZ>();
        strips.dstStride = m * FRACTAL;
        strips.quantPre = QuantOf(T{});
        Fixpipe<T, float, CFG_NZ>(Tensor(dst), Result(), strips);
        Free();
        SetFlag<HardEvent::FIX_MTE1>(0);
        WaitFlag<HardEvent::FIX_MTE1>(0);
    }
    __aicore__ inline static QuantMode_t QuantOf(half) { return QuantMode_t::F322F16; }
    __aicore__ inline static QuantMode_t QuantOf(bfloat16_t) { return QuantMode_t::F322BF16; }

    template <CO2Layout layout>
    __aicore__ inline FixpipeParamsArch3510<layout> Whole()
    {
        FixpipeParamsArch3510<layout> p;
        p.mSize = m;
        p.nSize = n;
        p.srcStride = m;
        return p;
    }

    int step = 0;    // operand pairs so far
    int result = 0;  // results so far
    int m = 0, n = 0;  // of the result at hand
};

// ---- vector cores -----------------------------------------------------------------------------------------------

// dst[i, :] = a[i, :] · row[i], `blocks` holding row[i] a data block each.
__aicore__ inline void TimesRows(const Floats &dst, const Floats &a, const Floats &blocks, int rows, int columns)
{
    const uint8_t pitch = columns / BLOCK;
    for (int c = 0; c < columns; c += REPEAT) Mul(dst[c], a[c], blocks, REPEAT, rows, {1, 1, 0, pitch, pitch, 1});
}

// A vector core's share of `total` rows into a matrix in L1: its half, in strips of 16 columns.
template <class T>
__aicore__ inline void ToCube(const Operand &dst, const LocalTensor<T> &src, int sub)
{
    const int rows = dst.rows / 2;
    DataCopyParams p;
    p.blockCount = rows;
    p.blockLen = 1;
    p.srcStride = dst.columns / FRACTAL - 1;
    p.dstStride = 0;
    for (int c = 0; c < dst.columns; c += FRACTAL) {
        const uint32_t strip = dst.address + (c * dst.rows + sub * rows * FRACTAL) * sizeof(T);
        DataCopy(LocalTensor<T>(TPosition::A1, strip, rows * FRACTAL), src[c], p);
    }
}

template <class U>
__aicore__ inline void Arrive(const LocalTensor<U> &dst, const GlobalTensor<U> &src, int size)
{
    DataCopyPad(dst, src, DataCopyExtParams{1, uint32_t(size * sizeof(U)), 0, 0, 0}, DataCopyPadExtParams<U>{});
}
template <class U>
__aicore__ inline void Leave(const GlobalTensor<U> &dst, const LocalTensor<U> &src, int size)
{
    DataCopyPad(dst, src, DataCopyExtParams{1, uint32_t(size * sizeof(U)), 0, 0, 0});
}

// A tile of a matrix whose rows are `pitch` apart.
template <class U>
__aicore__ inline void ArriveRows(const LocalTensor<U> &dst, const GlobalTensor<U> &src, int rows, int columns, int pitch)
{
    const uint32_t gap = (pitch - columns) * sizeof(U);
    DataCopyExtParams p{uint16_t(rows), uint32_t(columns * sizeof(U)), gap, 0, 0};
    DataCopyPad(dst, src, p, DataCopyPadExtParams<U>{});
}
template <class U>
__aicore__ inline void LeaveRows(const GlobalTensor<U> &dst, const LocalTensor<U> &src, int rows, int columns, int pitch)
{
    const uint32_t gap = (pitch - columns) * sizeof(U);
    DataCopyPad(dst, src, DataCopyExtParams{uint16_t(rows), uint32_t(columns * sizeof(U)), 0, gap, 0});
}

template <class U>
__aicore__ inline GlobalTensor<U> Global(GM_ADDR address, uint64_t size)
{
    GlobalTensor<U> t;
    t.SetGlobalBuffer(reinterpret_cast<__gm__ U *>(address), size);
    return t;
}

}  // namespace rewy
