// The emulation's own checks: `checks NAME` runs one of them, `checks` lists them. Each either computes something
// known, or plants one fault that must be reported in so many words.
#include "kernel_operator.h"
#include "launch.h"

#include <cstdio>
#include <map>
#include <random>

using namespace AscendC;

namespace {

using Vector = LocalTensor<float>;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
    std::function<void()> run;
    std::string fault;  // empty: must pass
};
std::map<std::string, Case> &cases()
{
    static std::map<std::string, Case> all;
    return all;
}
struct Register {
    Register(const char *name, const char *fault, std::function<void()> run) { cases()[name] = {std::move(run), fault}; }
};
#define PASSES(name)                                    \
    void name();                                        \
    const Register register_##name{#name, "", name};    \
    void name()
#define REPORTS(name, fault)                            \
    void name();                                        \
    const Register register_##name{#name, fault, name}; \
    void name()

void expect(bool ok, const std::string &what)
{
    if (!ok) throw std::runtime_error("expected " + what);
}

std::vector<bfloat16_t> random_matrix(size_t n, unsigned seed)
{
    std::mt19937 generator(seed);
    std::uniform_int_distribution<int> small(-4, 4);
    std::vector<bfloat16_t> x(n);
    for (auto &v : x) v = bfloat16_t(static_cast<float>(small(generator)));
    return x;
}

// ---- matrix products: every layout of the operands, results to both vector cores -------------------------------

constexpr FixpipeConfig kToUB{CO2Layout::ROW_MAJOR, true};

template <class T>
void load(const LocalTensor<T> &dst, std::vector<T> &src, uint16_t rows, uint16_t columns)
{
    GlobalTensor<T> g;
    g.SetGlobalBuffer(src.data(), src.size());
    Nd2NzParams p{1, rows, columns, 0, columns, rows, 1, 0};
    DataCopy(dst, g, p);
}

void product(std::vector<bfloat16_t> &a, std::vector<bfloat16_t> &b, std::vector<float> &c, uint16_t m, uint16_t n,
             uint16_t k, bool a_transposed, bool b_transposed, int times = 1)
{
    emulation::launch(1, [&] {
        const uint16_t ar = a_transposed ? k : m, ac = a_transposed ? m : k;
        const uint16_t br = b_transposed ? n : k, bc = b_transposed ? k : n;
        if ASCEND_IS_AIC {
            LocalTensor<bfloat16_t> l1a(TPosition::A1, 0, m * k), l1b(TPosition::B1, 64 << 10, k * n);
            LocalTensor<bfloat16_t> l0a(TPosition::A2, 0, m * k), l0b(TPosition::B2, 0, k * n);
            Vector l0c(TPosition::CO1, 0, m * n), ub(TPosition::VECIN, 0, m / 2 * n);
            load(l1a, a, ar, ac);
            load(l1b, b, br, bc);
            SetFlag<HardEvent::MTE2_MTE1>(0);
            WaitFlag<HardEvent::MTE2_MTE1>(0);
            LoadData2DParamsV2 pa{0, 0, uint16_t(ar / 16), uint16_t(ac / 16), ar / 16, uint16_t(m / 16), a_transposed};
            LoadData2DParamsV2 pb{0, 0, uint16_t(br / 16), uint16_t(bc / 16), br / 16, uint16_t(n / 16), !b_transposed};
            LoadData(l0a, l1a, pa);
            LoadData(l0b, l1b, pb);
            SetFlag<HardEvent::MTE1_M>(0);
            WaitFlag<HardEvent::MTE1_M>(0);
            for (int i = 0; i < times; ++i) Mmad(l0c, l0a, l0b, {m, n, k, i == 0});
            SetFlag<HardEvent::M_FIX>(0);
            WaitFlag<HardEvent::M_FIX>(0);
            FixpipeParamsArch3510<CO2Layout::ROW_MAJOR> pf{n, m, m, n};
            pf.dualDstCtl = 1;
            Fixpipe<float, float, kToUB>(ub, l0c, pf);
            CrossCoreSetFlag<2, PIPE_FIX>(0);
        }
        if ASCEND_IS_AIV {
            const uint32_t half_size = m / 2 * n;
            Vector ub(TPosition::VECIN, 0, half_size);
            GlobalTensor<float> out;
            out.SetGlobalBuffer(c.data(), c.size());
            CrossCoreWaitFlag<2, PIPE_MTE3>(0);
            DataCopyPad(out[GetSubBlockIdx() * half_size], ub, DataCopyExtParams{1, half_size * 4, 0, 0});
        }
    });
}

