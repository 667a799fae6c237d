// Mappings and copies. Nothing here owns memory.
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ftrun_native.h"
#include "process/thread.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace ftrun {
namespace {

constexpr size_t kPiece = 1024 * 1024;           // unit of work of a copying thread
constexpr size_t kWorthAThread = 4 * 1024 * 1024;  // below this, making a thread costs more than it saves

constexpr size_t kPastCache = 8 * 1024 * 1024;  // from here on what is written will not be read from a cache

struct Copy {
    char *destination;
    const char *source;
    size_t length;
    bool stream;
};

// memcpy that does not read the lines it overwrites; libc does so only for pieces far larger than ours.
void stream(char *destination, const char *source, size_t length) {
#if defined(__x86_64__)
    const size_t lead = std::min(length, (16 - reinterpret_cast<uintptr_t>(destination) % 16) % 16);
    std::memcpy(destination, source, lead);
    size_t at = lead;
    for (; at + 64 <= length; at += 64) {
        const auto *from = reinterpret_cast<const __m128i *>(source + at);
        auto *to = reinterpret_cast<__m128i *>(destination + at);
        const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    std::memcpy(destination + at, source + at, length - at);
    _mm_sfence();
#else
    std::memcpy(destination, source, length);
#endif
}

void copy_piece(void *context, size_t piece) {
    const Copy &copy = *static_cast<Copy *>(context);
    const size_t from = piece * kPiece, length = std::min(kPiece, copy.length - from);
    if (copy.stream) {
        stream(copy.destination + from, copy.source + from, length);
    } else {
        std::memcpy(copy.destination + from, copy.source + from, length);
    }
}

void touch(char *begin, char *end, size_t page, bool write) {
    for (char *at = begin; at < end; at += page) {
        // Adding zero atomically makes the page writable here without losing another process's write.
        if (write) {
            __atomic_fetch_add(at, 0, __ATOMIC_RELAXED);
        } else {
            static_cast<void>(*static_cast<volatile char *>(at));
        }
    }
}

}  // namespace
}  // namespace ftrun

extern "C" {

int64_t ftrun_map_fd(int fd, size_t length, bool write) {
    const int protection = PROT_READ | (write ? PROT_WRITE : 0);
    void *address = mmap(nullptr, length, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return address == MAP_FAILED ? -errno : reinterpret_cast<int64_t>(address);
}

int ftrun_unmap(void *address, size_t length) { return munmap(address, length) == 0 ? 0 : -errno; }

int ftrun_populate(void *address, size_t length, bool write) {
    if (length == 0) return 0;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    char *begin = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(address) & ~(page - 1));
    char *end = static_cast<char *>(address) + length;
    const int advice = write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    while (madvise(begin, static_cast<size_t>(end - begin), advice) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL && errno != ENOSYS) return -errno;
        // EINVAL is also the answer for a mapping that may not be written: touching that would kill the process.
        if (write && madvise(begin, page, MADV_POPULATE_READ) == 0) return -EACCES;
        ftrun::touch(begin, end, page, write);
        return 0;
    }
    return 0;
}

void ftrun_copy(void *destination, const void *source, size_t length, int threads) {
    if (length == 0) return;
    const int used = ftrun::pick_threads(length, ftrun::kWorthAThread, threads);
    const bool past_cache = length >= ftrun::kPastCache;
    if (used <= 1 && past_cache) {
        ftrun::stream(static_cast<char *>(destination), static_cast<const char *>(source), length);
        return;
    }
    if (used <= 1) {
        std::memcpy(destination, source, length);
        return;
    }
    ftrun::Copy copy{static_cast<char *>(destination), static_cast<const char *>(source), length,
                     past_cache};
    ftrun::parallel((length + ftrun::kPiece - 1) / ftrun::kPiece, used, ftrun::copy_piece, &copy);
}

}  // extern "C"
