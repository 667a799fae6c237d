// Threads as this library uses them: small, with every signal blocked. Never throws.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace ftrun {

// Starts `body(argument)` on a small stack, named `name` (at most 15 bytes). Returns 0 or an errno value.
int start_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);

// Calls `work(context, i)` for i in [0, pieces) on `threads` threads, this one included. A thread that cannot be made
// only makes it slower.
void parallel(std::size_t pieces, int threads, void (*work)(void *context, std::size_t piece), void *context);

// How many threads are worth using for `length` bytes when each should get at least `least`; `wanted` > 0 decides.
int pick_threads(std::size_t length, std::size_t least, int wanted);

// CLOCK_MONOTONIC in nanoseconds.
std::uint64_t now_ns();

// Seconds to nanoseconds, kept between 0 and about 30 years so that adding it to a time cannot overflow.
std::uint64_t to_ns(double seconds);

}  // namespace ftrun
