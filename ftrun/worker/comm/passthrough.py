"""Backend "ftrun" in a process that ftrun did not start: the group that "nccl" or "gloo" would have given."""

from __future__ import annotations

import atexit
from typing import Any

import torch.distributed as dist

from ftrun.worker.comm.backend import make_group


def build(options: Any) -> Any:
    """A group as torch asks for it; nothing in it is ever replaced."""
    # a group that is left to the interpreter's end aborts the process there, while its threads run
    atexit.unregister(_destroy)
    atexit.register(_destroy)
    return make_group(options.store, options.group_rank, options.group_size, options.timeout, swappable=False).group


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
