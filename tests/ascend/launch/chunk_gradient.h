// In place of csrc/chunk_gradient.h and csrc/state_pass.h: kernels that print what they are called with.
#pragma once

#include <cstdio>
#include <sstream>
#include <type_traits>

#include "kernel_operator.h"
#include "launch.h"

namespace rewy {

// name=address of each tensor, from a list of names and their values in that order.
template <class... Address>
void print(const char *kernel, const char *type, const char *names, Address... addresses)
{
    if (!ASCEND_IS_AIC || AscendC::GetBlockIdx() != 0) return;
    std::printf("%s %s", kernel, type);
    std::stringstream list(names);
    std::string name;
    for (uint8_t *address : {addresses...}) {
        std::getline(list >> std::ws, name, ',');
        std::printf(" %s=%zu", name.c_str(), reinterpret_cast<size_t>(address));
    }
    std::printf(" blocks=%lld\n", static_cast<long long>(AscendC::GetBlockNum()));
}

#define REWY_TEXT(...) #__VA_ARGS__
#define REWY_EXPANDED(...) REWY_TEXT(__VA_ARGS__)

template <class T>
const char *type_name()
{
    return std::is_same_v<T, half> ? "fp16" : "bf16";
}

template <class T, bool DECAY, bool GATES>
void ChunkGradient(REWY_CHUNK_GRADIENT_TENSORS(GM_ADDR), ChunkGradientTiling)
{
    const char *kernel = DECAY ? GATES ? "channel gates" : "channel decay" : "scalar gates";
    print(kernel, type_name<T>(), REWY_EXPANDED(REWY_CHUNK_GRADIENT_NAMES), REWY_CHUNK_GRADIENT_NAMES);
}

template <class T, int V>
void StatePass(REWY_STATE_PASS_TENSORS(GM_ADDR), StatePassTiling)
{
    const char *kernel = V == 64 ? "tile 64" : "tile 128";
    print(kernel, type_name<T>(), REWY_EXPANDED(REWY_STATE_PASS_NAMES), REWY_STATE_PASS_NAMES);
}

}  // namespace rewy