void check_product(bool a_transposed, bool b_transposed, int times = 1)
{
    const uint16_t m = 64, n = 96, k = 48;
    auto a = random_matrix(m * k, 1), b = random_matrix(k * n, 2);
    std::vector<float> c(m * n, kNaN);
    product(a, b, c, m, n, k, a_transposed, b_transposed, times);
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
            float sum = 0;
            for (int l = 0; l < k; ++l)
                sum += float(a[a_transposed ? l * m + i : i * k + l]) * float(b[b_transposed ? j * k + l : l * n + j]);
            expect(c[i * n + j] == times * sum, "the product at " + std::to_string(i) + ", " + std::to_string(j));
        }
    }
}

PASSES(product_plain) { check_product(false, false); }
PASSES(product_a_transposed) { check_product(true, false); }
PASSES(product_b_transposed) { check_product(false, true); }
PASSES(product_both_transposed) { check_product(true, true); }
PASSES(product_accumulates) { check_product(false, true, 3); }

REPORTS(small_products_accumulate_without_barrier, "Mmad on AIC M touches L0C")
{
    auto a = random_matrix(32 * 32, 1), b = random_matrix(32 * 32, 2);
    std::vector<float> c(32 * 32);
    product(a, b, c, 32, 32, 32, false, true, 2);
}

// ---- vectors -----------------------------------------------------------------------------------------------------

void on_vector_core(const std::function<void()> &kernel)
{
    emulation::launch(1, [&] {
        if (emulation::core().kind == emulation::Kind::AIV && GetSubBlockIdx() == 0) kernel();
    });
}

void values(const Vector &x, std::vector<float> v)
{
    for (size_t i = 0; i < v.size(); ++i) x.SetValue(i, v[i]);
    SetFlag<HardEvent::S_V>(0);
    WaitFlag<HardEvent::S_V>(0);
}
std::vector<float> values(const Vector &x, size_t n)
{
    SetFlag<HardEvent::V_S>(0);
    WaitFlag<HardEvent::V_S>(0);
    std::vector<float> v;
    for (size_t i = 0; i < n; ++i) v.push_back(x.GetValue(i));
    return v;
}

PASSES(rows_times_column)
{
    on_vector_core([] {
        Vector column(TPosition::VECCALC, 0, 8), blocks(TPosition::VECCALC, 1024, 64), x(TPosition::VECCALC, 4096, 512);
        values(column, {1, 2, 3, 4, 5, 6, 7, 8});
        Brcb(blocks, column, 1, {1, 8});
        Duplicate(x, 10.0f, 512);
        Mul(x, x, blocks, 64, 8, {1, 1, 0, 8, 8, 1});
        const auto v = values(x, 512);
        for (int i = 0; i < 512; ++i) expect(v[i] == 10.0f * (i / 64 + 1), "row " + std::to_string(i / 64));
    });
}

PASSES(row_sums)
{
    on_vector_core([] {
        Vector x(TPosition::VECCALC, 0, 128), sums(TPosition::VECCALC, 4096, 8);
        std::vector<float> v(128);
        for (int i = 0; i < 128; ++i) v[i] = i;
        values(x, v);
        ReduceRepeat<ReduceType::SUM, float, float>(sums, x, 64, 2, 1, 1, 8);
        expect(values(sums, 2) == std::vector<float>({2016, 6112}), "sums of both rows");
    });
}

// [2,8] transposed: from where its rows begin, one gather a column.
void transpose(uint32_t address)
{
    on_vector_core([=] {
        Vector x(TPosition::VECCALC, 0, 16), columns(TPosition::VECCALC, address, 64);
        LocalTensor<uint32_t> begins(TPosition::VECCALC, 1024, 8);
        for (int i = 0; i < 2; ++i) begins.SetValue(i, i * 32);
        values(x, {0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17});
        for (int i = 0; i < 8; ++i) Gather(columns[i * 8], x, begins, i * 4, 2);
        const auto v = values(columns, 58);
        for (int i = 0; i < 8; ++i) expect(v[i * 8] == i && v[i * 8 + 1] == 10 + i, "column " + std::to_string(i));
    });
}

PASSES(gathers_a_transpose) { transpose(512); }
REPORTS(gather_onto_itself, "Gather: source and result overlap") { transpose(0); }

