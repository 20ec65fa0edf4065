// Runs a kernel over the emulation on random operands, with one flag dropped if its name is given:
// kernel_faults chunk_gradient|state_forward|... [MTE2_V(0) | CROSS_CORE(3) | ...].
// Prints what the emulation reports, or else how many products ran beside loads, and a vector core's results per chunk
// in units of 256 bytes.
#include "chunk_gradient.h"
#include "state_pass.h"

#include <cstdio>
#include <deque>
#include <map>
#include <random>

namespace {

constexpr int C = rewy::C, CHUNKS = 8, CORES = 2;
constexpr rewy::Chip CHIP{CORES, rewy::DAV_3510};
using T = bfloat16_t;

// Random operands, and results: they live until the process ends.
template <class U>
uint8_t *some(size_t n)
{
    static std::deque<std::vector<U>> all;
    static std::mt19937 generator(0);
    std::uniform_real_distribution<float> uniform(-0.1f, 0.1f);
    std::vector<U> &x = all.emplace_back(n);
    for (U &v : x) v = U(uniform(generator));
    return reinterpret_cast<uint8_t *>(x.data());
}

uint8_t *numbers(std::vector<int32_t> x)
{
    static std::deque<std::vector<int32_t>> all;
    return reinterpret_cast<uint8_t *>(all.emplace_back(std::move(x)).data());
}

struct Form {
    bool conventional = false, gram = false, shared = false;
    int K = 128, V = 64, N = CHUNKS;
    std::vector<int32_t> far = {0, 1, 0, 0, 0, 1, 1, 0};
};

template <bool DECAY, bool GATES>
void chunk_gradient(const Form &form = {})
{
    const int K = form.K, V = form.V, N = form.N;
    uint8_t *q = some<T>(N * C * K), *k = some<T>(N * C * K), *v = some<T>(N * C * V), *d_o = some<T>(N * C * V);
    uint8_t *U = some<T>(N * C * V), *dR = some<T>(N * C * V), *S = some<T>(N * K * V), *dS = some<T>(N * K * V);
    uint8_t *b = some<float>(N * C * K), *w = some<float>(N * C * V), *G = some<float>(N * C * K);
    uint8_t *far_ = numbers(form.far), *masks_ = some<float>(8 * C * C);
    uint8_t *dq = some<float>(N * C * K), *dk = some<float>(N * C * K), *dv = some<T>(N * C * V);
    uint8_t *db = some<float>(N * C * K), *dw = some<float>(N * C * V), *dG = some<float>(N * C * K);
    uint8_t *remaining = some<float>(N * C * K), *dU = some<T>(N * C * V), *minus_X = some<T>(N * C * K);
    uint8_t *written = some<T>(N * C * V), *T_ = some<T>(N * C * C);
    const auto tiling =
        rewy::chunk_gradient_tiling(N, K, V, CHIP, 0.1, form.conventional, form.gram, form.shared);
    emulation::launch(CORES, [=] { rewy::ChunkGradient<T, DECAY, GATES>(REWY_CHUNK_GRADIENT_NAMES, tiling); });
}

// With the heads of the model of the cost, and decays of ordinary strength.
template <bool DECAY, bool GATES>
void modelled(bool conventional, bool gram = false)
{
    chunk_gradient<DECAY, GATES>(
        {.conventional = conventional, .gram = gram, .V = 128, .far = std::vector<int32_t>(CHUNKS)});
}

template <int TILE = 64>
void state_pass(bool reverse, bool conventional = false, bool v_first = false, int K = 128, bool by_sequence = false)
{
    constexpr int V = TILE, STEPS = 4, P = 4, N = STEPS * P;
    // By sequence: two of them, of five chunks and of two, with two heads; a chunk of each head is left over.
    const std::vector<int32_t> by_step{0, P, 2 * P, 3 * P, N}, starts = by_sequence ? std::vector<int32_t>{0, 10, 14} : by_step;
    uint8_t *X = some<T>(N * C * K), *K_ = some<T>(N * C * K), *T_ = some<T>(N * C * C), *A = some<T>(N * C * C);
    uint8_t *Q = some<T>(N * C * K), *d_o = some<T>(N * C * V), *written = some<float>(N * C * V);
    uint8_t *carry = some<float>(N * K), *first = some<float>(P * K * V), *states = some<float>(N * K * V);
    uint8_t *solved = some<float>(N * C * V), *final = some<float>(P * K * V), *starts_ = numbers(starts);
    uint8_t *unsolved = some<float>(N * C * V);
    emulation::launch(CORES, [=] {
        rewy::StatePass<T, TILE>(REWY_STATE_PASS_NAMES,
                                 rewy::state_pass_tiling(N, P, starts.size() - 1, K, V, CHIP, reverse, conventional,
                                                         v_first, v_first, by_sequence));
    });
}

// What a kernel touches of the buffers against what the host thinks that it takes: no more of any, all of L1, and over
// the kernels of each kind all of every buffer.
class Room {
public:
    void compare(const char *kernel, int K, int V, const rewy::Buffers &taken, const std::function<void()> &run)
    {
        emulation::touched = {};
        run();
        const auto &[l1, l0a, l0b, l0c, ub0, ub1] = emulation::touched;
        const size_t touched[] = {std::max(ub0, ub1), l1, l0a, l0b, l0c};
        const int64_t stated[] = {taken.ub, taken.l1, taken.l0a, taken.l0b, taken.l0c};
        for (int i = 0; i < 5; ++i) {
            used_up[i] |= touched[i] == size_t(stated[i]);
            if (touched[i] > size_t(stated[i]) || (i == 1 && touched[i] != size_t(stated[i])))
                std::printf("%s, K = %d, V = %d, %s: touches %zu, takes %lld\n", kernel, K, V, NAMES[i], touched[i],
                            static_cast<long long>(stated[i]));
        }
    }

