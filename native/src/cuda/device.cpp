// Device, Lane and Mark over CUDA streams and events.
#include "cuda/device.hpp"

#include <atomic>
#include <cerrno>

#include "cuda/work.hpp"
#include "transfer/host_device.hpp"

namespace ftrun {
namespace cuda {
namespace {

constexpr size_t kResults = 256;  // checksums of a lane that may be under way at once
constexpr double kLast = 60.0;  // seconds that a lane waits for its last work when it is given up

class CudaMark : public Mark {
 public:
    CudaMark(Ordinal device, Event recorded, int error) : event(recorded), device_(device), error_(error) {}
    ~CudaMark() override {
        const Current current(device_);
        if (event != nullptr && current.error == 0) calls().cuEventDestroy(event);
    }
    int query() const override {
        const Current current(device_);
        if (error_ != 0 || current.error != 0) return error_ != 0 ? error_ : current.error;
        return check(calls().cuEventQuery(event), "the device");
    }
    int wait(double seconds) const override {
        const Current current(device_);
        if (error_ != 0 || current.error != 0) return error_ != 0 ? error_ : current.error;
        return wait_event(event, seconds);
    }
    int error() const { return error_; }
    const Event event;

 private:
    const Ordinal device_;
    const int error_;
};

// One checksum under way: the kernel writes `value` (pinned), then a host function brings it to where it is wanted.
struct Result64 {
    uint64_t value;
    uint64_t *wanted;
    std::atomic<bool> busy;
};
static_assert(kResults * sizeof(Result64) <= kPinnedRoom);

void deliver(void *context) {
    Result64 &one = *static_cast<Result64 *>(context);
    *one.wanted = one.value;
    one.busy.store(false, std::memory_order_release);
}

class CudaLane : public Lane {
 public:
    explicit CudaLane(Ordinal device) : device_(device) {
        const Current current(device_);
        keep(current.error);
        if (error_ == 0) keep(check(calls().cuStreamCreate(&stream_, kNonBlocking), "cuStreamCreate"));
    }
    ~CudaLane() override {
        const Current current(device_);
        if (current.error != 0 || stream_ == nullptr) return;
        // it may still use what its owner frees or unmaps next, and its workspace
        const bool done = wait_stream(stream_, kLast) == 0;
        calls().cuStreamDestroy(stream_);
        if (done && results_ != nullptr) give_back(device_, space_);
    }
    int copy(void *destination, const void *source, size_t bytes) override {
        const Current current(device_);
        if (error_ != 0 || keep(current.error) != 0 || bytes == 0) return error_;
        const auto to = reinterpret_cast<Pointer>(destination), from = reinterpret_cast<Pointer>(source);
        return keep(check(calls().cuMemcpyAsync(to, from, bytes, stream_), "cuMemcpyAsync"));
    }
    int checksum(uint64_t *result, const void *source, size_t bytes, uint64_t seed) override {
        const Current current(device_);
        if (error_ != 0 || keep(current.error) != 0 || prepare() != 0) return error_;
        Result64 &one = results_[next_++ % kResults];
        if (one.busy.exchange(true, std::memory_order_acquire)) return refuse(EAGAIN, "too many checksums under way");
        one.wanted = result;
        const auto address = reinterpret_cast<Pointer>(source), total = reinterpret_cast<Pointer>(&one.value);
        if (keep(queue_checksum(device_, stream_, address, bytes, seed, space_.scratch, total)) != 0) return error_;
        return keep(check(calls().cuLaunchHostFunc(stream_, deliver, &one), "cuLaunchHostFunc"));
    }
    int receive(void *destination, const void *source, size_t bytes, uint64_t *result, uint64_t seed) override {
        const int error = copy(destination, source, bytes);
        return error != 0 ? error : checksum(result, destination, bytes, seed);
    }
    int after(const Mark &mark) override {
        const Current current(device_);
        if (error_ != 0 || keep(current.error) != 0) return error_;
        const auto *own = dynamic_cast<const CudaMark *>(&mark);
        if (own != nullptr && keep(own->error()) != 0) return error_;
        if (own != nullptr) return keep(check(calls().cuStreamWaitEvent(stream_, own->event, 0), "cuStreamWaitEvent"));
        const int state = mark.query();
        return state == -EINPROGRESS ? -ENOTSUP : keep(state);
    }
    std::shared_ptr<Mark> mark() override {
        const Current current(device_);
        Event event = nullptr;
        if (error_ == 0 && keep(current.error) == 0 &&
            keep(check(calls().cuEventCreate(&event, kDisableTiming), "cuEventCreate")) == 0) {
            keep(check(calls().cuEventRecord(event, stream_), "cuEventRecord"));
        }
        return std::make_shared<CudaMark>(device_, event, error_);
    }

 private:
    int keep(int error) {
        if (error_ == 0) error_ = error;
        return error_;
    }
    // Before the lane's first checksum. The kernels are loaded first, because that makes workspaces.
    int prepare() {
        if (results_ != nullptr) return 0;
        const Kernels *loaded = nullptr;
        if (keep(kernels(device_, &loaded)) != 0 || keep(borrow(device_, &space_)) != 0) return error_;
        results_ = static_cast<Result64 *>(space_.pinned);
        for (size_t i = 0; i < kResults; ++i) new (&results_[i].busy) std::atomic<bool>(false);
        return 0;
    }
    const Ordinal device_;
    Stream stream_ = nullptr;
    Workspace space_;
    Result64 *results_ = nullptr;
    size_t next_ = 0;
    int error_ = 0;
};

class CudaDevice : public Device {
 public:
    CudaDevice(Ordinal device, int threads) : device_(device), host_(make_host_device(threads)) {}
    std::unique_ptr<Lane> lane() override { return std::make_unique<CudaLane>(device_); }
    std::unique_ptr<Lane> loading_lane() override { return host_->lane(); }
    void *staging(size_t bytes) override {
        const Current current(device_);
        void *memory = nullptr;
        if (current.error != 0 || check(calls().cuMemAllocHost(&memory, bytes), "cuMemAllocHost") != 0) return nullptr;
        return memory;
    }
    void release_staging(void *memory, size_t) override {
        const Current current(device_);
        if (current.error == 0) calls().cuMemFreeHost(memory);
    }

 private:
    const Ordinal device_;
    const std::unique_ptr<Device> host_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Device> make_cuda_device(int ordinal, int threads) {
    const cuda::Current current(ordinal);
    if (current.error != 0) return nullptr;
    return std::make_unique<cuda::CudaDevice>(ordinal, threads);
}

}  // namespace ftrun
