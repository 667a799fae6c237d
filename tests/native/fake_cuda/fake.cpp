// The driver's calls. See fake.hpp for what holds and what does not.
#include "fake.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace fake {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kSlice = size_t{64} << 10;

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

struct Kernel {
    std::string name;
};

std::mutex mutex;
bool initialized = false;
std::map<int, Device *> devices;
std::map<Handle, Physical> physical;
std::map<Pointer, Range> ranges;
Handle next_handle = 1;
std::map<int, size_t> used;
thread_local std::deque<int> stack;

Device &device_at(int ordinal) {
    Device *&device = devices[ordinal];
    if (device == nullptr) {
        device = new Device;
        device->ordinal = ordinal;
    }
    return *device;
}

// What any call on a device gives: its first error, again and again.
Result state_of(int ordinal) {
    const Control wanted = control();
    const std::lock_guard<std::mutex> lock(mutex);
    if (ordinal < 0 || ordinal >= wanted.devices) return kInvalidDevice;
    Device &device = device_at(ordinal);
    if (wanted.lost == ordinal) device.sticky = kUnknown;
    return device.sticky;
}

Result current(int *ordinal) {
    if (stack.empty()) return kInvalidContext;
    *ordinal = stack.back();
    return state_of(*ordinal);
}

std::shared_ptr<Queue> *queue_of(Stream stream) { return static_cast<std::shared_ptr<Queue> *>(stream); }

Result find_queue(Stream stream, std::shared_ptr<Queue> *found) {
    int ordinal = 0;
    const Result state = current(&ordinal);
    if (state != kSuccess) return state;
    if (stream != nullptr) {
        *found = *queue_of(stream);
        return kSuccess;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    Device &device = device_at(ordinal);
    if (!device.legacy) device.legacy = std::make_shared<Queue>(ordinal);
    *found = device.legacy;
    return kSuccess;
}

// Slowly, in slices, so that a process can be killed in the middle.
void copy(char *to, const char *from, size_t size) {
    for (size_t at = 0; at < size; at += kSlice) {
        const size_t part = std::min(kSlice, size - at);
        std::memcpy(to + at, from + at, part);
        const double rate = control().rate;
        if (rate > 0) std::this_thread::sleep_for(std::chrono::duration<double>(static_cast<double>(part) / rate));
    }
}

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

bool has_room(int device, size_t size) { return used[device] + size <= control().memory; }

}  // namespace

Control control() {
    Control found;
    const char *path = std::getenv("FAKE_CUDA_CONTROL");
    if (path == nullptr) return found;
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string name, value;
        words >> name >> value;
        if (name == "devices") found.devices = std::atoi(value.c_str());
        if (name == "memory") found.memory = std::strtoull(value.c_str(), nullptr, 10);
        if (name == "rate") found.rate = std::atof(value.c_str());
        if (name == "lost") found.lost = std::atoi(value.c_str());
        if (name == "vmm") found.vmm = value != "0";
        if (name == "refuse") found.refused += value + " ";
    }
    return found;
}

bool refused(const char *call) {
    const std::string list = " " + control().refused;
    if (list.find(std::string(" ") + call + " ") != std::string::npos) return true;
    if (list.find(std::string(" ") + call + "#1 ") == std::string::npos) return false;
    static std::mutex counting;
    static std::map<std::string, int> seen;
    const std::lock_guard<std::mutex> lock(counting);
    return seen[call]++ == 0;
}

Queue::Queue(int ordinal) : device(ordinal), thread_([this] { run(); }) {}

Queue::~Queue() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) {
        thread_.detach();
    } else {
        thread_.join();
    }
}

void Queue::push(std::function<void()> work) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        work_.push_back(std::move(work));
    }
    changed_.notify_all();
}

void Queue::run() {
    for (;;) {
        std::function<void()> next;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return ending_ || !work_.empty(); });
            if (work_.empty()) return;
            next = std::move(work_.front());
            work_.pop_front();
        }
        if (state_of(device) == kSuccess) next();
    }
}

}  // namespace fake

using namespace fake;