    ~Room()
    {
        for (int i = 0; i < 5; ++i)
            if (!used_up[i]) std::printf("%s: no kernel takes all\n", NAMES[i]);
    }

private:
    static constexpr const char *NAMES[] = {"UB", "L1", "L0A", "L0B", "L0C"};
    bool used_up[5] = {};
};

void room()
{
    Room gradients, states;
    for (int K = 64; K <= 256; K += 64) {
        for (int V = 64; V <= 256; V += 64) {
            for (bool conventional : {false, true}) {
                const bool ahead = rewy::chunk_gradient_tiling(CHUNKS, K, V, CHIP, 1.0, conventional).ahead;
                gradients.compare("chunk gradient", K, V, rewy::chunk_gradient_takes(K, V, conventional, 1 + ahead), [=] {
                    chunk_gradient<false, false>({.conventional = conventional, .gram = conventional, .K = K, .V = V, .N = 2 * CORES});
                });
            }
        }
        auto run = [&]<int TILE>() {
            states.compare("state pass", K, TILE, rewy::state_pass_takes(K, TILE),
                           [=] { state_pass<TILE>(true, false, true, K); });
        };
        run.operator()<64>();
        if (K <= 128) run.operator()<128>();
    }
}

const std::map<std::string, std::function<void()>> KERNELS{
    {"chunk_gradient", [] { chunk_gradient<false, false>(); }},
    {"chunk_gradient_channel_decay", [] { chunk_gradient<true, false>(); }},
    {"chunk_gradient_channel_gates", [] { chunk_gradient<true, true>(); }},
    {"chunk_gradient_shared", [] { chunk_gradient<false, false>({.shared = true}); }},
    {"chunk_gradient_large", [] { chunk_gradient<false, false>({.K = 256, .V = 256}); }},
    {"chunk_gradient_conventional", [] { chunk_gradient<false, false>({.conventional = true, .gram = true}); }},
    {"chunk_gradient_conventional_no_decay", [] { chunk_gradient<false, false>({.conventional = true}); }},
    {"chunk_gradient_conventional_channel_decay", [] { chunk_gradient<true, false>({.conventional = true}); }},
    {"chunk_gradient_conventional_channel_gates", [] { chunk_gradient<true, true>({.conventional = true}); }},
    {"no decay, ReWY", [] { modelled<false, false>(false); }},
    {"no decay, conventional", [] { modelled<false, false>(true); }},
    {"scalar, ReWY", [] { modelled<false, false>(false); }},
    {"scalar, conventional", [] { modelled<false, false>(true, true); }},
    {"decay per channel, ReWY", [] { modelled<true, false>(false); }},
    {"decay per channel, conventional", [] { modelled<true, false>(true); }},
    {"all gates per channel, ReWY", [] { modelled<true, true>(false); }},
    {"all gates per channel, conventional", [] { modelled<true, true>(true); }},
    {"room", room},
    {"state_forward", [] { state_pass(false); }},
    {"state_forward_v_first", [] { state_pass(false, false, true); }},
    {"state_reverse", [] { state_pass(true); }},
    {"state_reverse_conventional", [] { state_pass(true, true); }},
    {"state_forward_by_sequence", [] { state_pass(false, false, false, 128, true); }},
    {"state_reverse_by_sequence", [] { state_pass(true, false, false, 128, true); }},
};

}  // namespace

int main(int argc, char **argv)
{
    const std::string kernel = argc > 1 ? argv[1] : "";
    if (argc > 2) emulation::dropped = argv[2];
    if (!KERNELS.contains(kernel)) {
        for (const auto &[name, run] : KERNELS) std::fprintf(stderr, "kernel_faults %s [flag]\n", name.c_str());
        return 1;
    }
    try {
        KERNELS.at(kernel)();
    } catch (const emulation::Failure &failure) {
        std::puts(failure.what());
        return 0;
    }
    std::printf("no failure\n%u of %u\n%u\n", emulation::products_beside_loads, emulation::products,
                emulation::vector_results / CHUNKS);
}
