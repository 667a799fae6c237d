// What ftrun uses of NVRTC, declared by hand so that it builds without CUDA. A test compares these with nvrtc.h.
#pragma once

#include <cstddef>

namespace ftrun::nvrtc {

using Result = int;
using Program = void *;

constexpr Result kSuccess = 0, kInvalidOption = 5, kCompilation = 6;

}  // namespace ftrun::nvrtc

// name, result, arguments
#define FTRUN_NVRTC_CALLS(X)                                                                                        \
    X(nvrtcVersion, Result, (int *, int *))                                                                         \
    X(nvrtcGetErrorString, const char *, (Result))                                                                  \
    X(nvrtcCreateProgram, Result, (Program *, const char *, const char *, int, const char *const *, const char *const *)) \
    X(nvrtcCompileProgram, Result, (Program, int, const char *const *))                                             \
    X(nvrtcGetProgramLogSize, Result, (Program, size_t *))                                                          \
    X(nvrtcGetProgramLog, Result, (Program, char *))                                                                \
    X(nvrtcGetCUBINSize, Result, (Program, size_t *))                                                               \
    X(nvrtcGetCUBIN, Result, (Program, char *))                                                                     \
    X(nvrtcDestroyProgram, Result, (Program *))
