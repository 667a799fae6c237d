// The kernels of a device, from their PTX, and their workspaces.
#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/work.hpp"

// The PTX text, ended by a zero as cuModuleLoadData wants it.
__asm__(
    ".section .rodata\n"
    ".balign 16\n"
    ".hidden ftrun_ptx\n"
    ".global ftrun_ptx\n"
    "ftrun_ptx:\n"
    ".incbin \"" FTRUN_NATIVE "/kernels/ftrun.ptx\"\n"
    ".byte 0\n"
    ".previous\n");
extern "C" const char ftrun_ptx[];

namespace ftrun::cuda {
namespace {

std::mutex mutex;
std::map<Ordinal, Kernels> loaded;
std::mutex pool_mutex;
std::map<Ordinal, std::vector<Workspace>> pool;
constexpr size_t kReady = 3;  // workspaces made beforehand: a call's, and those of a checked copy's two lanes

int make(Workspace *space) {
    int error = check(calls().cuMemAlloc(&space->scratch, kChecksumScratch), "cuMemAlloc");
    if (error == 0) error = check(calls().cuMemAllocHost(&space->pinned, kPinnedRoom), "cuMemAllocHost");
    if (error != 0 && space->scratch != 0) calls().cuMemFree(space->scratch);
    return error;
}

int make_ready(Ordinal device) {
    const std::lock_guard<std::mutex> lock(pool_mutex);
    int error = 0;
    while (error == 0 && pool[device].size() < kReady) {
        Workspace space;
        error = make(&space);
        if (error == 0) pool[device].push_back(space);
    }
    return error;
}

}  // namespace

int borrow(Ordinal device, Workspace *space) {
    {
        const std::lock_guard<std::mutex> lock(pool_mutex);
        std::vector<Workspace> &free = pool[device];
        if (!free.empty()) {
            *space = free.back();
            free.pop_back();
            return 0;
        }
    }
    return make(space);
}

void give_back(Ordinal device, const Workspace &space) {
    const std::lock_guard<std::mutex> lock(pool_mutex);
    pool[device].push_back(space);
}

int kernels(Ordinal device, const Kernels **found) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = loaded.find(device);
    if (known != loaded.end()) {
        *found = &known->second;
        return 0;
    }
    Module module = nullptr;
    Kernels all;
    int error = check(calls().cuModuleLoadData(&module, ftrun_ptx), "cuModuleLoadData of ftrun's kernels");
    const struct {
        const char *name;
        Function *slot;
    } wanted[] = {{"ftrun_checksum_lanes", &all.lanes},
                  {"ftrun_checksum_pieces", &all.pieces},
                  {"ftrun_checksum_join", &all.join}};
    for (const auto &one : wanted) {
        if (error == 0) error = check(calls().cuModuleGetFunction(one.slot, module, one.name), one.name);
    }
    if (error == 0) error = make_ready(device);
    if (error != 0) return error;
    *found = &(loaded[device] = all);
    return 0;
}

}  // namespace ftrun::cuda
