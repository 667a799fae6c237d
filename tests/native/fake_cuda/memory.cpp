// Memory: of a device, pinned, shared by descriptor, and what the driver knows about an address.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "fake.hpp"

namespace fake {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;

struct Physical {  // what a handle stands for
    int fd;
    int device;
    size_t size;
    bool counted;  // made here, so that it counts against this process's memory
    int references;
};

struct Range {  // memory that the driver knows
    size_t size;
    int device;  // -1: host memory
    Handle handle = 0;
};

std::map<Handle, Physical> physical;
std::map<Pointer, Range> ranges;
Handle next_handle = 1;
std::map<int, size_t> used, peak;

std::map<Pointer, Range>::iterator range_of(Pointer address) {
    auto found = ranges.upper_bound(address);
    if (found == ranges.begin()) return ranges.end();
    --found;
    return address < found->first + found->second.size ? found : ranges.end();
}

void release(Handle handle) {
    const auto found = physical.find(handle);
    if (found == physical.end() || --found->second.references > 0) return;
    if (found->second.counted) used[found->second.device] -= found->second.size;
    close(found->second.fd);
    physical.erase(found);
}

bool take(int device, size_t size) {
    if (used[device] + size > control().memory) return false;
    used[device] += size;
    peak[device] = std::max(peak[device], used[device]);
    return true;
}

// Did the process die, and did nobody take its exit code yet?
bool dead_and_there(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    if (!std::getline(file, line)) return false;
    const char state = line[line.rfind(')') + 2];
    return state == 'Z' || state == 'X';
}

// What the harshest driver does in a call that makes or gives back memory.
void wait_for_all(const char *call, int device) {
    note(call, device);
    await_idle(device);
}

}  // namespace

bool is_pageable(Pointer address) {
    const std::lock_guard<std::mutex> lock(mutex);
    return range_of(address) == ranges.end();
}

}  // namespace fake

// Not part of CUDA: the most memory of a device that this process ever had at a time.
API size_t fake_peak(int device) {
    const std::lock_guard<std::mutex> lock(mutex);
    return peak[device];
}

API Result cuMemGetInfo(size_t *free_bytes, size_t *total) {
    int device = 0;
    const Result state = current(&device);
    const std::lock_guard<std::mutex> lock(mutex);
    *total = control().memory;
    *free_bytes = *total - std::min(*total, used[device]);
    return state;
}

API Result cuMemAlloc(Pointer *address, size_t size) {
    NEED(cuMemAlloc)
    int device = 0;
    const Result state = current(&device);
    if (state != kSuccess) return state;
    wait_for_all("cuMemAlloc", device);
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!take(device, size)) {
        munmap(memory, size);
        return kOutOfMemory;
    }
    *address = reinterpret_cast<Pointer>(memory);
    ranges[*address] = {size, device};
    return kSuccess;
}

API Result cuMemFree(Pointer address) {
    wait_for_all("cuMemFree", -1);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges.find(address);
    if (found == ranges.end()) return kInvalidValue;
    used[found->second.device] -= found->second.size;
    munmap(reinterpret_cast<void *>(address), found->second.size);
    ranges.erase(found);
    return kSuccess;
}

API Result cuMemAllocHost(void **address, size_t size) {
    NEED(cuMemAllocHost)
    wait_for_all("cuMemAllocHost", -1);
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    const std::lock_guard<std::mutex> lock(mutex);
    ranges[reinterpret_cast<Pointer>(memory)] = {size, -1};
    *address = memory;
    return kSuccess;
}

API Result cuMemFreeHost(void *address) {
    wait_for_all("cuMemFreeHost", -1);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges.find(reinterpret_cast<Pointer>(address));
    if (found == ranges.end()) return kInvalidValue;
    munmap(address, found->second.size);
    ranges.erase(found);
    return kSuccess;
}

API Result cuMemHostRegister(void *address, size_t size, unsigned) {
    NEED(cuMemHostRegister)
    int device = 0;
    const Result state = current(&device);
    wait_for_all("cuMemHostRegister", -1);
    const std::lock_guard<std::mutex> lock(mutex);
    if (state == kSuccess && range_of(reinterpret_cast<Pointer>(address)) != ranges.end()) return kAlreadyRegistered;
    if (state == kSuccess) ranges[reinterpret_cast<Pointer>(address)] = {size, -1};
    return state;
}

API Result cuMemHostUnregister(void *address) {
    wait_for_all("cuMemHostUnregister", -1);
    const std::lock_guard<std::mutex> lock(mutex);
    return ranges.erase(reinterpret_cast<Pointer>(address)) == 1 ? kSuccess : kInvalidValue;
}

API Result cuMemHostGetDevicePointer(Pointer *seen, void *address, unsigned) {
    *seen = reinterpret_cast<Pointer>(address);
    return kSuccess;
}

