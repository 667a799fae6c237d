"""Simulates faults of a device: sends the launcher an event that is marked as simulated. It forges no report of the driver.

The run directory's devices.json maps each rank to its device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun.core.paths import DEVICES
from ftrun.core.shared.board import Board, Head
from ftrun.faults import requests
from ftrun.faults.kinds import FaultKind

_NO_INSTANCE = 0xFFFFFFFF
_EVENTS = {"xid": "xid", "ecc": "ecc", "gpu-lost": "lost"}  # fault kind -> kind in an event of the watcher of the devices


class NoDevice(Exception):
    """There is no device to strike; the message says why."""


def prepare(
    run_dir: Path, board: Board, rank: int, kind: FaultKind, argument: float | None
) -> tuple[str, Callable[[], None]]:
    """Return the fault of `rank`'s device in words, and the function that simulates it.

    Raises:
        NoDevice: The rank uses no device that NVML watches.
    """
    row = _device_of(run_dir, rank)

    def simulate() -> None:
        wanted = requests.Request(requests.DEVICE, kind.name, argument, rank, at=str(row["uuid"]))
        board[Head.REQUESTS] = requests.post(run_dir, wanted).number
        board.launcher_bell.ring()

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
    """Return the event that the watcher of the devices would have sent."""
    return {
        "op": "event", "gpu": request.at, "kind": _EVENTS[request.kind], "code": int(request.argument or 0),
        "gi": _NO_INSTANCE, "ci": _NO_INSTANCE, "recovery": 0, "pids": {}, "simulated": True,
    }  # fmt: skip
