// The seam between the transfer pipeline and the memory it crosses. Host memory is served by threads, a GPU by CUDA streams;
// the pipeline sees lanes of ordered work and marks between them, and never learns which it has.
//
// Rules: queueing never blocks; a result is 0 or a negative errno; a lane keeps its first error and does nothing more, so that
// whoever waits for a mark behind it gets that error; nothing here waits for a whole device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ftrun {

// A point in a lane's work. May be waited for by other lanes (of the same or another device) and by the host.
class Mark {
 public:
  virtual ~Mark() = default;
  // 0 when everything before the mark is done, -EINPROGRESS, or the error of its lane.
  virtual int query() const = 0;
  // As query, but sleeps up to `seconds` first; -ETIMEDOUT when it is still not done.
  virtual int wait(double seconds) const = 0;
  // When it was reached (ns, CLOCK_MONOTONIC); 0 = not yet, or its device cannot tell.
  virtual uint64_t reached_at() const { return 0; }
};

// Work in order. Lanes run beside each other.
class Lane {
 public:
  virtual ~Lane() = default;
  virtual int copy(void *destination, const void *source, size_t bytes) = 0;
  // Writes the 64-bit checksum of ftrun_checksum (same value on every device) to `result`, which the host may read after a mark.
  virtual int checksum(uint64_t *result, const void *source, size_t bytes, uint64_t seed) = 0;
  // Both at once; a device that can do it in one pass over the memory overrides this.
  virtual int copy_checksum(void *destination, const void *source, size_t bytes, uint64_t *result, uint64_t seed) {
    const int error = copy(destination, source, bytes);
    return error != 0 ? error : checksum(result, source, bytes, seed);
  }
  // As copy_checksum, for a source that perhaps only copies reach (a neighbour's memory): a GPU hashes what arrived.
  virtual int receive(void *destination, const void *source, size_t bytes, uint64_t *result, uint64_t seed) {
    return copy_checksum(destination, source, bytes, result, seed);
  }
  // Later work of this lane waits for `mark`; -ENOTSUP for a mark of another kind of device (the pipeline then waits on the host).
  virtual int after(const Mark &mark) = 0;
  virtual std::shared_ptr<Mark> mark() = 0;     // behind everything queued so far
};

// A place where segments live.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::unique_ptr<Lane> lane() = 0;  // nullptr when none can be had
  // One that fills staging memory from plain host memory. A GPU's own would block whoever queues, and its kernels cannot
  // hash what the device does not see.
  virtual std::unique_ptr<Lane> loading_lane() { return lane(); }
  // Staging memory next to the device that the host can fill at full speed (host: plain pages; CUDA: pinned).
  virtual void *staging(size_t bytes) = 0;
  virtual void release_staging(void *memory, size_t bytes) = 0;
};

}  // namespace ftrun
