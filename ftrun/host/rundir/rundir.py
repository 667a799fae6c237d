"""Claims a run directory under one name, describes it in run.json, and removes it at the end.

One rename makes the whole directory appear with its run.json, so that two launchers never share a name and no reader sees
half a directory. This file never touches a directory whose launcher lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from ftrun.core import ended, paths
from ftrun.core.errors import PlatformError, UsageError
from ftrun.core.runs import RunInfo, read_run
from ftrun.core.system import files
from ftrun.core.system.procfs import namespace, process_start

_ADJECTIVES = (
    "able agile amber bold brave brisk calm clear clever cosy crisp dapper eager early fair fast fine fond free fresh gentle "
    "glad golden grand happy hardy humble jolly keen kind lively lucky merry mild misty neat noble patient plucky polite proud "
    "quick quiet rapid ready royal sharp shiny silent silver sleek smart snug solid spry steady still sturdy sunny swift tidy "
    "true vivid warm wise witty young zesty"
).split()
_ANIMALS = (
    "badger bat bear beaver bee bison boar bobcat camel cat cod condor crab crane crow deer dingo dove duck eagle eel egret elk "
    "emu falcon ferret finch fox frog gecko gibbon goose gull hare hawk heron horse ibex ibis jay koala lark lemur lion llama "
    "lynx mole moose moth mouse newt ocelot okapi orca oriole osprey otter owl panda parrot pelican perch pigeon pony puffin "
    "puma quail rabbit raven robin salmon seal shark shrew skunk sloth snail spider squid stork swan tapir tern tiger toad trout "
    "turtle viper vole walrus wasp weasel whale wolf wombat wren yak zebra"
).split()


_locks: dict[Path, int | None] = {}  # lock descriptors of our own run directories


def remove_stale(root: Path) -> None:
    """Remove the directories under `root` whose launcher is gone."""
    for path in root.iterdir():
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith("."):
            owner = path.name.rpartition(".")[2]
            if owner.isdigit() and process_start(int(owner)) is None:
                shutil.rmtree(path, ignore_errors=True)
            continue
        run = read_run(path)
        if run is not None and not run.alive() and (run.is_near() or _let_go(path)):
            bury(run)


def bury(run: RunInfo) -> None:
    """Clean up for a killed launcher: copy the journal to the logs, record the run as ended, remove the directory."""
    logs = Path(str(run.raw.get("logs", "")))
    kept = logs / paths.JOURNAL
    if logs.is_absolute() and logs.is_dir() and not kept.exists():
        with contextlib.suppress(OSError):
            files.copy_private(run.path / paths.JOURNAL, kept)
            ended.add(run.raw, None)
    remove(run.path)


def claim(run_id: str | None, facts: dict[str, Any]) -> Path:
    """Make the run directory `run_id` (None: make a name up) and its run.json, which includes `facts`; remove stale directories first.

    Raises:
        UsageError: The name is taken.
        PlatformError: The root of the run directories is not writable.
    """
    root = paths.runs_root()
    remove_stale(root)
    pid = os.getpid()
    temporary = root / f".new.{pid}"
    lock: int | None = None
    try:
        temporary.mkdir(mode=0o700)
        lock = _hold(temporary)
        for name in [run_id] if run_id else _names():
            path = root / name
            whose = {"pid": pid, "start": process_start(pid), "pids": namespace()}
            record = {"run_id": name, **whose, "started": time.time(), **facts}
            files.write_private(temporary / paths.RUN_FILE, json.dumps(record))
            if os.path.lexists(path):
                paths.check_private(path)
            try:
                os.rename(temporary, path)
                _locks[path], lock = lock, None
                return path
            except OSError:
                holder = read_run(path)
        if run_id and holder is not None:
            raise UsageError(
                f"run id {run_id} is in use by process {holder.pid}; choose another --run-id, or: ftrun stop {run_id}",
                explain="F106",
            )
        raise UsageError(f"{path} exists and is not a run directory of ftrun; remove it or choose another --run-id")
    except OSError as error:
        raise PlatformError(f"cannot write to {root}: {error.strerror}; set {paths.ENV_RUNS_ROOT}") from None
    finally:
        _close(lock)
        shutil.rmtree(temporary, ignore_errors=True)


def _hold(folder: Path) -> int | None:
    """Lock the folder until we end, for launchers in other pid namespaces. Return the descriptor, None where locks do not work."""
    fd = os.open(folder / paths.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        (folder / paths.LOCK).unlink()
        return None
    return fd


def _let_go(folder: Path) -> bool:
    """Has the launcher released its lock on the folder, and so ended? False where there is no lock to test."""
    try:
        fd = os.open(folder / paths.LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def amend(path: Path, facts: dict[str, Any]) -> None:
    """Add `facts` to the run.json of our own run directory; readers see either the old file or the new one."""
    record = json.loads((path / paths.RUN_FILE).read_text())
    files.replace(path / paths.RUN_FILE, json.dumps({**record, **facts}), private=True)


def remove(path: Path) -> None:
    """Remove our own run directory, or one whose launcher is gone."""
    # rename it first, so that no reader finds half a directory under the run's name
    grave = path.with_name(f".old.{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        os.rename(path, grave)
        _close(_locks.pop(path, None))
        path = grave
    shutil.rmtree(path, ignore_errors=True)


def _names() -> list[str]:
    dice = random.SystemRandom()
    return [f"{dice.choice(_ADJECTIVES)}-{dice.choice(_ANIMALS)}" for _ in range(20)]
