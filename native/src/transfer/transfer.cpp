// Peer copy, and what both kinds of transfer share: cutting into chunks, packing, patience.
#include "transfer/transfer.hpp"

#include <algorithm>
#include <cerrno>
#include <new>

#include "transfer/host_device.hpp"
#include "process/thread.hpp"

namespace ftrun {
namespace {

constexpr uint64_t kMega = 1024 * 1024;
constexpr uint64_t kLeast = 64 * kMega, kMost = 256 * kMega;
constexpr uint64_t kFew = 4;      // chunks that a source should have, or its stages cannot overlap
constexpr double kSlice = 0.005;  // seconds between two looks at the watched word
constexpr size_t kAhead = 2;      // chunks queued beyond the one that is waited for

struct Piece {
    void *target;
    const void *source;
    uint64_t bytes;
};

// One chunk of a peer copy on its way.
struct Flight {
    std::vector<Piece> pieces;
    std::vector<uint64_t> read, back;  // hashes of its pieces: as read, and as read back
    uint64_t bytes = 0;
    std::shared_ptr<Mark> done;
};

class Copier {
 public:
    Copier(Device &device, const ftrun_transfer_terms &terms, ftrun_transfer_result &result)
        : terms_(terms), result_(result), patience_(terms), copying_(device.lane()) {
        if (terms.check == FTRUN_CHECK_BACK) checking_ = device.lane();
    }

    int run(const Extents &to, const Extents &from) {
        if (copying_ == nullptr || (terms_.check == FTRUN_CHECK_BACK && checking_ == nullptr)) return -EAGAIN;
        const uint64_t total = from.total();
        const uint64_t chunk = terms_.chunk != 0 ? terms_.chunk : ftrun_transfer_chunk(total, 0);
        for (uint64_t at = 0; at < total; at += chunk) {
            const uint64_t bytes = std::min(chunk, total - at);
            int error = patience_.spent();
            if (error == 0) error = launch(to.cut(at, bytes), from.cut(at, bytes), bytes);
            if (error != 0) return error;
            if (flights_.size() > kAhead) {
                const int landed = land();
                if (landed != 0) return landed;
            }
        }
        while (!flights_.empty()) {
            const int landed = land();
            if (landed != 0) return landed;
        }
        return 0;
    }

    uint64_t since() const { return patience_.since(); }

 private:
    int launch(const std::vector<ftrun_extent> &to, const std::vector<ftrun_extent> &from, uint64_t bytes) {
        flights_.push_back(std::make_unique<Flight>());
        Flight &flight = *flights_.back();
        flight.bytes = bytes;
        // at most so many pieces: results are written through pointers, so the vectors must not grow
        flight.read.resize(to.size() + from.size());
        flight.back.resize(to.size() + from.size());
        size_t piece = 0, i = 0, k = 0;
        uint64_t in_to = 0, in_from = 0;
        while (i < to.size() && k < from.size()) {
            const uint64_t size = std::min(to[i].bytes - in_to, from[k].bytes - in_from);
            void *target = pointer(to[i].address + in_to);
            const void *source = pointer(from[k].address + in_from);
            const int error = terms_.check == FTRUN_CHECK_NONE
                                  ? copying_->copy(target, source, size)
                                  : copying_->copy_checksum(target, source, size, &flight.read[piece], piece);
            if (error != 0) return error;
            flight.pieces.push_back({target, source, size});
            ++piece;
            in_to += size;
            in_from += size;
            if (in_to == to[i].bytes) ++i, in_to = 0;
            if (in_from == from[k].bytes) ++k, in_from = 0;
        }
        flight.read.resize(piece);
        flight.back.resize(piece);
        flight.done = copying_->mark();
        return terms_.check == FTRUN_CHECK_BACK ? read_back(flight) : 0;
    }

    int read_back(Flight &flight) {
        int error = checking_->after(*flight.done);
        for (size_t piece = 0; piece < flight.pieces.size() && error == 0; ++piece) {
            const Piece &one = flight.pieces[piece];
            error = checking_->checksum(&flight.back[piece], one.target, one.bytes, piece);
        }
        flight.done = checking_->mark();
        return error;
    }

    int land() {
        const Flight &flight = *flights_.front();
        const int error = patience_.wait(*flight.done);
        if (error != 0) return error;
        if (terms_.check == FTRUN_CHECK_BACK && flight.read != flight.back) return -EBADMSG;
        for (const uint64_t sum : flight.read) result_.checksum = chain(result_.checksum, sum);
        result_.bytes += flight.bytes;
        result_.copied += flight.bytes;
        ++result_.chunks;
        if (terms_.moved != nullptr) __atomic_fetch_add(terms_.moved, flight.bytes, __ATOMIC_RELAXED);
        flights_.erase(flights_.begin());
        return 0;
    }

