// What ftrun uses of the CUDA driver API, declared by hand so that it builds without CUDA. A test compares these with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ftrun::cuda {

using Result = int;
using Ordinal = int;
using Pointer = uint64_t;  // CUdeviceptr
using Handle = uint64_t;   // CUmemGenericAllocationHandle
using Context = void *;
using Stream = void *;
using Event = void *;
using Module = void *;
using Function = void *;

struct Uuid {
    char bytes[16];
};

struct Location {
    int type;
    int id;
};

struct Properties {  // CUmemAllocationProp
    int type;
    int handle_types;
    Location location;
    void *windows;
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
};

struct Access {  // CUmemAccessDesc
    Location location;
    int flags;
};

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kUnavailable = 46, kNoDevice = 100,
                 kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201, kNoBinary = 209, kUncorrectable = 214,
                 kInvalidPtx = 218, kNoJit = 221, kUnsupportedPtx = 222, kJitDisabled = 223, kInvalidSource = 300, kNotFound = 500, kNotReady = 600,
                 kIllegalAddress = 700, kAlreadyRegistered = 712, kLaunchFailed = 719, kNotPermitted = 800,
                 kNotSupported = 801, kUnknown = 999;
constexpr int kPinned = 1, kPosixFd = 1, kOnDevice = 1, kReadWrite = 3;
constexpr unsigned kNonBlocking = 1, kDisableTiming = 2, kDeviceMap = 2;
constexpr int kHostMemory = 1, kDeviceMemory = 2, kUnifiedMemory = 4;           // CUmemorytype
constexpr int kMemoryType = 2, kDeviceOrdinal = 9;                              // CUpointer_attribute
constexpr int kMajor = 75, kMinor = 76, kVmm = 102, kExportsFd = 103, kWrites64 = 122;  // CUdevice_attribute
constexpr int kMinimumGranularity = 0;
constexpr int kDriverApi = 12000;  // the calls as CUDA 12.0 declares them

}  // namespace ftrun::cuda

// name, arguments
#define FTRUN_CUDA_CALLS(X)                                                                                             \
    X(cuInit, (unsigned))                                                                                               \
    X(cuDriverGetVersion, (int *))                                                                                      \
    X(cuGetErrorName, (Result, const char **))                                                                          \
    X(cuGetErrorString, (Result, const char **))                                                                        \
    X(cuDeviceGet, (Ordinal *, int))                                                                                    \
    X(cuDeviceGetCount, (int *))                                                                                        \
    X(cuDeviceGetName, (char *, int, Ordinal))                                                                          \
    X(cuDeviceGetUuid, (Uuid *, Ordinal))                                                                               \
    X(cuDeviceGetAttribute, (int *, int, Ordinal))                                                                      \
    X(cuDeviceTotalMem, (size_t *, Ordinal))                                                                            \
    X(cuDevicePrimaryCtxRetain, (Context *, Ordinal))                                                                   \
    X(cuCtxPushCurrent, (Context))                                                                                      \
    X(cuCtxPopCurrent, (Context *))                                                                                     \
    X(cuMemGetInfo, (size_t *, size_t *))                                                                               \
    X(cuMemAlloc, (Pointer *, size_t))                                                                                  \
    X(cuMemFree, (Pointer))                                                                                             \
    X(cuMemAllocHost, (void **, size_t))                                                                                \
    X(cuMemFreeHost, (void *))                                                                                          \
    X(cuMemHostRegister, (void *, size_t, unsigned))                                                                    \
    X(cuMemHostUnregister, (void *))                                                                                    \
    X(cuMemHostGetDevicePointer, (Pointer *, void *, unsigned))                                                         \
    X(cuMemGetAllocationGranularity, (size_t *, const Properties *, int))                                               \
    X(cuMemCreate, (Handle *, size_t, const Properties *, unsigned long long))                                          \
    X(cuMemRelease, (Handle))                                                                                           \
    X(cuMemExportToShareableHandle, (void *, Handle, int, unsigned long long))                                          \
    X(cuMemImportFromShareableHandle, (Handle *, void *, int))                                                          \
    X(cuMemAddressReserve, (Pointer *, size_t, size_t, Pointer, unsigned long long))                                    \
    X(cuMemAddressFree, (Pointer, size_t))                                                                              \
    X(cuMemMap, (Pointer, size_t, size_t, Handle, unsigned long long))                                                  \
    X(cuMemUnmap, (Pointer, size_t))                                                                                    \
    X(cuMemSetAccess, (Pointer, size_t, const Access *, size_t))                                                        \
    X(cuPointerGetAttribute, (void *, int, Pointer))                                                                    \
    X(cuMemcpyAsync, (Pointer, Pointer, size_t, Stream))                                                                \
    X(cuMemsetD8Async, (Pointer, unsigned char, size_t, Stream))                                                        \
    X(cuStreamCreate, (Stream *, unsigned))                                                                             \
    X(cuStreamDestroy, (Stream))                                                                                        \
    X(cuStreamWaitEvent, (Stream, Event, unsigned))                                                                     \
    X(cuStreamWriteValue64, (Stream, Pointer, uint64_t, unsigned))                                                      \
    X(cuLaunchHostFunc, (Stream, void (*)(void *), void *))                                                             \
    X(cuEventCreate, (Event *, unsigned))                                                                               \
    X(cuEventDestroy, (Event))                                                                                          \
    X(cuEventRecord, (Event, Stream))                                                                                   \
    X(cuEventQuery, (Event))                                                                                            \
    X(cuModuleLoadData, (Module *, const void *))                                                                       \
    X(cuModuleGetFunction, (Function *, Module, const char *))                                                          \
    X(cuLaunchKernel, (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **, \
                       void **))
