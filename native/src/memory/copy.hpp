// A copy that hashes what it reads on the way: one pass over the memory instead of two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ftrun {

// Copies and returns ftrun_checksum(source, bytes, seed). The ranges must not overlap.
uint64_t copy_with_checksum(void *destination, const void *source, size_t bytes, uint64_t seed, int threads);

}  // namespace ftrun
