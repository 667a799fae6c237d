// Settings of this process that Python has no call for.
#include <malloc.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "ftrun_native.h"
#include "thread.hpp"

namespace {

// `bytes` from malloc with every page touched, or null.
char *touched(size_t bytes) {
    auto *block = static_cast<char *>(std::malloc(bytes));
    for (size_t at = 0; block != nullptr && at < bytes; at += 4096) {
        static_cast<volatile char *>(block)[at] = 0;
    }
    return block;
}

// What threads that each touch a heap of their own share.
struct Heaps {
    size_t bytes;
    std::mutex mutex;
    std::condition_variable changed;
    int there = 0;
    bool all_there = false;
};

void *touch_heap(void *argument) {
    auto &heaps = *static_cast<Heaps *>(argument);
    char *block = touched(heaps.bytes);
    std::unique_lock<std::mutex> lock(heaps.mutex);
    ++heaps.there;
    heaps.changed.notify_all();
    // a thread that ended would leave its heap to the next one
    heaps.changed.wait(lock, [&heaps] { return heaps.all_there; });
    lock.unlock();
    std::free(block);
    return nullptr;
}

}  // namespace

extern "C" {

int ftrun_malloc_keep(size_t bytes) {
#if defined(__GLIBC__)
    // mallopt takes an int; older releases of glibc also refuse a threshold above half a heap, 32 MiB.
    const int wanted = static_cast<int>(std::min<size_t>(bytes, INT_MAX));
    const int old_limit = 32 * 1024 * 1024;
    if (mallopt(M_MMAP_THRESHOLD, wanted) == 0 && mallopt(M_MMAP_THRESHOLD, std::min(wanted, old_limit)) == 0) {
        return -EINVAL;
    }
    return mallopt(M_TRIM_THRESHOLD, wanted) == 1 ? 0 : -EINVAL;
#else
    static_cast<void>(bytes);
    return 0;
#endif
}

int ftrun_malloc_touch(size_t bytes) {
    const size_t piece = 16 * 1024 * 1024; // below every release's limit for blocks that come from the heap
    std::vector<char *> pieces;
    pieces.reserve(bytes / piece + 1); // before the first piece: nothing may lie between two of them
    int result = 0;
    for (size_t done = 0; done < bytes && result == 0; done += piece) {
        const size_t size = std::min(piece, bytes - done);
        char *block = touched(size);
        if (block == nullptr) {
            result = -ENOMEM;
            break;
        }
        pieces.push_back(block);
    }
    for (char *block : pieces) {
        std::free(block);
    }
    return result;
}

int ftrun_malloc_touch_threads(int threads, size_t bytes) {
    Heaps heaps{};
    heaps.bytes = bytes;
    pthread_t running[FTRUN_MOST_HEAPS];
    int started = 0, result = threads < 0 || threads > FTRUN_MOST_HEAPS ? EINVAL : 0;
    while (result == 0 && started < threads) {
        result = ftrun::start_thread(&running[started], "ftrun-heap", touch_heap, &heaps);
        if (result == 0) ++started;
    }
    {
        std::unique_lock<std::mutex> lock(heaps.mutex);
        heaps.changed.wait(lock, [&heaps, started] { return heaps.there == started; });
        heaps.all_there = true;
        heaps.changed.notify_all();
    }
    for (int i = 0; i < started; ++i) {
        pthread_join(running[i], nullptr);
    }
    return -result;
}

int ftrun_set_subreaper(void) { return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 ? 0 : -errno; }

int ftrun_set_name(const char *name) { return prctl(PR_SET_NAME, name, 0, 0, 0) == 0 ? 0 : -errno; }

}  // extern "C"
