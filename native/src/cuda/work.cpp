// Launching the kernels, and waiting.
#include "cuda/work.hpp"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>

#include "memory/hash.hpp"
#include "process/thread.hpp"

namespace ftrun::cuda {
namespace {

constexpr uint64_t kBatch = kChecksumScratch / (kLanes * sizeof(uint64_t));  // pieces a launch
constexpr unsigned kThreads = 128;
constexpr uint64_t kSpinNs = 50 * 1000;
// Between the gradients and the update of a step the device is idle for as long as a look comes late: by less than a thousandth
// of the wait, where looks need not come more often than each 20 us for that.
constexpr uint64_t kShare = 1024, kShortest = 20 * 1000, kLongest = 200 * 1000;

// While it lives, this thread's pauses are as short as asked for; Linux may else make each 50 us longer.
class ExactPauses {
   public:
    ExactPauses() : before_(prctl(PR_GET_TIMERSLACK)) { set(1); }
    ~ExactPauses() { set(before_ > 0 ? static_cast<unsigned long>(before_) : 0); }  // 0: the thread's default
    ExactPauses(const ExactPauses &) = delete;
    ExactPauses &operator=(const ExactPauses &) = delete;

   private:
    static void set(unsigned long ns) { prctl(PR_SET_TIMERSLACK, ns); }
    const int before_;
};

unsigned blocks_for(uint64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

int launch(Function kernel, unsigned blocks, unsigned threads, Stream stream, void **parameters, const char *what) {
    return check(calls().cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, nullptr), what);
}

}  // namespace

int queue_checksum(Ordinal device, Stream stream, Pointer address, uint64_t length, uint64_t seed, Pointer scratch,
                   Pointer total) {
    const Kernels *kernel = nullptr;
    int error = kernels(device, &kernel);
    const uint64_t count = std::max<uint64_t>(1, (length + kPiece - 1) / kPiece);
    for (uint64_t first = 0; first < count && error == 0; first += kBatch) {
        uint64_t pieces = std::min(kBatch, count - first);
        uint64_t last = first + pieces == count;
        void *lanes[] = {&address, &length, &seed, &first, &pieces, &scratch};
        void *hashes[] = {&length, &seed, &first, &pieces, &scratch};
        void *join[] = {&length, &seed, &first, &pieces, &scratch, &total, &last};
        error = launch(kernel->lanes, blocks_for(pieces * kLanes), kThreads, stream, lanes, "ftrun_checksum_lanes");
        if (error == 0)
            error = launch(kernel->pieces, blocks_for(pieces), kThreads, stream, hashes, "ftrun_checksum_pieces");
        if (error == 0) error = launch(kernel->join, 1, 1, stream, join, "ftrun_checksum_join");
    }
    return error;
}

int wait_event(Event event, double seconds) {
    const uint64_t begin = now_ns();
    const uint64_t limit = to_ns(seconds);
    const ExactPauses exact;
    for (;;) {
        const Result result = calls().cuEventQuery(event);
        if (result != kNotReady) return check(result, "the device");
        const uint64_t waited = now_ns() - begin;
        if (waited >= limit) return refuse(ETIMEDOUT, "the device did not finish in time");
        if (waited < kSpinNs) continue;
        const timespec pause{0, static_cast<long>(std::min(waited / 16, std::clamp(waited / kShare, kShortest, kLongest)))};
        nanosleep(&pause, nullptr);
    }
}

int wait_stream(Stream stream, double seconds) {
    Event event = nullptr;
    int error = check(calls().cuEventCreate(&event, kDisableTiming), "cuEventCreate");
    if (error != 0) return error;
    error = check(calls().cuEventRecord(event, stream), "cuEventRecord");
    if (error == 0) error = wait_event(event, seconds);
    calls().cuEventDestroy(event);
    return error;
}

}  // namespace ftrun::cuda
