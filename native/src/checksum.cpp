// A fast position-dependent 64-bit hash. Not cryptographic: it finds damage, not forgery.
//
// A piece of up to 4 MiB is read as little-endian 64-bit words dealt to 8 lanes; the last block is padded with zeros.
// Each step of a lane is a bijection of its state, so one changed word always changes the lane. Pieces are hashed with
// their index as part of the seed and chained in order, which lets threads share the work without changing the result.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "ftrun_native.h"
#include "hash.hpp"
#include "thread.hpp"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum is defined on little-endian words"
#endif

namespace ftrun {
namespace {

constexpr size_t kSample = 4096;

inline void absorb(uint64_t (&lanes)[kLanes], const unsigned char *block) {
    uint64_t words[kLanes];
    std::memcpy(words, block, kBlock);
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
}

uint64_t hash_piece(const unsigned char *data, size_t length, uint64_t seed) {
    uint64_t lanes[kLanes];
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = first_of_lane(seed, i);
    size_t at = 0;
    for (; at + kBlock <= length; at += kBlock) absorb(lanes, data + at);
    if (at < length) {
        unsigned char last[kBlock] = {};
        std::memcpy(last, data + at, length - at);
        absorb(lanes, last);
    }
    uint64_t result = finish(seed ^ length);
    for (const uint64_t lane : lanes) result = step(result, finish(lane));
    return finish(result);
}

struct Pieces {
    const unsigned char *data;
    size_t length;
    uint64_t seed;
    uint64_t *results;
};

uint64_t hash_nth(const Pieces &pieces, size_t piece) {
    const size_t from = piece * kPiece;
    return hash_piece(pieces.data + from, std::min(kPiece, pieces.length - from), pieces.seed + piece);
}

void keep_nth(void *context, size_t piece) {
    const Pieces &pieces = *static_cast<Pieces *>(context);
    pieces.results[piece] = hash_nth(pieces, piece);
}

}  // namespace
}  // namespace ftrun

extern "C" {

uint64_t ftrun_checksum(const void *address, size_t length, uint64_t seed, int threads) {
    using namespace ftrun;
    Pieces pieces{static_cast<const unsigned char *>(address), length, seed, nullptr};
    const size_t count = std::max<size_t>(1, (length + kPiece - 1) / kPiece);
    const int used = pick_threads(length, kPiece, threads);
    std::unique_ptr<uint64_t[]> results;
    if (used > 1 && count > 1) results.reset(new (std::nothrow) uint64_t[count]);
    if (results) {
        pieces.results = results.get();
        parallel(count, used, keep_nth, &pieces);
    }
    uint64_t total = finish(seed + kMultiply);
    for (size_t i = 0; i < count; ++i) total = step(total, results ? results[i] : hash_nth(pieces, i));
    return finish(total ^ length);
}

uint64_t ftrun_sample_checksum(const void *address, size_t length, uint64_t samples, uint64_t seed) {
    using namespace ftrun;
    if (samples == 0) samples = 1;
    if (length / kSample < samples) return ftrun_checksum(address, length, seed, 1);
    const unsigned char *data = static_cast<const unsigned char *>(address);
    uint64_t total = finish(seed ^ length);
    for (uint64_t i = 0; i < samples; ++i) {
        const unsigned __int128 span = static_cast<unsigned __int128>(length - kSample) * i;
        const size_t from = samples == 1 ? 0 : static_cast<size_t>(span / (samples - 1));
        total = step(total, hash_piece(data + from, kSample, seed + i));
    }
    return finish(total);
}

}  // extern "C"
