// The transfer engine for the sanitizers: participants are threads where races count, processes where deaths do.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "expect.hpp"
#include "ftrun_transfer.h"

namespace {

constexpr uint64_t kChunk = 1 << 20;
constexpr uint32_t kCount = 4;

ftrun_extent extent(const void *address, size_t bytes) { return {reinterpret_cast<uint64_t>(address), bytes}; }

ftrun_transfer_terms terms(int check, double timeout = 30.0) {
    return {kChunk, 2, check, timeout, nullptr, 0, 0, nullptr};
}

char *shared(size_t bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED);
    return static_cast<char *>(memory);
}

void fill(std::vector<char> &bytes, unsigned seed) {
    for (char &byte : bytes) byte = static_cast<char>((seed = seed * 1664525u + 1013904223u) >> 24);
}

void test_copy() {
    for (const size_t size : {0u, 1u, 4097u, 1u << 20, 9000001u}) {
        std::vector<char> source(size), target(size);
        fill(source, 7);
        // cut differently on the two sides: small pieces are packed, large ones split
        const size_t a = size / 7, b = size / 3;
        const ftrun_extent from[] = {extent(source.data(), a), extent(source.data() + a, 0), extent(source.data() + a, size - a)};
        const ftrun_extent to[] = {extent(target.data(), b), extent(target.data() + b, size - b)};
        for (const int check : {FTRUN_CHECK_NONE, FTRUN_CHECK_READ, FTRUN_CHECK_BACK, FTRUN_CHECK_SPOTS}) {
            std::fill(target.begin(), target.end(), 0);
            uint64_t moved = 0;
            ftrun_transfer_terms how = terms(check);
            how.moved = &moved;
            ftrun_transfer_result result;
            EXPECT(ftrun_transfer_copy(to, 2, from, 3, &how, &result) == 0);
            EXPECT(result.bytes == size && moved == size && target == source);
        }
    }
    ftrun_transfer_result result;
    const auto how = terms(FTRUN_CHECK_READ);
    char byte = 0;
    const ftrun_extent one = extent(&byte, 1);
    EXPECT(ftrun_transfer_copy(&one, 1, nullptr, 0, &how, &result) == -EPROTO);
}

void test_watch_ends_a_copy() {
    std::vector<char> source(64 << 20, 'a'), target(64 << 20);
    uint64_t generation = 5u << 3;
    ftrun_transfer_terms how = terms(FTRUN_CHECK_BACK);
    how.watch = &generation;
    how.watch_shift = 3;
    how.watch_value = 6;
    ftrun_transfer_result result;
    const ftrun_extent from = extent(source.data(), source.size()), to = extent(target.data(), target.size());
    EXPECT(ftrun_transfer_copy(&to, 1, &from, 1, &how, &result) == -ECANCELED);
    how.watch_value = 5;
    EXPECT(ftrun_transfer_copy(&to, 1, &from, 1, &how, &result) == 0 && target == source);
}

// A ring for kCount participants.
struct Ring {
    ftrun_exchange_facts facts;
    char *control;
    std::vector<void *> buffers;

    Ring(int source, uint64_t total, uint64_t generation = 3) : facts{kCount, source, kChunk, total, generation, 9, 77} {
        const uint64_t size = ftrun_exchange_size(kCount);
        control = shared(size + 2 * kCount * kChunk);
        for (uint32_t i = 0; i < 2 * kCount; ++i) buffers.push_back(control + size + i * kChunk);
        EXPECT(ftrun_exchange_init(control, &facts) == 0);
    }
    ~Ring() { munmap(control, ftrun_exchange_size(kCount) + 2 * kCount * kChunk); }

