// The transfer engine over any Device; the C ABI in ftrun_transfer.h is this with host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "transfer/device.hpp"
#include "ftrun_transfer.h"

namespace ftrun {

// Bytes in order, wherever they lie.
class Extents {
 public:
    Extents(const ftrun_extent *list, size_t count) : list_(list, list + count) {
        for (const ftrun_extent &extent : list_) total_ += extent.bytes;
    }
    uint64_t total() const { return total_; }
    // The extents that cover [offset, offset + bytes), cut to it.
    std::vector<ftrun_extent> cut(uint64_t offset, uint64_t bytes) const;

 private:
    std::vector<ftrun_extent> list_;
    uint64_t total_ = 0;
};

// When a transfer is given up. Starts to count when made.
class Patience {
 public:
    explicit Patience(const ftrun_transfer_terms &terms);
    int spent() const;  // 0, -ETIMEDOUT or -ECANCELED
    // Waits for a mark with this patience: its result, or why it was given up.
    int wait(const Mark &mark) const;
    uint64_t since() const { return begin_; }

 private:
    const ftrun_transfer_terms &terms_;
    uint64_t begin_;
    uint64_t end_;
};

int transfer_copy(Device &device, const Extents &to, const Extents &from, const ftrun_transfer_terms &terms,
                  ftrun_transfer_result &result);

int exchange_run(Device &device, void *control, uint32_t me, const ftrun_exchange_facts &facts, const Extents &from,
                 const Extents &to, void *const *buffers, const ftrun_transfer_terms &terms,
                 ftrun_transfer_result &result);

// Queues one chunk between scattered extents and a contiguous buffer, hashed when `sum` is given: the hash is that of the
// buffer's bytes in order, whichever way they went.
int gather(Lane &lane, void *buffer, const std::vector<ftrun_extent> &from, uint64_t *sum, uint64_t seed);
int scatter(Lane &lane, const std::vector<ftrun_extent> &to, const void *buffer, uint64_t *sum, uint64_t seed);

inline void *pointer(uint64_t address) { return reinterpret_cast<void *>(static_cast<uintptr_t>(address)); }

// The next value of a checksum over chunks.
inline uint64_t chain(uint64_t total, uint64_t next) {
    total = (total ^ next) * 0x9FB21C651E98DF25u;
    return total ^ (total >> 29);
}

}  // namespace ftrun
