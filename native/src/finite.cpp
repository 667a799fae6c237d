// Looks for infinities and NaNs. In every IEEE format they are the numbers whose exponent bits are all ones, so the
// search is integer arithmetic over the raw words, which compilers turn into vector instructions.
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "clones.hpp"
#include "ftrun_native.h"

namespace {

constexpr size_t kPiece = 4096;  // words looked at between two decisions

template <typename Word>
inline __attribute__((always_inline)) int64_t find(const Word *words, size_t count, Word exponent) {
    for (size_t at = 0; at < count; at += kPiece) {
        const size_t end = count - at < kPiece ? count : at + kPiece;
        Word found = 0;
        for (size_t i = at; i < end; ++i) found |= static_cast<Word>((words[i] & exponent) == exponent);
        if (found == 0) continue;
        for (size_t i = at; i < end; ++i) {
            if ((words[i] & exponent) == exponent) return static_cast<int64_t>(i);
        }
    }
    return -1;
}

FTRUN_CLONES int64_t find16(const uint16_t *words, size_t count, uint16_t exponent) {
    return find<uint16_t>(words, count, exponent);
}
FTRUN_CLONES int64_t find32(const uint32_t *words, size_t count) { return find<uint32_t>(words, count, 0x7F800000u); }
FTRUN_CLONES int64_t find64(const uint64_t *words, size_t count) {
    return find<uint64_t>(words, count, 0x7FF0000000000000u);
}

}  // namespace

extern "C" int64_t ftrun_find_nonfinite(const void *data, size_t count, int format) {
    switch (format) {
        case FTRUN_FLOAT16: return find16(static_cast<const uint16_t *>(data), count, 0x7C00u);
        case FTRUN_BFLOAT16: return find16(static_cast<const uint16_t *>(data), count, 0x7F80u);
        case FTRUN_FLOAT32: return find32(static_cast<const uint32_t *>(data), count);
        case FTRUN_FLOAT64: return find64(static_cast<const uint64_t *>(data), count);
        default: return -EINVAL;
    }
}

extern "C" int64_t ftrun_find_nonfinite_each(const uint64_t *addresses, const uint64_t *counts, size_t pieces, int format) {
    for (size_t i = 0; i < pieces; ++i) {
        const void *data = reinterpret_cast<const void *>(static_cast<uintptr_t>(addresses[i]));
        const int64_t found = ftrun_find_nonfinite(data, static_cast<size_t>(counts[i]), format);
        if (found >= 0) return static_cast<int64_t>(i);
        if (found < -1) return found;
    }
    return -1;
}
