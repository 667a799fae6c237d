"""Faults asked for on a live run: a request is a file in the run directory, the board word REQUESTS its doorbell.

RUN_DIR/requests/N.json is written whole before the word is changed. Whoever renames it to N.taken has it: the worker that
fires it, or the person who takes it back; so it is fired once or never. No torch, no decisions.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ftrun.core.system import files
from ftrun.faults.kinds import spelled
from ftrun.faults.plan import InjectedFault, where

FOLDER = "requests"
FAULT, DRAIN, RANDOM, DEVICE = "fault", "drain", "random", "device"
REQUEST = "request"  # Fault.source


@dataclass(frozen=True)
class Request:
    """`op` is FAULT, DRAIN, RANDOM, or DEVICE (for the launcher: `at` is the device's UUID).

    `at` "" = any phase of a step; `step` None = any step; `epoch` None = any, or none; `seconds` None = for ever. A RANDOM one is for
    every rank (`rank` -1): `rate` faults a step from step `step` on, drawn from `seed`; `kind` "" = several kinds. `asked` is unix
    time.
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

    def as_fault(self) -> InjectedFault:
        """What a trigger fires. A drain is one that the rank's worker waits for between two steps."""
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


def post(run_dir: Path, request: Request, *, taken: bool = False) -> Request:
    """Write the request under the next free number; gives it with that number. Rings nobody.

    Raises:
        OSError
    """
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    request = replace(request, number=_reserve(folder), asked=time.time())
    files.replace(
        folder / f"{request.number}.{'taken' if taken else 'json'}", json.dumps(asdict(request)), private=True
    )
    return request


def _reserve(folder: Path) -> int:
    """A number that no other request has or had: whoever makes its file first has it."""
    number = 1 + max(map(_number, folder.iterdir()), default=0)
    while True:
        try:
            os.close(os.open(folder / f"{number}.number", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return number
        except FileExistsError:
            number += 1


def take(run_dir: Path, number: int) -> bool:
    """Have the request for oneself, to fire it or to take it back; False when somebody else has it."""
    folder = run_dir / FOLDER
    try:
        os.rename(folder / f"{number}.json", folder / f"{number}.taken")
    except FileNotFoundError:
        return False
    return True


def pending(run_dir: Path) -> list[Request]:
    """Requests that nobody has taken, oldest first."""
    found = []
    for path in sorted((run_dir / FOLDER).glob("*.json"), key=_number):
        with contextlib.suppress(OSError, ValueError, TypeError):  # taken just now, or not one of ours
            found.append(Request(**json.loads(path.read_text())))
    return found


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0
