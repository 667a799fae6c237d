// The C ABI's work in stream order.
#include <algorithm>
#include <cerrno>
#include <mutex>

#include "cuda_work.hpp"
#include "ftrun_cuda.h"

namespace ftrun::cuda {
namespace {

std::mutex scratch_mutex;  // calls that need device memory of their own wait for their result: one at a time

// Device memory for the length of one call.
struct Scratch {
    explicit Scratch(size_t bytes) { error = check(calls().cuMemAlloc(&address, bytes), "cuMemAlloc"); }
    ~Scratch() {
        if (address != 0) calls().cuMemFree(address);
    }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    Pointer address = 0;
    int error = 0;
};

Stream stream_of(uint64_t stream) { return reinterpret_cast<Stream>(stream); }

Pointer pointer_of(const void *address) { return reinterpret_cast<Pointer>(address); }

int fetch(Stream stream, uint64_t *result, Pointer from, double timeout) {
    const int error = check(calls().cuMemcpyAsync(pointer_of(result), from, sizeof(*result), stream), "cuMemcpyAsync");
    return error != 0 ? error : wait_stream(stream, timeout);
}

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
    const int error = ftrun_cuda_copy(device, stream, destination, source, length);
    return error != 0 ? error : ftrun_cuda_sync(device, stream, timeout);
}

int ftrun_cuda_checksum(int device, uint64_t stream, uint64_t address, uint64_t length, uint64_t seed, double timeout,
                        uint64_t *result) {
    const Current current(device);
    if (current.error != 0) return current.error;
    const std::lock_guard<std::mutex> lock(scratch_mutex);
    const Scratch scratch(kChecksumScratch + sizeof(uint64_t));
    if (scratch.error != 0) return scratch.error;
    const Pointer total = scratch.address + kChecksumScratch;
    const int error =
        queue_checksum(device, stream_of(stream), address, length, seed, scratch.address, total);
    return error != 0 ? error : fetch(stream_of(stream), result, total, timeout);
}

int ftrun_cuda_pack(int device, uint64_t stream, const uint64_t *table, uint64_t count, double timeout) {
    const Current current(device);
    if (current.error != 0 || count == 0) return current.error;
    const Kernels *kernel = nullptr;
    int error = kernels(device, &kernel);
    if (error != 0) return error;
    const size_t bytes = count * 3 * sizeof(uint64_t);
    const std::lock_guard<std::mutex> lock(scratch_mutex);
    const Scratch scratch(bytes);
    if (scratch.error != 0) return scratch.error;
    Pointer rows = scratch.address;
    void *parameters[] = {&rows, &count};
    error = check(calls().cuMemcpyAsync(rows, pointer_of(table), bytes, stream_of(stream)), "cuMemcpyAsync");
    if (error == 0) {
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>(count, 65535));
        error = check(calls().cuLaunchKernel(kernel->pack, blocks, 1, 1, 256, 1, 1, 0, stream_of(stream), parameters, nullptr),
                      "ftrun_pack");
    }
    return error != 0 ? error : wait_stream(stream_of(stream), timeout);
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
    const std::lock_guard<std::mutex> lock(scratch_mutex);
    const Scratch scratch(sizeof(uint64_t));
    if (scratch.error != 0) return scratch.error;
    Pointer counter = scratch.address;
    uint64_t width = kind == 3 ? 2 : static_cast<uint64_t>(kind);
    void *parameters[] = {&address, &count, &exponent, &width, &counter};
    error = check(calls().cuMemsetD8Async(counter, 0, sizeof(uint64_t), stream_of(stream)), "cuMemsetD8Async");
    if (error == 0) {
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>((count + 255) / 256 + 1, 4096));
        error = check(calls().cuLaunchKernel(kernel->nonfinite, blocks, 1, 1, 256, 1, 1, 0, stream_of(stream), parameters,
                                             nullptr),
                      "ftrun_nonfinite");
    }
    return error != 0 ? error : fetch(stream_of(stream), found, counter, timeout);
}

int ftrun_cuda_kernels(int device) {
    const Current current(device);
    const Kernels *kernel = nullptr;
    const int error = current.error != 0 ? current.error : kernels(device, &kernel);
    return error != 0 ? error : kernel->compiled;
}

}  // extern "C"
