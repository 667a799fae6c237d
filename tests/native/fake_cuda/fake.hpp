// A CUDA driver for machines without a GPU: its "device memory" is host memory, its streams are threads.
//
// What is true of a real driver and that ftrun relies on holds here too: shareable memory is a descriptor that any process
// can map and that outlives its exporter; a stream runs in order, beside the program, and stops in the middle of a copy when
// the process is killed; the first error of a context sticks. Memory of a device is reported as unified, which it is:
// the CPU reads it, so torch without CUDA can make tensors of it.
//
// Where drivers differ it is as harsh as any may be. Calls that make or give back memory of a device, and loading a module,
// wait for everything that is queued on the device; a copy from or to pageable memory returns when it is done. A kernel of a
// killed process may go on writing (fake_writes): the process is not over before it is done, as with the real driver, whose
// share of the process's end comes after its threads died.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../../native/src/cuda/abi.hpp"

namespace fake {

using namespace ftrun::cuda;

// The control file, FAKE_CUDA_CONTROL: lines "name value", read at each call so that a test can change them at any time.
//   devices N        how many devices the machine has (default 4); CUDA_VISIBLE_DEVICES hides and orders them as CUDA does
//   memory BYTES     of each device, counted in each process (default 1 GiB)
//   rate BYTES       a second that a copy on a stream moves (default: as fast as memcpy)
//   largest BYTES    of shareable memory that is found in one piece (default: no limit)
//   refuse CALL      this call gives CUDA_ERROR_NOT_PERMITTED; CALL#3 the third time in each process only
//   lost DEVICE      every call that needs the device gives CUDA_ERROR_UNKNOWN, from now on
//   vmm 0            devices cannot share memory
//   capability N     of every device: 90 (the default) is compute capability 9.0
//   ptx RESULT       loading PTX gives this error
//   import context   memory is imported by a thread with a current context only
//   import reaped    memory of a process that died is imported only when that was reaped
//   teardown SECONDS the driver's share of a killed process's end: as long as that it is there, with all it had open
//   stuck CALL       this call never returns
//   release 1        kernels that never end (fake_endless) end
//   order PATH       each piece of work on a stream is two lines there, when it is queued and when it is done, and each wait for
//                    it that is over is one: pid, ns, queued|done|waited, call, address, value
//   log PATH         each call that makes a context, or makes, maps or gives back memory, is a line there: pid, ns, call, device
struct Control {
    int devices = 4;
    size_t memory = size_t{1} << 30;
    size_t largest = SIZE_MAX;
    double rate = 0;
    int lost = -1;
    bool vmm = true;
    int capability = 90;
    int ptx = kSuccess;
    bool import_context = false;
    bool import_reaped = false;
    double teardown = 0;
    bool release = false;
    std::string log, order;
    std::string refused;
    std::string stuck;
};
Control control();
void linger(double seconds);  // this process's end takes that long, from the death of its threads on
bool refused(const char *call);  // never returns where the control file says that it is stuck
const std::vector<int> &visible();        // the machine's numbers of the devices that this process sees
void note(const char *call, int device);  // a line of the log
void tell(const char *what, const char *call, Pointer at, uint64_t value);  // a line of the order

struct Happening {  // an event's last recording
    std::mutex mutex;
    std::condition_variable changed;
    bool done = true;
    Result error = kSuccess;
};

struct Queue {  // a stream
    explicit Queue(int device);
    ~Queue();
    void push(const char *call, std::function<void()> work, Pointer at = 0, uint64_t value = 0);
    void drain();  // wait until all that was pushed before is done
    const int device;

 private:
    void run();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    uint64_t pushed_ = 0, done_ = 0;
    bool ending_ = false;
    std::thread thread_;
};

struct Device {  // also its primary context
    int ordinal = 0;
    Result sticky = kSuccess;
    std::shared_ptr<Queue> legacy;
    std::vector<std::weak_ptr<Queue>> queues;  // all of them
};

// What the calls share. `mutex` guards all that is not a queue's own.
extern std::mutex mutex;
extern bool initialized;
Device &device_at(int ordinal);  // under `mutex`
Result state_of(int ordinal);    // what any call on a device gives: its first error, again and again
Result current(int *ordinal);    // the device of the calling thread's context, and its state
bool has_context();              // has the calling thread one?
std::shared_ptr<Queue> make_queue(int ordinal);  // under `mutex`
void await_idle(int ordinal);    // what is queued on the device now; all devices for -1. Not under `mutex`
bool is_pageable(Pointer address);

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
