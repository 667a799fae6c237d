// One robust process-shared mutex, as the beat thread and the watchers use it.
#pragma once

#include <cstdint>

namespace ftrun {

// Both return 0 with the lock held by this thread, or an errno value. A lock left by a dead owner is taken over.
int life_try(void *lock);                          // EBUSY when taken
int life_wait(void *lock, std::uint64_t wait_ns);  // ETIMEDOUT when still taken

}  // namespace ftrun
