// The launchers of csrc/launch.h over the emulation, in place of csrc/launch.asc: the same kernel sources.
#include "chunk_gradient.h"
#include "state_pass.h"

namespace rewy {

namespace {

// Calls kernel() of the type.
template <class F>
void of_type(Type type, F kernel)
{
    if (type == Type::bf16) {
        kernel.template operator()<bfloat16_t>();
    } else {
        kernel.template operator()<half>();
    }
}

}  // namespace

bool launch_chunk_gradient(Type type, Channels channels, void *, REWY_CHUNK_GRADIENT_TENSORS(uint8_t *),
                           ChunkGradientTiling tiling)
{
#define REWY_INSTANCE(DECAY, GATES)                                                                        \
    if (channels.decay == DECAY && channels.gates == GATES) {                                              \
        of_type(type, [&]<class T>() {                                                                     \
            emulation::launch(tiling.blocks,                                                               \
                              [&] { ChunkGradient<T, DECAY, GATES>(REWY_CHUNK_GRADIENT_NAMES, tiling); }); \
        });                                                                                                \
        return true;                                                                                       \
    }
    REWY_GATES(REWY_INSTANCE)
#undef REWY_INSTANCE
    return false;
}

bool launch_state_pass(Type type, void *, REWY_STATE_PASS_TENSORS(uint8_t *), StatePassTiling tiling)
{
#define REWY_INSTANCE(V)                                                                                    \
    if (tiling.tile == V) {                                                                                 \
        of_type(type, [&]<class T>() {                                                                      \
            emulation::launch(tiling.blocks, [&] { StatePass<T, V>(REWY_STATE_PASS_NAMES, tiling); });      \
        });                                                                                                 \
        return true;                                                                                        \
    }
    REWY_TILES(REWY_INSTANCE)
#undef REWY_INSTANCE
    return false;
}

}  // namespace rewy
