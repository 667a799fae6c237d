// The C ABI's work in stream order.
#include "cuda/work.hpp"
#include "ftrun_cuda.h"

namespace ftrun::cuda {
namespace {

// A workspace for the length of one call. It goes back to the pool once `wait` has seen the call's work done.
class Borrowed {
 public:
    explicit Borrowed(Ordinal device) : device_(device) {
        error = borrow(device, &space_);
        idle_ = error == 0;
    }
    ~Borrowed() {
        if (idle_) give_back(device_, space_);
    }
    Borrowed(const Borrowed &) = delete;
    Borrowed &operator=(const Borrowed &) = delete;
    Pointer scratch() const { return space_.scratch; }
    uint64_t *pinned() const { return static_cast<uint64_t *>(space_.pinned); }
    // `queued`: 0, or why not all of the work was queued.
    int wait(int queued, Stream stream, double timeout) {
        const int waited = wait_stream(stream, timeout);
        idle_ = waited == 0;
        return queued != 0 ? queued : waited;
    }
    int error = 0;

 private:
    const Ordinal device_;
    Workspace space_;
    bool idle_ = false;
};

Stream stream_of(uint64_t stream) { return reinterpret_cast<Stream>(stream); }

Pointer pointer_of(const void *address) { return reinterpret_cast<Pointer>(address); }

}  // namespace
}  // namespace ftrun::cuda

using namespace ftrun::cuda;

extern "C" {

int ftrun_cuda_stamp(int device, uint64_t stream, uint64_t seen, uint64_t value) {
    const Current current(device);
    if (current.error != 0) return current.error;
    return check(calls().cuStreamWriteValue64(stream_of(stream), seen, value, 0), "cuStreamWriteValue64");
}

int ftrun_cuda_copy(int device, uint64_t stream, uint64_t destination, uint64_t source, uint64_t length) {
    const Current current(device);
    if (current.error != 0 || length == 0) return current.error;
    return check(calls().cuMemcpyAsync(destination, source, length, stream_of(stream)), "cuMemcpyAsync");
}

int ftrun_cuda_sync(int device, uint64_t stream, double timeout) {
    const Current current(device);
    return current.error != 0 ? current.error : wait_stream(stream_of(stream), timeout);
}

int ftrun_cuda_copy_now(int device, uint64_t stream, uint64_t destination, uint64_t source, uint64_t length,
                        double timeout) {
    int error = ftrun_cuda_sync(device, stream, timeout);  // a copy of pageable memory would wait for it without a deadline
    if (error == 0) error = ftrun_cuda_copy(device, stream, destination, source, length);
    return error != 0 ? error : ftrun_cuda_sync(device, stream, timeout);
}

int ftrun_cuda_checksum(int device, uint64_t stream, uint64_t address, uint64_t length, uint64_t seed, double timeout,
                        uint64_t *result) {
    const Current current(device);
    if (current.error != 0) return current.error;
    const Kernels *kernel = nullptr;
    int error = kernels(device, &kernel);
    if (error != 0) return error;
    Borrowed space(device);
    if (space.error != 0) return space.error;
    const Pointer total = pointer_of(space.pinned());
    error = queue_checksum(device, stream_of(stream), address, length, seed, space.scratch(), total);
    error = space.wait(error, stream_of(stream), timeout);
    if (error == 0) *result = *space.pinned();
    return error;
}

int ftrun_cuda_kernels(int device) {
    const Current current(device);
    const Kernels *kernel = nullptr;
    const int error = current.error != 0 ? current.error : kernels(device, &kernel);
    return error;
}

}  // extern "C"
