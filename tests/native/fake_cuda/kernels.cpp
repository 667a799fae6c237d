// Runs ftrun's own kernel source on the host: one thread after the other, which is right because none waits for another.
#include <tuple>
#include <utility>

#include "fake.hpp"

#define __global__ static
#define __device__
#define unroll
struct Dimension {
    unsigned x;
};
static thread_local Dimension blockIdx, threadIdx, blockDim, gridDim;

#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#include "../../../native/kernels/ftrun.cu"

namespace fake {
namespace {

template <typename... Arguments, size_t... Index>
std::function<void()> launch(void (*body)(Arguments...), unsigned blocks, unsigned threads, void **parameters,
                           std::index_sequence<Index...>) {
    const auto values = std::make_tuple(*static_cast<std::decay_t<Arguments> *>(parameters[Index])...);
    return [=] {
        gridDim.x = blocks;
        blockDim.x = threads;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) std::apply(body, values);
        }
    };
}

template <typename... Arguments>
std::function<void()> launch(void (*body)(Arguments...), unsigned blocks, unsigned threads, void **parameters) {
    return launch(body, blocks, threads, parameters, std::index_sequence_for<Arguments...>{});
}

}  // namespace

std::function<void()> kernel(const std::string &name, unsigned blocks, unsigned threads, void **parameters) {
    if (name == "ftrun_checksum_lanes") return launch(ftrun_checksum_lanes, blocks, threads, parameters);
    if (name == "ftrun_checksum_pieces") return launch(ftrun_checksum_pieces, blocks, threads, parameters);
    if (name == "ftrun_checksum_join") return launch(ftrun_checksum_join, blocks, threads, parameters);
    return {};
}

}  // namespace fake
