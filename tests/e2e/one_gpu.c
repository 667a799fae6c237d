/* Answers of the CUDA runtime on a machine with one GPU, as far as torch's CUDA build asks before it uses the device.
 *
 * Preloaded into a process on a machine without a GPU. It implements no device: whatever goes on to allocate memory or to launch
 * a kernel fails, which is how a test notices a process that was not meant to touch one. */

#define SUCCESS 0

int cudaGetDeviceCount(int *count) {
    *count = 1;
    return SUCCESS;
}

int cudaGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}

int cudaSetDevice(int device) {
    (void)device;
    return SUCCESS;
}
