// What happens in a stream's order: copies, kernels, events.
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.hpp"

namespace fake {

Queue::Queue(int ordinal) : device(ordinal), thread_([this] { run(); }) {}

Queue::~Queue() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) {
        thread_.detach();
    } else {
        thread_.join();
    }
}

void Queue::push(const char *call, std::function<void()> work, Pointer at, uint64_t value) {
    tell("queued", call, at, value);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        work_.push_back([=, work = std::move(work)] {
            work();
            tell("done", call, at, value);
        });
        ++pushed_;
    }
    changed_.notify_all();
}

void Queue::drain() {
    if (thread_.get_id() == std::this_thread::get_id()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t wanted = pushed_;
    changed_.wait(lock, [this, wanted] { return done_ >= wanted; });
}

void Queue::run() {
    for (;;) {
        std::function<void()> next;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return ending_ || !work_.empty(); });
            if (work_.empty()) return;
            next = std::move(work_.front());
            work_.pop_front();
        }
        if (state_of(device) == kSuccess) next();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ++done_;
        }
        changed_.notify_all();
    }
}

namespace {

constexpr size_t kSlice = size_t{64} << 10;

struct Kernel {
    std::string name;
};

std::shared_ptr<Queue> *queue_of(Stream stream) { return static_cast<std::shared_ptr<Queue> *>(stream); }

Result find_queue(Stream stream, std::shared_ptr<Queue> *found) {
    int ordinal = 0;
    const Result state = current(&ordinal);
    if (state != kSuccess) return state;
    if (stream != nullptr) {
        *found = *queue_of(stream);
        return kSuccess;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    Device &device = device_at(ordinal);
    if (!device.legacy) device.legacy = make_queue(ordinal);
    *found = device.legacy;
    return kSuccess;
}

// Slowly, in slices, so that a process can be killed in the middle.
void copy(char *to, const char *from, size_t size) {
    for (size_t at = 0; at < size; at += kSlice) {
        const size_t part = std::min(kSlice, size - at);
        std::memcpy(to + at, from + at, part);
        const double rate = control().rate;
        if (rate > 0) std::this_thread::sleep_for(std::chrono::duration<double>(static_cast<double>(part) / rate));
    }
}

// PTX for the device's capability or an older one.
Result fits(const std::string &image) {
    const Control wanted = control();
    const size_t at = image.find(".target sm_");
    if (at == std::string::npos) return kInvalidValue;
    if (wanted.ptx != kSuccess) return wanted.ptx;
    return std::atoi(image.c_str() + at + std::strlen(".target sm_")) <= wanted.capability ? kSuccess : kInvalidPtx;
}

}  // namespace
}  // namespace fake

API Result cuMemcpyAsync(Pointer to, Pointer from, size_t size, Stream stream) {
    NEED(cuMemcpyAsync)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("cuMemcpyAsync", [=] { copy(reinterpret_cast<char *>(to), reinterpret_cast<const char *>(from), size); }, to, size);
    if (is_pageable(to) || is_pageable(from)) queue->drain();
    return kSuccess;
}

// Not part of CUDA: kernels of a program. This one writes `size` bytes that it reads anywhere.
API Result fake_update(Pointer to, Pointer from, size_t size, Stream stream) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("fake_update", [=] { copy(reinterpret_cast<char *>(to), reinterpret_cast<const char *>(from), size); }, to, size);
    return kSuccess;
}

