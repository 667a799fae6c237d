// The CUDA driver, found at run time. Nothing here links against CUDA; without a driver every call fails with -ENOENT.
//
// Rules: results are 0 or a negative errno; `why()` of the same thread says what failed, in words. A context is current only
// inside a Current, so that the program's own choice of device is never changed.
#pragma once

#include <string>

#include "cuda/abi.hpp"

namespace ftrun::cuda {

struct Calls {
#define FTRUN_DECLARE(name, arguments) Result(*name) arguments = nullptr;
    FTRUN_CUDA_CALLS(FTRUN_DECLARE)
#undef FTRUN_DECLARE
};

// Loads and initializes the driver once a process (again in a forked child that had not). 0 or a negative errno.
int load();

// Is a driver already part of this process, brought in by whoever? Never loads one.
bool present();

// The loaded driver's calls; only after load() gave 0.
const Calls &calls();

// What the last failure in this thread was.
const char *why();

// 0, or the negative errno of a driver result; keeps the text for why(). `what` names the call and its object.
int check(Result result, const char *what);
int refuse(int error, const std::string &text);

// The device's primary context (the one that torch uses), current for the life of this object. `error` is 0 or negative.
class Current {
 public:
    explicit Current(Ordinal device);
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    int error = 0;

 private:
    bool pushed_ = false;
};

}  // namespace ftrun::cuda
