#include "process/thread.hpp"

#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

namespace ftrun {
namespace {

constexpr std::size_t kSmallStack = 64 * 1024;
constexpr int kMostThreads = 8;

struct Job {
    std::size_t pieces;
    void (*work)(void *, std::size_t);
    void *context;
    std::atomic<std::size_t> next{0};
};

void *take_pieces(void *argument) {
    Job &job = *static_cast<Job *>(argument);
    for (;;) {
        const std::size_t piece = job.next.fetch_add(1, std::memory_order_relaxed);
        if (piece >= job.pieces) return nullptr;
        job.work(job.context, piece);
    }
}

int usable_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
    return std::max(1, CPU_COUNT(&set));
}

}  // namespace

int start_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument) {
    // A new thread inherits the mask: block before, restore after, and no signal handler ever runs on its small stack.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kSmallStack);
    int error = pthread_create(thread, &attributes, body, argument);
    // Libraries with much static thread-local storage make glibc refuse so small a stack.
    if (error == EINVAL) error = pthread_create(thread, nullptr, body, argument);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error == 0) pthread_setname_np(*thread, name);
    return error;
}

void parallel(std::size_t pieces, int threads, void (*work)(void *, std::size_t), void *context) {
    Job job{pieces, work, context};
    const std::size_t wanted = static_cast<std::size_t>(std::max(1, threads));
    const std::size_t most = std::min<std::size_t>({pieces, wanted, kMostThreads});
    pthread_t helpers[kMostThreads];
    std::size_t made = 0;
    while (made + 1 < most && start_thread(&helpers[made], "ftrun-copy", take_pieces, &job) == 0) ++made;
    take_pieces(&job);
    for (std::size_t i = 0; i < made; ++i) pthread_join(helpers[i], nullptr);
}

int pick_threads(std::size_t length, std::size_t least, int wanted) {
    if (wanted > 0) return std::min(wanted, kMostThreads);
    const std::size_t worth = length / least;
    if (worth < 2) return 1;
    // Beyond four threads one memory controller gains little, and other ranks of the node copy too.
    return static_cast<int>(std::min<std::size_t>(worth, static_cast<std::size_t>(std::min(4, usable_cpus()))));
}

std::uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint64_t to_ns(double seconds) {
    if (!(seconds > 0)) return 0;  // also NaN
    return static_cast<std::uint64_t>(std::min(seconds, 1e9) * 1e9);
}

}  // namespace ftrun
