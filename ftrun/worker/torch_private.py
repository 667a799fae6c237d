"""Every private name of torch, CPython, glibc or the kernel that ftrun relies on, each with its reason and a probe.

Nothing outside this file may use such a name; `make lint` checks it. A private name is kept only for correctness.
"""

from __future__ import annotations

from typing import Any


def record_own_groups(distributed: Any) -> None:
    """Keep torch's flight recorder away from groups of backend "ftrun", whose inner groups are recorded by themselves.

    Since torch 2.15 the recorder attaches itself to each new group and asks it for its name in C++, where a group that is
    written in Python has none: `init_process_group` would end in "ProcessGroup name not set".

    Args:
        distributed: The module `torch.distributed`.
    """
    recording = getattr(distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add("ftrun")
