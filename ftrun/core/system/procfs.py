"""Inspects processes in /proc, collects their exit codes, and signals them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def stat(pid: int | str, task: int | str | None = None) -> list[str] | None:
    """Return the fields of /proc/PID/stat (or of one task's) from the state on: field n of proc(5) is at n - 3. None = gone."""
    path = f"/proc/{pid}/stat" if task is None else f"/proc/{pid}/task/{task}/stat"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, 2048).rpartition(b")")[2].decode().split()
    except OSError:
        return None
    finally:
        os.close(fd)


def tasks(pid: int | str) -> list[str]:
    """Return the threads of a process, [] if it is gone."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def children(pid: int | str) -> list[int]:
    """Return the children of all threads of `pid`, zombies among them."""
    found: list[int] = []
    for task in tasks(pid):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def status(pid: int | str, task: int | str | None = None) -> dict[str, str]:
    """Return the fields of /proc/PID/status (or of one task's), {} if it is gone."""
    try:
        lines = (
            Path(f"/proc/{pid}/status" if task is None else f"/proc/{pid}/task/{task}/status").read_text().splitlines()
        )
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def mount(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, "?" if it cannot be read."""
    found = "/", "?"
    where = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, at, kind, *_ = line.split()
            at = at.replace("\\040", " ")
            if Path(where).is_relative_to(at) and len(at) >= len(found[0]):
                found = at, kind
    return found[1]


def namespace() -> str:
    """Return the name of this process's pid namespace, "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, None if there is no such process (or only a zombie)."""
    fields = stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def reaped() -> Iterator[tuple[int, int]]:
    """Reap every ended child of this process; yield its pid and its exit code (128 + n for signal n)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, exit_code(status)


def exit_code(status: int) -> int:
    """Convert a wait status to an exit code, 128 + n for signal n."""
    return shell_code(os.waitstatus_to_exitcode(status))


def shell_code(code: int) -> int:
    """Convert Python's return code to a shell's exit code: -n (signal n) becomes 128 + n."""
    return code if code >= 0 else 128 - code


def kill_group(pid: int, signum: int = signal.SIGKILL) -> bool:
    """Signal a process and its process group, each process once (SIGKILL twice). Return True if a process got the signal."""
    if pid <= 1:  # 0 would be our own group
        return False
    found = False
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)
        found = True
    with contextlib.suppress(OSError):
        # the process may have no group of its own yet, or have left it; a second SIGKILL does no harm
        if signum == signal.SIGKILL or os.getpgid(pid) != pid:
            os.kill(pid, signum)
            found = True
    return found


_READ = {"x86_64": "0", "aarch64": "63", "riscv64": "63"}  # number of the system call


def reads_stdin(pid: int) -> bool:
    """Does the main thread of a process wait in a read of descriptor 0? False if the kernel does not report it."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return False
    return words[:2] == [_READ.get(os.uname().machine, "-"), "0x0"]


def has_stdin() -> bool:
    """Is descriptor 0 open, and not /dev/null?"""
    try:
        return os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev
    except OSError:
        return False
