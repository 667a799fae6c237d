// What a rank writes three times a step, in one call, so that the order of the writes is the compiler's to keep.
#include <cstring>

#include "ftrun_native.h"

extern "C" void ftrun_slot_write(uint64_t *slot, const void *data, size_t length, uint64_t tag) {
    ftrun_store64(slot, 0);
    // The invalidation must be seen before the first byte of the new content.
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    char *const content = reinterpret_cast<char *>(slot) + FTRUN_SLOT_HEADER;
    std::memcpy(content, data, length);
    ftrun_store64(slot + 1, length);
    ftrun_store64(slot + 2, ftrun_checksum(content, length, 0, 0));
    ftrun_store64(slot, tag);
}
