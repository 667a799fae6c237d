// Uniform numbers of a Mersenne twister, a block of words at a time in vector instructions: the bits that torch draws one
// by one. The generator: M. Matsumoto, T. Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998). The layout of its state and
// how a word becomes a number are ATen's.
#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "clones.hpp"
#include "ftrun_native.h"

namespace {

constexpr int kWords = 624, kMiddle = 397;

struct State {  // what torch.Generator.get_state() begins with
    uint64_t seed;
    int32_t left, seeded;  // words until all are made anew, and one
    uint64_t next;
    uint64_t words[kWords];  // 32 bits each
};

inline __attribute__((always_inline)) uint32_t twist(uint32_t upper, uint32_t lower) {
    const uint32_t mixed = (upper & 0x80000000u) | (lower & 0x7FFFFFFFu);
    return (mixed >> 1) ^ ((0u - (lower & 1u)) & 0x9908B0DFu);
}

// Each new word depends on one at least 227 places away: several can be made at once.
inline __attribute__((always_inline)) void renew(uint32_t *words) {
    for (int i = 0; i < kWords - kMiddle; ++i) words[i] = words[i + kMiddle] ^ twist(words[i], words[i + 1]);
    for (int i = kWords - kMiddle; i < kWords - 1; ++i) {
        words[i] = words[i + kMiddle - kWords] ^ twist(words[i], words[i + 1]);
    }
    words[kWords - 1] = words[kMiddle - 1] ^ twist(words[kWords - 1], words[0]);
}

inline __attribute__((always_inline)) float fraction(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9D2C5680u;
    word ^= (word << 15) & 0xEFC60000u;
    word ^= word >> 18;
    return static_cast<float>(static_cast<int32_t>(word & 0xFFFFFFu)) * (1.0f / 16777216.0f);
}

struct Rounded {  // product and sum
    static inline __attribute__((always_inline)) float scale(float x, float width, float from) { return x * width + from; }
};

struct Fused {  // only their result, as compilers do for processors that can
    static inline __attribute__((always_inline)) float scale(float x, float width, float from) {
        return __builtin_fmaf(x, width, from);
    }
};

template <typename How>
inline __attribute__((always_inline)) void draw(uint32_t *words, size_t at, float *out, size_t count, float from, float to) {
    const float width = to - from;
    while (count > 0) {
        if (at == kWords) {
            renew(words);
            at = 0;
        }
        const size_t now = std::min(count, kWords - at);
        for (size_t i = 0; i < now; ++i) {
            const float drawn = How::scale(fraction(words[at + i]), width, from);
            out[i] = drawn == to ? from : drawn;  // `to` itself, which rounding can lead to, is not in the range
        }
        at += now;
        out += now;
        count -= now;
    }
}

FTRUN_CLONES void draw_rounded(uint32_t *words, size_t at, float *out, size_t count, float from, float to) {
    draw<Rounded>(words, at, out, count, from, to);
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void draw_fused(uint32_t *words, size_t at, float *out, size_t count, float from,
                                                    float to) {
    draw<Fused>(words, at, out, count, from, to);
}
bool can_fuse() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
void draw_fused(uint32_t *words, size_t at, float *out, size_t count, float from, float to) {
    draw<Fused>(words, at, out, count, from, to);
}
bool can_fuse() { return true; }
#endif

}  // namespace

extern "C" int ftrun_uniform(void *generator, float *out, size_t count, float from, float to, int fused) {
    State &state = *static_cast<State *>(generator);
    uint32_t words[kWords];
    if (fused && !can_fuse()) return -ENOTSUP;
    const bool fresh = state.left == 1;  // nothing is left: after seeding `next` says otherwise
    if (!fresh && (state.next > kWords || state.left != kWords + 1 - static_cast<int64_t>(state.next))) return -EINVAL;
    if (count == 0) return 0;
    for (int i = 0; i < kWords; ++i) words[i] = static_cast<uint32_t>(state.words[i]);
    const size_t at = fresh ? kWords : static_cast<size_t>(state.next);
    (fused ? draw_fused : draw_rounded)(words, at, out, count, from, to);
    const size_t end = (at + count - 1) % kWords + 1;
    for (int i = 0; i < kWords; ++i) state.words[i] = words[i];
    state.next = end;
    state.left = static_cast<int32_t>(kWords + 1 - end);
    return 0;
}
