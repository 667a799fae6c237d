// Finding NVRTC and running it. A library that was opened stays open: it is not made to be unloaded.
#include "cuda_compile.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>
#include <set>
#include <vector>

#include "cuda_driver.hpp"
#include "ftrun_cuda.h"
#include "nvrtc_abi.hpp"

// The kernels' source and the header that it includes, as text ended by a zero.
__asm__(
    ".section .rodata\n"
    ".hidden ftrun_cu\n"
    ".global ftrun_cu\n"
    "ftrun_cu:\n"
    ".incbin \"" FTRUN_NATIVE "/kernels/ftrun.cu\"\n"
    ".byte 0\n"
    ".hidden ftrun_hash\n"
    ".global ftrun_hash\n"
    "ftrun_hash:\n"
    ".incbin \"" FTRUN_NATIVE "/src/hash.hpp\"\n"
    ".byte 0\n"
    ".previous\n");
extern "C" const char ftrun_cu[];
extern "C" const char ftrun_hash[];

namespace ftrun::cuda {
namespace {

using nvrtc::Program;
using nvrtc::Result;

// A CUDA 13 compiler knows no device before compute capability 7.5, so an older one may do where the newest does not.
constexpr const char *kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr size_t kMostOfLog = 400;

std::mutex mutex;
std::string told_folders;

struct Nvrtc {
#define FTRUN_DECLARE(name, result, arguments) result(*name) arguments = nullptr;
    FTRUN_NVRTC_CALLS(FTRUN_DECLARE)
#undef FTRUN_DECLARE
    std::string label;
};

std::vector<std::string> candidates() {
    std::string folders;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        folders = told_folders;
    }
    std::vector<std::string> found;
    for (size_t start = 0; start < folders.size();) {
        const size_t end = std::min(folders.find(':', start), folders.size());
        for (const char *name : kNames) {
            const std::string path = folders.substr(start, end - start) + "/" + name;
            if (access(path.c_str(), F_OK) == 0) found.push_back(path);
        }
        start = end + 1;
    }
    found.insert(found.end(), std::begin(kNames), std::end(kNames));
    return found;
}

bool open(const std::string &file, std::set<void *> *tried, Nvrtc *made, std::string *reason) {
    void *library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const std::string said = dlerror();
        if (said.rfind(file + ": cannot open shared object file", 0) != 0) *reason = said;
        return false;
    }
    if (!tried->insert(library).second) return false;  // found by its path before
#define FTRUN_RESOLVE(name, result, arguments)                                     \
    made->name = reinterpret_cast<decltype(made->name)>(dlsym(library, #name));    \
    if (made->name == nullptr) {                                                   \
        *reason = file + " has no " #name;                                         \
        return false;                                                              \
    }
    FTRUN_NVRTC_CALLS(FTRUN_RESOLVE)
#undef FTRUN_RESOLVE
    int major = 0, minor = 0;
    made->nvrtcVersion(&major, &minor);
    made->label = "NVRTC " + std::to_string(major) + "." + std::to_string(minor) + " (" + file + ")";
    return true;
}

// What the compiler printed, on one line.
std::string log_of(const Nvrtc &nvrtc, Program program) {
    size_t size = 0;
    if (nvrtc.nvrtcGetProgramLogSize(program, &size) != nvrtc::kSuccess || size < 2) return "";
    std::string log(size, '\0');
    if (nvrtc.nvrtcGetProgramLog(program, log.data()) != nvrtc::kSuccess) return "";
    log.resize(std::min(std::strlen(log.c_str()), kMostOfLog));
    while (!log.empty() && log.back() == '\n') log.pop_back();
    std::replace(log.begin(), log.end(), '\n', ' ');
    return ": " + log;
}

Result compile(const Nvrtc &nvrtc, Program program, const std::string &target, std::string *image) {
    const std::string architecture = "--gpu-architecture=" + target;
    const char *options[] = {architecture.c_str(), "--std=c++17"};
    Result result = nvrtc.nvrtcCompileProgram(program, 2, options);
    size_t size = 0;
    if (result == nvrtc::kSuccess) result = nvrtc.nvrtcGetCUBINSize(program, &size);
    image->resize(size);
    return result == nvrtc::kSuccess ? nvrtc.nvrtcGetCUBIN(program, image->data()) : result;
}

bool compile(const Nvrtc &nvrtc, const std::string &target, std::string *image, std::string *reason) {
    const char *headers[] = {ftrun_hash};
    const char *names[] = {"../src/hash.hpp"};
    Program program = nullptr;
    Result result = nvrtc.nvrtcCreateProgram(&program, ftrun_cu, "ftrun.cu", 1, headers, names);
    if (result == nvrtc::kSuccess) result = compile(nvrtc, program, target, image);
    if (result != nvrtc::kSuccess) {
        *reason = nvrtc.label + " for " + target + ": " + nvrtc.nvrtcGetErrorString(result);
        if (program != nullptr) *reason += log_of(nvrtc, program);
    }
    if (program != nullptr) nvrtc.nvrtcDestroyProgram(&program);
    return result == nvrtc::kSuccess;
}

}  // namespace

void look_for_nvrtc_in(const char *folders) {
    const std::lock_guard<std::mutex> lock(mutex);
    told_folders = folders;
}

int compile_kernels(int major, int minor, const std::function<int(const Compiled &)> &take) {
    const std::string target = "sm_" + std::to_string(major) + std::to_string(minor);
    std::string reasons;
    std::set<void *> tried;
    for (const std::string &file : candidates()) {
        Nvrtc nvrtc;
        Compiled made;
        std::string reason;
        if (open(file, &tried, &nvrtc, &reason) && compile(nvrtc, target, &made.image, &reason)) {
            made.compiler = nvrtc.label;
            const int error = take(made);
            if (error != -ENOEXEC) return error;
            reason = nvrtc.label + ": " + why();
        }
        if (!reason.empty()) reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    return refuse(ENOEXEC, reasons.empty() ? std::string("NVRTC was not found (") + kNames[0] + ", " + kNames[1] + ")" : reasons);
}

}  // namespace ftrun::cuda

extern "C" {

void ftrun_cuda_nvrtc_folders(const char *folders) { ftrun::cuda::look_for_nvrtc_in(folders); }

int64_t ftrun_cuda_compile(int major, int minor, const void **image, const char **compiler) {
    static thread_local ftrun::cuda::Compiled last;
    const int error = ftrun::cuda::compile_kernels(major, minor, [](const ftrun::cuda::Compiled &made) {
        last = made;
        return 0;
    });
    if (error != 0) return error;
    *image = last.image.data();
    *compiler = last.compiler.c_str();
    return static_cast<int64_t>(last.image.size());
}

}  // extern "C"
