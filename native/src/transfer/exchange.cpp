// Several processes, one control block in shared memory: who is there, how many chunks each source has broadcast, how many
// each receiver has taken of it. Words are only ever written by their owner; one bell wakes whoever waits.
#include <cerrno>
#include <cstring>
#include <new>

#include <algorithm>

#include "transfer/host_device.hpp"
#include "process/life.hpp"
#include "process/thread.hpp"
#include "transfer/transfer.hpp"

namespace ftrun {
namespace {

constexpr uint64_t kMagic = 0x31474e4148435846u;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kSlots = 2;       // shared buffers of a source
constexpr double kLookAgain = 0.002;  // seconds between two looks whether somebody died

enum State : uint64_t { kAbsent = 0, kHere = 1, kLeft = 2, kDead = 3 };

struct Head {
    uint64_t magic;
    ftrun_exchange_facts facts;
    uint32_t bell;
};

struct alignas(64) Line {
    char life[FTRUN_LIFE_BYTES];  // held while it takes part
    uint64_t state;
    uint64_t wants;     // 1: receives, and is waited for
    uint64_t produced;  // chunks that lie, or lay, in its buffers
    uint64_t sums[kSlots];
    uint64_t error;  // errno with which it stopped to be a source, 0 = none
};

static_assert(sizeof(Head) <= kPage, "the head outgrew its page");

uint64_t load(const uint64_t &word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
void store(uint64_t &word, uint64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

class Control {
 public:
    Control(void *memory, uint32_t count) : head_(static_cast<Head *>(memory)), count_(count) {
        lines_ = reinterpret_cast<Line *>(static_cast<char *>(memory) + kPage);
        consumed_ = reinterpret_cast<uint64_t *>(lines_ + count);
    }
    Head &head() { return *head_; }
    Line &line(uint32_t who) { return lines_[who]; }
    // Chunks of `source` that `receiver` has taken.
    uint64_t &consumed(uint32_t source, uint32_t receiver) { return consumed_[source * count_ + receiver]; }
    void ring() { ftrun_bell_ring(&head_->bell); }
    uint32_t count() const { return count_; }

    // Marks those that took part and died. Their lock is free, and they have not said that they leave.
    void look_for_deaths() {
        for (uint32_t who = 0; who < count_; ++who) {
            Line &there = lines_[who];
            if (load(there.state) != kHere || life_try(there.life) != 0) continue;
            if (load(there.state) == kHere) {
                store(there.state, kDead);
                ring();
            }
            ftrun_life_release(there.life);
        }
    }

 private:
    Head *head_;
    uint32_t count_;
    Line *lines_;
    uint64_t *consumed_;
};

uint64_t chunks_of(const ftrun_exchange_facts &facts, uint32_t who) {
    uint64_t offset;
    return (ftrun_exchange_share(&facts, who, &offset) + facts.chunk - 1) / facts.chunk;
}

// One participant. The calling thread receives, a second one sends.
class Participant {
 public:
    Participant(Device &device, Control control, uint32_t me, const ftrun_exchange_facts &facts, const Extents &from,
                const Extents &to, void *const *buffers, const ftrun_transfer_terms &terms, ftrun_transfer_result &result)
        : device_(device), control_(control), me_(me), facts_(facts), from_(from), to_(to), buffers_(buffers),
          terms_(terms), result_(result), patience_(terms) {}

    int run() {
        Line &mine = control_.line(me_);
        if (life_try(mine.life) != 0) return -EBUSY;
        store(mine.wants, to_.total() != 0);
        store(mine.state, kHere);
        control_.ring();
        const int error = both();
        store(mine.state, kLeft);
        control_.ring();
        ftrun_life_release(mine.life);
        result_.copied += sent_;
        result_.nanoseconds = now_ns() - patience_.since();
        return error;
    }

 private:
    // A receiver that gives up goes on as a source: the others need its share.
    int both() {
        pthread_t sender;
        const bool sends = from_.total() != 0;
        if (sends) {
            const int error = start_thread(&sender, "ftrun-send", send, this);
            if (error != 0) return stop_sending(-error);
        }
        const int received = to_.total() != 0 ? receive() : 0;
        if (received != 0) {
            store(control_.line(me_).wants, 0);
            control_.ring();
        }
        if (sends) pthread_join(sender, nullptr);
        return received != 0 ? received : send_error_;
    }

    // Waits until `ready`, which gives 1, 0 (not yet) or an error.
    template <typename Ready>
    int wait(Ready ready) {
        uint32_t *bell = &control_.head().bell;
        for (;;) {
            const uint32_t seen = ftrun_load32(bell);
            const int now = ready();
            if (now != 0) return now > 0 ? 0 : now;
            const int over = patience_.spent();
            if (over != 0) return over;
            if (!ftrun_bell_wait(bell, seen, kLookAgain)) control_.look_for_deaths();
        }
    }

    // -- sending: load into a buffer of our own, broadcast through the two shared ones --

    static void *send(void *self) {
        auto *participant = static_cast<Participant *>(self);
        int error;
        try {
            error = participant->send_all();
        } catch (const std::bad_alloc &) {
            error = -ENOMEM;
        }
        participant->send_error_ = error;
        if (error != 0) participant->stop_sending(error);
        return nullptr;
    }

    int stop_sending(int error) {
        store(control_.line(me_).error, static_cast<uint64_t>(-error));
        control_.ring();
        return error;
    }

    int send_all() {
        const uint64_t chunks = chunks_of(facts_, me_);
        std::vector<uint64_t> sums(chunks, 0);
        const auto release = [this](void *memory) { device_.release_staging(memory, facts_.chunk); };
        const std::unique_ptr<void, decltype(release)> loaded(device_.staging(facts_.chunk), release);
        if (!loaded) return -ENOMEM;
        // after what they write to, so that they end first
        const auto loading = device_.loading_lane(), broadcasting = device_.lane();
        if (!loading || !broadcasting) return -EAGAIN;
        std::shared_ptr<Mark> ready;
        uint64_t load_begin = now_ns();
        int error = queue_load(*loading, loaded.get(), 0, sums[0], ready);
        for (uint64_t chunk = 0; chunk < chunks && error == 0; ++chunk) {
            error = wait([this, chunk] { return is_free(chunk); });
            if (error != 0) break;
            const uint64_t free_since = now_ns();
            const auto loaded_here = ready;
            error = order(*broadcasting, *ready);
            if (error != 0) break;
            const uint64_t bytes = bytes_of(me_, chunk);
            error = broadcasting->copy(buffers_[kSlots * me_ + chunk % kSlots], loaded.get(), bytes);
            const auto broadcast = broadcasting->mark();
            if (error == 0 && chunk + 1 < chunks) {
                error = order(*loading, *broadcast);
                if (error == 0) error = queue_load(*loading, loaded.get(), chunk + 1, sums[chunk + 1], ready);
            }
            if (error == 0) error = patience_.wait(*broadcast);
            if (error != 0) break;
            const uint64_t load_end = end_of(*loaded_here), end = end_of(*broadcast);
            note(FTRUN_STAGE_LOAD, me_, load_begin, load_end);
            note(FTRUN_STAGE_BROADCAST, me_, std::max(load_end, free_since), end);
            load_begin = end;  // the next load waits for this broadcast: both need the one buffer
            publish(chunk, sums[chunk], bytes);
        }
        return error;
    }

    int queue_load(Lane &lane, void *buffer, uint64_t chunk, uint64_t &sum, std::shared_ptr<Mark> &ready) {
        const uint64_t bytes = bytes_of(me_, chunk);
        uint64_t *hashed = terms_.check == FTRUN_CHECK_NONE ? nullptr : &sum;
        const int error = gather(lane, buffer, from_.cut(chunk * facts_.chunk, bytes), hashed, chunk);
        ready = lane.mark();
        sent_ += bytes;
        return error;
    }

    // When a mark that was waited for was reached.
    static uint64_t end_of(const Mark &mark) {
        const uint64_t when = mark.reached_at();
        return when != 0 ? when : now_ns();
    }

    // Both threads note what they did.
    void note(uint32_t stage, uint32_t source, uint64_t begin, uint64_t end) {
        ftrun_transfer_log *log = terms_.log;
        if (log == nullptr) return;
        const uint64_t at = __atomic_fetch_add(&log->count, 1, __ATOMIC_RELAXED);
        if (at < log->room) log->spans[at] = {begin, end, stage, source};
    }

    // `lane` goes on after `mark`; between two kinds of device the host waits instead.
    int order(Lane &lane, const Mark &mark) {
        const int error = lane.after(mark);
        return error == -ENOTSUP ? patience_.wait(mark) : error;
    }

    void publish(uint64_t chunk, uint64_t sum, uint64_t bytes) {
        Line &mine = control_.line(me_);
        store(mine.sums[chunk % kSlots], sum);
        store(mine.produced, chunk + 1);
        control_.ring();
        sent_ += bytes;
    }

    // May the shared buffer of `chunk` be written? Not before everybody took what was in it.
    int is_free(uint64_t chunk) {
        if (chunk < kSlots) return 1;
        for (uint32_t who = 0; who < control_.count(); ++who) {
            const Line &there = control_.line(who);
            const uint64_t state = load(there.state);
            const bool waited_for = state == kAbsent || (state == kHere && load(there.wants) != 0);
            if (waited_for && load(control_.consumed(me_, who)) + kSlots <= chunk) return 0;
        }
        return 1;
    }

    // -- receiving: whatever chunk is there first --

    int receive() {
        const uint32_t count = control_.count();
        std::vector<uint64_t> next(count, 0), last(count, 0);
        for (uint32_t who = 0; who < count; ++who) last[who] = chunks_of(facts_, who);
        const auto reloading = device_.lane();
        if (!reloading) return -EAGAIN;
        uint32_t begin = me_;
        for (;;) {
            uint32_t source = count;
            const int error = wait([&] { return find(next, last, begin, source); });
            if (error != 0) {
                blame_absent(error, next, last);
                return error;
            }
            if (source == count) return 0;
            const int taken = reload(*reloading, source, next[source]);
            if (taken != 0) return taken;
            ++next[source];
            begin = source + 1;  // nobody's buffers stay full for long
        }
    }

    // 1 with the source of a chunk that can be taken (or `count`: all is here), 0 when none can yet.
    int find(const std::vector<uint64_t> &next, const std::vector<uint64_t> &last, uint32_t begin, uint32_t &source) {
        const uint32_t count = control_.count();
        bool open = false;
        for (uint32_t k = 0; k < count; ++k) {
            const uint32_t who = (begin + k) % count;
            if (next[who] == last[who]) continue;
            open = true;
            const Line &there = control_.line(who);
            const uint64_t state = load(there.state);  // before what it produced: it may end in between
            const bool gone = state == kDead || state == kLeft || load(there.error) != 0;
            if (load(there.produced) > next[who]) {
                source = who;
                return 1;
            }
            if (gone) {
                result_.failed = who;
                return -EPIPE;
            }
        }
        source = count;
        return open ? 0 : 1;
    }

    void blame_absent(int error, const std::vector<uint64_t> &next, const std::vector<uint64_t> &last) {
        if (error != -ETIMEDOUT) return;
        for (uint32_t who = 0; who < control_.count(); ++who) {
            if (next[who] < last[who]) result_.failed = who;
        }
    }

    int reload(Lane &lane, uint32_t source, uint64_t chunk) {
        uint64_t offset;
        ftrun_exchange_share(&facts_, source, &offset);
        const uint64_t bytes = bytes_of(source, chunk);
        const bool check = terms_.check != FTRUN_CHECK_NONE;
        hashed_ = 0;
        const uint64_t begin = now_ns();
        int error = scatter(lane, to_.cut(offset + chunk * facts_.chunk, bytes),
                            buffers_[kSlots * source + chunk % kSlots], check ? &hashed_ : nullptr, chunk);
        const auto reloaded = lane.mark();
        if (error == 0) error = patience_.wait(*reloaded);
        if (error != 0) return error;
        note(FTRUN_STAGE_RELOAD, source, begin, end_of(*reloaded));
        if (check && hashed_ != load(control_.line(source).sums[chunk % kSlots])) {
            result_.failed = source;
            return -EBADMSG;
        }
        store(control_.consumed(source, me_), chunk + 1);
        control_.ring();
        // chunks come in any order of their sources: add what does not depend on it
        result_.checksum += chain(source + 1, chain(chunk + 1, hashed_));
        result_.bytes += bytes;
        result_.copied += bytes;
        ++result_.chunks;
        if (terms_.moved != nullptr) __atomic_fetch_add(terms_.moved, bytes, __ATOMIC_RELAXED);
        return 0;
    }

    uint64_t bytes_of(uint32_t source, uint64_t chunk) const {
        uint64_t offset;
        const uint64_t share = ftrun_exchange_share(&facts_, source, &offset);
        return std::min(facts_.chunk, share - chunk * facts_.chunk);
    }

    Device &device_;
    Control control_;
    const uint32_t me_;
    const ftrun_exchange_facts &facts_;
    const Extents &from_, &to_;
    void *const *buffers_;
    const ftrun_transfer_terms &terms_;
    ftrun_transfer_result &result_;
    Patience patience_;
    int send_error_ = 0;  // the sender's until it is joined
    uint64_t sent_ = 0;   // the same
    uint64_t hashed_ = 0;
};

int check_facts(const Head &head, uint32_t me, const ftrun_exchange_facts &mine, const Extents &from, const Extents &to) {
    if (head.magic != kMagic) return -EPROTO;
    const ftrun_exchange_facts &facts = head.facts;
    if (facts.generation != mine.generation || facts.step != mine.step) return -ESTALE;
    if (facts.participants != mine.participants || facts.source != mine.source || facts.chunk != mine.chunk ||
        facts.total != mine.total || facts.layout != mine.layout) {
        return -EPROTO;
    }
    if (me >= facts.participants) return -EINVAL;
    uint64_t offset;
    if (from.total() != ftrun_exchange_share(&facts, me, &offset)) return -EPROTO;
    return to.total() == 0 || to.total() == facts.total ? 0 : -EPROTO;
}

}  // namespace

int exchange_run(Device &device, void *control, uint32_t me, const ftrun_exchange_facts &facts, const Extents &from,
                 const Extents &to, void *const *buffers, const ftrun_transfer_terms &terms,
                 ftrun_transfer_result &result) {
    const int error = check_facts(*static_cast<const Head *>(control), me, facts, from, to);
    if (error != 0) return error;
    Participant participant(device, Control(control, facts.participants), me, facts, from, to, buffers, terms, result);
    return participant.run();
}

}  // namespace ftrun

extern "C" {

uint64_t ftrun_exchange_size(uint32_t participants) {
    using namespace ftrun;
    const uint64_t count = participants;
    const uint64_t bytes = kPage + count * sizeof(Line) + count * count * sizeof(uint64_t);
    return (bytes + kPage - 1) / kPage * kPage;
}

uint64_t ftrun_exchange_share(const ftrun_exchange_facts *facts, uint32_t who, uint64_t *offset) {
    *offset = 0;
    if (facts->source >= 0) return static_cast<uint32_t>(facts->source) == who ? facts->total : 0;
    // whole pages, so that every share begins aligned
    const uint64_t pages = (facts->total + ftrun::kPage - 1) / ftrun::kPage;
    const uint64_t each = (pages + facts->participants - 1) / facts->participants * ftrun::kPage;
    *offset = std::min(each * who, facts->total);
    return std::min(each, facts->total - *offset);
}

int ftrun_exchange_init(void *control, const ftrun_exchange_facts *facts) {
    using namespace ftrun;
    if (facts->participants == 0 || facts->chunk == 0) return -EINVAL;
    if (facts->source >= static_cast<int64_t>(facts->participants)) return -EINVAL;
    Control fresh(control, facts->participants);
    for (uint32_t who = 0; who < facts->participants; ++who) {
        const int error = ftrun_life_init(fresh.line(who).life);
        if (error != 0) return error;
    }
    fresh.head().facts = *facts;
    fresh.head().magic = kMagic;
    return 0;
}

int ftrun_exchange_read(const void *control, ftrun_exchange_facts *facts) {
    const ftrun::Head &head = *static_cast<const ftrun::Head *>(control);
    if (head.magic != ftrun::kMagic) return -EINVAL;
    *facts = head.facts;
    return 0;
}

int ftrun_exchange_run(void *control, uint32_t me, const ftrun_exchange_facts *facts, const ftrun_extent *from,
                       size_t from_count, const ftrun_extent *to, size_t to_count, void *const *buffers,
                       const ftrun_transfer_terms *terms, ftrun_transfer_result *result) {
    *result = ftrun_transfer_result{0, 0, 0, 0, 0, -1};
    try {
        const auto device = ftrun::make_host_device(terms->threads);
        return ftrun::exchange_run(*device, control, me, *facts, {from, from_count}, {to, to_count}, buffers, *terms,
                                   *result);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
}

int ftrun_exchange_look(const void *control, uint32_t who, ftrun_exchange_progress *progress) {
    using namespace ftrun;
    const Head &head = *static_cast<const Head *>(control);
    if (head.magic != kMagic || who >= head.facts.participants) return -EINVAL;
    Control there(const_cast<void *>(control), head.facts.participants);
    const Line &line = there.line(who);
    *progress = {load(line.state), load(line.produced), 0};
    for (uint32_t source = 0; source < there.count(); ++source) progress->consumed += load(there.consumed(source, who));
    return 0;
}

}  // extern "C"
