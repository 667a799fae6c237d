// The pipeline's seam over CUDA, run against the fake driver: order, marks, checksums, errors that stick to a lane.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "cuda/device.hpp"
#include "ftrun_cuda.h"

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, ftrun_cuda_why()); \
            std::exit(1);                                                                   \
        }                                                                                   \
    } while (0)

namespace {

constexpr size_t kSize = size_t{6} << 20;

void steer(const char *text) { std::ofstream(std::getenv("FAKE_CUDA_CONTROL")) << text; }

struct Other : ftrun::Mark {  // a mark of another kind
    int state = -EINPROGRESS;
    int query() const override { return state; }
    int wait(double) const override { return state == -EINPROGRESS ? -ETIMEDOUT : state; }
};

char *device_memory(int device) {
    const int64_t base = ftrun_cuda_reserve(device, kSize);
    EXPECT(base > 0 && ftrun_cuda_create(device, static_cast<uint64_t>(base), kSize) >= 0);
    return reinterpret_cast<char *>(base);
}

}  // namespace

int main() {
    EXPECT(ftrun::make_cuda_device(99) == nullptr);
    const auto zero = ftrun::make_cuda_device(0), one = ftrun::make_cuda_device(1);
    EXPECT(zero != nullptr && one != nullptr);
    char *staging = static_cast<char *>(zero->staging(kSize));
    EXPECT(staging != nullptr);
    for (size_t i = 0; i < kSize; ++i) staging[i] = static_cast<char>(i * 31);
    char *near = device_memory(0), *far = device_memory(1);

    // H2D on one device, on to the other behind a mark, checked there; nothing blocks while it is slow
    steer("rate 30000000\n");
    const auto in = zero->lane(), out = one->lane();
    EXPECT(in->copy(near, staging, kSize) == 0);
    const auto arrived = in->mark();
    EXPECT(arrived->query() == -EINPROGRESS && arrived->wait(0.01) == -ETIMEDOUT);
    EXPECT(out->after(*arrived) == 0 && out->copy(far, near, kSize) == 0);
    std::vector<uint64_t> sums(3, 0);
    EXPECT(out->checksum(&sums[0], far, kSize, 9) == 0 && out->checksum(&sums[1], far + 3, 1000, 0) == 0);
    const auto done = out->mark();
    EXPECT(done->query() == -EINPROGRESS && sums[0] == 0);
    EXPECT(done->wait(20) == 0 && arrived->query() == 0);
    EXPECT(std::memcmp(far, staging, kSize) == 0);
    EXPECT(sums[0] == ftrun_checksum(staging, kSize, 9, 1) && sums[1] == ftrun_checksum(staging + 3, 1000, 0, 1));
    steer("");

    // a mark of another kind: taken when it is done, and its error is the lane's
    Other other, failed;
    EXPECT(in->after(other) == -ENOTSUP && in->copy(near, staging, 8) == 0);
    other.state = 0;
    EXPECT(in->after(other) == 0 && in->mark()->wait(20) == 0);
    failed.state = -EPIPE;
    const auto broken = zero->lane();
    EXPECT(broken->after(failed) == -EPIPE && broken->copy(near, staging, 8) == -EPIPE);
    EXPECT(broken->mark()->wait(1) == -EPIPE);
    EXPECT(in->after(*broken->mark()) == -EPIPE && in->mark()->query() == -EPIPE);

    // a lost device: whoever waits gets its error, the other device goes on
    const auto late = zero->lane();
    steer("lost 0\n");
    EXPECT(late->copy(near, staging, 8) == -EIO && late->mark()->wait(1) == -EIO);
    EXPECT(out->copy(far, staging, 8) == 0 && out->mark()->wait(20) == 0);
    std::puts("lane test: ok");
}