PASSES(casts_round_to_even)
{
    on_vector_core([] {
        Vector x(TPosition::VECCALC, 0, 16), y(TPosition::VECCALC, 1024, 16);
        LocalTensor<bfloat16_t> b(TPosition::VECCALC, 2048, 16);
        values(x, {1.00390625f, 1.01171875f, -3.0f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
        Cast(b, x, RoundMode::CAST_RINT, 16);
        Cast(y, b, RoundMode::CAST_NONE, 16);
        const auto v = values(y, 3);
        expect(v[0] == 1.0f && v[1] == 1.015625f && v[2] == -3.0f, "bfloat16 values");
    });
}

PASSES(exp_flushes_subnormals)
{
    on_vector_core([] {
        Vector x(TPosition::VECCALC, 0, 8);
        values(x, {0, -1000, -100, 1, 0, 0, 0, 0});
        Exp(x, x, 4);
        const auto v = values(x, 4);
        expect(v[0] == 1 && v[1] == 0 && v[2] == 0 && std::fabs(v[3] - 2.7182817f) < 1e-6f, "exponentials");
    });
}

// ---- planted faults ----------------------------------------------------------------------------------------------

void copy_and_double(bool wait)
{
    std::vector<float> x(64, 1.0f);
    on_vector_core([&] {
        GlobalTensor<float> g;
        g.SetGlobalBuffer(x.data(), x.size());
        Vector ub(TPosition::VECIN, 0, 64);
        DataCopyPad(ub, g, DataCopyExtParams{1, 256, 0, 0}, DataCopyPadExtParams<float>{});
        SetFlag<HardEvent::MTE2_V>(0);
        if (wait) WaitFlag<HardEvent::MTE2_V>(0);
        Muls(ub, ub, 2.0f, 64);
    });
}
PASSES(copy_then_wait) { copy_and_double(true); }
REPORTS(copy_without_wait, "Muls on AIV 0 V touches UB of AIV 0 near byte 0, which was written at checks.cpp")
{
    copy_and_double(false);
}

REPORTS(buffer_reused_while_read, "which was read at checks.cpp")
{
    std::vector<float> x(64, 1.0f);
    on_vector_core([&] {
        GlobalTensor<float> g;
        g.SetGlobalBuffer(x.data(), x.size());
        Vector ub(TPosition::VECOUT, 0, 64);
        Duplicate(ub, 1.0f, 64);
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        DataCopyPad(g, ub, DataCopyExtParams{1, 256, 0, 0});
        Duplicate(ub, 2.0f, 64);
    });
}

REPORTS(reads_what_nobody_wrote, "that nothing has written")
{
    on_vector_core([] { Muls(Vector(TPosition::VECCALC, 0, 64), Vector(TPosition::VECCALC, 1024, 64), 1.0f, 64); });
}
REPORTS(unified_buffer_overflows, "a local tensor ends at byte 253984 of UB of AIV 0, which has 253952")
{
    on_vector_core([] { Vector(TPosition::VECCALC, 253952 - 32, 16); });
}
REPORTS(l0a_overflows, "of L0A, which has 65536")
{
    emulation::launch(1, [] {
        if ASCEND_IS_AIC { LocalTensor<half>(TPosition::A2, 0, (32 << 10) + 1); }
    });
}
REPORTS(tensor_misaligned, "which is no multiple of 32")
{
    on_vector_core([] { Vector(TPosition::VECCALC, 16, 8); });
}
REPORTS(tensor_overrun, "touches elements 0..72 of a local tensor that has 64")
{
    on_vector_core([] { Duplicate(Vector(TPosition::VECCALC, 0, 64), 0.0f, 72); });
}
REPORTS(global_stride_too_wide, "of a global tensor that has 1024")
{
    auto x = random_matrix(1024, 1);
    emulation::launch(1, [&] {
        if ASCEND_IS_AIC {
            GlobalTensor<bfloat16_t> g;
            g.SetGlobalBuffer(x.data(), x.size());
            DataCopy(LocalTensor<bfloat16_t>(TPosition::A1, 0, 1024), g, Nd2NzParams{1, 32, 32, 0, 33, 32, 1, 0});
        }
    });
}
REPORTS(flag_set_twice, "twice without a wait")
{
    on_vector_core([] {
        SetFlag<HardEvent::V_MTE3>(0);
        SetFlag<HardEvent::V_MTE3>(0);
    });
}
REPORTS(flag_left_over, "SetFlag<V_MTE3>(1) is never waited for")
{
    on_vector_core([] { SetFlag<HardEvent::V_MTE3>(1); });
}
REPORTS(wait_for_nothing, "for a flag that nothing has set")
{
    on_vector_core([] { WaitFlag<HardEvent::V_MTE3>(0); });
}
REPORTS(wrong_cast, "quantPre does not fit")
{
    emulation::launch(1, [] {
        if ASCEND_IS_AIC {
            Fixpipe<bfloat16_t, float, kToUB>(LocalTensor<bfloat16_t>(TPosition::VECIN, 0, 256),
                                              Vector(TPosition::CO1, 0, 256), {16, 16, 16, 16});
        }
    });
}

REPORTS(one_vector_core_stays_away, "deadlock: waits for cross-core flag 3")
{
    emulation::launch(1, [] {
        if ASCEND_IS_AIC { CrossCoreWaitFlag<2, PIPE_MTE1>(3); }
        if ASCEND_IS_AIV {
            if (GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(3);
        }
    });
}
REPORTS(counter_overflows, "passes 15")
{
    emulation::launch(1, [] {
        if ASCEND_IS_AIC {
            for (int i = 0; i < 16; ++i) CrossCoreSetFlag<2, PIPE_FIX>(0);
        }
    });
}
REPORTS(credit_left_over, "ends with cross-core flag 1 at 1")
{
    emulation::launch(1, [] {
        if ASCEND_IS_AIC { CrossCoreSetFlag<2, PIPE_FIX>(1); }
    });
}

// A vector core hands tiles to the cube core through L1 and reuses its buffer: with a free flag it may, without
// one the cube core may still be reading.
void handover(bool credit)
{
    emulation::launch(1, [credit] {
        LocalTensor<bfloat16_t> l1(TPosition::A1, 0, 512);
        for (int i = 0; i < 2; ++i) {
            if ASCEND_IS_AIV {
                LocalTensor<bfloat16_t> ub(TPosition::VECOUT, 0, 256);
                if (i == 1) {
                    SetFlag<HardEvent::MTE3_V>(0);
                    WaitFlag<HardEvent::MTE3_V>(0);
                }
                Duplicate(ub, bfloat16_t(1.0f), 256);
                SetFlag<HardEvent::V_MTE3>(0);
                WaitFlag<HardEvent::V_MTE3>(0);
                if (credit && i == 1) CrossCoreWaitFlag<2, PIPE_MTE3>(1);
                DataCopy(l1[256 * GetSubBlockIdx()], ub, DataCopyParams{1, 16, 0, 0});
                CrossCoreSetFlag<2, PIPE_MTE3>(0);
            }
            if ASCEND_IS_AIC {
                LocalTensor<bfloat16_t> l0(TPosition::A2, 0, 512);
                CrossCoreWaitFlag<2, PIPE_MTE1>(0);
                PipeBarrier<PIPE_MTE1>();
                LoadData(l0, l1, {0, 0, 2, 1, 2, 2, false});
                if (credit && i == 0) CrossCoreSetFlag<2, PIPE_MTE1>(1);
            }
        }
    });
}
PASSES(handover_with_credit) { handover(true); }
REPORTS(handover_without_credit, "with no wait between") { handover(false); }

// ---- tiling (csrc/launch.h) --------------------------------------------------------------------------------------

constexpr rewy::Chip CHIP{32, rewy::DAV_3510};

PASSES(tiling_gives_no_core_nothing)
{
    expect(rewy::chunk_gradient_tiling(5, 64, 64, CHIP, 1.0, false).blocks == 5, "five chunks, five blocks");
    expect(rewy::chunk_gradient_tiling(500, 64, 64, {24, rewy::DAV_3510}, 1.0, false).blocks == 24, "every core of a chip with 24");
    expect(rewy::state_pass_tiling(40, 4, 10, 128, 128, CHIP, false, false).blocks == 8, "four scans in two tiles each");
}

PASSES(tiling_of_values)
{
    auto tile = [](int64_t P, int64_t K, int64_t V) { return rewy::state_pass_tiling(P, P, 1, K, V, CHIP, true, false).tile; };
    expect(tile(32, 128, 128) == 128, "wide tiles where they keep every core busy");
    expect(tile(31, 128, 128) == 64, "narrow ones where they do not");
    expect(tile(16, 128, 256) == 128, "two wide tiles of a sequence count as two");
    expect(tile(64, 192, 128) == 64 && tile(64, 256, 128) == 64, "narrow ones for states of more than 128 rows");
    expect(tile(64, 64, 192) == 64, "narrow ones for what is no multiple of 128");
    const rewy::StatePassTiling t = rewy::state_pass_tiling(8, 8, 1, 128, 192, CHIP, false, false);
    expect(t.tiles * t.tile == 192, "tiles cover the values");
}

PASSES(tiling_of_l1)
{
    auto ahead = [](int64_t K, int64_t V, bool conventional, int64_t l1) {
        rewy::Chip chip = CHIP;
        chip.buffers.l1 = l1;
        return rewy::chunk_gradient_tiling(8, K, V, chip, 1.0, conventional).ahead;
    };
    const int64_t whole = rewy::DAV_3510.l1, two = rewy::chunk_gradient_takes(128, 128, false, 2).l1;
    expect(ahead(192, 192, false, whole) && !ahead(192, 256, false, whole), "two chunks while they fit");
    expect(ahead(192, 128, true, whole) && !ahead(192, 192, true, whole), "in the conventional form as well");
    expect(ahead(128, 128, false, two) && !ahead(128, 128, false, two - 1), "in what the chip has");
    expect(!ahead(256, 256, false, 2 * whole), "and not in more than the kernels are made for");
}

PASSES(tiling_of_a_smaller_unified_buffer)
{
    rewy::Chip chip = CHIP;
    chip.buffers.ub = rewy::state_pass_ub(128) - 1;
    expect(rewy::state_pass_tiling(64, 64, 1, 128, 128, chip, true, false).tile == 64, "narrow tiles where wide ones do not fit");
}

// Each buffer of the chip as large as is needed, then a byte smaller.
PASSES(lacking_names_the_buffer)
{
    auto refused = [](const rewy::Lack &lack, const char *buffer, int64_t taken, int64_t there) {
        return std::string(lack.buffer) == buffer && lack.taken == taken && lack.there == there;
    };
    const rewy::Buffers needed = rewy::chunk_gradient_takes(256, 256, true, 1);
    expect(rewy::chunk_gradient_lacks(256, 256, true, needed).buffer == nullptr, "what it takes is enough");
    const std::pair<int64_t rewy::Buffers::*, const char *> each[] = {{&rewy::Buffers::ub, "unified buffer"},
                                                                     {&rewy::Buffers::l1, "L1"},
                                                                     {&rewy::Buffers::l0a, "L0A"},
                                                                     {&rewy::Buffers::l0b, "L0B"},
                                                                     {&rewy::Buffers::l0c, "L0C"}};
    for (const auto &[buffer, name] : each) {
        for (int64_t there : {needed.*buffer - 1, int64_t{0}}) {
            rewy::Buffers smaller = needed;
            smaller.*buffer = there;
            const rewy::Lack lack = rewy::chunk_gradient_lacks(256, 256, true, smaller);
            expect(refused(lack, name, needed.*buffer, there), "a byte less is not, nor is a size that is not told");
        }
    }
    expect(rewy::chunk_gradient_lacks(64, 64, false, {needed.ub, needed.l1 / 4, needed.l0a, needed.l0b, needed.l0c})
                   .buffer == nullptr,
           "small heads take less of L1");
    const rewy::Buffers state = rewy::state_pass_takes(256, 64);
    expect(rewy::state_pass_lacks(256, state).buffer == nullptr, "a state pass has its own needs");
    expect(refused(rewy::state_pass_lacks(256, {state.ub - 1, state.l1, state.l0a, state.l0b, state.l0c}),
                   "unified buffer", state.ub, state.ub - 1),
           "and is refused by them");
}

PASSES(every_size_fits_the_chip_of_the_kernels)
{
    for (int64_t K : {64, 128, 192, 256}) {
        expect(rewy::state_pass_lacks(K, rewy::DAV_3510).buffer == nullptr, "state passes");
        for (int64_t V : {64, 128, 192, 256})
            for (bool conventional : {false, true})
                expect(rewy::chunk_gradient_lacks(K, V, conventional, rewy::DAV_3510).buffer == nullptr, "chunk gradient");
    }
}

PASSES(sizes_taken)
{
    for (int64_t n : {64, 128, 192, 256}) expect(rewy::takes_sizes(n, 64) && rewy::takes_sizes(64, n), "multiples of 64");
    for (int64_t n : {0, 32, 96, 320}) expect(!rewy::takes_sizes(n, 64) && !rewy::takes_sizes(64, n), "nothing else");
}

}  // namespace

int main(int argc, char **argv)
{
    if (argc < 2) {
        for (const auto &[name, _] : cases()) std::puts(name.c_str());
        return 0;
    }
    const Case &c = cases().at(argv[1]);
    std::string failure;
    try {
        c.run();
    } catch (const std::exception &e) {
        failure = e.what();
    }
    const bool ok = c.fault.empty() ? failure.empty() : failure.find(c.fault) != std::string::npos;
    std::printf("%s: %s\n", argv[1], failure.empty() ? "no failure" : failure.c_str());
    return ok ? 0 : 1;
}
