// The library itself: the control file, what is wrong with which device, the calls about devices and contexts.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "fake.hpp"

namespace fake {

std::mutex mutex;
bool initialized = false;

namespace {
std::map<int, Device *> devices;
thread_local std::deque<int> stack;
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
        if (name == "largest") found.largest = std::strtoull(value.c_str(), nullptr, 10);
        if (name == "rate") found.rate = std::atof(value.c_str());
        if (name == "lost") found.lost = std::atoi(value.c_str());
        if (name == "capability") found.capability = std::atoi(value.c_str());
        if (name == "ptx") found.ptx = std::atoi(value.c_str());
        if (name == "import") found.import_context = value == "context", found.import_reaped = value == "reaped";
        if (name == "teardown") found.teardown = std::atof(value.c_str());
        if (name == "stuck") found.stuck = value;
        if (name == "release") found.release = value != "0";
        if (name == "log") found.log = value;
        if (name == "order") found.order = value;
        if (name == "vmm") found.vmm = value != "0";
        if (name == "refuse") found.refused += value + " ";
    }
    return found;
}

bool refused(const char *call) {
    const Control wanted = control();
    while (wanted.stuck == call) pause();
    const std::string list = " " + wanted.refused;
    if (list.find(std::string(" ") + call + " ") != std::string::npos) return true;
    const std::string counted = std::string(" ") + call + "#";
    const size_t at = list.find(counted);
    if (at == std::string::npos) return false;
    static std::mutex counting;
    static std::map<std::string, int> seen;
    const std::lock_guard<std::mutex> lock(counting);
    return ++seen[call] == std::atoi(list.c_str() + at + counted.size());
}

namespace {
// Adds a line to a file: pid, ns, text.
void write_line(const std::string &path, const std::string &text) {
    if (path.empty()) return;
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    const std::string line = std::to_string(getpid()) + " " + std::to_string(now.tv_sec * 1000000000LL + now.tv_nsec) + " " + text + "\n";
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
    close(fd);
}
}  // namespace

void note(const char *call, int device) { write_line(control().log, std::string(call) + " " + std::to_string(device)); }

void tell(const char *what, const char *call, Pointer at, uint64_t value) {
    write_line(control().order, std::string(what) + " " + call + " " + std::to_string(at) + " " + std::to_string(value));
}

// A thread of the driver is held at its end by a tracer, and with it the process and all its descriptors.
void linger(double seconds) {
    static pid_t held_of = 0;
    if (held_of == getpid()) return;
    held_of = getpid();
    std::thread([seconds] {
        const auto thread = static_cast<pid_t>(syscall(SYS_gettid));
        if (fork() == 0) {
            setsid();
            prctl(PR_SET_NAME, "fake driver");
            close_range(0, ~0U, 0);
            int status = 0;
            if (ptrace(PTRACE_SEIZE, thread, nullptr, PTRACE_O_TRACEEXIT) != 0) _exit(1);
            if (waitpid(thread, &status, __WALL) == thread) usleep(static_cast<useconds_t>(seconds * 1e6));
            _exit(0);
        }
        for (;;) pause();
    }).detach();
}

namespace {
void uuid_of(int device, char (&bytes)[16]) {
    std::memset(bytes, 0, sizeof(bytes));
    std::snprintf(bytes, sizeof(bytes), "%d fake device", device);
}

// As nvidia-smi prints it.
std::string text_of(int device) {
    char bytes[16];
    uuid_of(device, bytes);
    std::string text = "GPU-";
    for (size_t i = 0; i < sizeof(bytes); ++i) {
        char two[4];
        std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned char>(bytes[i]));
        text += (i == 4 || i == 6 || i == 8 || i == 10) ? std::string("-") + two : two;
    }
    return text;
}
}  // namespace

