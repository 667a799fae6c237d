// The inner loop of ftrun_checksum: whole blocks into lanes, and where the words go that were hashed.
//
// Each word is loaded once: the hash is of what was stored, whatever the source does meanwhile.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>

#include "memory/hash.hpp"

namespace ftrun {

struct Lanes {
    uint64_t value[kLanes], key[kLanes];

    explicit Lanes(uint64_t seed) {
        for (size_t i = 0; i < kLanes; ++i) {
            value[i] = first_of_lane(seed, i);
            key[i] = first_key(value[i]);
        }
    }
};

// `target` of a Stream is aligned to this.
constexpr size_t kStreamAligned = 32;

struct Nowhere {
    static void store(unsigned char *, const uint64_t (&)[kLanes]) {}
    static void finish() {}
};

struct Plain {
    static void store(unsigned char *target, const uint64_t (&words)[kLanes]) { std::memcpy(target, words, kBlock); }
    static void finish() {}
};

#if defined(__x86_64__)
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
void absorb_scalar(Lanes &lanes, const unsigned char *data, size_t blocks, unsigned char *target) {
    uint64_t words[kLanes];
    for (size_t block = 0; block < blocks; ++block) {
        std::memcpy(words, data + block * kBlock, kBlock);
        for (size_t i = 0; i < kLanes; ++i) {
            lanes.value[i] = absorb(lanes.value[i], lanes.key[i], words[i], words[i ^ 1]);
            lanes.key[i] += kSpread;
        }
        if (block % kStirred == kStirred - 1) {
            for (uint64_t &value : lanes.value) value = stir(value);
        }
        Store::store(target + block * kBlock, words);
    }
    Store::finish();
}

#if defined(__x86_64__)
#define FTRUN_AVX2 __attribute__((target("avx2")))

// The low 64 bits of value * kMultiply, which the vector unit has no single instruction for.
FTRUN_AVX2 inline __m256i stir(__m256i value) {
    const __m256i low = _mm256_set1_epi64x(static_cast<long long>(kMultiply & 0xFFFFFFFFu));
    const __m256i high = _mm256_set1_epi64x(static_cast<long long>(kMultiply >> 32));
    value = _mm256_xor_si256(value, _mm256_srli_epi64(value, 29));
    const __m256i cross =
        _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(value, 32), low), _mm256_mul_epu32(value, high));
    return _mm256_add_epi64(_mm256_mul_epu32(value, low), _mm256_slli_epi64(cross, 32));
}

FTRUN_AVX2 inline __m256i absorb(__m256i lane, __m256i key, __m256i word) {
    const __m256i mixed = _mm256_xor_si256(word, key);
    const __m256i neighbour = _mm256_shuffle_epi32(word, 0x4E);  // the two words of each half change places
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(lane, _mm256_add_epi64(product, neighbour));
}

FTRUN_AVX2 inline void put(Nowhere, __m256i *, __m256i) {}
FTRUN_AVX2 inline void put(Plain, __m256i *target, __m256i word) { _mm256_storeu_si256(target, word); }
FTRUN_AVX2 inline void put(Stream, __m256i *target, __m256i word) { _mm256_stream_si256(target, word); }

template <typename Store>
FTRUN_AVX2 void absorb_avx2(Lanes &lanes, const unsigned char *data, size_t blocks, unsigned char *target) {
    auto *value = reinterpret_cast<__m256i *>(lanes.value), *key = reinterpret_cast<__m256i *>(lanes.key);
    const auto *from = reinterpret_cast<const __m256i *>(data);
    auto *to = reinterpret_cast<__m256i *>(target);
    const __m256i spread = _mm256_set1_epi64x(static_cast<long long>(kSpread));
    __m256i lane0 = _mm256_loadu_si256(value), lane1 = _mm256_loadu_si256(value + 1);
    __m256i key0 = _mm256_loadu_si256(key), key1 = _mm256_loadu_si256(key + 1);
    for (size_t block = 0; block < blocks; ++block) {
        const __m256i word0 = _mm256_loadu_si256(from + 2 * block), word1 = _mm256_loadu_si256(from + 2 * block + 1);
        lane0 = absorb(lane0, key0, word0);
        lane1 = absorb(lane1, key1, word1);
        key0 = _mm256_add_epi64(key0, spread);
        key1 = _mm256_add_epi64(key1, spread);
        if (block % kStirred == kStirred - 1) lane0 = stir(lane0), lane1 = stir(lane1);
        put(Store{}, to + 2 * block, word0);
        put(Store{}, to + 2 * block + 1, word1);
    }
    Store::finish();
    _mm256_storeu_si256(value, lane0);
    _mm256_storeu_si256(value + 1, lane1);
    _mm256_storeu_si256(key, key0);
    _mm256_storeu_si256(key + 1, key1);
}
#endif

using Absorb = void (*)(Lanes &lanes, const unsigned char *data, size_t blocks, unsigned char *target);

// The fastest that this processor has; all give the same lanes.
template <typename Store>
Absorb pick_absorb() {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2");
    if (wide) return absorb_avx2<Store>;
#endif
    return absorb_scalar<Store>;
}

}  // namespace ftrun
