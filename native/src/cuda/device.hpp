// A GPU as the transfer pipeline sees it.
#pragma once

#include <memory>

#include "transfer/device.hpp"

namespace ftrun {

// Lanes are streams of their own, marks are events, staging is pinned host memory, which a host lane with copies of `threads`
// threads fills. nullptr when there is no such device; ftrun_cuda_why() then says why. `after` a mark of another kind is
// -ENOTSUP while that is not done: wait for it on the host.
std::unique_ptr<Device> make_cuda_device(int ordinal, int threads = 0);

}  // namespace ftrun
