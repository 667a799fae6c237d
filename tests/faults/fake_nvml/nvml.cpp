// A libnvidia-ml.so.1 for machines without one: devices and events come from the text file that FTRUN_FAKE_NVML names.
// It is read again whenever it was replaced. One line a thing, words of the form key=value:
//
//   gpu uuid=GPU-a name=Fake temperature=40 utilisation=50 used=1 total=8 throttle=0 recovery=0 lost=0 reset=0
//       field3=0 (any field of nvmlDeviceGetFieldValues) wedge=FUNCTION (that call never returns; wedge=all) mig=0
//   mig gpu=0 uuid=MIG-a gi=1 ci=0
//   event seq=1 gpu=0 type=8 data=48 gi=4294967295 ci=4294967295
//
// or, as tests/injected appends them, "INDEX xid N", "INDEX ecc" and "INDEX lost".
//
// Events are numbered; a set hands out those that came after it was registered. Processes on a device are the files
// <control file>.procs/<UUID>/<pid> whose process lives. Not thread-safe beyond what is needed: one lock around the file.
#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Return : int {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    RESET_REQUIRED = 16,
};

using Words = std::map<std::string, std::string>;

struct World {
    std::vector<Words> gpus, migs, events, struck;
    long long strikes = 0;
};

// handles: 1 + n for a GPU, 1001 + n for a MIG device
constexpr uintptr_t kGpu = 1, kMig = 1001;

std::mutex lock;
World world;
timespec read_at{};
ino_t read_inode = 0;
off_t read_size = 0;  // the clock of a file is coarser than two appends

const char* control() { return std::getenv("FTRUN_FAKE_NVML"); }

long long number(const Words& words, const std::string& key, long long otherwise) {
    const auto found = words.find(key);
    return found == words.end() ? otherwise : std::atoll(found->second.c_str());
}

std::string text(const Words& words, const std::string& key, const std::string& otherwise) {
    const auto found = words.find(key);
    return found == words.end() ? otherwise : found->second;
}

// one appended line: what happens to device `index`
void strike(World& fresh, const std::string& index, const std::string& line) {
    std::istringstream parts(line);
    std::string skipped, what, code;
    parts >> skipped >> what >> code;
    const auto gpu = static_cast<size_t>(std::atoll(index.c_str()));
    if (gpu >= fresh.gpus.size()) return;
    if (what == "lost") {
        fresh.gpus[gpu]["lost"] = "1";
        return;
    }
    const std::string seq = std::to_string(++fresh.strikes);
    const std::string type = what == "ecc" ? "2" : "8";
    fresh.struck.push_back({{"seq", seq}, {"gpu", index}, {"type", type}, {"data", code.empty() ? "0" : code}});
}

World now() {
    const std::lock_guard<std::mutex> guard(lock);
    struct stat info{};
    if (control() == nullptr || stat(control(), &info) != 0) return world;
    const bool same_time = info.st_mtim.tv_sec == read_at.tv_sec && info.st_mtim.tv_nsec == read_at.tv_nsec;
    if (info.st_ino == read_inode && info.st_size == read_size && same_time) return world;
    World fresh;
    std::ifstream file(control());
    for (std::string line; std::getline(file, line);) {
        std::istringstream parts(line);
        std::string kind, part;
        Words words;
        parts >> kind;
        while (parts >> part) {
            const auto equals = part.find('=');
            if (equals != std::string::npos) words[part.substr(0, equals)] = part.substr(equals + 1);
        }
        if (kind == "gpu") fresh.gpus.push_back(words);
        if (kind == "mig") fresh.migs.push_back(words);
        if (kind == "event") fresh.events.push_back(words);
        if (!kind.empty() && kind.find_first_not_of("0123456789") == std::string::npos) strike(fresh, kind, line);
    }
    world = fresh;
    read_inode = info.st_ino;
    read_size = info.st_size;
    read_at = info.st_mtim;
    return world;
}

// the GPU's words under a handle of it or of one of its MIG devices; nullptr for a bad handle
const Words* gpu_of(const World& w, uintptr_t handle) {
    size_t index = handle - kGpu;
    if (handle >= kMig) {
        if (handle - kMig >= w.migs.size()) return nullptr;
        index = static_cast<size_t>(number(w.migs[handle - kMig], "gpu", 0));
    }
    return index < w.gpus.size() ? &w.gpus[index] : nullptr;
}

const Words* words_of(const World& w, uintptr_t handle) {
    if (handle >= kMig) return handle - kMig < w.migs.size() ? &w.migs[handle - kMig] : nullptr;
    return gpu_of(w, handle);
}

