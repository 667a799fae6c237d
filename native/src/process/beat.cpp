// The beat thread: proof of life that a frozen or dead process cannot give, and the end of an orphan.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "ftrun_native.h"
#include "process/life.hpp"
#include "process/thread.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace ftrun {
namespace {

struct Beat {
    void *lock;
    uint64_t *word;
    uint64_t interval_ns;
    uint64_t grace_ns;
    pid_t launcher;
    pid_t owner;  // the process that started it: a forked child inherits this memory but not the thread
    int pidfd = -1;  // -1: ask with kill(launcher, 0)
    std::atomic<bool> stopping{false};
    std::atomic<int> stop_fd{-1};  // only wakes the thread: a script may have closed or reused the descriptor
    pthread_t thread;
    sem_t started;
    int error = 0;
};

std::atomic<Beat *> current{nullptr};

// A zombie runs nothing any more, but kill(pid, 0) still finds it.
bool is_running(pid_t pid) {
    if (kill(pid, 0) != 0 && errno == ESRCH) return false;
    char path[32], text[512];
    std::snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(pid));
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno != ENOENT;
    const ssize_t got = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (got <= 0) return got < 0 && errno != ESRCH;
    text[got] = '\0';
    const char *state = std::strrchr(text, ')');  // the name before it may hold anything
    return state == nullptr || state[1] == '\0' || (state[2] != 'Z' && state[2] != 'X');
}

[[noreturn]] void end_orphan() {
    // A worker leads its own group. Anything else may share its group with a shell or a test runner: spare those.
    if (getpgrp() == getpid()) kill(0, SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

// Until the next multiple of the interval on the clock that all processes share: all beats of a machine come together, so that
// one look sees them all, and what a beat takes from a step it takes from all ranks at once.
uint64_t until_the_next(uint64_t interval_ns) { return interval_ns - now_ns() % interval_ns; }

// Sleeps until the next beat or until something happens; true when the thread must end.
bool sleep_interval(Beat &beat, bool &launcher_dead) {
    pollfd fds[2] = {{beat.stop_fd.load(), POLLIN, 0}, {launcher_dead ? -1 : beat.pidfd, POLLIN, 0}};
    timespec interval;
    const uint64_t pause = until_the_next(beat.interval_ns);
    interval.tv_sec = static_cast<time_t>(pause / 1000000000u);
    interval.tv_nsec = static_cast<long>(pause % 1000000000u);
    ppoll(fds, 2, &interval, nullptr);
    if (beat.stopping.load()) return true;
    if (fds[0].revents != 0) beat.stop_fd = -1;
    if (fds[1].revents != 0) {
        // A script that closes every descriptor, or reuses ours, must not look like a dead launcher.
        launcher_dead = !is_running(beat.launcher);
        if (!launcher_dead) beat.pidfd = -1;
    } else if (beat.launcher > 0 && beat.pidfd < 0 && !launcher_dead) {
        launcher_dead = !is_running(beat.launcher);
    }
    return false;
}

void *run(void *argument) {
    Beat &beat = *static_cast<Beat *>(argument);
    beat.error = life_try(beat.lock);
    const bool held = beat.error == 0;
    if (held) __atomic_store_n(beat.word, now_ns(), __ATOMIC_RELEASE);
    sem_post(&beat.started);
    if (!held) return nullptr;
    bool launcher_dead = false;
    uint64_t dead_since = 0;
    while (!sleep_interval(beat, launcher_dead)) {
        const uint64_t now = now_ns();
        __atomic_store_n(beat.word, now, __ATOMIC_RELEASE);
        if (!launcher_dead) continue;
        if (dead_since == 0) dead_since = now;
        if (now - dead_since >= beat.grace_ns) end_orphan();
        beat.interval_ns = std::min(beat.interval_ns, std::max<uint64_t>(1000000u, beat.grace_ns - (now - dead_since)));
    }
    ftrun_life_release(beat.lock);
    return nullptr;
}

void destroy(Beat *beat) {
    if (beat->pidfd >= 0) close(beat->pidfd);
    if (beat->stop_fd.load() >= 0) close(beat->stop_fd.load());
    sem_destroy(&beat->started);
    delete beat;
}

}  // namespace
}  // namespace ftrun

extern "C" {

int ftrun_beat_start(void *lock, uint64_t *word, double interval, int launcher_pid, double orphan_grace) {
    using namespace ftrun;
    Beat *old = current.load();
    if (old != nullptr && old->owner == getpid()) return -EALREADY;
    Beat *beat = new (std::nothrow) Beat{};
    if (beat == nullptr) return -ENOMEM;
    beat->lock = lock;
    beat->word = word;
    beat->interval_ns = std::max<uint64_t>(to_ns(interval), 1000000u);
    beat->grace_ns = to_ns(orphan_grace);
    beat->launcher = launcher_pid;
    beat->owner = getpid();
    if (launcher_pid > 0) beat->pidfd = static_cast<int>(syscall(SYS_pidfd_open, launcher_pid, 0));
    beat->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    sem_init(&beat->started, 0, 0);
    int error = beat->stop_fd.load() < 0 ? errno : start_thread(&beat->thread, "ftrun-beat", run, beat);
    if (error == 0) {
        while (sem_wait(&beat->started) != 0 && errno == EINTR) {
        }
        error = beat->error;
        if (error != 0) pthread_join(beat->thread, nullptr);
    }
    if (error != 0) {
        destroy(beat);
        return -error;
    }
    current.store(beat);
    return 0;
}

int ftrun_beat_stop(void) {
    using namespace ftrun;
    Beat *beat = current.load();
    // In a forked child the thread does not exist and the descriptors may be closed or reused: forget, touch nothing.
    if (beat == nullptr || beat->owner != getpid()) {
        current.store(nullptr);
        return 0;
    }
    if (!current.compare_exchange_strong(beat, nullptr)) return 0;
    beat->stopping = true;
    const uint64_t one = 1;
    const int stop_fd = beat->stop_fd.load();
    // Unheard, the thread still sees the flag after one interval.
    if (stop_fd >= 0 && write(stop_fd, &one, sizeof(one)) < 0) beat->stop_fd = -1;
    pthread_join(beat->thread, nullptr);
    destroy(beat);
    return 0;
}

}  // extern "C"
