// The arithmetic of ftrun_checksum, shared by the host and the GPU: both must give the same 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define FTRUN_EVERYWHERE __host__ __device__
#else
#define FTRUN_EVERYWHERE
#endif

namespace ftrun {

constexpr uint64_t kMultiply = 0x9FB21C651E98DF25u;
constexpr uint64_t kSpread = 0xD6E8FEB86659FD93u;
constexpr size_t kLanes = 8;
constexpr size_t kBlock = kLanes * sizeof(uint64_t);
constexpr size_t kPiece = 4 * 1024 * 1024;

FTRUN_EVERYWHERE inline uint64_t rotate(uint64_t value, int by) { return (value << by) | (value >> (64 - by)); }

// The rotation brings high bits back down: without it two flipped sign bits in one lane would cancel out.
FTRUN_EVERYWHERE inline uint64_t step(uint64_t lane, uint64_t word) { return rotate((lane ^ word) * kMultiply, 29); }

FTRUN_EVERYWHERE inline uint64_t finish(uint64_t value) {
    value ^= value >> 32;
    value *= kSpread;
    value ^= value >> 29;
    value *= kMultiply;
    return value ^ (value >> 32);
}

FTRUN_EVERYWHERE inline uint64_t first_of_lane(uint64_t seed, size_t lane) { return finish(seed + (lane + 1) * kSpread); }

}  // namespace ftrun
