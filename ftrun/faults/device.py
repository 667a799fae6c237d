"""Faults of a device: told to the fake NVML library, whose control file FTRUN_FAKE_NVML names, one line a fault.

A line is `INDEX xid N`, `INDEX lost` or `INDEX ecc`: what happens to the device of that NVML index from now on.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ftrun.core.board import Cell, F
from ftrun.faults.kinds import Kind

ENV_FAKE_NVML = "FTRUN_FAKE_NVML"
_WORDS = {"xid": "xid", "gpu-lost": "lost", "ecc": "ecc"}


class NoDevice(Exception):
    """There is no device that could be struck; the message says why."""


def prepare(
    control: str | None, cell: Cell, local_rank: int, kind: Kind, argument: float | None
) -> tuple[str, Callable[[], None]]:
    """What would be told to the library whose control file is `control`, and telling it. Errors: NoDevice."""
    if not control:
        raise NoDevice(f"{kind.name} needs a device that NVML watches, and this run has none")
    index = cell[F.DEVICE] - 1 if cell[F.DEVICE] else local_rank
    line = f"{index} {_WORDS[kind.name]}" + ("" if argument is None else f" {argument:g}")

    def tell() -> None:
        # one write of less than a page in append mode: lines of several processes never mix
        fd = os.open(control, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    return line, tell
