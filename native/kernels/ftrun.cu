// Kernels of ftrun. Compiled to ftrun.ptx by make_ptx.py (keep both in step: a test compares them).
// No kernel shares memory or waits for another thread, so that the tests' fake driver can run this same source on the host.
#include "../src/memory/hash.hpp"

namespace {

__device__ inline uint64_t word_at(const unsigned char *at) {
    if ((reinterpret_cast<uintptr_t>(at) & 7) == 0) return *reinterpret_cast<const uint64_t *>(at);
    uint64_t value = 0;
    for (int i = 7; i >= 0; --i) value = value << 8 | at[i];
    return value;
}

// The word at `offset` of the last block, of which `rest` bytes are there.
__device__ inline uint64_t padded_word(const unsigned char *block, uint64_t offset, uint64_t rest) {
    uint64_t value = 0;
    for (uint64_t i = 0; i < 8; ++i) {
        if (offset + i < rest) value |= static_cast<uint64_t>(block[offset + i]) << (8 * i);
    }
    return value;
}

__device__ inline uint64_t thread_index() { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ inline uint64_t piece_length(uint64_t length, uint64_t piece) {
    const uint64_t left = length - piece * ftrun::kPiece;
    return left < ftrun::kPiece ? left : ftrun::kPiece;
}

}  // namespace

extern "C" {

// One thread a lane of a piece: 8 neighbours read 64 neighbouring bytes. `lanes` has room for 8 * pieces words.
__global__ void ftrun_checksum_lanes(const unsigned char *data, uint64_t length, uint64_t seed, uint64_t first,
                                     uint64_t pieces, uint64_t *lanes) {
    const uint64_t index = thread_index();
    if (index >= pieces * ftrun::kLanes) return;
    const uint64_t piece = first + index / ftrun::kLanes;
    const uint64_t lane = index % ftrun::kLanes;
    const uint64_t size = length == 0 ? 0 : piece_length(length, piece);
    const unsigned char *at = data + piece * ftrun::kPiece;
    const uint64_t mine = lane * 8, beside = (lane ^ 1) * 8;
    uint64_t state = ftrun::first_of_lane(seed + piece, lane);
    uint64_t key = ftrun::first_key(state);
    const uint64_t blocks = size / ftrun::kBlock;
#pragma unroll 8
    for (uint64_t block = 0; block < blocks; ++block) {
        state = ftrun::absorb(state, key, word_at(at + mine), word_at(at + beside));
        key += ftrun::kSpread;
        at += ftrun::kBlock;
        if (block % ftrun::kStirred == ftrun::kStirred - 1) state = ftrun::stir(state);
    }
    const uint64_t rest = size - blocks * ftrun::kBlock;
    if (rest != 0) state = ftrun::absorb(state, key, padded_word(at, mine, rest), padded_word(at, beside, rest));
    lanes[index] = state;
}

// One thread a piece: its 8 lanes become its hash, written over the first of them.
__global__ void ftrun_checksum_pieces(uint64_t length, uint64_t seed, uint64_t first, uint64_t pieces, uint64_t *lanes) {
    const uint64_t index = thread_index();
    if (index >= pieces) return;
    uint64_t *mine = lanes + index * ftrun::kLanes;
    const uint64_t piece = first + index;
    uint64_t result = ftrun::finish((seed + piece) ^ (length == 0 ? 0 : piece_length(length, piece)));
    for (uint64_t lane = 0; lane < ftrun::kLanes; ++lane) result = ftrun::step(result, ftrun::finish(mine[lane]));
    mine[0] = ftrun::finish(result);
}

// One thread in all: chains the pieces in order. `total` carries the chain from one call to the next.
__global__ void ftrun_checksum_join(uint64_t length, uint64_t seed, uint64_t first, uint64_t pieces,
                                    const uint64_t *lanes, uint64_t *total, uint64_t last) {
    if (thread_index() != 0) return;
    uint64_t chain = first == 0 ? ftrun::finish(seed + ftrun::kMultiply) : *total;
#pragma unroll 8
    for (uint64_t piece = 0; piece < pieces; ++piece) chain = ftrun::step(chain, lanes[piece * ftrun::kLanes]);
    *total = last ? ftrun::finish(chain ^ length) : chain;
}

}  // extern "C"
