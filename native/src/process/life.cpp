// Life locks: robust mutexes whose loss tells another process that their owner ended.
#include "process/life.hpp"

#include <pthread.h>
#include <time.h>

#include <cerrno>
#include <cstring>

#include "ftrun_native.h"
#include "process/thread.hpp"

static_assert(sizeof(pthread_mutex_t) <= FTRUN_LIFE_BYTES, "a life lock does not fit its place on the board");

namespace ftrun {
namespace {

pthread_mutex_t *mutex_of(void *lock) { return static_cast<pthread_mutex_t *>(lock); }

int taken_over(void *lock, int error) {
    return error == EOWNERDEAD ? pthread_mutex_consistent(mutex_of(lock)) : error;
}

}  // namespace

int life_try(void *lock) { return taken_over(lock, pthread_mutex_trylock(mutex_of(lock))); }

int life_wait(void *lock, std::uint64_t wait_ns) {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
    constexpr clockid_t clock = CLOCK_MONOTONIC;
#else
    constexpr clockid_t clock = CLOCK_REALTIME;  // a clock that jumps only makes one wait of many longer or shorter
#endif
    timespec end;
    clock_gettime(clock, &end);
    const std::uint64_t ns = static_cast<std::uint64_t>(end.tv_nsec) + wait_ns;
    end.tv_sec += static_cast<time_t>(ns / 1000000000u);
    end.tv_nsec = static_cast<long>(ns % 1000000000u);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
    return taken_over(lock, pthread_mutex_clocklock(mutex_of(lock), clock, &end));
#else
    return taken_over(lock, pthread_mutex_timedlock(mutex_of(lock), &end));
#endif
}

}  // namespace ftrun

extern "C" {

int ftrun_life_init(void *lock) {
    std::memset(lock, 0, FTRUN_LIFE_BYTES);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    int error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    if (error == 0) error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    if (error == 0) error = pthread_mutex_init(ftrun::mutex_of(lock), &attributes);
    pthread_mutexattr_destroy(&attributes);
    return -error;
}

int ftrun_life_hold(void *lock) { return -ftrun::life_try(lock); }

int ftrun_life_release(void *lock) { return -pthread_mutex_unlock(ftrun::mutex_of(lock)); }

}  // extern "C"