const std::vector<int> &visible() {
    static thread_local std::vector<int> seen;
    seen.clear();
    const int all = control().devices;
    const char *variable = std::getenv("CUDA_VISIBLE_DEVICES");
    if (variable == nullptr) {
        for (int device = 0; device < all; ++device) seen.push_back(device);
        return seen;
    }
    std::istringstream parts(variable);
    std::string part;
    while (std::getline(parts, part, ',')) {
        int found = -1;
        for (int device = 0; device < all; ++device) {
            const bool named = part.rfind("GPU-", 0) == 0 ? text_of(device).rfind(part, 0) == 0 : part == std::to_string(device);
            if (named) found = device;
        }
        if (found < 0) break;  // the first that names none ends the list
        for (const int before : seen) {
            if (before == found) return seen.clear(), seen;  // named twice: none at all
        }
        seen.push_back(found);
    }
    return seen;
}

Device &device_at(int ordinal) {
    Device *&device = devices[ordinal];
    if (device == nullptr) {
        device = new Device;
        device->ordinal = ordinal;
    }
    return *device;
}

Result state_of(int ordinal) {
    const Control wanted = control();
    const std::lock_guard<std::mutex> lock(mutex);
    if (ordinal < 0 || ordinal >= static_cast<int>(visible().size())) return kInvalidDevice;
    Device &device = device_at(ordinal);
    if (wanted.lost == visible()[static_cast<size_t>(ordinal)]) device.sticky = kUnknown;
    return device.sticky;
}

Result current(int *ordinal) {
    if (stack.empty()) return kInvalidContext;
    *ordinal = stack.back();
    return state_of(*ordinal);
}

bool has_context() { return !stack.empty(); }

std::shared_ptr<Queue> make_queue(int ordinal) {
    const auto made = std::make_shared<Queue>(ordinal);
    device_at(ordinal).queues.push_back(made);
    return made;
}

void await_idle(int ordinal) {
    std::vector<std::shared_ptr<Queue>> busy;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        for (const auto &[at, device] : devices) {
            if (ordinal >= 0 && at != ordinal) continue;
            for (const auto &queue : device->queues) {
                if (auto held = queue.lock()) busy.push_back(std::move(held));
            }
        }
    }
    for (const auto &queue : busy) queue->drain();
}

}  // namespace fake

API Result cuInit(unsigned) {
    if (refused("cuInit")) return kNotPermitted;
    if (visible().empty()) return kNoDevice;
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
                                                         {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                         {kInvalidPtx, "CUDA_ERROR_INVALID_PTX"},
                                                         {kUnsupportedPtx, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
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
    *count = static_cast<int>(visible().size());
    return kSuccess;
}

API Result cuDeviceGet(Ordinal *device, int ordinal) {
    NEED(cuDeviceGet)
    *device = ordinal;
    return ordinal < static_cast<int>(visible().size()) ? kSuccess : kInvalidDevice;
}

API Result cuDeviceGetName(char *name, int room, Ordinal device) {
    std::snprintf(name, static_cast<size_t>(room), "Fake GPU %d", visible()[static_cast<size_t>(device)]);
    return kSuccess;
}

API Result cuDeviceGetUuid(Uuid *uuid, Ordinal device) {
    uuid_of(visible()[static_cast<size_t>(device)], uuid->bytes);
    return kSuccess;
}

API Result cuDeviceGetAttribute(int *value, int which, Ordinal) {
    const bool vmm = control().vmm;
    const int capability = control().capability;
    *value = which == kMajor ? capability / 10 : which == kMinor ? capability % 10 : which == kVmm || which == kExportsFd ? vmm : which == kWrites64;
    return kSuccess;
}

API Result cuDeviceTotalMem(size_t *bytes, Ordinal) {
    *bytes = control().memory;
    return kSuccess;
}

API Result cuDevicePrimaryCtxRetain(Context *context, Ordinal device) {
    NEED(cuDevicePrimaryCtxRetain)
    const Result state = state_of(device);
    note("cuDevicePrimaryCtxRetain", device);
    if (const double seconds = control().teardown; seconds > 0) linger(seconds);
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