#define API extern "C" __attribute__((visibility("default")))
#define NEED(call)                                     \
    if (!initialized) return kNotInitialized;          \
    if (refused(#call)) return kNotPermitted;

API Result cuInit(unsigned) {
    if (refused("cuInit")) return kNotPermitted;
    if (control().devices == 0) return kNoDevice;
    initialized = true;
    return kSuccess;
}

API Result cuDriverGetVersion(int *version) {
    *version = 12040;
    return kSuccess;
}

API Result cuGetErrorName(Result result, const char **name) {
    static const std::map<Result, const char *> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                         {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                         {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
                                                         {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
                                                         {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                         {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
                                                         {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
                                                         {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                         {kUnknown, "CUDA_ERROR_UNKNOWN"}};
    const auto found = names.find(result);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? kInvalidValue : kSuccess;
}

API Result cuGetErrorString(Result, const char **text) {
    *text = "said by the fake driver";
    return kSuccess;
}

API Result cuDeviceGetCount(int *count) {
    NEED(cuDeviceGetCount)
    *count = control().devices;
    return kSuccess;
}

API Result cuDeviceGet(Ordinal *device, int ordinal) {
    NEED(cuDeviceGet)
    *device = ordinal;
    return ordinal < control().devices ? kSuccess : kInvalidDevice;
}

API Result cuDeviceGetName(char *name, int room, Ordinal device) {
    std::snprintf(name, static_cast<size_t>(room), "Fake GPU %d", device);
    return kSuccess;
}

API Result cuDeviceGetUuid(Uuid *uuid, Ordinal device) {
    std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
    std::snprintf(uuid->bytes, sizeof(uuid->bytes), "fake device %d", device);
    return kSuccess;
}

API Result cuDeviceGetAttribute(int *value, int which, Ordinal) {
    const bool vmm = control().vmm;
    *value = which == kMajor ? 9 : which == kMinor ? 0 : which == kVmm || which == kExportsFd ? vmm : which == kWrites64;
    return kSuccess;
}

API Result cuDeviceTotalMem(size_t *bytes, Ordinal) {
    *bytes = control().memory;
    return kSuccess;
}

API Result cuDevicePrimaryCtxRetain(Context *context, Ordinal device) {
    NEED(cuDevicePrimaryCtxRetain)
    const Result state = state_of(device);
    const std::lock_guard<std::mutex> lock(mutex);
    if (state == kSuccess) *context = &device_at(device);
    return state;
}

API Result cuCtxPushCurrent(Context context) {
    stack.push_back(static_cast<Device *>(context)->ordinal);
    return kSuccess;
}

API Result cuCtxPopCurrent(Context *context) {
    if (stack.empty()) return kInvalidContext;
    const std::lock_guard<std::mutex> lock(mutex);
    *context = &device_at(stack.back());
    stack.pop_back();
    return kSuccess;
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
    const std::lock_guard<std::mutex> lock(mutex);
    if (!has_room(device, size)) return kOutOfMemory;
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    *address = reinterpret_cast<Pointer>(memory);
    ranges[*address] = {size, device};
    used[device] += size;
    return kSuccess;
}

API Result cuMemFree(Pointer address) {
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
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    const std::lock_guard<std::mutex> lock(mutex);
    ranges[reinterpret_cast<Pointer>(memory)] = {size, -1};
    *address = memory;
    return kSuccess;
}

API Result cuMemFreeHost(void *address) {
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
    const std::lock_guard<std::mutex> lock(mutex);
    if (state == kSuccess && range_of(reinterpret_cast<Pointer>(address)) != ranges.end()) return kAlreadyRegistered;
    if (state == kSuccess) ranges[reinterpret_cast<Pointer>(address)] = {size, -1};
    return state;
}

API Result cuMemHostUnregister(void *address) {
    const std::lock_guard<std::mutex> lock(mutex);
    return ranges.erase(reinterpret_cast<Pointer>(address)) == 1 ? kSuccess : kInvalidValue;
}

API Result cuMemHostGetDevicePointer(Pointer *seen, void *address, unsigned) {
    *seen = reinterpret_cast<Pointer>(address);
    return kSuccess;
}

API Result cuMemGetAllocationGranularity(size_t *granularity, const Properties *, int) {
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
    if (!has_room(wanted->location.id, size)) return kOutOfMemory;
    const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return kOutOfMemory;
    *handle = next_handle++;
    physical[*handle] = {fd, wanted->location.id, size, true, 1};
    used[wanted->location.id] += size;
    return kSuccess;
}

API Result cuMemRelease(Handle handle) {
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
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    char path[64], target[64] = {};
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof(target) - 1) < 0 || std::strncmp(target, "/memfd:fake-cuda", 16) != 0)
        return kInvalidValue;
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

API Result cuMemcpyAsync(Pointer to, Pointer from, size_t size, Stream stream) {
    NEED(cuMemcpyAsync)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push([=] { copy(reinterpret_cast<char *>(to), reinterpret_cast<const char *>(from), size); });
    return kSuccess;
}

API Result cuMemsetD8Async(Pointer to, unsigned char value, size_t size, Stream stream) {
    NEED(cuMemsetD8Async)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push([=] { std::memset(reinterpret_cast<void *>(to), value, size); });
    return kSuccess;
}

API Result cuStreamCreate(Stream *stream, unsigned) {
    NEED(cuStreamCreate)
    int device = 0;
    const Result state = current(&device);
    if (state == kSuccess) *stream = new std::shared_ptr<Queue>(std::make_shared<Queue>(device));
    return state;
}

API Result cuStreamDestroy(Stream stream) {
    delete queue_of(stream);
    return kSuccess;
}

API Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    const auto happening = *static_cast<std::shared_ptr<Happening> *>(event);
    queue->push([happening] {
        std::unique_lock<std::mutex> lock(happening->mutex);
        happening->changed.wait(lock, [&] { return happening->done; });
    });
    return kSuccess;
}

API Result cuStreamWriteValue64(Stream stream, Pointer to, uint64_t value, unsigned) {
    NEED(cuStreamWriteValue64)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push([=] { __atomic_store_n(reinterpret_cast<uint64_t *>(to), value, __ATOMIC_RELEASE); });
    return kSuccess;
}

API Result cuLaunchHostFunc(Stream stream, void (*body)(void *), void *context) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state == kSuccess) queue->push([=] { body(context); });
    return state;
}

API Result cuEventCreate(Event *event, unsigned) {
    NEED(cuEventCreate)
    int device = 0;
    const Result state = current(&device);
    if (state == kSuccess) *event = new std::shared_ptr<Happening>(std::make_shared<Happening>());
    return state;
}

API Result cuEventDestroy(Event event) {
    delete static_cast<std::shared_ptr<Happening> *>(event);
    return kSuccess;
}

API Result cuEventRecord(Event event, Stream stream) {
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    const auto happening = std::make_shared<Happening>();
    happening->done = false;
    *static_cast<std::shared_ptr<Happening> *>(event) = happening;
    queue->push([happening] {
        {
            const std::lock_guard<std::mutex> lock(happening->mutex);
            happening->done = true;
        }
        happening->changed.notify_all();
    });
    return kSuccess;
}

API Result cuEventQuery(Event event) {
    int device = 0;
    const Result state = current(&device);
    if (state != kSuccess) return state;
    const auto happening = *static_cast<std::shared_ptr<Happening> *>(event);
    const std::lock_guard<std::mutex> lock(happening->mutex);
    return happening->done ? kSuccess : kNotReady;
}

API Result cuModuleLoadData(Module *module, const void *image) {
    NEED(cuModuleLoadData)
    if (std::strstr(static_cast<const char *>(image), ".version") == nullptr) return kInvalidValue;
    *module = const_cast<void *>(image);
    return kSuccess;
}

API Result cuModuleGetFunction(Function *function, Module module, const char *name) {
    const std::string entry = std::string(".visible .entry ") + name + "(";
    if (std::strstr(static_cast<const char *>(module), entry.c_str()) == nullptr) return kNotFound;
    *function = new Kernel{name};
    return kSuccess;
}

API Result cuLaunchKernel(Function function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                          Stream stream, void **parameters, void **) {
    NEED(cuLaunchKernel)
    std::shared_ptr<Queue> queue;
    const Result state = find_queue(stream, &queue);
    if (state != kSuccess) return state;
    queue->push(kernel(static_cast<Kernel *>(function)->name, x, threads, parameters));
    return kSuccess;
}

API Result cuGetProcAddress_v2(const char *name, void **found, int, uint64_t, int *) {
    static const std::map<std::string, void *> all = {
#define FAKE_ENTRY(call, arguments) {#call, reinterpret_cast<void *>(call)},
        FTRUN_CUDA_CALLS(FAKE_ENTRY)
#undef FAKE_ENTRY
    };
    const auto entry = all.find(name);
    if (entry == all.end()) return kNotFound;
    *found = entry->second;
    return kSuccess;
}

// Not part of CUDA: what a program that runs a wild kernel would meet. Every later call on the device gives the error.
API Result fake_illegal_address(int device) {
    const std::lock_guard<std::mutex> lock(mutex);
    device_at(device).sticky = kIllegalAddress;
    return kSuccess;
}
