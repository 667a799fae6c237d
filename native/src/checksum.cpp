// A fast position-dependent 64-bit hash. Not cryptographic: it finds damage, not forgery.
//
// A piece of up to 4 MiB is read as little-endian 64-bit words dealt to 8 lanes; the last block is padded with zeros.
// Each step of a lane is a bijection of its state, so one changed word always changes the lane. Pieces are hashed with
// their index as part of the seed and chained in order, which lets threads share the work without changing the result.
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "copy.hpp"
#include "ftrun_native.h"
#include "hash.hpp"
#include "thread.hpp"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum is defined on little-endian words"
#endif

namespace ftrun {
namespace {

constexpr size_t kSample = 4096;
constexpr size_t kPastCache = 4 * 1024 * 1024;

inline void absorb(uint64_t (&lanes)[kLanes], const uint64_t (&words)[kLanes]) {
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
}

// What becomes of the words that were hashed. Each is loaded once: the hash is of what was stored, whatever the source
// does meanwhile.
struct Nowhere {
    static void store(unsigned char *, const uint64_t (&)[kLanes]) {}
    static void finish() {}
};

struct Plain {
    static void store(unsigned char *target, const uint64_t (&words)[kLanes]) { std::memcpy(target, words, kBlock); }
    static void finish() {}
};

#if defined(__x86_64__)
// Past the cache: a copy of many megabytes would only push out what others need. `target` is aligned to 8 bytes.
struct Stream {
    static void store(unsigned char *target, const uint64_t (&words)[kLanes]) {
        for (size_t i = 0; i < kLanes; ++i) {
            _mm_stream_si64(reinterpret_cast<long long *>(target) + i, static_cast<long long>(words[i]));
        }
    }
    static void finish() { _mm_sfence(); }
};
#else
using Stream = Plain;
#endif

template <typename Store>
uint64_t hash_piece(const unsigned char *data, size_t length, uint64_t seed, unsigned char *target) {
    uint64_t lanes[kLanes], words[kLanes];
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = first_of_lane(seed, i);
    size_t at = 0;
    for (; at + kBlock <= length; at += kBlock) {
        std::memcpy(words, data + at, kBlock);
        absorb(lanes, words);
        Store::store(target + at, words);
    }
    Store::finish();
    if (at < length) {
        std::memset(words, 0, kBlock);
        std::memcpy(words, data + at, length - at);
        absorb(lanes, words);
        if (target != nullptr) std::memcpy(target + at, words, length - at);
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
    unsigned char *target;  // nullptr: nothing is copied
};

uint64_t hash_nth(const Pieces &pieces, size_t piece) {
    const size_t from = piece * kPiece, length = std::min(kPiece, pieces.length - from);
    const unsigned char *data = pieces.data + from;
    const uint64_t seed = pieces.seed + piece;
    if (pieces.target == nullptr) return hash_piece<Nowhere>(data, length, seed, nullptr);
    unsigned char *target = pieces.target + from;
    const bool aligned = reinterpret_cast<uintptr_t>(target) % 8 == 0;
    if (aligned && pieces.length >= kPastCache) return hash_piece<Stream>(data, length, seed, target);
    return hash_piece<Plain>(data, length, seed, target);
}

void keep_nth(void *context, size_t piece) {
    const Pieces &pieces = *static_cast<Pieces *>(context);
    pieces.results[piece] = hash_nth(pieces, piece);
}

uint64_t hash_all(const void *address, size_t length, uint64_t seed, int threads, void *target) {
    Pieces pieces{static_cast<const unsigned char *>(address), length, seed, nullptr,
                  static_cast<unsigned char *>(target)};
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

}  // namespace

uint64_t copy_with_checksum(void *destination, const void *source, size_t bytes, uint64_t seed, int threads) {
    return hash_all(source, bytes, seed, threads, destination);
}

}  // namespace ftrun

extern "C" {

uint64_t ftrun_checksum(const void *address, size_t length, uint64_t seed, int threads) {
    return ftrun::hash_all(address, length, seed, threads, nullptr);
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
        total = step(total, hash_piece<Nowhere>(data + from, kSample, seed + i, nullptr));
    }
    return finish(total);
}

}  // extern "C"
