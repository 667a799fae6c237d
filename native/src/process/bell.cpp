// Atomic words and futex bells on memory that several processes share.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "ftrun_native.h"
#include "process/thread.hpp"

extern "C" {

int ftrun_abi_version(void) { return FTRUN_ABI_VERSION; }

uint64_t ftrun_load64(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

uint32_t ftrun_load32(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

void ftrun_store64(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

uint64_t ftrun_cas64(uint64_t *word, uint64_t expected, uint64_t desired) {
    __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

bool ftrun_all_equal64(const uint64_t *list, uint64_t value) {
    for (uint64_t i = 1; i <= list[0]; ++i) {
        if (ftrun_load64(reinterpret_cast<const uint64_t *>(list[i])) != value) return false;
    }
    return true;
}

bool ftrun_arrive(uint64_t *mine, uint64_t value, const uint64_t *list) {
    ftrun_store64(mine, value);
    // Of several that arrive at once, the one whose fence comes last sees every other's word.
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return ftrun_all_equal64(list, value);
}

void ftrun_bell_ring(uint32_t *bell) {
    __atomic_fetch_add(bell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool ftrun_bell_wait(const uint32_t *bell, uint32_t seen, double timeout) {
    if (ftrun_load32(bell) != seen) return true;
    const uint64_t end = ftrun::now_ns() + ftrun::to_ns(timeout);
    timespec deadline;
    deadline.tv_sec = static_cast<time_t>(end / 1000000000u);
    deadline.tv_nsec = static_cast<long>(end % 1000000000u);
    for (;;) {
        // WAIT_BITSET takes an absolute CLOCK_MONOTONIC deadline: going round the loop does not lengthen the wait.
        const long result =
            syscall(SYS_futex, bell, FUTEX_WAIT_BITSET, seen, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
        const int error = errno;
        if (ftrun_load32(bell) != seen) return true;
        // EINTR returns early, so that an interpreter can run its signal handlers.
        if (result != 0 && error != EAGAIN) return false;
    }
}

}  // extern "C"
