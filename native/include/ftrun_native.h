/* The whole C ABI of libftrun_native. This header and ftrun/native/__init__.py describe the same functions.
 *
 * Rules for every function:
 *   - Memory belongs to the caller; nothing here frees or keeps a caller's memory, except as said.
 *   - `int` results are 0 or a negative errno value, unless said otherwise. errno itself means nothing to the caller.
 *   - Durations are seconds (double), sizes are bytes, times on the board are CLOCK_MONOTONIC nanoseconds.
 *   - Words must be aligned to their size. Shared words may lie in memory mapped by several processes.
 *   - No function prints, throws, or reads the environment. Threads made here block every signal.
 */
#ifndef FTRUN_NATIVE_H
#define FTRUN_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FTRUN_API __attribute__((visibility("default")))
#else
#define FTRUN_API
#endif

#define FTRUN_ABI_VERSION 11
#define FTRUN_SLOT_HEADER 64 /* bytes before a slot's content */
#define FTRUN_LIFE_BYTES 64 /* room that a life lock takes on the board */

#ifdef __cplusplus
extern "C" {
#endif

/* FTRUN_ABI_VERSION of the library that was loaded. */
FTRUN_API int ftrun_abi_version(void);

/* ---- words and bells (bell.cpp): never fail, never block but for ftrun_bell_wait ---- */

FTRUN_API uint64_t ftrun_load64(const uint64_t *word);                                        /* acquire */
FTRUN_API uint32_t ftrun_load32(const uint32_t *word);                                        /* acquire */
FTRUN_API void ftrun_store64(uint64_t *word, uint64_t value);                                 /* release */
FTRUN_API uint64_t ftrun_cas64(uint64_t *word, uint64_t expected, uint64_t desired);          /* the previous value */

/* `list` is a count followed by that many addresses of words; true when each word (acquire) equals `value`. */
FTRUN_API bool ftrun_all_equal64(const uint64_t *list, uint64_t value);

/* Stores `value` in `mine` and then looks at the list. Of all that arrive, at least one gets true: the last one. */
FTRUN_API bool ftrun_arrive(uint64_t *mine, uint64_t value, const uint64_t *list);

/* Adds one to the bell and wakes every waiter in every process. */
FTRUN_API void ftrun_bell_ring(uint32_t *bell);

/* Sleeps until the bell's count differs from `seen` (true) or `timeout` seconds passed or a signal came (false). */
FTRUN_API bool ftrun_bell_wait(const uint32_t *bell, uint32_t seen, double timeout);

/* ---- life locks (life.cpp): robust process-shared mutexes; the kernel frees them when the owner thread ends ---- */

/* Prepares FTRUN_LIFE_BYTES at `lock`; nobody may use it yet. */
FTRUN_API int ftrun_life_init(void *lock);

/* Locks it for the calling thread. -EBUSY when another thread holds it. */
FTRUN_API int ftrun_life_hold(void *lock);

/* Unlocks it; the thread that holds it must call. -EPERM when the caller does not hold it. */
FTRUN_API int ftrun_life_release(void *lock);

/* ---- the beat thread (beat.cpp): one per process ---- */

/* Starts a thread that locks `lock`, stores the time to `beat` at each multiple of `interval` seconds, and kills this process (with
 * its process group if it leads one) once process `launcher_pid` has been dead for `orphan_grace` seconds; pid 0:
 * never. Returns when the lock is held. -EBUSY when the lock is taken; -EALREADY when the thread runs.
 * `lock` and `beat` must stay mapped until ftrun_beat_stop or the end of the process. */
FTRUN_API int ftrun_beat_start(void *lock, uint64_t *beat, double interval, int launcher_pid, double orphan_grace);

/* Ends the thread and unlocks. Nothing happens when none runs, as in a forked child. */
FTRUN_API int ftrun_beat_stop(void);

/* ---- watchers (watch.cpp) ---- */

/* Starts a thread that waits until `lock` is free, because its owner ended or unlocked it, and then adds 1 to the
 * eventfd and ends. Returns a handle > 0 or a negative errno. The caller keeps the eventfd open until the event or
 * ftrun_watch_stop, and `lock` mapped until the event or the end of the thread. */
FTRUN_API int64_t ftrun_watch_start(void *lock, int eventfd);

/* After the return the thread writes to its eventfd no more. With `wait` it has also ended (at most 0.6 s, or as long again as it
 * has watched, up to a minute), so that `lock` may be unmapped. Call once for each handle, also for a watcher that fired. -ENOENT for an unknown handle. */
FTRUN_API int ftrun_watch_stop(int64_t handle, bool wait);

/* ---- memory (memory.cpp) ---- */

/* mmap(MAP_SHARED | MAP_NORESERVE) of `length` bytes, which may exceed the file: touching bytes beyond its end is
 * SIGBUS until the file has grown. Returns the address or a negative errno. The caller unmaps; it may close `fd`. */
FTRUN_API int64_t ftrun_map_fd(int fd, size_t length, bool write);
FTRUN_API int ftrun_unmap(void *address, size_t length);

/* Faults the pages in without changing them, for reading or for writing. The range must lie inside the file
 * (-EFAULT beyond it on kernels >= 5.14, SIGBUS before). */
FTRUN_API int ftrun_populate(void *address, size_t length, bool write);

/* memcpy by `threads` threads (0 = choose). The ranges must not overlap. */
FTRUN_API void ftrun_copy(void *destination, const void *source, size_t length, int threads);

/* ---- slots (slot.cpp) ---- */

/* Replaces a slot's content: tag word 0, then `length` bytes behind the FTRUN_SLOT_HEADER, their length (word 1) and their
 * checksum (word 2), then the tag word. The data may not overlap the slot. */
FTRUN_API void ftrun_slot_write(uint64_t *slot, const void *data, size_t length, uint64_t tag);

/* ---- checksums (checksum.cpp): not cryptographic; stable across releases with the same ABI version ---- */

/* 64-bit hash that depends on every byte, its position, the length and the seed, not on alignment or `threads`. */
FTRUN_API uint64_t ftrun_checksum(const void *address, size_t length, uint64_t seed, int threads);

/* The same of `pieces` times 64 bytes that are spread evenly over `length` bytes, moved on by a piece with each `turn`; of all
 * bytes where that is no less. */
FTRUN_API uint64_t ftrun_sample(const void *address, size_t length, uint64_t pieces, uint64_t turn);

/* ---- this process (process.cpp) ---- */

/* Orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER). */
FTRUN_API int ftrun_set_subreaper(void);

/* Name of the calling thread as `ps` and `top` show it; 15 bytes are kept. */
FTRUN_API int ftrun_set_name(const char *name);

#ifdef __cplusplus
}
#endif
#endif