// This one waits for a peer that is dead: it ends when the control file says `release 1`.
API Result fake_endless(Stream stream) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("fake_endless", [] {
        while (!control().release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    return kSuccess;
}

// This one overwrites `size` bytes again and again for some seconds, whatever becomes of the process. Until it is done the
// dead process keeps one thread, whose end a tracer holds up, and with it all its descriptors.
API Result fake_writes(Pointer to, size_t size, double seconds, Stream stream) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("fake_writes", [=] {
        const auto launcher = static_cast<pid_t>(syscall(SYS_gettid));
        int ready[2];
        if (pipe(ready) != 0) std::abort();
        const pid_t writer = fork();
        if (writer == 0) {
            setsid();
            prctl(PR_SET_NAME, "fake gpu");
            const long held = ptrace(PTRACE_SEIZE, launcher, nullptr, PTRACE_O_TRACEEXIT);
            if (held != 0 || write(ready[1], "x", 1) != 1) _exit(1);
            close_range(0, ~0U, 0);
            timespec now{};
            clock_gettime(CLOCK_MONOTONIC, &now);
            const double end = static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9 + seconds;
            for (unsigned char value = 1; static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9 < end; ++value) {
                std::memset(reinterpret_cast<void *>(to), value, size);
                usleep(200);
                clock_gettime(CLOCK_MONOTONIC, &now);
            }
            _exit(0);
        }
        close(ready[1]);
        char byte = 0;
        if (read(ready[0], &byte, 1) != 1) std::abort();  // no process may be traced here
        close(ready[0]);
        waitpid(writer, nullptr, __WALL);
    });
    return kSuccess;
}

API Result cuMemsetD8Async(Pointer to, unsigned char value, size_t size, Stream stream) {
    NEED(cuMemsetD8Async)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("cuMemsetD8Async", [=] { std::memset(reinterpret_cast<void *>(to), value, size); });
    return kSuccess;
}

API Result cuStreamCreate(Stream *stream, unsigned) {
    NEED(cuStreamCreate)
    int device = 0;
    const Result state = current(&device);
    if (state != kSuccess) return state;
    const std::lock_guard<std::mutex> lock(mutex);
    *stream = new std::shared_ptr<Queue>(make_queue(device));
    return kSuccess;
}

API Result cuStreamDestroy(Stream stream) {
    delete queue_of(stream);
    return kSuccess;
}

API Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    const auto happening = *static_cast<std::shared_ptr<Happening> *>(event);
    queue->push("cuStreamWaitEvent", [happening] {
        std::unique_lock<std::mutex> lock(happening->mutex);
        happening->changed.wait(lock, [&] { return happening->done; });
    });
    return kSuccess;
}

API Result cuStreamWriteValue64(Stream stream, Pointer to, uint64_t value, unsigned) {
    NEED(cuStreamWriteValue64)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("cuStreamWriteValue64", [=] { __atomic_store_n(reinterpret_cast<uint64_t *>(to), value, __ATOMIC_RELEASE); }, to, value);
    return kSuccess;
}

API Result cuLaunchHostFunc(Stream stream, void (*body)(void *), void *context) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state == kSuccess) queue->push("cuLaunchHostFunc", [=] { body(context); });
    return state;
}

API Result cuEventCreate(Event *event, unsigned) {
    NEED(cuEventCreate)
    int device = 0;
    const Result state = current(&device);
    if (state == kSuccess) *event = new std::shared_ptr<Happening>(std::make_shared<Happening>());
    return state;
}

API Result cuEventDestroy(Event event) {
    delete static_cast<std::shared_ptr<Happening> *>(event);
    return kSuccess;
}

API Result cuEventRecord(Event event, Stream stream) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    const auto happening = std::make_shared<Happening>();
    happening->done = false;
    *static_cast<std::shared_ptr<Happening> *>(event) = happening;
    queue->push("cuEventRecord", [happening] {
        {
            const std::lock_guard<std::mutex> lock(happening->mutex);
            happening->done = true;
        }
        happening->changed.notify_all();
    });
    return kSuccess;
}

API Result cuEventQuery(Event event) {
    int device = 0;
    const Result state = current(&device);
    if (state != kSuccess) return state;
    const auto happening = *static_cast<std::shared_ptr<Happening> *>(event);
    const std::lock_guard<std::mutex> lock(happening->mutex);
    if (happening->done) tell("waited", "cuEventQuery", 0, 0);
    return happening->done ? kSuccess : kNotReady;
}

API Result cuModuleLoadData(Module *module, const void *image) {
    NEED(cuModuleLoadData)
    const std::string text = static_cast<const char *>(image);
    const Result taken = fits(text);
    note("cuModuleLoadData", -1);
    await_idle(-1);
    if (taken == kSuccess) *module = new std::string(text);
    return taken;
}

API Result cuModuleGetFunction(Function *function, Module module, const char *name) {
    const std::string entry = std::string(".visible .entry ") + name + "(";
    if (std::strstr(static_cast<const std::string *>(module)->c_str(), entry.c_str()) == nullptr) return kNotFound;
    *function = new Kernel{name};
    return kSuccess;
}

API Result cuLaunchKernel(Function function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                          Stream stream, void **parameters, void **) {
    NEED(cuLaunchKernel)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push("cuLaunchKernel", kernel(static_cast<Kernel *>(function)->name, x, threads, parameters));
    return kSuccess;
}