API Result cuMemGetAllocationGranularity(size_t *granularity, const Properties *, int) {
    NEED(cuMemGetAllocationGranularity)
    *granularity = kGranularity;
    return kSuccess;
}

API Result cuMemCreate(Handle *handle, size_t size, const Properties *wanted, unsigned long long) {
    NEED(cuMemCreate)
    const Result state = state_of(wanted->location.id);
    if (state != kSuccess) return state;
    if (!control().vmm) return kNotSupported;
    if (size == 0 || size % kGranularity != 0) return kInvalidValue;
    const std::lock_guard<std::mutex> lock(mutex);
    if (size > control().largest) return kOutOfMemory;
    const int fd = memfd_create(("fake-cuda-" + std::to_string(getpid())).c_str(), MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return kOutOfMemory;
    if (!take(wanted->location.id, size)) {
        close(fd);
        return kOutOfMemory;
    }
    note("cuMemCreate", wanted->location.id);
    *handle = next_handle++;
    physical[*handle] = {fd, wanted->location.id, size, true, 1};
    return kSuccess;
}

API Result cuMemRelease(Handle handle) {
    wait_for_all("cuMemRelease", -1);
    const std::lock_guard<std::mutex> lock(mutex);
    if (physical.count(handle) == 0) return kInvalidValue;
    release(handle);
    return kSuccess;
}

API Result cuMemExportToShareableHandle(void *shareable, Handle handle, int, unsigned long long) {
    NEED(cuMemExportToShareableHandle)
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = physical.find(handle);
    if (found == physical.end()) return kInvalidValue;
    const int fd = fcntl(found->second.fd, F_DUPFD, 3);  // inherited by programs, as a real one is
    std::memcpy(shareable, &fd, sizeof(fd));
    return fd < 0 ? kUnknown : kSuccess;
}

API Result cuMemImportFromShareableHandle(Handle *handle, void *shareable, int) {
    NEED(cuMemImportFromShareableHandle)
    if (control().import_context && !has_context()) return kInvalidContext;
    note("cuMemImportFromShareableHandle", -1);
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    char path[64], target[64] = {};
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof(target) - 1) < 0 || std::strncmp(target, "/memfd:fake-cuda", 16) != 0)
        return kInvalidValue;
    const pid_t maker = std::atoi(target + std::strlen("/memfd:fake-cuda-"));
    if (control().import_reaped && dead_and_there(maker)) return kNotPermitted;
    struct stat facts{};
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0 || fstat(own, &facts) != 0) return kInvalidValue;
    const std::lock_guard<std::mutex> lock(mutex);
    *handle = next_handle++;
    physical[*handle] = {own, -1, static_cast<size_t>(facts.st_size), false, 1};
    return kSuccess;
}

API Result cuMemAddressReserve(Pointer *address, size_t size, size_t, Pointer, unsigned long long) {
    NEED(cuMemAddressReserve)
    if (size == 0 || size % kGranularity != 0) return kInvalidValue;
    void *found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return kOutOfMemory;
    *address = reinterpret_cast<Pointer>(found);
    return kSuccess;
}

API Result cuMemAddressFree(Pointer address, size_t size) {
    return munmap(reinterpret_cast<void *>(address), size) == 0 ? kSuccess : kInvalidValue;
}

API Result cuMemMap(Pointer address, size_t size, size_t offset, Handle handle, unsigned long long) {
    NEED(cuMemMap)
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = physical.find(handle);
    if (found == physical.end() || offset != 0 || size > found->second.size) return kInvalidValue;
    void *at = reinterpret_cast<void *>(address);
    if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) == MAP_FAILED) return kInvalidValue;
    ++found->second.references;
    ranges[address] = {size, found->second.device, handle};
    return kSuccess;
}

API Result cuMemSetAccess(Pointer address, size_t size, const Access *access, size_t count) {
    NEED(cuMemSetAccess)
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges.find(address);
    if (found == ranges.end() || count == 0) return kInvalidValue;
    if (found->second.device < 0) found->second.device = access[count - 1].location.id;
    return mprotect(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}

API Result cuMemUnmap(Pointer address, size_t size) {
    wait_for_all("cuMemUnmap", -1);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges.find(address);
    if (found == ranges.end() || found->second.size != size) return kInvalidValue;
    mmap(reinterpret_cast<void *>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    const Handle handle = found->second.handle;
    ranges.erase(found);
    release(handle);
    return kSuccess;
}

API Result cuPointerGetAttribute(void *value, int which, Pointer address) {
    NEED(cuPointerGetAttribute)
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = range_of(address);
    if (found == ranges.end()) return kInvalidValue;
    const int device = found->second.device;
    const int answer = which == kMemoryType ? (device < 0 ? kHostMemory : kUnifiedMemory) : device;
    std::memcpy(value, &answer, sizeof(answer));
    return kSuccess;
}
