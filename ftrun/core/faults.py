"""The names of faults, for detectors, policies and people."""

from __future__ import annotations

import enum


class Fault(str, enum.Enum):
    """A detected fault. Its value is its name in the journal, in `--json` and in a policy file."""

    EXIT = "exit"  # the process left with a code
    SIGNAL = "signal"  # the process was killed, and nothing more is known
    OOM = "oom"  # the kernel killed it because host memory was short
    EXCEPTION = "exception"  # a body raised, or the script did
    FROZEN = "frozen"  # stopped or in a frozen cgroup: no thread runs
    GIL = "gil"  # native threads run, no Python does
    HANG = "hang"  # Python runs and gets nowhere
    COLLECTIVE = "collective"  # the others wait in a collective that this rank has not entered
    LINK = "link"  # every rank waits inside the same collective
    NONFINITE = "nonfinite"  # gradients or loss are not finite
    CORRUPT = "corrupt"  # its replica differs from the majority
    STRAGGLER = "straggler"  # alive, and slower than the others
    CUDA = "cuda"  # a sticky CUDA error in the process
    XID = "xid"  # the driver reported an Xid
    GPU_LOST = "gpu-lost"  # the device does not answer
    ECC = "ecc"  # uncorrectable memory error of the device
    DISK_FULL = "disk-full"  # no room where logs or journal go
    MEMORY_FULL = "memory-full"  # no room for shared memory
    DRAIN = "drain"  # a person asked for this rank to be moved
    GAVE_WAY = "gave-way"  # it ended itself, since only a replacement can go on from there
