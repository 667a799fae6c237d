// What overlapping the stages of a host reload is worth where they do not share one bottleneck: the engine of native/src over
// host memory, with a link of limited rate before the staging buffer, as the copy engine of a GPU is. Four participants.
//
//     overlap MEGABYTES LINK_MB_PER_S      prints: seconds overlapped, seconds one after another
#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "memory/copy.hpp"
#include "transfer/transfer.hpp"

namespace {

constexpr uint32_t kCount = 4;
using Clock = std::chrono::steady_clock;

double rate;  // of a link, bytes a second

// As long as the link takes; the processor is free meanwhile, but for the copy itself.
void over_link(void *destination, const void *source, size_t bytes) {
    const auto end = Clock::now() + std::chrono::duration<double>(static_cast<double>(bytes) / rate);
    ftrun_copy(destination, source, bytes, 1);
    std::this_thread::sleep_until(end);
}

class LinkMark : public ftrun::Mark {
 public:
    explicit LinkMark(std::shared_future<int> done) : done_(std::move(done)) {}
    int query() const override { return wait(0) == -ETIMEDOUT ? -EINPROGRESS : done_.get(); }
    int wait(double seconds) const override {
        const auto state = done_.wait_for(std::chrono::duration<double>(seconds));
        return state == std::future_status::ready ? done_.get() : -ETIMEDOUT;
    }

 private:
    std::shared_future<int> done_;
};

class LinkDevice;

class LinkLane : public ftrun::Lane {
 public:
    explicit LinkLane(LinkDevice &device) : device_(device), thread_([this] { serve(); }) {}
    ~LinkLane() override {
        put(nullptr);
        thread_.join();
    }
    int copy(void *destination, const void *source, size_t bytes) override;
    int checksum(uint64_t *result, const void *source, size_t bytes, uint64_t seed) override {
        return put([=] { *result = ftrun_checksum(source, bytes, seed, 1); });
    }
    int after(const ftrun::Mark &) override { return -ENOTSUP; }  // the engine waits
    std::shared_ptr<ftrun::Mark> mark() override {
        auto promise = std::make_shared<std::promise<int>>();
        auto mark = std::make_shared<LinkMark>(promise->get_future().share());
        put([promise] { promise->set_value(0); });
        return mark;
    }

 private:
    int put(std::function<void()> work) {
        const std::lock_guard<std::mutex> hold(mutex_);
        queue_.push_back(std::move(work));
        more_.notify_one();
        return 0;
    }
    void serve() {
        for (;;) {
            std::unique_lock<std::mutex> hold(mutex_);
            more_.wait(hold, [this] { return !queue_.empty(); });
            const auto work = std::move(queue_.front());
            queue_.pop_front();
            hold.unlock();
            if (!work) return;
            work();
        }
    }

    LinkDevice &device_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> queue_;
    std::thread thread_;
};

class LinkDevice : public ftrun::Device {
 public:
    std::unique_ptr<ftrun::Lane> lane() override { return std::make_unique<LinkLane>(*this); }
    void *staging(size_t) override { return staging_; }
    void release_staging(void *, size_t) override {}
    explicit LinkDevice(void *staging) : staging_(staging) {}
    bool is_link(const void *destination) const { return destination == staging_; }

 private:
    void *staging_;
};

int LinkLane::copy(void *destination, const void *source, size_t bytes) {
    if (device_.is_link(destination)) return put([=] { over_link(destination, source, bytes); });
    return put([=] { ftrun_copy(destination, source, bytes, 1); });
}

char *memory(size_t bytes) {
    void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (found == MAP_FAILED) std::abort();
    return static_cast<char *>(found);
}

ftrun_extent extent(const void *address, size_t bytes) { return {reinterpret_cast<uint64_t>(address), bytes}; }

struct Bench {
    ftrun_exchange_facts facts;
    char *state, *control, *targets[kCount], *staging[kCount];
    std::vector<void *> buffers;

    explicit Bench(uint64_t total)
        : facts{kCount, -1, ftrun_transfer_chunk(total / kCount, 0) / 2, total, 1, 1, 1}, state(memory(total)) {
        for (uint64_t at = 0; at + 8 <= total; at += 8) std::memcpy(state + at, &at, 8);
        control = memory(ftrun_exchange_size(kCount));
        for (uint32_t i = 0; i < 2 * kCount; ++i) buffers.push_back(memory(facts.chunk));
        for (char *&target : targets) target = memory(total);
        for (char *&one : staging) one = memory(facts.chunk);
    }

    template <typename Work>
    double time(Work work) {
        const auto begin = Clock::now();
        std::vector<std::thread> threads;
        for (uint32_t me = 0; me < kCount; ++me) threads.emplace_back(work, me);
        for (std::thread &thread : threads) thread.join();
        return std::chrono::duration<double>(Clock::now() - begin).count();
    }

    double overlapped() {
        std::memset(control, 0, ftrun_exchange_size(kCount));
        if (ftrun_exchange_init(control, &facts) != 0) std::abort();
        return time([this](uint32_t me) {
            uint64_t offset;
            const uint64_t share = ftrun_exchange_share(&facts, me, &offset);
            const ftrun_extent from = extent(state + offset, share), to = extent(targets[me], facts.total);
            const ftrun_transfer_terms terms{0, 1, FTRUN_CHECK_NONE, 120, nullptr, 0, 0, nullptr};
            ftrun_transfer_result result{};
            LinkDevice device(staging[me]);
            const int error = ftrun::exchange_run(device, control, me, facts, {&from, 1}, {&to, 1}, buffers.data(), terms, result);
            if (error != 0 || result.bytes != facts.total) std::abort();
        });
    }

    double in_turn() {
        pthread_barrier_t barrier;
        pthread_barrier_init(&barrier, nullptr, kCount);
        const double seconds = time([this, &barrier](uint32_t me) {
            uint64_t offset, begin;
            const uint64_t share = ftrun_exchange_share(&facts, me, &offset), most = ftrun_exchange_share(&facts, 0, &begin);
            const auto at_most = [this](uint64_t size, uint64_t at) { return at < size ? std::min(facts.chunk, size - at) : 0; };
            for (uint64_t at = 0; at < most; at += facts.chunk) {
                over_link(staging[me], state + offset + at, at_most(share, at));
                pthread_barrier_wait(&barrier);
                ftrun_copy(buffers[2 * me], staging[me], at_most(share, at), 1);
                pthread_barrier_wait(&barrier);
                for (uint32_t who = 0; who < kCount; ++who) {
                    const uint64_t size = ftrun_exchange_share(&facts, who, &begin);
                    ftrun_copy(targets[me] + begin + at, buffers[2 * who], at_most(size, at), 1);
                }
                pthread_barrier_wait(&barrier);
            }
        });
        pthread_barrier_destroy(&barrier);
        return seconds;
    }

    // What arrived is the state, then forgotten.
    void verify() {
        for (char *target : targets) {
            if (std::memcmp(target, state, facts.total) != 0) std::abort();
            std::memset(target, 0, facts.total);
        }
    }
};

}  // namespace

int main(int count, char **arguments) {
    if (count != 3) return 2;
    Bench bench(std::strtoull(arguments[1], nullptr, 10) * 1000000 / 4096 * 4096);
    rate = std::strtod(arguments[2], nullptr) * 1e6;
    bench.overlapped();
    bench.verify();
    const double turns = bench.in_turn();
    bench.verify();
    std::printf("%.6f %.6f\n", bench.overlapped(), turns);
}
