// The C ABI's work in stream order.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cuda_work.hpp"
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

uint64_t exponent_of(int kind) {
    switch (kind) {
        case 2: return 0x7C00;
        case 3: return 0x7F80;
        case 4: return 0x7F800000;
        case 8: return 0x7FF0000000000000;
        default: return 0;
    }
}

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

int ftrun_cuda_pack(int device, uint64_t stream, const uint64_t *table, uint64_t count, double timeout) {
    const Current current(device);
    if (current.error != 0 || count == 0) return current.error;
    const Kernels *kernel = nullptr;
    int error = kernels(device, &kernel);
    if (error != 0) return error;
    Borrowed space(device);
    error = space.error;
    constexpr uint64_t kRow = 3 * sizeof(uint64_t), kBatch = kPinnedRoom / kRow;
    for (uint64_t first = 0; first < count && error == 0; first += kBatch) {
        uint64_t batch = std::min(kBatch, count - first);
        std::memcpy(space.pinned(), table + 3 * first, batch * kRow);
        Pointer rows = pointer_of(space.pinned());
        void *parameters[] = {&rows, &batch};
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>(batch, 65535));
        error = check(calls().cuLaunchKernel(kernel->pack, blocks, 1, 1, 256, 1, 1, 0, stream_of(stream), parameters, nullptr),
                      "ftrun_pack");
        error = space.wait(error, stream_of(stream), timeout);
    }
    return error;
}

int ftrun_cuda_nonfinite(int device, uint64_t stream, uint64_t address, uint64_t count, int kind, double timeout,
                         uint64_t *found) {
    uint64_t exponent = exponent_of(kind);
    if (exponent == 0) return refuse(EINVAL, "ftrun_cuda_nonfinite: unknown kind of number");
    const Current current(device);
    if (current.error != 0) return current.error;
    const Kernels *kernel = nullptr;
    int error = kernels(device, &kernel);
    if (error != 0) return error;
    Borrowed space(device);
    if (space.error != 0) return space.error;
    Pointer counter = space.scratch();
    uint64_t width = kind == 3 ? 2 : static_cast<uint64_t>(kind);
    void *parameters[] = {&address, &count, &exponent, &width, &counter};
    error = check(calls().cuMemsetD8Async(counter, 0, sizeof(uint64_t), stream_of(stream)), "cuMemsetD8Async");
    if (error == 0) {
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>((count + 255) / 256 + 1, 4096));
        error = check(calls().cuLaunchKernel(kernel->nonfinite, blocks, 1, 1, 256, 1, 1, 0, stream_of(stream), parameters,
                                             nullptr),
                      "ftrun_nonfinite");
    }
    if (error == 0)
        error = check(calls().cuMemcpyAsync(pointer_of(space.pinned()), counter, sizeof(uint64_t), stream_of(stream)),
                      "cuMemcpyAsync");
    error = space.wait(error, stream_of(stream), timeout);
    if (error == 0) *found = *space.pinned();
    return error;
}

int ftrun_cuda_kernels(int device) {
    const Current current(device);
    const Kernels *kernel = nullptr;
    const int error = current.error != 0 ? current.error : kernels(device, &kernel);
    return error != 0 ? error : kernel->compiled;
}

}  // extern "C"
