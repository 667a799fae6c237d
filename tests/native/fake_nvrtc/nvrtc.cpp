// An NVRTC for machines without one: it reads the source far enough to know its headers and kernels, and makes what the fake
// driver takes. Lines of the control file, FAKE_CUDA_CONTROL, "name value":
//   nvrtc_oldest N   the oldest device that it compiles for: 75 (the default) is sm_75
//   nvrtc_error TEXT the source has this error
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "../../../native/src/nvrtc_abi.hpp"

using namespace ftrun::nvrtc;

#define API extern "C" __attribute__((visibility("default")))
#define FAKE_DECLARE(call, result, arguments) API result call arguments;
FTRUN_NVRTC_CALLS(FAKE_DECLARE)
#undef FAKE_DECLARE

namespace {

struct Source {
    std::string text, log, image;
    std::set<std::string> headers;
};

Source *source_of(Program program) { return static_cast<Source *>(program); }

std::string wanted(const std::string &name) {
    const char *path = std::getenv("FAKE_CUDA_CONTROL");
    std::ifstream file(path != nullptr ? path : "/dev/null");
    std::string line;
    while (std::getline(file, line)) {
        if (line.rfind(name + " ", 0) == 0) return line.substr(name.size() + 1);
    }
    return "";
}

Result failed(Source *source, Result result, const std::string &said) {
    source->log = said + "\n";
    return result;
}

std::string between(const std::string &line, const char *before, char after) {
    const size_t start = line.find(before);
    if (start == std::string::npos) return "";
    const size_t from = start + std::strlen(before);
    return line.substr(from, line.find(after, from) - from);
}

}  // namespace

API Result nvrtcVersion(int *major, int *minor) {
    *major = 12;
    *minor = 9;
    return kSuccess;
}

API const char *nvrtcGetErrorString(Result result) {
    return result == kInvalidOption ? "NVRTC_ERROR_INVALID_OPTION" : result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "?";
}

API Result nvrtcCreateProgram(Program *program, const char *text, const char *, int count, const char *const *,
                              const char *const *names) {
    auto *source = new Source{text, "", "", {}};
    for (int i = 0; i < count; ++i) source->headers.insert(names[i]);
    *program = source;
    return kSuccess;
}

API Result nvrtcCompileProgram(Program program, int count, const char *const *options) {
    Source *source = source_of(program);
    int target = 0;
    for (int i = 0; i < count; ++i) std::sscanf(options[i], "--gpu-architecture=sm_%d", &target);
    const std::string oldest = wanted("nvrtc_oldest"), error = wanted("nvrtc_error");
    if (target < (oldest.empty() ? 75 : std::atoi(oldest.c_str())))
        return failed(source, kInvalidOption, "nvrtc: error: invalid value for --gpu-architecture (-arch)");
    if (!error.empty()) return failed(source, kCompilation, "ftrun.cu(7): error: " + error);
    source->image = "fake cubin sm_" + std::to_string(target) + "\n";
    std::istringstream lines(source->text);
    std::string line;
    while (std::getline(lines, line)) {
        const std::string header = between(line, "#include \"", '"'), kernel = between(line, "__global__ void ", '(');
        if (!header.empty() && source->headers.count(header) == 0)
            return failed(source, kCompilation, "ftrun.cu: catastrophic error: cannot open source file \"" + header + "\"");
        if (!kernel.empty()) source->image += ".visible .entry " + kernel + "(\n";
    }
    source->image += '\0';
    return kSuccess;
}

API Result nvrtcGetProgramLogSize(Program program, size_t *size) {
    *size = source_of(program)->log.size() + 1;
    return kSuccess;
}

API Result nvrtcGetProgramLog(Program program, char *log) {
    std::strcpy(log, source_of(program)->log.c_str());
    return kSuccess;
}

API Result nvrtcGetCUBINSize(Program program, size_t *size) {
    *size = source_of(program)->image.size();
    return kSuccess;
}

API Result nvrtcGetCUBIN(Program program, char *image) {
    std::memcpy(image, source_of(program)->image.data(), source_of(program)->image.size());
    return kSuccess;
}

API Result nvrtcDestroyProgram(Program *program) {
    delete source_of(*program);
    *program = nullptr;
    return kSuccess;
}
