// What a rank writes three times a step. One call each, since what a step costs here is mostly code and data that fell out
// of the caches while the model ran.
#include <algorithm>
#include <cstring>

#include "ftrun_native.h"

namespace {

size_t size_of(const uint64_t *list) {
    size_t size = 0;
    for (uint64_t i = 0; i < list[0]; ++i) size += list[2 + 2 * i];
    return size;
}

}  // namespace

extern "C" {

void ftrun_gather(void *destination, const uint64_t *list) {
    char *at = static_cast<char *>(destination);
    for (uint64_t i = 0; i < list[0]; ++i) {
        const uint64_t address = list[1 + 2 * i], length = list[2 + 2 * i];
        std::memcpy(at, reinterpret_cast<const void *>(address), length);
        at += length;
    }
}

void ftrun_slot_write(uint64_t *slot, const void *data, size_t length, const uint64_t *list, size_t summed, uint64_t tag) {
    ftrun_store64(slot, 0);
    // The invalidation must be seen before the first byte of the new content.
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    char *const content = reinterpret_cast<char *>(slot) + FTRUN_SLOT_HEADER;
    std::memcpy(content, data, length);
    ftrun_gather(content + length, list);
    length += size_of(list);
    ftrun_store64(slot + 1, length);
    ftrun_store64(slot + 2, ftrun_checksum(content, std::min(length, summed), 0, 1));
    ftrun_store64(slot, tag);
}

}  // extern "C"
