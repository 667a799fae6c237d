// Work on a stream: what the C ABI and the pipeline's CUDA lanes both queue.
#pragma once

#include "cuda_driver.hpp"

namespace ftrun::cuda {

struct Kernels {
    Function lanes = nullptr, pieces = nullptr, join = nullptr, pack = nullptr, nonfinite = nullptr;
    bool compiled = false;  // by NVRTC, since the driver refused their PTX
};

// The kernels, loaded for `device` (whose context is current). 0 or a negative errno, -ENOEXEC when its driver takes neither
// their PTX nor what NVRTC makes of their source.
int kernels(Ordinal device, const Kernels **found);

constexpr size_t kChecksumScratch = size_t{1} << 20;

// Queues ftrun_checksum of `length` bytes; the value comes to *total, a word that the stream can write. `scratch` has room
// for kChecksumScratch bytes on the device and is free again when the value is there.
int queue_checksum(Ordinal device, Stream stream, Pointer address, uint64_t length, uint64_t seed, Pointer scratch,
                   Pointer total);

// Sleeps until the event happened: 0, -ETIMEDOUT after `seconds`, or the error of the work before it.
int wait_event(Event event, double seconds);

// As wait_event for everything queued on the stream so far.
int wait_stream(Stream stream, double seconds);

}  // namespace ftrun::cuda
