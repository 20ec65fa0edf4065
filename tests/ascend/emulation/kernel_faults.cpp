// Runs a kernel over the emulation on random operands, with one flag dropped if its name is given:
// kernel_faults chunk_gradient|state_forward|state_reverse [MTE2_V(0) | CROSS_CORE(3) | ...].
// Prints what the emulation reports.
#include "chunk_gradient.h"
#include "state_pass.h"

#include <cstdio>
#include <deque>
#include <random>

namespace {

constexpr int N = 6, C = rewy::C, K = 128, V = 64, STEPS = 2, P = N / STEPS, CORES = 2;
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

void chunk_gradient()
{
    uint8_t *q = some<T>(N * C * K), *k = some<T>(N * C * K), *v = some<T>(N * C * V), *d_o = some<T>(N * C * V);
    uint8_t *U = some<T>(N * C * V), *dR = some<T>(N * C * V), *S = some<T>(N * K * V), *dS = some<T>(N * K * V);
    uint8_t *beta = some<float>(N * C), *G = some<float>(N * C);
    uint8_t *dq = some<float>(N * C * K), *dk = some<float>(N * C * K), *dv = some<T>(N * C * V);
    uint8_t *dbeta = some<float>(N * C), *dG = some<float>(N * C), *rest = some<float>(N * C);
    emulation::launch(CORES, [=] {
        rewy::ChunkGradient<T, K, V>(q, k, v, beta, G, d_o, U, dR, S, dS, dq, dk, dv, dbeta, dG, rest,
                                     rewy::chunk_gradient_tiling(N, CORES, 0.1));
    });
}

void state_pass(bool reverse)
{
    uint8_t *X = some<T>(N * C * K), *K_ = some<T>(N * C * K), *T_ = some<T>(N * C * C), *A = some<T>(N * C * C);
    uint8_t *Q = some<T>(N * C * K), *d_o = some<T>(N * C * V), *written = some<float>(N * C * V);
    uint8_t *carry = some<float>(N * K), *first = some<float>(P * K * V), *states = some<float>(N * K * V);
    uint8_t *solved = some<float>(N * C * V), *last = some<float>(P * K * V);
    emulation::launch(CORES, [=] {
        rewy::StatePass<T, K, V>(X, K_, T_, A, Q, d_o, written, carry, first, states, solved, last,
                                 rewy::state_pass_tiling(P, STEPS, CORES, reverse));
    });
}

}  // namespace

int main(int argc, char **argv)
{
    const std::string kernel = argc > 1 ? argv[1] : "";
    if (argc > 2) emulation::dropped = argv[2];
    try {
        if (kernel == "chunk_gradient") {
            chunk_gradient();
        } else if (kernel == "state_forward" || kernel == "state_reverse") {
            state_pass(kernel == "state_reverse");
        } else {
            std::fputs("kernel_faults chunk_gradient|state_forward|state_reverse [flag]\n", stderr);
            return 1;
        }
    } catch (const emulation::Failure &failure) {
        std::puts(failure.what());
        return 0;
    }
    std::puts("no failure");
}
