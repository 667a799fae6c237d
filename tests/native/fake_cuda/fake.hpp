// A CUDA driver for machines without a GPU: its "device memory" is host memory, its streams are threads.
//
// What is true of a real driver and that ftrun relies on holds here too: shareable memory is a descriptor that any process
// can map and that outlives its exporter; a stream runs in order, beside the program, and stops in the middle of a copy when
// the process is killed; the first error of a context sticks. Memory of a device is reported as unified, which it is:
// the CPU reads it, so torch without CUDA can make tensors of it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../../../native/src/cuda_abi.hpp"

namespace fake {

using namespace ftrun::cuda;

// The control file, FAKE_CUDA_CONTROL: lines "name value", read at each call so that a test can change them at any time.
//   devices N        how many devices (default 4)
//   memory BYTES     of each device, counted in each process (default 1 GiB)
//   rate BYTES       a second that a copy on a stream moves (default: as fast as memcpy)
//   largest BYTES    of shareable memory that is found in one piece (default: no limit)
//   refuse CALL      this call gives CUDA_ERROR_NOT_PERMITTED; CALL#3 the third time in each process only
//   lost DEVICE      every call that needs the device gives CUDA_ERROR_UNKNOWN, from now on
//   vmm 0            devices cannot share memory
//   capability N     of every device: 90 (the default) is compute capability 9.0
//   ptx RESULT       loading PTX gives this error
struct Control {
    int devices = 4;
    size_t memory = size_t{1} << 30;
    size_t largest = SIZE_MAX;
    double rate = 0;
    int lost = -1;
    bool vmm = true;
    int capability = 90;
    int ptx = kSuccess;
    std::string refused;
};
Control control();
bool refused(const char *call);

struct Happening {  // an event's last recording
    std::mutex mutex;
    std::condition_variable changed;
    bool done = true;
    Result error = kSuccess;
};

struct Queue {  // a stream
    explicit Queue(int device);
    ~Queue();
    void push(std::function<void()> work);
    const int device;

 private:
    void run();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool ending_ = false;
    std::thread thread_;
};

struct Device {  // also its primary context
    int ordinal = 0;
    Result sticky = kSuccess;
    std::shared_ptr<Queue> legacy;
};

// What the calls share. `mutex` guards all that is not a queue's own.
extern std::mutex mutex;
extern bool initialized;
Device &device_at(int ordinal);  // under `mutex`
Result state_of(int ordinal);    // what any call on a device gives: its first error, again and again
Result current(int *ordinal);    // the device of the calling thread's context, and its state

// The work that a launch of the kernel `name` means, its parameters copied; empty when there is no such kernel.
std::function<void()> kernel(const std::string &name, unsigned blocks, unsigned threads, void **parameters);

}  // namespace fake

#define API extern "C" __attribute__((visibility("default")))
#define NEED(call)                            \
    if (!initialized) return kNotInitialized; \
    if (refused(#call)) return kNotPermitted;

// The driver's calls, as ftrun declares them: a definition that differs does not compile.
using namespace fake;
#define FAKE_DECLARE(call, arguments) API Result call arguments;
FTRUN_CUDA_CALLS(FAKE_DECLARE)
#undef FAKE_DECLARE
