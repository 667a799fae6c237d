"""Locates the files of a run, in a private folder for each run on memory-backed storage."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from ftrun.core.errors import PlatformError, UsageError

# names inside a run directory
BOARD = "board"
JOURNAL = "journal.jsonl"
RUN_FILE = "run.json"
LOCK = "lock"  # the launcher holds it as long as it lives
LOG_DIR = "ftrun-logs"  # the default folder for log folders
AGAIN = r"(_[0-9a-f]{8})?"  # suffix of a log folder's name if an earlier run has the same name
FD_STORE_SOCKET = "fd-store.sock"
DEVICES = "devices.json"
NODES = "nodes.json"  # what each node of the run shows of itself, as this node last saw it
RESERVE = "reserve"
FAULT_PLAN = "fault-plan.toml"

# variables that a worker gets beside torchrun's
ENV_RUN_DIR = "FTRUN_RUN_DIR"
ENV_CELL = "FTRUN_CELL"
ENV_FAULT_PLAN = "FTRUN_FAULT_PLAN"
ENV_RANDOM_FAULTS = "FTRUN_FAULT_DICE"  # RATE:SEED
OWN_FILES = str(Path(__file__).resolve().parents[1]) + os.sep  # the prefix of ftrun's own files in a traceback
ENV_RUNS_ROOT = "FTRUN_RUNS_ROOT"
ENV_DIGESTS = "FTRUN_DIGESTS"  # the folder in which ranks record their digests (`ftrun verify`)
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def error_record(message: str, callstack: str, now: float) -> dict[str, Any]:
    """Return the content of an error file, as `@record` writes it; `now` is unix time."""
    return {"message": {"message": message, "extraInfo": {"py_callstack": callstack, "timestamp": str(int(now))}}}


def runs_root() -> Path:
    """Return the folder that holds this user's run directories, and make it if missing.

    It is FTRUN_RUNS_ROOT if set, else $XDG_RUNTIME_DIR/ftrun, else /dev/shm/ftrun-UID, else /tmp/ftrun-UID.

    Raises:
        PlatformError: The folder cannot be made.
        UsageError: It is not a private folder.
    """
    named = os.environ.get(ENV_RUNS_ROOT)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if named:
        root = Path(named)
    elif runtime and os.access(runtime, os.W_OK):
        root = Path(runtime) / "ftrun"
    else:
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
        root = base / f"ftrun-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        pass  # check_private reports that it is not a folder
    except OSError as error:
        raise PlatformError(
            f"no folder for runs can be made at {root} ({error.strerror}); set {ENV_RUNS_ROOT} to a private folder, best on a tmpfs"
        ) from None
    check_private(root)
    return root


def state_dir() -> Path:
    """Return the folder for files that outlive a run and a reboot: ftrun in $XDG_STATE_HOME, else in ~/.local/state. It may be missing."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "ftrun"


def check_private(folder: Path) -> None:
    """Refuse a folder that is a link, another user's, or open to others.

    Raises:
        UsageError: The message says how to mend it.
        OSError: There is no such folder.
    """
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"{folder} is not a directory; remove it or set {ENV_RUNS_ROOT} to a private folder", explain="F203")
    if info.st_uid != os.getuid():
        raise UsageError(
            f"{folder} belongs to user {info.st_uid}, not to you; set {ENV_RUNS_ROOT} to a folder of yours",
            explain="F203",
        )
    if info.st_mode & 0o077:
        raise UsageError(f"{folder} can be read by others (mode {info.st_mode & 0o777:o}); run: chmod 700 {folder}", explain="F203")


def temporary_folder(run_dir: Path, cell: int) -> Path:
    """Return the folder for the sockets of one worker's multiprocessing."""
    return run_dir / f"mp-{cell}"


def attempt_logs(logs: Path, attempt: int) -> Path:
    """Return the folder of one attempt inside a run's log folder."""
    return logs / f"attempt_{attempt}"


def logged_values(error: Path) -> Path:
    """Return the file that `job.log` writes in an attempt, given the error file of one of its workers."""
    return error.parent.parent / "metrics.jsonl"


def error_file(logs: Path, attempt: int, local_rank: int) -> Path:
    """Return the file that a failing worker writes beside its log files (TORCHELASTIC_ERROR_FILE)."""
    return attempt_logs(logs, attempt) / str(local_rank) / "error.json"
