// A fast position-dependent 64-bit hash. Not cryptographic: it finds damage, not forgery.
//
// A piece of up to 1 MiB is read as little-endian 64-bit words dealt to 8 lanes; the last block is padded with zeros. A word
// is added to its neighbour's lane as it is, and to its own as a product of its halves, keyed by its place. Pieces are hashed
// with their index as part of the seed and chained in order, which lets threads share the work without changing the result.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "memory/absorb.hpp"
#include "memory/copy.hpp"
#include "ftrun_native.h"
#include "memory/hash.hpp"
#include "process/thread.hpp"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum is defined on little-endian words"
#endif

namespace ftrun {
namespace {

constexpr size_t kPastCache = 4 * 1024 * 1024;
constexpr size_t kWorthAThread = 4 * 1024 * 1024;

template <typename Absorb>
uint64_t hash_piece(const unsigned char *data, size_t length, uint64_t seed, unsigned char *target, Absorb absorb_blocks) {
    Lanes lanes(seed);
    const size_t blocks = length / kBlock, whole = blocks * kBlock;
    absorb_blocks(lanes, data, blocks, target);
    if (whole < length) {
        unsigned char last[kBlock] = {};
        std::memcpy(last, data + whole, length - whole);
        absorb_scalar<Nowhere>(lanes, last, 1, nullptr);
        if (target != nullptr) std::memcpy(target + whole, last, length - whole);
    }
    uint64_t result = finish(seed ^ length);
    for (const uint64_t value : lanes.value) result = step(result, finish(value));
    return finish(result);
}

uint64_t hash_piece(const unsigned char *data, size_t length, uint64_t seed) {
    return hash_piece(data, length, seed, nullptr, pick_absorb<Nowhere>());
}

struct Pieces {
    const unsigned char *data;
    size_t length;
    uint64_t seed;
    uint64_t *results;
    unsigned char *target;  // nullptr: nothing is copied
};

uint64_t hash_nth(const Pieces &pieces, size_t piece) {
    const size_t from = piece * kPiece, length = std::min(kPiece, pieces.length - from);
    const unsigned char *data = pieces.data + from;
    const uint64_t seed = pieces.seed + piece;
    if (pieces.target == nullptr) return hash_piece(data, length, seed);
    unsigned char *target = pieces.target + from;
    // past the cache: a copy of many megabytes would only push out what others need, and read what it overwrites
    const bool stream = pieces.length >= kPastCache && reinterpret_cast<uintptr_t>(target) % kStreamAligned == 0;
    return hash_piece(data, length, seed, target, stream ? pick_absorb<Stream>() : pick_absorb<Plain>());
}

void keep_nth(void *context, size_t piece) {
    const Pieces &pieces = *static_cast<Pieces *>(context);
    pieces.results[piece] = hash_nth(pieces, piece);
}

uint64_t hash_all(const void *address, size_t length, uint64_t seed, int threads, void *target) {
    Pieces pieces{static_cast<const unsigned char *>(address), length, seed, nullptr,
                  static_cast<unsigned char *>(target)};
    const size_t count = std::max<size_t>(1, (length + kPiece - 1) / kPiece);
    const int used = pick_threads(length, kWorthAThread, threads);
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

}  // namespace

uint64_t copy_with_checksum(void *destination, const void *source, size_t bytes, uint64_t seed, int threads) {
    return hash_all(source, bytes, seed, threads, destination);
}

}  // namespace ftrun

extern "C" {

uint64_t ftrun_checksum(const void *address, size_t length, uint64_t seed, int threads) {
    return ftrun::hash_all(address, length, seed, threads, nullptr);
}

uint64_t ftrun_sample(const void *address, size_t length, uint64_t pieces, uint64_t turn) {
    constexpr size_t kPiece = 64;
    if (length <= pieces * kPiece) return ftrun_checksum(address, length, 0, 1);
    const size_t apart = length / pieces, places = apart / kPiece;
    const char *const first = static_cast<const char *>(address) + turn % places * kPiece;
    uint64_t value = length;
    for (uint64_t i = 0; i < pieces; ++i) value = ftrun_checksum(first + i * apart, kPiece, value, 1);
    return value;
}

}  // extern "C"
