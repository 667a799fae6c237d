// Finding the driver: dlopen, then cuGetProcAddress_v2 for everything else.
#include "cuda/driver.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>

namespace ftrun::cuda {
namespace {

constexpr const char *kLibrary = "libcuda.so.1";
using GetProcAddress = Result (*)(const char *, void **, int, uint64_t, int *);

std::mutex mutex;
Calls table;
int state = 1;  // 1: not tried; else the result of load()
std::string state_why;
std::map<Ordinal, Context> contexts;
thread_local std::string last;

int errno_of(Result result) {
    switch (result) {
        case kSuccess: return 0;
        case kInvalidValue: return EINVAL;
        case kOutOfMemory: return ENOMEM;
        case kNoDevice:
        case kInvalidDevice: return ENODEV;
        case kInvalidImage:
        case kNoBinary:
        case kInvalidPtx:
        case kNoJit:
        case kUnsupportedPtx:
        case kJitDisabled:
        case kInvalidSource: return ENOEXEC;
        case kNotReady: return EINPROGRESS;
        case kNotPermitted: return EPERM;
        case kNotSupported: return EOPNOTSUPP;
        default: return EIO;
    }
}

int resolve() {
    void *library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return refuse(ENOENT, std::string("no CUDA driver: ") + dlerror());
    const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    if (get == nullptr) return refuse(ENOSYS, std::string(kLibrary) + " is older than CUDA 12.0: install a newer driver");
#define FTRUN_RESOLVE(name, arguments)                                                                             \
    {                                                                                                              \
        void *found = nullptr;                                                                                     \
        if (get(#name, &found, kDriverApi, 0, nullptr) != kSuccess || found == nullptr)                            \
            return refuse(ENOSYS, std::string(kLibrary) + " has no " #name ": install a driver of CUDA 12.0 or later"); \
        table.name = reinterpret_cast<decltype(table.name)>(found);                                                \
    }
    FTRUN_CUDA_CALLS(FTRUN_RESOLVE)
#undef FTRUN_RESOLVE
    return check(table.cuInit(0), "cuInit");
}

int context_of(Ordinal device, Context *context) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = contexts.find(device);
    if (found != contexts.end()) {
        *context = found->second;
        return 0;
    }
    const int error = check(table.cuDevicePrimaryCtxRetain(context, device), "cuDevicePrimaryCtxRetain");
    if (error == 0) contexts[device] = *context;  // kept until the end of the process, as torch keeps its own
    return error;
}

}  // namespace

const char *why() { return last.c_str(); }

int refuse(int error, const std::string &text) {
    last = text;
    return -error;
}

int check(Result result, const char *what) {
    if (result == kSuccess) return 0;
    const char *name = nullptr;
    const char *text = nullptr;
    if (table.cuGetErrorName != nullptr) table.cuGetErrorName(result, &name);
    if (table.cuGetErrorString != nullptr) table.cuGetErrorString(result, &text);
    char line[256];
    std::snprintf(line, sizeof(line), "%s: %s (%d%s%s)", what, name != nullptr ? name : "CUDA error", result,
                  text != nullptr ? ", " : "", text != nullptr ? text : "");
    return refuse(errno_of(result), line);
}

int load() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (state == 1) {
        state = resolve();
        state_why = last;
    }
    if (state != 0) last = state_why;
    return state;
}

bool present() {
    void *library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return false;
    dlclose(library);
    return true;
}

const Calls &calls() { return table; }

Current::Current(Ordinal device) {
    error = load();
    Context context = nullptr;
    if (error == 0) error = context_of(device, &context);
    if (error == 0) error = check(table.cuCtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = error == 0;
}

Current::~Current() {
    Context context = nullptr;
    if (pushed_) table.cuCtxPopCurrent(&context);
}

}  // namespace ftrun::cuda
