#include "transfer/host_device.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

#include "memory/copy.hpp"
#include "ftrun_native.h"
#include "process/thread.hpp"

namespace ftrun {
namespace {

// Shared by a lane's work, the mark that was handed out, and lanes that wait for it.
struct Point {
    std::mutex mutex;
    std::condition_variable reached;
    int result = -EINPROGRESS;
    uint64_t when = 0;

    void reach(int value) {
        {
            const std::lock_guard<std::mutex> hold(mutex);
            result = value;
            when = now_ns();
        }
        reached.notify_all();
    }
};

class HostMark : public Mark {
 public:
    explicit HostMark(std::shared_ptr<Point> point) : point_(std::move(point)) {}

    int query() const override {
        const std::lock_guard<std::mutex> hold(point_->mutex);
        return point_->result;
    }

    int wait(double seconds) const override {
        const uint64_t end = now_ns() + to_ns(seconds);
        std::unique_lock<std::mutex> hold(point_->mutex);
        while (point_->result == -EINPROGRESS) {
            const uint64_t now = now_ns();
            if (now >= end) return -ETIMEDOUT;
            point_->reached.wait_for(hold, std::chrono::nanoseconds(end - now));
        }
        return point_->result;
    }

    uint64_t reached_at() const override {
        const std::lock_guard<std::mutex> hold(point_->mutex);
        return point_->when;
    }

    const std::shared_ptr<Point> &point() const { return point_; }

 private:
    std::shared_ptr<Point> point_;
};

enum class Kind { kCopy, kChecksum, kCopyChecksum, kAfter, kMark };

struct Work {
    Kind kind;
    void *destination = nullptr;
    const void *source = nullptr;
    size_t bytes = 0;
    uint64_t seed = 0;
    uint64_t *result = nullptr;
    std::shared_ptr<Point> point;
};

class HostLane : public Lane {
 public:
    explicit HostLane(int threads) : threads_(threads) {}

    // -EAGAIN and the like when no thread can be had.
    int start() { return -start_thread(&thread_, "ftrun-lane", run, this); }

    // Work that has not begun is dropped: whoever tears a lane down has waited for what counts, or has given up.
    ~HostLane() override {
        {
            const std::lock_guard<std::mutex> hold(mutex_);
            ending_ = true;
        }
        more_.notify_one();
        pthread_join(thread_, nullptr);
        for (const Work &work : queue_) {
            if (work.kind == Kind::kMark) work.point->reach(-ECANCELED);
        }
    }

    int copy(void *destination, const void *source, size_t bytes) override {
        return put({Kind::kCopy, destination, source, bytes, 0, nullptr, nullptr});
    }

    int checksum(uint64_t *result, const void *source, size_t bytes, uint64_t seed) override {
        return put({Kind::kChecksum, nullptr, source, bytes, seed, result, nullptr});
    }

    int copy_checksum(void *destination, const void *source, size_t bytes, uint64_t *result, uint64_t seed) override {
        return put({Kind::kCopyChecksum, destination, source, bytes, seed, result, nullptr});
    }

    int after(const Mark &mark) override {
        const auto *ours = dynamic_cast<const HostMark *>(&mark);
        if (ours == nullptr) return -ENOTSUP;
        return put({Kind::kAfter, nullptr, nullptr, 0, 0, nullptr, ours->point()});
    }

    std::shared_ptr<Mark> mark() override {
        auto point = std::make_shared<Point>();
        if (put({Kind::kMark, nullptr, nullptr, 0, 0, nullptr, point}) != 0) point->reach(-ECANCELED);
        return std::make_shared<HostMark>(point);
    }

 private:
    int put(Work work) {
        {
            const std::lock_guard<std::mutex> hold(mutex_);
            if (ending_) return -ECANCELED;
            queue_.push_back(std::move(work));
        }
        more_.notify_one();
        return 0;
    }

    static void *run(void *self) {
        static_cast<HostLane *>(self)->serve();
        return nullptr;
    }

    void serve() {
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            while (queue_.empty() && !ending_) more_.wait(hold);
            if (ending_) return;
            Work work = std::move(queue_.front());
            queue_.pop_front();
            hold.unlock();
            perform(work);
            hold.lock();
        }
    }

    // The first error stays, and nothing more is done.
    void perform(const Work &work) {
        if (work.kind == Kind::kMark) {
            work.point->reach(error_);
        } else if (error_ == 0 && work.kind == Kind::kAfter) {
            error_ = await(*work.point);
        } else if (error_ == 0 && work.kind == Kind::kCopy) {
            ftrun_copy(work.destination, work.source, work.bytes, threads_);
        } else if (error_ == 0 && work.kind == Kind::kChecksum) {
            *work.result = ftrun_checksum(work.source, work.bytes, work.seed, threads_);
        } else if (error_ == 0 && work.kind == Kind::kCopyChecksum) {
            *work.result = copy_with_checksum(work.destination, work.source, work.bytes, work.seed, threads_);
        }
    }

    // The other lane ends every point that it was given, so this ends when it ends; it also looks whether we end first.
    int await(Point &point) {
        std::unique_lock<std::mutex> hold(point.mutex);
        while (point.result == -EINPROGRESS) {
            point.reached.wait_for(hold, std::chrono::milliseconds(20));
            hold.unlock();
            const bool over = is_ending();
            hold.lock();
            if (over) return -ECANCELED;
        }
        return point.result;
    }

    bool is_ending() {
        const std::lock_guard<std::mutex> hold(mutex_);
        return ending_;
    }

    const int threads_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<Work> queue_;
    bool ending_ = false;
    int error_ = 0;  // only the lane's own thread looks at it
    pthread_t thread_{};
};

constexpr size_t kHuge = 2 * 1024 * 1024;

size_t whole(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

class HostDevice : public Device {
 public:
    explicit HostDevice(int threads) : threads_(threads) {}

    std::unique_ptr<Lane> lane() override {
        auto lane = std::make_unique<HostLane>(threads_);
        if (lane->start() == 0) return lane;
        lane.release();  // its destructor would wait for a thread that there is not; a few words are lost
        return nullptr;
    }

    // Fresh memory is zeroed page by page at its first touch, which in small pages takes longer than the copy into it.
    void *staging(size_t bytes) override {
        const size_t size = whole(bytes);
        void *memory = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        char *begin = static_cast<char *>(memory);
        char *aligned = begin + (kHuge - reinterpret_cast<uintptr_t>(begin) % kHuge) % kHuge;
        if (aligned != begin) munmap(begin, static_cast<size_t>(aligned - begin));
        const size_t rest = static_cast<size_t>(begin + size + kHuge - (aligned + size));
        if (rest != 0) munmap(aligned + size, rest);
        madvise(aligned, size, MADV_HUGEPAGE);  // only a wish
        return aligned;
    }

    void release_staging(void *memory, size_t bytes) override {
        if (memory != nullptr) munmap(memory, whole(bytes));
    }

 private:
    const int threads_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(int threads) { return std::make_unique<HostDevice>(threads); }

}  // namespace ftrun