    int run(uint32_t me, const char *state, char *target, ftrun_transfer_result *result, double timeout = 30.0) {
        uint64_t offset;
        const uint64_t share = ftrun_exchange_share(&facts, me, &offset);
        const ftrun_extent from = extent(state + offset, share);
        // a hole of three pieces, so that chunks are scattered
        const ftrun_extent to[] = {extent(target, 100), extent(target + 100, 5000), extent(target + 5100, facts.total - 5100)};
        const auto how = terms(FTRUN_CHECK_READ, timeout);
        return ftrun_exchange_run(control, me, &facts, &from, share != 0, to, target == nullptr ? 0 : 3, buffers.data(),
                                  &how, result);
    }
};

void test_exchange(int source) {
    std::vector<char> state(9u * kChunk + 12345);
    fill(state, 11);
    Ring ring(source, state.size());
    std::vector<std::vector<char>> targets(kCount, std::vector<char>(state.size()));
    std::vector<std::thread> threads;
    uint64_t sums[kCount];
    for (uint32_t me = 0; me < kCount; ++me) {
        threads.emplace_back([&, me] {
            ftrun_transfer_result result;
            EXPECT(ring.run(me, state.data(), targets[me].data(), &result) == 0);
            EXPECT(result.bytes == state.size() && result.failed == -1);
            sums[me] = result.checksum;
        });
    }
    for (std::thread &thread : threads) thread.join();
    for (uint32_t me = 0; me < kCount; ++me) EXPECT(targets[me] == state && sums[me] == sums[0]);
    ftrun_exchange_progress progress;
    EXPECT(ftrun_exchange_look(ring.control, kCount, &progress) == -EINVAL);
    EXPECT(ftrun_exchange_look(ring.control, 1, &progress) == 0 && progress.state == 2 && progress.consumed >= 10);
}

// `victim` ends itself as soon as it takes part (its sender has begun); what becomes of the others?
void test_death(int source, uint32_t victim, int expected) {
    std::vector<char> state(24u * kChunk);
    fill(state, 13);
    Ring ring(source, state.size());
    pid_t children[kCount];
    for (uint32_t me = 0; me < kCount; ++me) {
        children[me] = fork();
        if (children[me] != 0) continue;
        if (me == victim) {
            std::thread([&ring, me] {
                ftrun_exchange_progress progress{};
                while (progress.produced + progress.consumed == 0) ftrun_exchange_look(ring.control, me, &progress);
                raise(SIGKILL);
            }).detach();
        }
        std::vector<char> target(state.size());
        ftrun_transfer_result result;
        const int error = ring.run(me, state.data(), target.data(), &result);
        if (error == 0) _exit(target == state ? 0 : 99);
        _exit(result.failed == static_cast<int64_t>(victim) ? -error : 98);
    }
    for (uint32_t me = 0; me < kCount; ++me) {
        int status = 0;
        EXPECT(waitpid(children[me], &status, 0) == children[me]);
        if (me == victim) {
            EXPECT(WIFSIGNALED(status));
        } else {
            EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == expected);
        }
    }
}

void test_refusals() {
    std::vector<char> state(2u * kChunk), target(2u * kChunk);
    Ring ring(-1, state.size());
    ftrun_transfer_result result;
    ring.facts.generation = 4;
    EXPECT(ring.run(0, state.data(), target.data(), &result) == -ESTALE);
    ring.facts.generation = 3;
    ring.facts.layout = 78;
    EXPECT(ring.run(0, state.data(), target.data(), &result) == -EPROTO);
    ring.facts.layout = 77;
    EXPECT(ring.run(0, state.data(), target.data(), &result, 0.05) == -ETIMEDOUT && result.failed > 0);
    EXPECT(ftrun_transfer_chunk(1 << 20, 0) == 1 << 20);
    EXPECT(ftrun_transfer_chunk(uint64_t{1} << 40, 0) == 256u << 20);
    EXPECT(ftrun_transfer_chunk(uint64_t{1} << 40, 96u << 20) == 32u << 20);
}

}  // namespace

void test_transfers() {
    test_copy();
    test_watch_ends_a_copy();
    test_exchange(-1);
    test_exchange(2);
    test_refusals();
    test_death(1, 1, EPIPE);
    test_death(1, 3, 0);
    test_death(-1, 2, EPIPE);
}
