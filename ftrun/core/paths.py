"""The places of a run's files: a private folder on memory-backed storage, one a run."""

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
LOCK = "lock"  # held as long as the launcher lives
LOG_DIR = "ftrun-logs"  # where log folders are made when nobody says otherwise
AGAIN = r"(_[0-9a-f]{8})?"  # behind a run's name in that of its log folder, when an earlier run has the name
FD_STORE_SOCKET = "fd-store.sock"
DEVICES = "devices.json"
RESERVE = "reserve"
FAULT_PLAN = "fault-plan.toml"

# variables a worker gets beside torchrun's
ENV_RUN_DIR = "FTRUN_RUN_DIR"
ENV_CELL = "FTRUN_CELL"
ENV_FAULT_PLAN = "FTRUN_FAULT_PLAN"
ENV_RANDOM_FAULTS = "FTRUN_FAULT_DICE"  # RATE:SEED
OWN_FILES = str(Path(__file__).resolve().parents[1]) + os.sep  # what tells our code from the script's in a traceback
ENV_RUNS_ROOT = "FTRUN_RUNS_ROOT"
ENV_DIGESTS = "FTRUN_DIGESTS"  # the folder in which ranks record what they computed (`ftrun verify`)
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def error_record(message: str, callstack: str, now: float) -> dict[str, Any]:
    """The content of an error file, as `@record` writes it; `now` is unix time."""
    return {"message": {"message": message, "extraInfo": {"py_callstack": callstack, "timestamp": str(int(now))}}}


def runs_root() -> Path:
    """The folder that holds this user's run directories; made when missing.

    FTRUN_RUNS_ROOT if set, else $XDG_RUNTIME_DIR/ftrun, else /dev/shm/ftrun-UID, else /tmp/ftrun-UID.

    Raises:
        PlatformError: When it cannot be made.
        UsageError: When it is no private folder.
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
        pass  # check_private tells what stands there in place of a folder
    except OSError as error:
        raise PlatformError(
            f"no folder for runs can be made at {root} ({error.strerror}); set {ENV_RUNS_ROOT} to a private folder, best on a tmpfs"
        ) from None
    check_private(root)
    return root


def state_dir() -> Path:
    """The folder for files that outlive a run and a reboot: ftrun in $XDG_STATE_HOME, else in ~/.local/state. It may be missing."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "ftrun"


def check_private(folder: Path) -> None:
    """Refuse a folder that is a link, another user's, or open to others.

    Raises:
        UsageError: Saying how to mend it.
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
    """The folder for the sockets of one worker's multiprocessing."""
    return run_dir / f"mp-{cell}"


def attempt_logs(logs: Path, attempt: int) -> Path:
    """The folder of one attempt inside a run's log folder."""
    return logs / f"attempt_{attempt}"


def logged_values(error: Path) -> Path:
    """The file that `job.log` writes in an attempt, by the error file of one of its workers."""
    return error.parent.parent / "metrics.jsonl"


def error_file(logs: Path, attempt: int, local_rank: int) -> Path:
    """The file that a failing worker leaves beside its log files (TORCHELASTIC_ERROR_FILE)."""
    return attempt_logs(logs, attempt) / str(local_rank) / "error.json"
