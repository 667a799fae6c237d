// Mappings and copies. Nothing here owns memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ftrun_native.h"
#include "thread.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace ftrun {
namespace {

constexpr size_t kPiece = 1024 * 1024;           // unit of work of a copying thread
constexpr size_t kWorthAThread = 4 * 1024 * 1024;  // below this, making a thread costs more than it saves

struct Copy {
    char *destination;
    const char *source;
    size_t length;
};

void copy_piece(void *context, size_t piece) {
    const Copy &copy = *static_cast<Copy *>(context);
    const size_t from = piece * kPiece;
    std::memcpy(copy.destination + from, copy.source + from, std::min(kPiece, copy.length - from));
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
    if (used <= 1) {
        std::memcpy(destination, source, length);
        return;
    }
    ftrun::Copy copy{static_cast<char *>(destination), static_cast<const char *>(source), length};
    ftrun::parallel((length + ftrun::kPiece - 1) / ftrun::kPiece, used, ftrun::copy_piece, &copy);
}

}  // extern "C"
