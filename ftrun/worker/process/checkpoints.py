"""Write and read checkpoints of a model that every rank has whole: one file, read without running code (`weights_only`)."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftrun.core.errors import UsageError

State = dict[Any, Any]


def mark_of(*words: object) -> str:
    """Return a short mark of `words`: the same words give the same mark on every rank."""
    return f"{zlib.crc32(repr(words).encode()):08x}"


def write(path: Path, state: State) -> None:
    """Write a checkpoint whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    whole(path, lambda temporary: torch.save(state, temporary))


def whole(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a temporary file, and rename it to `path` once it is whole.

    Raises:
        OSError: If it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        fill(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, device: torch.device) -> State:
    """Read a checkpoint. Raises UsageError for a folder."""
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder, as job.save writes it for a model of which each rank has a part, and each rank has all of this one: lay "
            "it out as it was, or read the DTensors in the folder's newest step with torch.distributed.checkpoint"
        )
    state: State = torch.load(path, map_location=device, weights_only=True)
    return state
