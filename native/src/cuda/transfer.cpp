// The transfer engine over a GPU.
#include <cerrno>
#include <new>

#include "cuda/device.hpp"
#include "cuda/driver.hpp"
#include "ftrun_cuda.h"
#include "transfer/transfer.hpp"

extern "C" {

int ftrun_cuda_transfer_copy(int device, const ftrun_extent *to, size_t to_count, const ftrun_extent *from,
                             size_t from_count, const ftrun_transfer_terms *terms, ftrun_transfer_result *result) {
    *result = ftrun_transfer_result{0, 0, 0, 0, 0, -1};
    try {
        const auto gpu = ftrun::make_cuda_device(device);
        if (gpu == nullptr) return -ENODEV;
        return ftrun::transfer_copy(*gpu, {to, to_count}, {from, from_count}, *terms, *result);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
}

int ftrun_cuda_exchange_run(int device, void *control, uint32_t me, const ftrun_exchange_facts *facts,
                            const ftrun_extent *from, size_t from_count, const ftrun_extent *to, size_t to_count,
                            void *const *buffers, const ftrun_transfer_terms *terms, ftrun_transfer_result *result) {
    *result = ftrun_transfer_result{0, 0, 0, 0, 0, -1};
    try {
        const auto gpu = ftrun::make_cuda_device(device, terms->threads);
        if (gpu == nullptr) return -ENODEV;
        return ftrun::exchange_run(*gpu, control, me, *facts, {from, from_count}, {to, to_count}, buffers, *terms,
                                   *result);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
}

}  // extern "C"
