// The kernels compiled on this machine by NVRTC, for a device or a driver that does not take their PTX. Needs no device.
#pragma once

#include <functional>
#include <string>

namespace ftrun::cuda {

struct Compiled {
    std::string image;     // a cubin
    std::string compiler;  // its name, version and file
};

// Folders joined by ':' in which NVRTC is looked for before the loader's own places.
void look_for_nvrtc_in(const char *folders);

// Compiles for a compute capability with one NVRTC after the other, until `take` gives anything but -ENOEXEC for what came
// out, and returns that. -ENOEXEC when there is none left; why() then has the reason of each.
int compile_kernels(int major, int minor, const std::function<int(const Compiled &)> &take);

}  // namespace ftrun::cuda
