// Functions compiled once more for newer processors; the loader takes the one that fits.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(FTRUN_SANITIZE)
#define FTRUN_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define FTRUN_CLONES
#endif
