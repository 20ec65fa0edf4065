// Every launch of csrc/launch.asc, the tensors at addresses 1, 2, 3, ...
#include <cstddef>
#include <utility>

#include "launch.h"

using std::size_t;

namespace {

using namespace rewy;

template <size_t... I>
bool chunk_gradient(Type type, Channels channels, std::index_sequence<I...>)
{
    return launch_chunk_gradient(type, channels, nullptr, reinterpret_cast<uint8_t *>(I + 1)...,
                                 chunk_gradient_tiling(5, 64, 64, {3, DAV_3510}, 1.0, false));
}

template <size_t... I>
bool state_pass(Type type, int V, std::index_sequence<I...>)
{
    return launch_state_pass(type, nullptr, reinterpret_cast<uint8_t *>(I + 1)...,
                             state_pass_tiling(5, 2, 3, 64, V, {2, DAV_3510}, false, false));
}

}  // namespace

int main()
{
    bool launched = true;
    for (Type type : {Type::bf16, Type::fp16}) {
        for (Channels channels : {Channels{false, false}, Channels{true, false}, Channels{true, true}})
            launched &= chunk_gradient(type, channels, std::make_index_sequence<24>());
        for (int V : {64, 128}) launched &= state_pass(type, V, std::make_index_sequence<14>());
    }
    const bool refused = !chunk_gradient(Type::bf16, {false, true}, std::make_index_sequence<24>());
    return launched && refused ? 0 : 1;
}
