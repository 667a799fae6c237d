"""Posts requests for faults on a live run: a request is a file in the run directory, and the board word REQUESTS its doorbell.

Theory of operation. A client writes RUN_DIR/requests/N.json whole and then sets the word to N. Each trigger that sees the word change reads
the pending requests. The process that renames N.json to N.taken owns the request: the worker that fires it, or the command that
withdraws it; so a request fires once or never. This file imports no torch and decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ftrun.core.shared.board import Cell, Flag
from ftrun.core.system import files
from ftrun.faults.kinds import spelled
from ftrun.faults.plan import InjectedFault, where

FOLDER = "requests"
FAULT, DRAIN, RANDOM, DEVICE = "fault", "drain", "random", "device"
MOVE = "move"  # for the launcher, which asks another node: a rank of that node is to be drained, or the whole node
REQUEST = "request"  # InjectedFault.source


@dataclass(frozen=True)
class Request:
    """A request. `op` is FAULT, DRAIN, RANDOM, DEVICE (for the launcher: `at` is the device's UUID), or MOVE (for the launcher: `node` is
    to be moved, or with -1 the `rank` of another node).

    `at` "" = any phase of a step; `step` None = any step; `epoch` None = any, or none; `seconds` None = for ever. A RANDOM request is
    for all ranks (`rank` -1): `rate` faults per step from step `step` on, drawn from `seed`; `kind` "" = several kinds. `asked`: unix time.
    """

    op: str
    kind: str = ""
    argument: float | None = None
    rank: int = -1
    at: str = ""
    step: int | None = None
    seconds: float | None = None
    rate: float = 0.0
    seed: int = 0
    asked: float = 0.0
    number: int = 0
    epoch: int | None = None
    node: int = -1
    key: str = ""  # of a MOVE, by which its outcome is known

    def as_fault(self) -> InjectedFault:
        """Return the fault for a trigger to fire. In a drain the rank's worker waits for its end between two steps."""
        return InjectedFault(
            index=self.number,
            kind=self.kind,
            argument=self.argument,
            rank=self.rank,
            step=self.step,
            epoch=self.epoch,
            at=self.at,
            times=1,
            line=0,
            seconds=self.seconds,
            source=REQUEST,
        )

    def __str__(self) -> str:
        kind = spelled(self.kind, self.argument)
        phase, steps = f" in {self.at}" if self.at else "", where(self.epoch, self.step)
        return f"{kind} on rank {self.rank}{phase}" + (f" of {steps}" if steps else "")


def why_not_moved(rank: int, cell: Cell) -> str:
    """Return why `rank`, whose worker has `cell`, has no place between two steps, "" if it has."""
    if cell.has(Flag.LOOP_DONE):
        return f"rank {rank} has finished its steps: there is nothing to move any more"
    if cell.has(Flag.SCRIPT) and not cell.has(Flag.GROUP):
        return f'rank {rank} has no "ftrun" process group: only ranks of a script that calls ftrun.protect can be moved'
    return ""


def post(run_dir: Path, request: Request, *, taken: bool = False) -> Request:
    """Write the request under the next free number, and return it with that number. The caller sets REQUESTS and rings.

    Raises:
        OSError: The file cannot be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    request = replace(request, number=_reserve(folder), asked=time.time())
    files.replace(
        folder / f"{request.number}.{'taken' if taken else 'json'}", json.dumps(asdict(request)), private=True
    )
    return request


def _reserve(folder: Path) -> int:
    """Reserve a number that no other request has or had, by exclusive creation of its file."""
    number = 1 + max(map(_number, folder.iterdir()), default=0)
    while True:
        try:
            os.close(os.open(folder / f"{number}.number", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return number
        except FileExistsError:
            number += 1


def take(run_dir: Path, number: int) -> bool:
    """Take the request, to fire or withdraw it; return False if another process took it."""
    folder = run_dir / FOLDER
    try:
        os.rename(folder / f"{number}.json", folder / f"{number}.taken")
    except FileNotFoundError:
        return False
    return True


def pending(run_dir: Path) -> list[Request]:
    """Return the requests that no process has taken, oldest first."""
    found = []
    for path in sorted((run_dir / FOLDER).glob("*.json"), key=_number):
        with contextlib.suppress(OSError, ValueError, TypeError):  # a process took it just now, or the file is no request
            found.append(Request(**json.loads(path.read_text())))
    return found


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0
