// The arithmetic of ftrun_checksum, shared by the host and the GPU: both must give the same 64 bits.
//
// Words are multiplied as halves of 32 bits, which vector units do four or more at a time: the hash of bytes that are being
// copied anyway must not be what the copy waits for.
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
constexpr size_t kPiece = 1024 * 1024;
constexpr size_t kStirred = 16;  // blocks after which the lanes are stirred

FTRUN_EVERYWHERE inline uint64_t rotate(uint64_t value, int by) { return (value << by) | (value >> (64 - by)); }

// One more value of a chain; a bijection of either. The rotation brings high bits back down.
FTRUN_EVERYWHERE inline uint64_t step(uint64_t chain, uint64_t next) { return rotate((chain ^ next) * kMultiply, 29); }

// One more word of a lane. The product makes it count by its place, which is in the key; the neighbour's word makes sure
// that a single word is never lost in a product with zero.
FTRUN_EVERYWHERE inline uint64_t absorb(uint64_t lane, uint64_t key, uint64_t word, uint64_t neighbour) {
    const uint64_t mixed = word ^ key;
    return lane + (mixed & 0xFFFFFFFFu) * (mixed >> 32) + neighbour;
}

// Brings high bits back down: without it two flipped sign bits far from each other might cancel out.
FTRUN_EVERYWHERE inline uint64_t stir(uint64_t lane) { return (lane ^ (lane >> 29)) * kMultiply; }

FTRUN_EVERYWHERE inline uint64_t finish(uint64_t value) {
    value ^= value >> 32;
    value *= kSpread;
    value ^= value >> 29;
    value *= kMultiply;
    return value ^ (value >> 32);
}

FTRUN_EVERYWHERE inline uint64_t first_of_lane(uint64_t seed, size_t lane) { return finish(seed + (lane + 1) * kSpread); }

// The key of a lane's first word; each further block adds kSpread.
FTRUN_EVERYWHERE inline uint64_t first_key(uint64_t first_of_lane) { return finish(first_of_lane ^ kMultiply); }

}  // namespace ftrun
