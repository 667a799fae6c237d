// Settings of this process that Python has no call for.
#include <sys/prctl.h>

#include <cerrno>

#include "ftrun_native.h"

extern "C" {

int ftrun_set_subreaper(void) { return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 ? 0 : -errno; }

int ftrun_set_name(const char *name) { return prctl(PR_SET_NAME, name, 0, 0, 0) == 0 ? 0 : -errno; }

}  // extern "C"
