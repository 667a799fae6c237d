/* Transfers: the part of the C ABI that moves whole states. Twin of ftrun/native/transfer.py; the rules of ftrun_native.h hold.
 *
 * A transfer moves bytes in chunks. Its two sides are lists of extents of the same total size: large extents are split into
 * chunks, small ones are packed into one. Nothing here waits for longer than its terms say.
 *
 * Errors: -ETIMEDOUT, -ECANCELED (the watched word moved on), -EPIPE (a source died or failed; `failed` names it),
 * -EBADMSG (a checksum differs), -EPROTO (another layout, size or number of participants), -ESTALE (another generation or
 * step), -EBUSY (somebody takes part in this place already), -ENOMEM, -EAGAIN (no thread could be made), -EINVAL.
 */
#ifndef FTRUN_TRANSFER_H
#define FTRUN_TRANSFER_H

#include "ftrun_native.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t address;
    uint64_t bytes;
} ftrun_extent;

/* What a participant of an exchange did with one chunk, and when. */
enum {
    FTRUN_STAGE_LOAD = 0,      /* its share into its own buffer (H2D) */
    FTRUN_STAGE_BROADCAST = 1, /* from there into a buffer that all can read */
    FTRUN_STAGE_RELOAD = 2     /* from `source`'s shared buffer to where it belongs */
};

typedef struct {
    uint64_t begin; /* ns, CLOCK_MONOTONIC */
    uint64_t end;
    uint32_t stage;  /* FTRUN_STAGE_... */
    uint32_t source; /* participant whose chunk it was */
} ftrun_transfer_span;

typedef struct {
    ftrun_transfer_span *spans; /* room for `room` of them */
    uint64_t room;
    uint64_t count; /* spans that there were; those beyond `room` are not kept */
} ftrun_transfer_log;

enum {
    FTRUN_CHECK_NONE = 0,
    FTRUN_CHECK_READ = 1, /* hash what is read, on the way; an exchange compares it at every receiver */
    FTRUN_CHECK_BACK = 2 /* also read what was written, and compare: half as much again crosses the memory */
};

typedef struct {
    uint64_t chunk;        /* bytes; 0 = ftrun_transfer_chunk. An exchange has its own in its facts. */
    int32_t threads;       /* of one copy; 0 = chosen by size */
    int32_t check;         /* FTRUN_CHECK_... */
    double timeout;        /* seconds for the whole transfer */
    const uint64_t *watch; /* given up with -ECANCELED once (*watch >> watch_shift) != watch_value; NULL: never */
    uint64_t watch_shift;
    uint64_t watch_value;
    uint64_t *moved; /* bytes that arrived are added here as they arrive; may be NULL */
    ftrun_transfer_log *log; /* where an exchange notes what it did when; may be NULL */
} ftrun_transfer_terms;

typedef struct {
    uint64_t bytes;       /* that arrived here */
    uint64_t copied;      /* that this process wrote, staging included */
    uint64_t checksum;    /* of what arrived; depends on the chunks; 0 when nothing was checked */
    uint64_t chunks;      /* that arrived */
    uint64_t nanoseconds; /* the whole call */
    int64_t failed;       /* participant whose fault an error is, -1 = none or not known */
} ftrun_transfer_result;

/* Bytes of a chunk for a source that sends `bytes`, when `room` bytes may be taken for its three buffers (0 = no limit):
 * 64 to 256 MiB, less when there is less to send or less room, never below 1 MiB. */
FTRUN_API uint64_t ftrun_transfer_chunk(uint64_t bytes, uint64_t room);

/* Peer copy: memory to memory, both mapped here. */
FTRUN_API int ftrun_transfer_copy(const ftrun_extent *to, size_t to_count, const ftrun_extent *from, size_t from_count,
                                  const ftrun_transfer_terms *terms, ftrun_transfer_result *result);

/* ---- exchange: several processes, each a source, a receiver or both ----
 *
 * Every participant calls ftrun_exchange_run with the same facts on the same shared control block. Sources load their share
 * into a buffer of their own (H2D), broadcast it through two shared buffers, and everybody who wants it reloads from there,
 * all three at once. A receiver that dies is no longer waited for; a source that dies ends it for those who need it. */

typedef struct {
    uint32_t participants;
    int32_t source;      /* the one source, or -1: each sends its share (ftrun_exchange_share) */
    uint64_t chunk;      /* bytes of each shared buffer */
    uint64_t total;      /* bytes that a receiver gets */
    uint64_t generation; /* must agree in all participants */
    uint64_t step;
    uint64_t layout; /* hash of what lies where */
} ftrun_exchange_facts;

/* Bytes of the control block, a multiple of 4096. */
FTRUN_API uint64_t ftrun_exchange_size(uint32_t participants);

/* What participant `who` sends: `*offset` and the returned number of bytes of the whole. */
FTRUN_API uint64_t ftrun_exchange_share(const ftrun_exchange_facts *facts, uint32_t who, uint64_t *offset);

/* Prepares the zeroed control block; one process, before the others see it. */
FTRUN_API int ftrun_exchange_init(void *control, const ftrun_exchange_facts *facts);

/* What it was prepared with; -EINVAL for memory that was not. */
FTRUN_API int ftrun_exchange_read(const void *control, ftrun_exchange_facts *facts);

/* Takes part as `me`. `from`: this participant's share (empty for none); `to`: room for the whole (empty: receives nothing).
 * `buffers`: 2 * participants addresses, those of participant p at 2p and 2p + 1, each of `chunk` bytes and mapped here. */
FTRUN_API int ftrun_exchange_run(void *control, uint32_t me, const ftrun_exchange_facts *facts, const ftrun_extent *from,
                                 size_t from_count, const ftrun_extent *to, size_t to_count, void *const *buffers,
                                 const ftrun_transfer_terms *terms, ftrun_transfer_result *result);

/* For people and tests: how far participant `who` is. Values are a moment old. */
typedef struct {
    uint64_t state;    /* 0 not here yet, 1 takes part, 2 left, 3 died */
    uint64_t produced; /* chunks that it has broadcast */
    uint64_t consumed; /* chunks that it has reloaded, of all sources */
} ftrun_exchange_progress;

FTRUN_API int ftrun_exchange_look(const void *control, uint32_t who, ftrun_exchange_progress *progress);

#ifdef __cplusplus
}
#endif
#endif
