"""ftrun: torchrun that survives. `import ftrun` never imports torch; it waits until the script does."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ftrun.core.errors import DeviceError, FtrunError, PlatformError, UsageError, WorkerError
from ftrun.core.system.when_imported import when_imported

__version__ = "0.1.0"
__all__ = ["DeviceError", "FtrunError", "Job", "PlatformError", "Step", "UsageError", "WorkerError", "protect"]

if TYPE_CHECKING:
    from ftrun.worker.process.job import Job
    from ftrun.worker.process.protect import protect
    from ftrun.worker.step.body import Step

_PUBLIC = {"protect": "ftrun.worker.process.protect", "Job": "ftrun.worker.process.job", "Step": "ftrun.worker.step.body"}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'ftrun' has no attribute {name!r}")


def _create(*arguments: Any) -> Any:
    return importlib.import_module("ftrun.worker.process.backend").create(*arguments)


def _register(distributed: Any) -> None:
    """Make "ftrun" a backend of torch.distributed; what it does is imported when a group is made."""
    if distributed.is_available() and not hasattr(distributed.Backend, "FTRUN"):
        distributed.Backend.register_backend("ftrun", _create, extended_api=True, devices=["cpu", "cuda"])
        importlib.import_module("ftrun.worker.torch_compat.torch_private").record_own_groups(distributed)
    if not any(name in os.environ for name in ("FTRUN_RUN_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK")):
        # plain `python`: a world of one, so that the script runs unchanged
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")


when_imported("torch.distributed", _register)
