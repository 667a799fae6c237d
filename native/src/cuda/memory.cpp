// What there is, and memory on a device that several processes map.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cuda/driver.hpp"
#include "ftrun_cuda.h"

namespace ftrun::cuda {
namespace {

Properties properties_of(Ordinal device) {
    Properties wanted{};
    wanted.type = kPinned;
    wanted.handle_types = kPosixFd;
    wanted.location = {kOnDevice, device};
    return wanted;
}

int attribute(Ordinal device, int which) {
    int value = 0;
    return calls().cuDeviceGetAttribute(&value, which, device) == kSuccess ? value : 0;
}

int map(Ordinal home, Ordinal device, Handle handle, Pointer address, uint64_t length) {
    int error = check(calls().cuMemMap(address, length, 0, handle, 0), "cuMemMap");
    if (error != 0) return error;
    const Access access[2] = {{{kOnDevice, device}, kReadWrite}, {{kOnDevice, home}, kReadWrite}};
    error = check(calls().cuMemSetAccess(address, length, access, home == device ? 1 : 2), "cuMemSetAccess");
    int direct = 0;
    if (error != 0 && home != device) {
        // not reachable directly: copies between the two still work, by way of the device that has it
        error = check(calls().cuMemSetAccess(address, length, access + 1, 1), "cuMemSetAccess");
        direct = 1;
    }
    if (error != 0) calls().cuMemUnmap(address, length);
    return error != 0 ? error : direct;
}

int import(int fd, Handle *handle) {
    void *shareable = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
    return check(calls().cuMemImportFromShareableHandle(handle, shareable, kPosixFd), "cuMemImportFromShareableHandle");
}

}  // namespace
}  // namespace ftrun::cuda

using namespace ftrun::cuda;

