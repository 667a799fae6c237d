"""Runs a script once for `ftrun verify`: a launcher as a child process, with its output in a file and its digests in a folder.

This file compares nothing. The kernel ends the child with SIGTERM when this process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftrun.core import journal, paths
from ftrun.core.system.procfs import shell_code
from ftrun.core.text import tell
from ftrun.host.services import spawn

OUTPUT = "output.log"
_LOOK = 0.1  # seconds between two looks at the progress
_PROGRESS = struct.Struct("<qq")  # as ftrun/worker/step/digest_recorder.py writes it
_PR_SET_PDEATHSIG = 1
_LAST_LINES = 15
_PATIENCE = 20.0  # seconds beyond the shutdown timeout that a run has to end after a signal

Watch = Callable[[int, int], None]  # called with the steps begun and the total of steps (0 = not known yet)


@dataclass(frozen=True)
class Trial:
    """A finished run. `folder` holds output.log, digests/ and logs/. `fired` and `unfired` count and name the faults of its plan.

    `not_kept`: names of the script's values that the loop changes and ftrun does not keep, each with the reason.
    """

    name: str
    folder: Path
    code: int
    seconds: float
    fired: int = 0
    unfired: tuple[str, ...] = ()
    restarts: int = 0
    incidents: int = 0
    not_kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def digests(self) -> Path:
        return self.folder / "digests"

    def last_lines(self) -> list[str]:
        """Return the last lines of the run's output."""
        with contextlib.suppress(OSError):
            return (self.folder / OUTPUT).read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return []


class Interrupted(Exception):
    """Signal `signum` came while a trial ran, and the trial was ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def run(
    name: str, folder: Path, options: Sequence[str], script: Sequence[str], ranks: int, patience: float, watch: Watch
) -> Trial:
    """Run `ftrun run OPTIONS SCRIPT` to its end. `patience`: its shutdown timeout in seconds.

    Raises:
        OSError: A file of the run cannot be written, or the launcher cannot be started.
        Interrupted: A signal to this process ended the run.
    """
    digests = folder / "digests"
    digests.mkdir(parents=True)
    progress = digests / "progress"
    progress.write_bytes(bytes(_PROGRESS.size * ranks))
    environment = {**os.environ, paths.ENV_DIGESTS: str(digests)}
    command = spawn.command(
        "from ftrun.cli.main import main; main()", "run", *options, f"--log-dir={folder / 'logs'}", *script
    )
    began = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        code = _wait(_start(command, environment, output.fileno()), patience, lambda: watch(*_steps(progress)))
    return Trial(name, folder, code, time.monotonic() - began, **_journalled(folder / "logs"))


def _start(command: list[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        preexec_fn=die_with_parent,
    )


def _wait(process: subprocess.Popen[bytes], patience: float, look: Callable[[], None]) -> int:
    """Wait for the process and return its exit code, 128 + n for death by signal n.

    Raises:
        Interrupted: A signal to this process ended it.
    """
    got: list[int] = []
    before = {s: signal.signal(s, lambda number, _: got.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            try:
                code = process.wait(_LOOK)
            except subprocess.TimeoutExpired:
                look()
            else:
                return shell_code(code)
            if got:
                _end(process, patience, got)
                raise Interrupted(got[0])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end(process: subprocess.Popen[bytes], patience: float, got: list[int]) -> None:
    """Send the run the first signal that came, again for each later one, and wait for its end; the second one ends it at once."""
    tell("verify: ending the run; the same signal again ends it at once")
    told = 0
    deadline = time.monotonic() + patience + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        for _ in range(len(got) - told):
            process.send_signal(got[0])
        told = len(got)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK)


def _steps(progress: Path) -> tuple[int, int]:
    """Return the steps begun by the slowest rank, and the total of steps (0 = not known yet)."""
    with contextlib.suppress(OSError):
        ranks = list(_PROGRESS.iter_unpack(progress.read_bytes()))
        return min(done for done, _ in ranks), min(total for _, total in ranks)
    return 0, 0


def _journalled(logs: Path) -> dict[str, Any]:
    """Read the run's faults, incidents and restarts from its journal."""
    fired, unfired, not_kept = 0, [], {}
    summary: dict[str, Any] = {}
    for path in logs.glob(f"*/{paths.JOURNAL}"):
        for entry in journal.lines(path):
            note = entry.get("note")
            if note == "fault":
                fired += 1
            elif note == "unfired":
                unfired.append(str(entry["fault"]))
            elif note == "kept":
                not_kept = entry["not_kept"]
            elif note == "summary":
                summary = entry
    counted = {name: int(summary.get(name, 0)) for name in ("restarts", "incidents")}
    return {"fired": fired, "unfired": tuple(unfired), "not_kept": not_kept, **counted}


def usable_name(folder: Path) -> Path:
    """Make and return `folder`, or the first of `folder-2`, `folder-3`, ... that does not exist."""
    for number in range(1, 10_000):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(folder)
