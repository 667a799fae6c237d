// Page faults that a forked process would take one by one, taken ahead: what a sibling has touched, this one will, too.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "ftrun_native.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace {

// of an entry of /proc/PID/pagemap
constexpr uint64_t kPresent = uint64_t{1} << 63, kExclusive = uint64_t{1} << 56;
constexpr uint64_t kOfFile = uint64_t{1} << 61;  // or of shared memory: nobody has written to it here
constexpr size_t kChunk = 4096;  // entries read at a time
constexpr uint64_t kLargest = uint64_t{4} << 30;  // bytes of a mapping of ours that is looked at

struct Region {
    uint64_t begin, end, offset, inode;
    unsigned major, minor;
    bool writable;
};

using File = std::unique_ptr<FILE, int (*)(FILE *)>;

// Private mappings of `process`, in order. Empty when they cannot be read.
std::vector<Region> regions(const std::string &process) {
    std::vector<Region> found;
    File maps(std::fopen(("/proc/" + process + "/maps").c_str(), "re"), std::fclose);
    char line[4608];
    while (maps && std::fgets(line, sizeof line, maps.get()) != nullptr) {
        Region region{};
        char permissions[5] = "";
        int name = 0;
        if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64 " %n", &region.begin, &region.end,
                        permissions, &region.offset, &region.major, &region.minor, &region.inode, &name) < 7) {
            continue;
        }
        const bool of_the_kernel = std::strncmp(line + name, "[v", 2) == 0;  // vdso, vvar, vsyscall
        if (permissions[0] != 'r' || permissions[3] != 'p' || of_the_kernel) continue;
        region.writable = permissions[1] == 'w';
        found.push_back(region);
    }
    return found;
}

bool same(const Region &a, const Region &b) {
    if (a.writable != b.writable || a.inode != b.inode || a.major != b.major || a.minor != b.minor) return false;
    return a.inode == 0 || a.begin - a.offset == b.begin - b.offset;
}

class Pagemap {
public:
    explicit Pagemap(const std::string &process)
        : descriptor_(open(("/proc/" + process + "/pagemap").c_str(), O_RDONLY | O_CLOEXEC)) {}
    ~Pagemap() {
        if (descriptor_ >= 0) close(descriptor_);
    }
    Pagemap(const Pagemap &) = delete;
    Pagemap &operator=(const Pagemap &) = delete;

    bool is_open() const { return descriptor_ >= 0; }

    bool read(uint64_t page, size_t count, std::vector<uint64_t> &entries) const {
        entries.resize(count);
        const auto wanted = static_cast<ssize_t>(count * sizeof(uint64_t));
        return pread(descriptor_, entries.data(), count * sizeof(uint64_t), static_cast<off_t>(page * sizeof(uint64_t))) == wanted;
    }

private:
    int descriptor_;
};

// What to do with a page of ours, given what the sibling did with its own; 0 = nothing.
int advice(const Region &region, uint64_t mine, uint64_t theirs) {
    if (!(theirs & kPresent)) return 0;
    if (region.writable && (theirs & kExclusive) && !(theirs & kOfFile)) {
        // it wrote there. Ours is still shared with the parent's, or was never looked at. Fresh memory is its own affair
        if (!(mine & kPresent)) return region.inode != 0 ? MADV_POPULATE_WRITE : 0;
        return mine & kExclusive ? 0 : MADV_POPULATE_WRITE;
    }
    return mine & kPresent || region.inode == 0 ? 0 : MADV_POPULATE_READ;
}

class Follower {
public:
    explicit Follower(const std::string &process) : mine_("self"), theirs_(process) {}

    int64_t run(const std::vector<Region> &ours, const std::vector<Region> &others) {
        if (!mine_.is_open() || !theirs_.is_open()) return -EACCES;
        size_t at = 0;
        for (const Region &region : ours) {
            if (region.end - region.begin > kLargest) continue;  // the script's own data, or only reserved
            while (at < others.size() && others[at].end <= region.begin) ++at;
            for (size_t i = at; i < others.size() && others[i].begin < region.end; ++i) {
                if (same(region, others[i])) {
                    look(region, std::max(region.begin, others[i].begin), std::min(region.end, others[i].end));
                }
            }
        }
        return touched_;
    }

private:
    void look(const Region &region, uint64_t begin, uint64_t end) {
        const uint64_t last = end / page_;
        for (uint64_t page = begin / page_; page < last; page += kChunk) {
            const auto count = static_cast<size_t>(std::min<uint64_t>(kChunk, last - page));
            if (!theirs_.read(page, count, other_) || !mine_.read(page, count, own_)) return;
            for (size_t i = 0; i < count;) {
                const int wanted = advice(region, own_[i], other_[i]);
                size_t next = i + 1;
                while (next < count && advice(region, own_[next], other_[next]) == wanted) ++next;
                if (wanted != 0) touch(page + i, next - i, wanted);
                i = next;
            }
        }
    }

    void touch(uint64_t page, size_t count, int wanted) {
        auto *address = reinterpret_cast<void *>(static_cast<uintptr_t>(page * page_));
        if (madvise(address, count * page_, wanted) == 0) touched_ += static_cast<int64_t>(count);
    }

    const uint64_t page_ = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    Pagemap mine_, theirs_;
    std::vector<uint64_t> own_, other_;
    int64_t touched_ = 0;
};

}  // namespace

extern "C" int64_t ftrun_follow_pages(int pid) {
    if (madvise(nullptr, 0, MADV_POPULATE_READ) != 0) return 0;  // unknown before Linux 5.14
    try {
        const std::string process = std::to_string(pid);
        const std::vector<Region> ours = regions("self"), others = regions(process);
        if (ours.empty() || others.empty()) return -ESRCH;
        return Follower(process).run(ours, others);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
}
