/* The C ABI of libftrun_native for GPUs. This header and ftrun/native/cuda.py describe the same functions.
 *
 * Rules beyond those of ftrun_native.h:
 *   - Every function works without a driver and without a GPU: it then gives -ENOENT or -ENODEV.
 *   - After a negative result ftrun_cuda_why() in the same thread says what failed, in words.
 *   - -EIO: the device or this process's use of it is broken (a lost device, an illegal address, a driver error without
 *     an errno of its own). Once a device answered so, it answers so until the process ends.
 *   - `device` is the driver's ordinal in this process; `stream` is a CUstream, 0 = the legacy default stream.
 *   - What is queued on a stream happens in its order; nothing here waits for a whole device.
 *   - Addresses on a device are those of the process (they are not the same in another).
 */
#ifndef FTRUN_CUDA_H
#define FTRUN_CUDA_H

#include "ftrun_native.h"
#include "ftrun_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char name[96];
    uint8_t uuid[16];
    uint64_t bytes;          /* memory in all */
    uint64_t granularity;    /* sizes of shareable memory are multiples of this; 0 = it cannot be shared */
    int32_t major, minor;    /* compute capability */
    int32_t vmm;             /* 1: memory can be shared as a file descriptor (virtual memory management) */
    int32_t writes64;        /* 1: a stream can write a 64-bit word */
} FtrunCudaDevice;

/* ---- the driver ---- */

FTRUN_API const char *ftrun_cuda_why(void);
FTRUN_API bool ftrun_cuda_present(void);                                        /* loaded already, by whoever */
FTRUN_API int ftrun_cuda_driver(int *version);                                  /* loads it; 12040 = CUDA 12.4 */
FTRUN_API int ftrun_cuda_devices(void);                                         /* how many, or a negative errno */
FTRUN_API int ftrun_cuda_device(int device, FtrunCudaDevice *facts);
FTRUN_API int ftrun_cuda_room(int device, uint64_t *free, uint64_t *total);

/* Whose memory `address` is: `device` of a GPU, -1 = plain host memory. `host` = 1 when the CPU can read it too. */
FTRUN_API int ftrun_cuda_owner(const void *address, int *device, int *host);

/* ---- memory that several processes map ----
 *
 * Only by virtual memory management, not by CUDA's older IPC handles. Such a handle names an allocation of the process that
 * made it: when that process frees it or dies, what others have mapped is undefined, and weights must outlive exactly that
 * death. The fd store would have to allocate everything, with a context on each device, and its own death, which costs nothing
 * now, would take all weights along. What a driver of CUDA 12 serves has virtual memory management from V100 on, as far as
 * known, but for some kinds of virtual GPUs: protect() refuses those. */

/* A range of addresses without memory. `length` must be a multiple of the granularity. */
FTRUN_API int64_t ftrun_cuda_reserve(int device, uint64_t length);
FTRUN_API int ftrun_cuda_free_range(uint64_t address, uint64_t length);

/* New zeroed memory of `length` bytes (a multiple of the granularity), mapped at `address` of a reserved range. Gives a
 * descriptor (close-on-exec) by which other processes map it. -ENOMEM when the device is full. */
FTRUN_API int ftrun_cuda_create(int device, uint64_t address, uint64_t length);

/* Maps what a descriptor stands for. It lives on `home`; `device` (mostly the same) will use it as well.
 * 1: mapped, but for copies only, since kernels of `device` cannot reach `home`. */
FTRUN_API int ftrun_cuda_attach(int home, int device, int fd, uint64_t address, uint64_t length);
FTRUN_API int ftrun_cuda_unmap(uint64_t address, uint64_t length);

/* Keeps the memory of a descriptor alive without mapping it. Gives a handle; `ftrun_cuda_let_go` ends it. */
FTRUN_API int ftrun_cuda_hold(int device, int fd, uint64_t *handle);
FTRUN_API int ftrun_cuda_let_go(uint64_t handle);

/* Lets streams of `device` write to host memory (whole pages). `seen` is its address for them. */
FTRUN_API int ftrun_cuda_register(int device, void *address, size_t length, uint64_t *seen);
FTRUN_API int ftrun_cuda_unregister(int device, void *address);

/* ---- work in stream order ---- */

/* Writes a word after everything queued before is done and visible. `seen`: device memory or registered host memory. */
FTRUN_API int ftrun_cuda_stamp(int device, uint64_t stream, uint64_t seen, uint64_t value);
FTRUN_API int ftrun_cuda_copy(int device, uint64_t stream, uint64_t destination, uint64_t source, uint64_t length);

/* Waits until everything queued on the stream is done. -ETIMEDOUT after `timeout` seconds. */
FTRUN_API int ftrun_cuda_sync(int device, uint64_t stream, double timeout);

/* Copies and waits. A read or write of host memory that outlasts `timeout` still goes on: keep the memory. */
FTRUN_API int ftrun_cuda_copy_now(int device, uint64_t stream, uint64_t destination, uint64_t source, uint64_t length,
                                  double timeout);

/* ftrun_checksum of device memory, computed there. */
FTRUN_API int ftrun_cuda_checksum(int device, uint64_t stream, uint64_t address, uint64_t length, uint64_t seed,
                                  double timeout, uint64_t *result);

/* Loads the kernels for `device`; every call that needs them does. -ENOEXEC: the driver does not take their PTX. */
FTRUN_API int ftrun_cuda_kernels(int device);

/* ---- transfers ---- */

/* ftrun_transfer_copy between extents that kernels of `device` can reach, on streams of its own. */
FTRUN_API int ftrun_cuda_transfer_copy(int device, const ftrun_extent *to, size_t to_count, const ftrun_extent *from,
                                       size_t from_count, const ftrun_transfer_terms *terms,
                                       ftrun_transfer_result *result);

/* ftrun_exchange_run where everybody receives into memory of a GPU. `control` and `from` are plain host memory, `to` and this
 * participant's own two `buffers` memory of `device`; those of the others are mapped for it, and only copies have to reach
 * them if `to` is one extent. A chunk counts as broadcast, or as taken, once the device is done with it. */
FTRUN_API int ftrun_cuda_exchange_run(int device, void *control, uint32_t me, const ftrun_exchange_facts *facts,
                                      const ftrun_extent *from, size_t from_count, const ftrun_extent *to,
                                      size_t to_count, void *const *buffers, const ftrun_transfer_terms *terms,
                                      ftrun_transfer_result *result);

#ifdef __cplusplus
}
#endif
#endif
