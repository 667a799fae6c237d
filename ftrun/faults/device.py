"""Faults of a device: told to the fake NVML library that a test runs on, else to the launcher, marked as simulated.

Which device a rank uses stands in the run directory's devices.json. The fake library is driven by the file that
FTRUN_FAKE_NVML names; the driver's own word is never forged: a real library knows nothing of what is simulated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun.core.paths import DEVICES
from ftrun.core.shared.board import Board, Head
from ftrun.faults import requests
from ftrun.faults.kinds import FaultKind

ENV_FAKE_NVML = "FTRUN_FAKE_NVML"
_NO_INSTANCE = 0xFFFFFFFF
_EVENTS = {"xid": "xid", "ecc": "ecc", "gpu-lost": "lost"}  # as the launcher's watcher of the devices says them


class NoDevice(Exception):
    """There is no device that could be struck; the message says why."""


def prepare(
    run_dir: Path, board: Board, control: str | None, rank: int, kind: FaultKind, argument: float | None
) -> tuple[str, Callable[[], None]]:
    """What happens to the device of `rank`, in words, and making it happen.

    Raises:
        NoDevice
    """
    row = _device_of(run_dir, rank)
    if control:
        what = "lost" if kind.name == "gpu-lost" else kind.name
        line = f"{row['index']} {what}" + ("" if argument is None else f" {argument:g}")
        return f"{kind.name} on fake device {row['index']}", lambda: _tell(Path(control), line)

    def simulate() -> None:
        wanted = requests.Request(requests.DEVICE, kind.name, argument, rank, at=str(row["uuid"]))
        board[Head.REQUESTS] = requests.post(run_dir, wanted).number
        board.ring_launcher()

    return f"{kind.name} on {row['uuid']}, simulated", simulate


def _device_of(run_dir: Path, rank: int) -> dict[str, Any]:
    try:
        rows: list[dict[str, Any]] = json.loads((run_dir / DEVICES).read_text())
    except FileNotFoundError:
        raise NoDevice("this run has no devices that NVML watches") from None
    row = next((r for r in rows if r["rank"] == rank), None)
    if row is None:
        raise NoDevice(f"rank {rank} uses none of the devices that NVML shows ({len(rows)} in this run)")
    return row


def message(request: requests.Request) -> dict[str, Any]:
    """What the watcher of the devices would have said."""
    return {
        "op": "event", "gpu": request.at, "kind": _EVENTS[request.kind], "code": int(request.argument or 0),
        "gi": _NO_INSTANCE, "ci": _NO_INSTANCE, "recovery": 0, "pids": {}, "simulated": True,
    }  # fmt: skip


def _tell(control: Path, line: str) -> None:
    # one write in append mode: lines of several processes never mix
    fd = os.open(control, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)
