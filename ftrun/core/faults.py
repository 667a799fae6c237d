"""Names the faults, for detectors, policies and people."""

from __future__ import annotations

import enum


class Fault(str, enum.Enum):
    """A detected fault. Its value is its name in the journal, in `--json` and in a policy file."""

    EXIT = "exit"  # the process left with a code
    SIGNAL = "signal"  # the process was killed, and nothing more is known
    OOM = "oom"  # the kernel killed it because host memory was short
    EXCEPTION = "exception"  # a body raised, or the script did
    FROZEN = "frozen"  # the process is stopped or in a frozen cgroup: no thread runs
    GIL = "gil"  # native threads run, but no Python thread does
    HANG = "hang"  # Python runs but makes no progress
    COLLECTIVE = "collective"  # the other ranks wait in a collective that this rank has not entered
    LINK = "link"  # every rank waits inside the same collective
    NONFINITE = "nonfinite"  # gradients or loss are not finite
    CORRUPT = "corrupt"  # the rank's replica differs from the majority
    STRAGGLER = "straggler"  # the rank is alive but slower than the others
    CUDA = "cuda"  # a sticky CUDA error in the process
    XID = "xid"  # the driver reported an Xid
    GPU_LOST = "gpu-lost"  # the device does not answer
    ECC = "ecc"  # the device reported an uncorrectable memory error
    DISK_FULL = "disk-full"  # the file system of the logs or the journal is full
    MEMORY_FULL = "memory-full"  # the file system of shared memory is full
    DRAIN = "drain"  # a person asked to move this rank
    GAVE_WAY = "gave-way"  # the worker ended itself, since only a replacement can go on from there
    CUT_OFF = "cut-off"  # the fd store ended the rank, since its node was cut off from the others
