// Settings of this process that Python has no call for.
#include <malloc.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "ftrun_native.h"

namespace {

// Lets threads go on once all of them are there.
class Meeting {
public:
    explicit Meeting(int expected) : expected_(expected) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        ++there_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return there_ >= expected_; });
    }

    void expect(int fewer) {
        const std::lock_guard<std::mutex> lock(mutex_);
        expected_ = fewer;
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int expected_;
    int there_ = 0;
};

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
        auto *block = static_cast<char *>(std::malloc(size));
        if (block == nullptr) {
            result = -ENOMEM;
            break;
        }
        pieces.push_back(block);
        for (size_t at = 0; at < size; at += 4096) {
            static_cast<volatile char *>(block)[at] = 0;
        }
    }
    for (char *block : pieces) {
        std::free(block);
    }
    return result;
}

int ftrun_malloc_touch_threads(int threads, size_t bytes) {
    Meeting all_hold_theirs(threads);  // one that ended would leave its memory to the next
    std::vector<std::thread> running;
    int result = 0;
    try {
        running.reserve(static_cast<size_t>(std::max(threads, 0)));
        for (int i = 0; i < threads; ++i) {
            running.emplace_back([&all_hold_theirs, bytes] {
                auto *block = static_cast<char *>(std::malloc(bytes));
                for (size_t at = 0; block != nullptr && at < bytes; at += 4096) {
                    static_cast<volatile char *>(block)[at] = 0;
                }
                all_hold_theirs.wait();
                std::free(block);
            });
        }
    } catch (const std::exception &) {  // no more threads, or no memory for one
        result = -EAGAIN;
        all_hold_theirs.expect(static_cast<int>(running.size()));
    }
    for (std::thread &thread : running) {
        thread.join();
    }
    return result;
}

int ftrun_set_subreaper(void) { return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 ? 0 : -errno; }

int ftrun_set_name(const char *name) { return prctl(PR_SET_NAME, name, 0, 0, 0) == 0 ? 0 : -errno; }

}  // extern "C"
