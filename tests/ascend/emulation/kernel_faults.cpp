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

constexpr int C = rewy::C, N = 8, CORES = 2;
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
    int K = 128, V = 64;
    std::vector<int32_t> far = {0, 1, 0, 0, 0, 1, 1, 0};
};

template <bool DECAY, bool GATES>
void chunk_gradient(const Form &form = {})
{
    const int K = form.K, V = form.V;
    uint8_t *q = some<T>(N * C * K), *k = some<T>(N * C * K), *v = some<T>(N * C * V), *d_o = some<T>(N * C * V);
    uint8_t *U = some<T>(N * C * V), *dR = some<T>(N * C * V), *S = some<T>(N * K * V), *dS = some<T>(N * K * V);
    uint8_t *b = some<float>(N * C * K), *w = some<float>(N * C * V), *G = some<float>(N * C * K);
    uint8_t *far_ = numbers(form.far), *masks_ = some<float>(8 * C * C);
    uint8_t *dq = some<float>(N * C * K), *dk = some<float>(N * C * K), *dv = some<T>(N * C * V);
    uint8_t *db = some<float>(N * C * K), *dw = some<float>(N * C * V), *dG = some<float>(N * C * K);
    uint8_t *remaining = some<float>(N * C * K), *dU = some<T>(N * C * V), *minus_X = some<T>(N * C * K);
    uint8_t *written = some<T>(N * C * V), *T_ = some<T>(N * C * C);
    const auto tiling =
        rewy::chunk_gradient_tiling(N, K, V, CORES, 0.1, form.conventional, form.gram, form.shared);
    emulation::launch(CORES, [=] { rewy::ChunkGradient<T, DECAY, GATES>(REWY_CHUNK_GRADIENT_NAMES, tiling); });
}

// With the heads of the model of the cost, and decays of ordinary strength.
template <bool DECAY, bool GATES>
void modelled(bool conventional, bool gram = false)
{
    chunk_gradient<DECAY, GATES>(
        {.conventional = conventional, .gram = gram, .V = 128, .far = std::vector<int32_t>(N)});
}

void state_pass(bool reverse, bool conventional = false, bool v_first = false)
{
    constexpr int K = 128, V = 64, STEPS = 4, P = 4, N = STEPS * P;
    uint8_t *X = some<T>(N * C * K), *K_ = some<T>(N * C * K), *T_ = some<T>(N * C * C), *A = some<T>(N * C * C);
    uint8_t *Q = some<T>(N * C * K), *d_o = some<T>(N * C * V), *written = some<float>(N * C * V);
    uint8_t *carry = some<float>(N * K), *first = some<float>(P * K * V), *states = some<float>(N * K * V);
    uint8_t *solved = some<float>(N * C * V), *final = some<float>(P * K * V), *starts_ = numbers({0, P, 2 * P, 3 * P, N});
    uint8_t *unsolved = some<float>(N * C * V);
    emulation::launch(CORES, [=] {
        rewy::StatePass<T, 64>(REWY_STATE_PASS_NAMES,
                               rewy::state_pass_tiling(N, P, STEPS, K, V, CORES, reverse, conventional, v_first,
                                                       v_first));
    });
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
    {"state_forward", [] { state_pass(false); }},
    {"state_forward_v_first", [] { state_pass(false, false, true); }},
    {"state_reverse", [] { state_pass(true); }},
    {"state_reverse_conventional", [] { state_pass(true, true); }},
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
                emulation::vector_results / N);
}
