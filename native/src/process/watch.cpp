// Watcher threads: each waits for one life lock to be lost and says so on an eventfd.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "ftrun_native.h"
#include "process/life.hpp"
#include "process/thread.hpp"

namespace ftrun {
namespace {

// How long a stopped watcher may take to see that it was stopped. It grows with the time that it has watched already: one that
// watches for hours need not wake for that.
constexpr uint64_t kFirstSliceNs = 500000000, kLongestSliceNs = 60000000000;

struct Watch {
    void *lock;
    int event_fd;
    bool stopped = false;  // guarded by `guard`, as is the right to write to event_fd
    bool ended = false;
    std::mutex guard;
    std::condition_variable changed;
};

struct Watches {
    std::mutex guard;
    std::map<int64_t, std::shared_ptr<Watch>> all;
    int64_t last = 0;
};

// Never freed: detached threads may outlive static destruction.
Watches &watches() {
    static Watches *const instance = new Watches;
    return *instance;
}

void *run(void *argument) {
    const std::unique_ptr<std::shared_ptr<Watch>> owned(static_cast<std::shared_ptr<Watch> *>(argument));
    Watch &watch = **owned;
    for (uint64_t slice = kFirstSliceNs;; slice = std::min(2 * slice, kLongestSliceNs)) {
        const int error = life_wait(watch.lock, slice);
        if (error == 0) ftrun_life_release(watch.lock);
        const std::lock_guard<std::mutex> hold(watch.guard);
        if (error != ETIMEDOUT && !watch.stopped) {
            // ENOTRECOVERABLE and EINVAL end here too: a lock that can never be waited for again is lost.
            const uint64_t one = 1;
            while (write(watch.event_fd, &one, sizeof(one)) < 0 && errno == EINTR) {
            }
        }
        if (error != ETIMEDOUT || watch.stopped) {
            watch.ended = true;
            watch.changed.notify_all();
            return nullptr;
        }
    }
}

}  // namespace
}  // namespace ftrun

extern "C" {

int64_t ftrun_watch_start(void *lock, int eventfd) {
    using namespace ftrun;
    try {
        auto watch = std::make_shared<Watch>();
        watch->lock = lock;
        watch->event_fd = eventfd;
        auto owned = std::make_unique<std::shared_ptr<Watch>>(watch);
        Watches &registry = watches();
        const std::lock_guard<std::mutex> hold(registry.guard);
        const int64_t handle = ++registry.last;
        registry.all.emplace(handle, watch);
        pthread_t thread;
        const int error = start_thread(&thread, "ftrun-watch", run, owned.get());
        if (error != 0) {
            registry.all.erase(handle);
            return -error;
        }
        owned.release();
        pthread_detach(thread);
        return handle;
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
}

int ftrun_watch_stop(int64_t handle, bool wait) {
    using namespace ftrun;
    std::shared_ptr<Watch> watch;
    {
        Watches &registry = watches();
        const std::lock_guard<std::mutex> hold(registry.guard);
        const auto found = registry.all.find(handle);
        if (found == registry.all.end()) return -ENOENT;
        watch = found->second;
        registry.all.erase(found);
    }
    std::unique_lock<std::mutex> hold(watch->guard);
    watch->stopped = true;
    if (wait) watch->changed.wait(hold, [&] { return watch->ended; });
    return 0;
}

}  // extern "C"