// what every call on a device begins with: it may never return, or say that the device is gone
int enter(uintptr_t handle, const char* call) {
    while (true) {
        const World w = now();
        const Words* gpu = gpu_of(w, handle);
        if (gpu == nullptr) return INVALID_ARGUMENT;
        const std::string wedge = text(*gpu, "wedge", "");
        if (wedge != "all" && wedge != call) {
            if (number(*gpu, "lost", 0)) return GPU_IS_LOST;
            return number(*gpu, "reset", 0) ? RESET_REQUIRED : SUCCESS;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

template <typename T>
int give(uintptr_t handle, const char* call, const char* key, long long otherwise, T* out) {
    const int entered = enter(handle, call);
    if (entered != SUCCESS) return entered;
    const World w = now();
    *out = static_cast<T>(number(*gpu_of(w, handle), key, otherwise));
    return SUCCESS;
}

int copy(const std::string& from, char* to, unsigned length) {
    if (from.size() + 1 > length) return INSUFFICIENT_SIZE;
    std::memcpy(to, from.c_str(), from.size() + 1);
    return SUCCESS;
}

struct EventSet {
    uintptr_t device = 0;
    unsigned long long types = 0;
    long long seen = 0, seen_strikes = 0;
};

long long newest(const std::vector<Words>& events) {
    long long last = 0;
    for (const Words& event : events) last = std::max(last, number(event, "seq", 0));
    return last;
}

// the next event of the set's device that it has not seen; nullptr when there is none
const Words* next(const EventSet& set, const std::vector<Words>& events, long long& seen) {
    for (const Words& event : events) {
        const long long seq = number(event, "seq", 0);
        if (seq <= seen || kGpu + static_cast<uintptr_t>(number(event, "gpu", 0)) != set.device) continue;
        seen = seq;
        if (static_cast<unsigned long long>(number(event, "type", 8)) & set.types) return &event;
    }
    return nullptr;
}

}  // namespace

extern "C" {

struct Utilization { unsigned gpu, memory; };
struct Memory { unsigned long long total, free, used; };
struct ProcessInfo { unsigned pid; unsigned long long used; unsigned gi, ci; };
struct EventData { uintptr_t device; unsigned long long type, data; unsigned gi, ci; };
struct FieldValue {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type;
    int result;
    unsigned long long value;
};

int nvmlInitWithFlags(unsigned) {
    while (std::getenv("FTRUN_FAKE_NVML_WEDGED_INIT")) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return control() != nullptr && access(control(), R_OK) == 0 ? SUCCESS : UNINITIALIZED;
}
int nvmlInit_v2() { return nvmlInitWithFlags(0); }
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "fake error"; }
int nvmlSystemGetDriverVersion(char* out, unsigned length) { return copy("999.0", out, length); }

int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(now().gpus.size());
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, uintptr_t* handle) {
    if (index >= now().gpus.size()) return INVALID_ARGUMENT;
    *handle = kGpu + index;
    return SUCCESS;
}
int nvmlDeviceGetUUID(uintptr_t handle, char* out, unsigned length) {
    const World w = now();
    const Words* words = words_of(w, handle);
    return words == nullptr ? INVALID_ARGUMENT : copy(text(*words, "uuid", ""), out, length);
}
int nvmlDeviceGetName(uintptr_t handle, char* out, unsigned length) {
    const World w = now();
    const Words* words = gpu_of(w, handle);
    return words == nullptr ? INVALID_ARGUMENT : copy(text(*words, "name", "Fake"), out, length);
}
int nvmlDeviceGetUtilizationRates(uintptr_t handle, Utilization* out) {
    if (handle >= kMig) return NOT_SUPPORTED;
    return give(handle, "nvmlDeviceGetUtilizationRates", "utilisation", 0, &out->gpu);
}
int nvmlDeviceGetTemperature(uintptr_t handle, int, unsigned* out) {
    return give(handle, "nvmlDeviceGetTemperature", "temperature", 40, out);
}
int nvmlDeviceGetMemoryInfo(uintptr_t handle, Memory* out) {
    const int code = give(handle, "nvmlDeviceGetMemoryInfo", "used", 1 << 20, &out->used);
    if (code == SUCCESS) give(handle, "nvmlDeviceGetMemoryInfo", "total", 1 << 30, &out->total);
    out->free = out->total - out->used;
    return code;
}
int nvmlDeviceGetCurrentClocksEventReasons(uintptr_t handle, unsigned long long* out) {
    if (handle >= kMig) return NOT_SUPPORTED;
    return give(handle, "nvmlDeviceGetCurrentClocksEventReasons", "throttle", 0, out);
}
int nvmlDeviceGetFieldValues(uintptr_t handle, int count, FieldValue* values) {
    const int entered = enter(handle, "nvmlDeviceGetFieldValues");
    if (entered != SUCCESS) return entered;
    const World w = now();
    const Words& gpu = *gpu_of(w, handle);
    for (int i = 0; i < count; ++i) {
        const std::string key = values[i].field == 230 ? "recovery" : "field" + std::to_string(values[i].field);
        values[i].type = 3;
        values[i].result = gpu.count(key) ? SUCCESS : NOT_SUPPORTED;
        values[i].value = static_cast<unsigned long long>(number(gpu, key, 0));
    }
    return SUCCESS;
}

int nvmlEventSetCreate(EventSet** out) {
    *out = new EventSet;
    return SUCCESS;
}
int nvmlEventSetFree(EventSet* set) {
    delete set;
    return SUCCESS;
}
int nvmlDeviceGetSupportedEventTypes(uintptr_t handle, unsigned long long* out) {
    if (handle >= kMig) return NOT_SUPPORTED;
    return give(handle, "nvmlDeviceGetSupportedEventTypes", "events", 8 | 2 | 32768 | 16384, out);
}
int nvmlDeviceRegisterEvents(uintptr_t handle, unsigned long long types, EventSet* set) {
    const int entered = enter(handle, "nvmlDeviceRegisterEvents");
    if (entered != SUCCESS) return entered;
    set->device = handle;
    set->types = types;
    const World w = now();
    set->seen = newest(w.events);
    set->seen_strikes = newest(w.struck);
    return SUCCESS;
}
int nvmlEventSetWait_v2(EventSet* set, EventData* out, unsigned milliseconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (true) {
        const int entered = enter(set->device, "nvmlEventSetWait");
        if (entered == GPU_IS_LOST) return entered;
        const World w = now();
        const Words* event = next(*set, w.events, set->seen);
        if (event == nullptr) event = next(*set, w.struck, set->seen_strikes);
        if (event != nullptr) {
            *out = EventData{set->device, static_cast<unsigned long long>(number(*event, "type", 8)),
                             static_cast<unsigned long long>(number(*event, "data", 0)),
                             static_cast<unsigned>(number(*event, "gi", UINT32_MAX)),
                             static_cast<unsigned>(number(*event, "ci", UINT32_MAX))};
            return SUCCESS;
        }
        if (std::chrono::steady_clock::now() >= end) return TIMEOUT;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

int nvmlDeviceGetComputeRunningProcesses_v3(uintptr_t handle, unsigned* count, ProcessInfo* out) {
    const int entered = enter(handle, "nvmlDeviceGetComputeRunningProcesses");
    if (entered != SUCCESS) return entered;
    const World w = now();
    std::vector<unsigned> pids;
    const std::string folder = std::string(control()) + ".procs/" + text(*words_of(w, handle), "uuid", "");
    if (DIR* entries = opendir(folder.c_str())) {
        while (const dirent* entry = readdir(entries)) {
            const int pid = std::atoi(entry->d_name);
            if (pid > 0 && kill(pid, 0) == 0) pids.push_back(static_cast<unsigned>(pid));
        }
        closedir(entries);
    }
    const unsigned room = *count;
    *count = static_cast<unsigned>(pids.size());
    if (pids.empty()) return SUCCESS;
    if (out == nullptr || room < pids.size()) return INSUFFICIENT_SIZE;
    for (size_t i = 0; i < pids.size(); ++i) out[i] = ProcessInfo{pids[i], 1 << 20, UINT32_MAX, UINT32_MAX};
    return SUCCESS;
}

int nvmlDeviceGetMigMode(uintptr_t handle, unsigned* current, unsigned* pending) {
    *pending = 0;
    const World w = now();
    const Words* gpu = gpu_of(w, handle);
    if (gpu == nullptr) return INVALID_ARGUMENT;
    *current = *pending = static_cast<unsigned>(number(*gpu, "mig", 0));
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(uintptr_t, unsigned* count) {
    *count = 7;
    return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(uintptr_t handle, unsigned index, uintptr_t* out) {
    const World w = now();
    for (size_t i = 0; i < w.migs.size(); ++i) {
        if (kGpu + static_cast<uintptr_t>(number(w.migs[i], "gpu", 0)) != handle || index-- != 0) continue;
        *out = kMig + i;
        return SUCCESS;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(uintptr_t handle, unsigned* out) {
    const World w = now();
    const Words* words = words_of(w, handle);
    if (words == nullptr || handle < kMig) return INVALID_ARGUMENT;
    *out = static_cast<unsigned>(number(*words, "gi", 0));
    return SUCCESS;
}
int nvmlDeviceGetComputeInstanceId(uintptr_t handle, unsigned* out) {
    const World w = now();
    const Words* words = words_of(w, handle);
    if (words == nullptr || handle < kMig) return INVALID_ARGUMENT;
    *out = static_cast<unsigned>(number(*words, "ci", 0));
    return SUCCESS;
}

}  // extern "C"
