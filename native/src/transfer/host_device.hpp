// Host memory as a Device: lanes are threads, marks are flags with a condition variable.
#pragma once

#include "transfer/device.hpp"

namespace ftrun {

// `threads`: how many a single large copy or checksum may use (0 = chosen by size). Outlives its lanes.
std::unique_ptr<Device> make_host_device(int threads);

}  // namespace ftrun
