// Work on a stream: what the C ABI and the pipeline's CUDA lanes both queue.
#pragma once

#include "cuda/driver.hpp"

namespace ftrun::cuda {

struct Kernels {
    Function lanes = nullptr, pieces = nullptr, join = nullptr;
};

// The kernels, loaded for `device` (whose context is current), with workspaces for their first users. 0 or a negative errno,
// -ENOEXEC when the driver does not take their PTX.
int kernels(Ordinal device, const Kernels **found);

constexpr size_t kChecksumScratch = size_t{1} << 20;
constexpr size_t kPinnedRoom = size_t{256} << 10;

// Memory that work on a stream needs beside what it works on. Some of it is made when the kernels are loaded and never given
// back: both may wait for everything on the device, and in the middle of a repair that may be a kernel that waits for a dead
// peer. Pinned, because a copy from or to pageable memory waits for its stream, without a deadline.
struct Workspace {
    Pointer scratch = 0;     // kChecksumScratch bytes of the device
    void *pinned = nullptr;  // kPinnedRoom bytes of the host, at the same address for the device
};

// Takes a workspace of the device (whose context is current) out of the pool; makes one when all are in use.
int borrow(Ordinal device, Workspace *space);

// Back to the pool. Not for one whose work did not end in time: the device may still write there, so it is left alone.
void give_back(Ordinal device, const Workspace &space);

// Queues ftrun_checksum of `length` bytes; the value comes to *total, a word that the stream can write. `scratch` has room
// for kChecksumScratch bytes on the device and is free again when the value is there.
int queue_checksum(Ordinal device, Stream stream, Pointer address, uint64_t length, uint64_t seed, Pointer scratch,
                   Pointer total);

// Sleeps until the event happened: 0, -ETIMEDOUT after `seconds`, or the error of the work before it.
int wait_event(Event event, double seconds);

// As wait_event for everything queued on the stream so far.
int wait_stream(Stream stream, double seconds);

}  // namespace ftrun::cuda
