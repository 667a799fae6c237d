"""The processes of one check: found as descendants of the runner, asked where they are, ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from ftrun.core.system import procfs

DUMP = signal.SIGRTMIN + 5  # see stacks/sitecustomize.py
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER = 0.5  # seconds that a process gets to write its stacks
_LOOK = 0.02


def adopt_orphans() -> None:
    """Processes whose parents die become children of this one, so that none is lost sight of."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """All processes below this one, zombies left out."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        for child in procfs.children(waiting.pop()):
            fields = procfs.stat(child)
            if fields is not None and fields[0] not in "ZX":
                found.append(child)
            waiting.append(child)
    return found


def end(pids: list[int], timeout: float = 20.0) -> list[int]:
    """SIGKILL them and wait; those that do not go are returned (the driver holds them)."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in (*pids, *descendants()) if procfs.process_start(pid) is not None]:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if time.monotonic() > deadline:
            return sorted(set(left))
        time.sleep(0.01)
    reap()
    return []


def reap() -> None:
    """Take the exit codes of all children that ended, orphans among them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def where(pids: list[int], folder: Path) -> str:
    """What each process is doing: its name, state and kernel wait; then the Python stacks, as they came to the logs in `folder`."""
    lines = []
    before = _sizes(folder)
    for pid in pids:
        status = procfs.status(pid)
        lines.append(f"-- pid {pid} {status.get('Name', '(gone)')}, state {status.get('State', '?')}, {_kernel(pid)}")
        if int(status.get("SigCgt", "0"), 16) >> (DUMP - 1) & 1:
            sizes = _sizes(folder)
            with contextlib.suppress(OSError):
                os.kill(pid, DUMP)
                _await_answer(folder, sizes)  # one after the other: they write to one file, word by word
    for path, text in _added(folder, before).items():
        lines += [f"-- stacks, from {path.relative_to(folder)}", text]
    return "\n".join(lines)


def _sizes(folder: Path) -> dict[Path, int]:
    """What processes of a check write to: the check's own log, and the output of its runs."""
    return {path: path.stat().st_size for path in (folder / "log", *folder.glob("**/output.txt")) if path.exists()}


def _await_answer(folder: Path, before: dict[Path, int]) -> None:
    """Until something came to the logs and nothing more comes, or for as long as a process gets."""
    deadline, seen = time.monotonic() + _ANSWER, before
    while time.monotonic() < deadline:
        time.sleep(_LOOK)
        now = _sizes(folder)
        if now == seen and now != before:
            return
        seen = now


def _added(folder: Path, before: dict[Path, int]) -> dict[Path, str]:
    """What came to the logs since."""
    found = {}
    for path in _sizes(folder):
        with path.open("rb") as file:
            file.seek(before.get(path, 0))
            if text := file.read().decode(errors="replace").rstrip():
                found[path] = text
    return found


def _kernel(pid: int) -> str:
    """The kernel function that each thread waits in."""
    waits = []
    for task in procfs.tasks(pid):
        with contextlib.suppress(OSError):
            waits.append(Path(f"/proc/{pid}/task/{task}/wchan").read_text() or "running")
    return "waits in " + ", ".join(waits)
