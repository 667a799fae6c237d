// Drives every function once for the sanitizers (make native-asan native-tsan). What the results mean is tested from Python.
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "memory/absorb.hpp"
#include "expect.hpp"
#include "ftrun_native.h"

namespace {

char *shared_page() {
    void *page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(page != MAP_FAILED);
    return static_cast<char *>(page);
}

void test_words() {
    char *page = shared_page();
    auto *word = reinterpret_cast<uint64_t *>(page);
    auto *bell = reinterpret_cast<uint32_t *>(page + 64);
    ftrun_store64(word, 5);
    EXPECT(ftrun_cas64(word, 5, 6) == 5 && ftrun_load64(word) == 6);
    const uint64_t list[] = {2, reinterpret_cast<uint64_t>(word), reinterpret_cast<uint64_t>(word)};
    EXPECT(ftrun_all_equal64(list, 6) && !ftrun_all_equal64(list, 5));
    EXPECT(ftrun_arrive(word, 7, list) && ftrun_load64(word) == 7);
    EXPECT(!ftrun_bell_wait(bell, 0, 0.01));
    ftrun_bell_ring(bell);
    EXPECT(ftrun_bell_wait(bell, 0, 1e300) && ftrun_load32(bell) == 1);
    EXPECT(ftrun_unmap(page, 4096) == 0);
}

// Heap blocks of exactly the size: one byte read or written too far ends the test.
void test_ranges() {
    for (const size_t size : {0u, 1u, 63u, 64u, 65u, 4097u, 1048577u, 8388609u, 12582911u}) {
        std::vector<char> source(size + 1, 'x'), target(size);
        ftrun_copy(target.data(), source.data() + 1, size, 3);
        EXPECT(size == 0 || std::memcmp(target.data(), source.data() + 1, size) == 0);
        EXPECT(ftrun_checksum(source.data() + 1, size, 1, 1) == ftrun_checksum(target.data(), size, 1, 4));
    }
}

// Every way to hash gives the same lanes and stores the same bytes.
template <typename Store>
void test_absorb(const unsigned char *source, size_t blocks) {
    using namespace ftrun;
    const size_t size = blocks * kBlock;
    unsigned char *target = static_cast<unsigned char *>(std::aligned_alloc(kBlock, size + kBlock));
    Lanes plain(5), fast(5);
    absorb_scalar<Nowhere>(plain, source, blocks, nullptr);
    pick_absorb<Store>()(fast, source, blocks, target);
    EXPECT(std::memcmp(&plain, &fast, sizeof(Lanes)) == 0 && std::memcmp(source, target, size) == 0);
    std::memset(target, 0, size);
    Lanes again(5);
    absorb_scalar<Store>(again, source, blocks, target);
    EXPECT(std::memcmp(&plain, &again, sizeof(Lanes)) == 0 && std::memcmp(source, target, size) == 0);
    std::free(target);
}

void test_absorbing() {
    std::vector<unsigned char> bytes(200 * ftrun::kBlock + 1);
    unsigned state = 3;
    for (unsigned char &byte : bytes) byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
    for (const size_t blocks : {0u, 1u, 15u, 16u, 17u, 200u}) {
        test_absorb<ftrun::Plain>(bytes.data() + 1, blocks);
        test_absorb<ftrun::Stream>(bytes.data() + 1, blocks);
    }
}

void test_life() {
    char *page = shared_page();
    auto *beat = reinterpret_cast<uint64_t *>(page + 2 * FTRUN_LIFE_BYTES);
    auto *bell = reinterpret_cast<uint32_t *>(page + 3 * FTRUN_LIFE_BYTES);
    EXPECT(ftrun_life_init(page) == 0);
    for (int i = 0; i < 20; ++i) {
        EXPECT(ftrun_beat_start(page, beat, 0.001, getpid(), 0.0) == 0);
        EXPECT(ftrun_beat_start(page, beat, 0.001, 0, 0.0) == -EALREADY);
        EXPECT(ftrun_life_hold(page) == -EBUSY);
        EXPECT(ftrun_beat_stop() == 0 && ftrun_beat_stop() == 0);
        EXPECT(ftrun_life_hold(page) == 0 && ftrun_life_release(page) == 0);
    }
    const pid_t child = fork();
    if (child == 0) {
        if (ftrun_beat_start(page, beat, 0.01, 0, 0.0) != 0) _exit(1);
        ftrun_bell_ring(bell);
        for (;;) pause();
    }
    EXPECT(ftrun_bell_wait(bell, 0, 30.0));
    const int event = eventfd(0, 0);
    const int64_t stopped = ftrun_watch_start(page, event), fired = ftrun_watch_start(page, event);
    EXPECT(stopped > 0 && fired > 0);
    EXPECT(ftrun_watch_stop(stopped, false) == 0);
    EXPECT(kill(child, SIGKILL) == 0 && waitpid(child, nullptr, 0) == child);
    uint64_t count = 0;
    EXPECT(read(event, &count, sizeof(count)) == sizeof(count) && count == 1);
    EXPECT(ftrun_watch_stop(fired, true) == 0 && ftrun_watch_stop(fired, true) == -ENOENT);
    close(event);
    // The page stays: the watcher that was stopped without waiting may look at it once more.
}

void test_mapping() {
    const int file = memfd_create("native_test", MFD_CLOEXEC);
    EXPECT(file >= 0 && ftruncate(file, 8192) == 0);
    const int64_t mapped = ftrun_map_fd(file, 1 << 20, true);
    EXPECT(mapped > 0);
    char *address = reinterpret_cast<char *>(mapped);
    EXPECT(ftrun_populate(address + 1, 8191, true) == 0 && ftrun_populate(address, 8192, false) == 0);
    EXPECT(ftrun_unmap(address, 1 << 20) == 0);
    EXPECT(ftrun_map_fd(-1, 4096, true) == -EBADF);
    close(file);
    EXPECT(ftrun_set_name("native-test") == 0 && ftrun_set_subreaper() == 0);
}

}  // namespace

int main() {
    test_words();
    test_ranges();
    test_absorbing();
    test_life();
    test_mapping();
    test_transfers();
    std::puts("native test: ok");
}