    const ftrun_transfer_terms &terms_;
    ftrun_transfer_result &result_;
    Patience patience_;
    std::vector<std::unique_ptr<Flight>> flights_;  // before the lanes: they write into it until they are gone
    std::unique_ptr<Lane> copying_, checking_;
};

}  // namespace

std::vector<ftrun_extent> Extents::cut(uint64_t offset, uint64_t bytes) const {
    std::vector<ftrun_extent> pieces;
    uint64_t at = 0;
    for (const ftrun_extent &extent : list_) {
        const uint64_t low = std::max(at, offset), high = std::min(at + extent.bytes, offset + bytes);
        if (low < high) pieces.push_back({extent.address + (low - at), high - low});
        at += extent.bytes;
        if (at >= offset + bytes) break;
    }
    return pieces;
}

Patience::Patience(const ftrun_transfer_terms &terms)
    : terms_(terms), begin_(now_ns()), end_(begin_ + to_ns(terms.timeout)) {}

int Patience::spent() const {
    if (terms_.watch != nullptr) {
        const uint64_t value = __atomic_load_n(terms_.watch, __ATOMIC_ACQUIRE) >> terms_.watch_shift;
        if (value != terms_.watch_value) return -ECANCELED;
    }
    return now_ns() >= end_ ? -ETIMEDOUT : 0;
}

int Patience::wait(const Mark &mark) const {
    for (;;) {
        const int result = mark.wait(kSlice);
        if (result != -ETIMEDOUT) return result;
        const int over = spent();
        if (over != 0) return over;
    }
}

int gather(Lane &lane, void *buffer, const std::vector<ftrun_extent> &from, uint64_t *sum, uint64_t seed) {
    if (sum != nullptr && from.size() == 1) {
        return lane.copy_checksum(buffer, pointer(from[0].address), from[0].bytes, sum, seed);
    }
    uint64_t at = 0;
    for (const ftrun_extent &extent : from) {
        const int error = lane.copy(static_cast<char *>(buffer) + at, pointer(extent.address), extent.bytes);
        if (error != 0) return error;
        at += extent.bytes;
    }
    return sum == nullptr ? 0 : lane.checksum(sum, buffer, at, seed);
}

int scatter(Lane &lane, const std::vector<ftrun_extent> &to, const void *buffer, uint64_t *sum, uint64_t seed) {
    if (sum != nullptr && to.size() == 1) {
        return lane.receive(pointer(to[0].address), buffer, to[0].bytes, sum, seed);
    }
    uint64_t at = 0;
    for (const ftrun_extent &extent : to) {
        const int error = lane.copy(pointer(extent.address), static_cast<const char *>(buffer) + at, extent.bytes);
        if (error != 0) return error;
        at += extent.bytes;
    }
    return sum == nullptr ? 0 : lane.checksum(sum, buffer, at, seed);
}

int transfer_copy(Device &device, const Extents &to, const Extents &from, const ftrun_transfer_terms &terms,
                  ftrun_transfer_result &result) {
    if (to.total() != from.total()) return -EPROTO;
    Copier copier(device, terms, result);
    const int error = copier.run(to, from);
    result.nanoseconds = now_ns() - copier.since();
    return error;
}

}  // namespace ftrun

extern "C" {

uint64_t ftrun_transfer_chunk(uint64_t bytes, uint64_t room) {
    using namespace ftrun;
    uint64_t chunk = std::clamp(bytes / (2 * kFew), kLeast, kMost);
    chunk = std::min(chunk, std::max(bytes / kFew, kMega));
    if (room != 0) chunk = std::min(chunk, room / 3);
    return std::max((chunk + kMega - 1) / kMega, uint64_t{1}) * kMega;
}

int ftrun_transfer_copy(const ftrun_extent *to, size_t to_count, const ftrun_extent *from, size_t from_count,
                        const ftrun_transfer_terms *terms, ftrun_transfer_result *result) {
    *result = ftrun_transfer_result{0, 0, 0, 0, 0, -1};
    try {
        const auto device = ftrun::make_host_device(terms->threads);
        return ftrun::transfer_copy(*device, {to, to_count}, {from, from_count}, *terms, *result);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
}

}  // extern "C"
