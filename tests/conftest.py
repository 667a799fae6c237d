"""Shared fixtures: a private runs folder, a way to start real runs, and a check that nothing of a run is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 60.0

# under nohup, or in the background of a shell, some are ignored, and so they would be in every run that a test starts
for _ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_ignored, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
for _size in ("COLUMNS", "LINES"):  # readline sets them where pytest starts processes of its own
    os.environ.pop(_size, None)


# what ftrun keeps of runs that ended is the user's; each fixture has a folder of its own for it
_STATE = tempfile.TemporaryDirectory(prefix="ftrun-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """The first true value of `condition`; fails with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s for: {what}")
        time.sleep(0.01)


@contextlib.contextmanager
def small_file_system(path: Path, megabytes: float) -> Iterator[None]:
    """A tmpfs of that size at `path`, which is made if need be. Skips the test where none may be mounted."""
    path.mkdir(mode=0o700, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k,mode=0700", "none", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def leaked_memory(before: set[str], patience: float = 5.0) -> set[str]:
    """Names that are new in /dev/shm since it held `before`, that no live process maps, and that stay.

    Tests that run at the same time have shared memory too: theirs is mapped, or gone soon.
    """
    deadline = time.monotonic() + patience
    while (left := _unmapped(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _unmapped(before: set[str]) -> set[str]:
    left: dict[str, str] = {}
    for name in set(os.listdir("/dev/shm")) - before:
        with contextlib.suppress(FileNotFoundError):
            left[f"/dev/shm/{name}"] = (
                f" {os.stat(f'/dev/shm/{name}').st_ino} "  # a semaphore is mapped by another name
            )
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            left = {path: inode for path, inode in left.items() if inode not in text}
    return {path for path in left if os.path.exists(path)}


def processes_of(root: Path) -> dict[int, str]:
    """Live processes (no zombies) that were started with the runs folder `root` in their environment: pid -> name."""
    wanted = f"FTRUN_RUNS_ROOT={root}".encode()
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if stat[0] in "ZX" or wanted not in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                continue
            found[int(entry)] = Path(f"/proc/{entry}/comm").read_text().strip()
    return found


class Run:
    """One `ftrun` process and everything it started."""

    def __init__(self, process: subprocess.Popen[bytes], base: Path, runs_root: Path, out: Path, err: Path) -> None:
        self.process = process
        self.base = base
        self.runs_root = runs_root
        self._out = out
        self._err = err

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, seconds: float = DEADLINE) -> int:
        """The exit code; fails with the run's output after `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {seconds:g} s\n{self.stdout}\n{self.stderr}")

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    @property
    def dir(self) -> Path:
        """The run directory, once there is one."""

        def found() -> Path | None:
            return next((p.parent for p in self.runs_root.glob("*/run.json") if _pid(p) == self.process.pid), None)

        return Path(wait_for(found, "the run directory"))

    def pids(self, name: str) -> list[int]:
        """Live processes of this run whose name starts with `name` ("ftrun rank 2", "ftrun forksrv", ...)."""
        return [pid for pid, comm in processes_of(self.runs_root).items() if comm.startswith(name[:15])]

    def pid(self, name: str) -> int:
        """The only such process; waits until it is there."""
        return int(wait_for(lambda: self.pids(name), f"a process called {name}")[0])

    def wait_output(self, text: str, times: int = 1) -> None:
        """Wait until `text` was printed (stdout or stderr) at least so often."""

        def there() -> bool:
            return (self.stdout + self.stderr).count(text) >= times or self.process.poll() is not None

        wait_for(there, f"{text!r} in the output")
        if (self.stdout + self.stderr).count(text) < times:
            pytest.fail(f"the run ended without printing {text!r}\n{self.stdout}\n{self.stderr}")

    def journal(self) -> list[dict[str, Any]]:
        """The journal that an ended run left with its logs."""
        path = next((self.base / "logs").glob("*/journal.jsonl"))
        return [json.loads(line) for line in path.read_text().splitlines()]


def _pid(run_file: Path) -> int | None:
    try:
        return int(json.loads(run_file.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


class Ftrun:
    """Starts runs in a folder of their own; `script` writes a training script there."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.runs_root = base / "runs"
        self.runs_root.mkdir(mode=0o700)
        self.runs: list[Run] = []
        self.env = {**os.environ, "FTRUN_RUNS_ROOT": str(self.runs_root), "XDG_STATE_HOME": str(base / "state")}
        self.env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        self.env.pop("OMP_NUM_THREADS", None)

    def command(self, *args: object) -> list[str]:
        # what the installed `ftrun` does: the current directory is not on its import path
        code = "import sys; sys.path.pop(0); from ftrun.cli.main import main; main()"
        return [sys.executable, "-c", code, *map(str, args)]

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.base / name
        path.write_text(text)
        return path

    def start(self, *args: object, logs: bool = True, **env: str) -> Run:
        """Start `ftrun ARGS`; its output goes to files."""
        out, err = (self.base / f"{stream}-{len(self.runs)}" for stream in ("out", "err"))
        extra = ("--log-dir", self.base / "logs") if logs else ()
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                self.command(*extra, *args),
                cwd=self.base,
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
        run = Run(process, self.base, self.runs_root, out, err)
        self.runs.append(run)
        return run

    def call(
        self, *args: object, seconds: float = DEADLINE, folder: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `ftrun ARGS` (no log folder added) to its end, in `folder` instead of the runs' own if it is given."""
        return subprocess.run(
            self.command(*args),
            cwd=folder or self.base,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def clean_up(self) -> dict[int, str]:
        """End what a failed test left; gives what was there."""
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait()
        # an orphan that was killed may need a moment to go
        deadline = time.monotonic() + 3.0
        while (left := processes_of(self.runs_root)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return left


@pytest.fixture
def ftrun(tmp_path: Path) -> Iterator[Ftrun]:
    """A runner for real runs. Fails the test when a process of its runs is left."""
    runner = Ftrun(tmp_path)
    ended = True
    # the background of a shell ignores Ctrl-C, and so would everything that is started here
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield runner
        ended = all(run.process.poll() is not None for run in runner.runs)
    finally:
        signal.signal(signal.SIGINT, before)
        left = runner.clean_up()
    assert not left, f"processes left behind: {left}"
    assert ended, "the test left a run going"
