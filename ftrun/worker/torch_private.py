"""Every private name of torch, CPython, glibc or the kernel that ftrun relies on, each with its reason and a probe.

Nothing outside this file may use such a name; `make lint` checks it. A private name is kept only for correctness.
"""

from __future__ import annotations

from datetime import timedelta
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


def nccl(store: Any, rank: int, size: int, timeout: timedelta, group: Any) -> Any:
    """The backend that `init_process_group("nccl")` would give: the class that this torch means, or the user has chosen.

    Since torch 2.15 "nccl" is a registered creator, and TORCH_DIST_USE_NCCL2=0 registers that of the older class. Before,
    there is one class. Nothing public makes a backend without making it one of the script's groups.

    Args:
        store: Where its ranks find one another; it is asked for as long as the backend lives.
        rank: This one's.
        size: Number of ranks.
        timeout: Of a collective.
        group: The ProcessGroup that the backend will be registered with.
    """
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import distributed_c10d

    plugin = distributed_c10d.Backend._plugins.get("NCCL")
    if plugin is None:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    asked = c10d._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size, asked.timeout = store, rank, size, timeout
    asked.group_id = ""
    asked.global_ranks_in_group = []
    if hasattr(asked, "process_group"):
        asked.process_group = group
    return plugin.creator_fn(asked, None)