extern "C" {

const char *ftrun_cuda_why(void) { return why(); }

bool ftrun_cuda_present(void) { return present(); }

int ftrun_cuda_driver(int *version) {
    const int error = load();
    return error != 0 ? error : check(calls().cuDriverGetVersion(version), "cuDriverGetVersion");
}

int ftrun_cuda_devices(void) {
    int error = load();
    int count = 0;
    if (error == 0) error = check(calls().cuDeviceGetCount(&count), "cuDeviceGetCount");
    return error != 0 ? error : count;
}

int ftrun_cuda_device(int device, FtrunCudaDevice *facts) {
    const int count = ftrun_cuda_devices();
    if (count < 0) return count;
    if (device < 0 || device >= count)
        return refuse(ENODEV, "there is no device " + std::to_string(device) + " (" + std::to_string(count) + " found)");
    std::memset(facts, 0, sizeof(*facts));
    Uuid uuid{};
    size_t bytes = 0;
    int error = check(calls().cuDeviceGetName(facts->name, sizeof(facts->name) - 1, device), "cuDeviceGetName");
    if (error == 0) error = check(calls().cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
    if (error == 0) error = check(calls().cuDeviceTotalMem(&bytes, device), "cuDeviceTotalMem");
    if (error != 0) return error;
    std::memcpy(facts->uuid, uuid.bytes, sizeof(uuid.bytes));
    facts->bytes = bytes;
    facts->major = attribute(device, kMajor);
    facts->minor = attribute(device, kMinor);
    facts->vmm = attribute(device, kVmm) != 0 && attribute(device, kExportsFd) != 0;
    facts->writes64 = attribute(device, kWrites64) != 0;
    const Properties wanted = properties_of(device);
    size_t granularity = 0;
    if (facts->vmm && calls().cuMemGetAllocationGranularity(&granularity, &wanted, kMinimumGranularity) == kSuccess)
        facts->granularity = granularity;
    return 0;
}

int ftrun_cuda_room(int device, uint64_t *free, uint64_t *total) {
    const Current current(device);
    if (current.error != 0) return current.error;
    size_t left = 0, all = 0;
    const int error = check(calls().cuMemGetInfo(&left, &all), "cuMemGetInfo");
    *free = left;
    *total = all;
    return error;
}

int ftrun_cuda_owner(const void *address, int *device, int *host) {
    *device = -1;
    *host = 1;
    const int error = load();
    if (error != 0) return error;
    const auto pointer = reinterpret_cast<Pointer>(address);
    unsigned type = 0;
    const Result result = calls().cuPointerGetAttribute(&type, kMemoryType, pointer);
    if (result == kInvalidValue || result == kNotInitialized) return 0;  // the driver does not know it: plain memory
    if (result != kSuccess) return check(result, "cuPointerGetAttribute");
    if (type == static_cast<unsigned>(kHostMemory)) return 0;
    *host = type == static_cast<unsigned>(kUnifiedMemory);
    return check(calls().cuPointerGetAttribute(device, kDeviceOrdinal, pointer), "cuPointerGetAttribute");
}

int64_t ftrun_cuda_reserve(int device, uint64_t length) {
    const Current current(device);
    if (current.error != 0) return current.error;
    Pointer address = 0;
    const int error = check(calls().cuMemAddressReserve(&address, length, 0, 0, 0), "cuMemAddressReserve");
    return error != 0 ? error : static_cast<int64_t>(address);
}

int ftrun_cuda_free_range(uint64_t address, uint64_t length) {
    const int error = load();
    return error != 0 ? error : check(calls().cuMemAddressFree(address, length), "cuMemAddressFree");
}

int ftrun_cuda_create(int device, uint64_t address, uint64_t length) {
    const Current current(device);
    if (current.error != 0) return current.error;
    const Properties wanted = properties_of(device);
    Handle handle = 0;
    int error = check(calls().cuMemCreate(&handle, length, &wanted, 0), "cuMemCreate");
    if (error != 0) return error;
    int fd = -1;
    error = check(calls().cuMemExportToShareableHandle(&fd, handle, kPosixFd, 0), "cuMemExportToShareableHandle");
    if (error == 0) {
        fcntl(fd, F_SETFD, FD_CLOEXEC);
        error = map(device, device, handle, address, length);
    }
    calls().cuMemRelease(handle);  // the mapping and the descriptor keep the memory
    Stream stream = nullptr;
    if (error == 0) {
        // what another process left there must not look like our weights
        error = check(calls().cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
        if (error == 0) error = check(calls().cuMemsetD8Async(address, 0, length, stream), "cuMemsetD8Async");
        if (error == 0) error = ftrun_cuda_sync(device, reinterpret_cast<uint64_t>(stream), 60.0);
        if (stream != nullptr) calls().cuStreamDestroy(stream);
        if (error != 0) calls().cuMemUnmap(address, length);
    }
    if (error != 0 && fd >= 0) close(fd);
    return error != 0 ? error : fd;
}

int ftrun_cuda_attach(int home, int device, int fd, uint64_t address, uint64_t length) {
    const Current current(device);
    if (current.error != 0) return current.error;
    Handle handle = 0;
    int error = import(fd, &handle);
    if (error != 0) return error;
    error = map(home, device, handle, address, length);
    calls().cuMemRelease(handle);
    return error;
}

int ftrun_cuda_unmap(uint64_t address, uint64_t length) {
    const int error = load();
    return error != 0 ? error : check(calls().cuMemUnmap(address, length), "cuMemUnmap");
}

int ftrun_cuda_hold(int device, int fd, uint64_t *handle) {
    int error = load();
    if (error != 0) return error;
    void *shareable = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
    // a context takes hundreds of megabytes of the device: made only if the driver wants one for this
    const Result result = calls().cuMemImportFromShareableHandle(handle, shareable, kPosixFd);
    if (result != kInvalidContext) return check(result, "cuMemImportFromShareableHandle");
    const Current current(device);
    return current.error != 0 ? current.error : import(fd, handle);
}

int ftrun_cuda_let_go(uint64_t handle) {
    const int error = load();
    return error != 0 ? error : check(calls().cuMemRelease(handle), "cuMemRelease");
}

int ftrun_cuda_register(int device, void *address, size_t length, uint64_t *seen) {
    const Current current(device);
    if (current.error != 0) return current.error;
    int error = check(calls().cuMemHostRegister(address, length, kDeviceMap), "cuMemHostRegister");
    if (error == 0) error = check(calls().cuMemHostGetDevicePointer(seen, address, 0), "cuMemHostGetDevicePointer");
    return error;
}

int ftrun_cuda_unregister(int device, void *address) {
    const Current current(device);
    return current.error != 0 ? current.error : check(calls().cuMemHostUnregister(address), "cuMemHostUnregister");
}

}  // extern "C"
