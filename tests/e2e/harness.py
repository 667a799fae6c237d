"""Run the reference script under torchrun, ftrun, and ftrun with faults; compare what the ranks wrote.

Nothing here knows how ftrun works: it looks at exit codes, at what the script wrote, and at the journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftrun.control.replay import replay
from tests.e2e import stock as plain

SCRIPTS = Path(__file__).resolve().parent / "scripts"
ROOT = SCRIPTS.parents[2]
REFERENCE = SCRIPTS / "reference.py"
RANKS = 4
TIMEOUT = 90.0
BY_TORCHRUN = os.environ.get("BY_TORCHRUN") == "1"  # what is compared with is torchrun's own run each time
_ABORTED = "terminate called without an active exception"

# what must be equal, the most telling first
COMPARED = (
    "batches",
    "losses",
    "weights",
    "optimizer",
    "buffers",
    "private",
    "schedule",
    "scaler",
    "rng_python",
    "rng_numpy",
    "rng_torch",
    "scores",
    "rng",
)


class StillRunning(AssertionError):
    """A run did not end in time, and was killed."""


def free_port() -> int:
    """A TCP port of this machine that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def tool(name: str) -> str:
    """A program installed beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


@dataclass
class Outcome:
    """A finished run. `ranks` holds what each rank wrote, None for a rank that wrote nothing."""

    code: int
    seconds: float
    output: str
    folder: Path
    ranks: list[dict[str, Any] | None]
    journal: list[dict[str, Any]] = field(default_factory=list)

    def need(self) -> list[dict[str, Any]]:
        """All ranks' results of a run that must have ended well."""
        assert self.code == 0, f"exit code {self.code}\n{self.tail()}"
        missing = [r for r, result in enumerate(self.ranks) if result is None]
        assert not missing, f"ranks {missing} wrote nothing\n{self.tail()}"
        return [r for r in self.ranks if r is not None]

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.output.splitlines()[-lines:])

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line["event"] for line in self.journal if line.get("event", {}).get("kind") == kind]

    def actions(self, kind: str) -> list[dict[str, Any]]:
        return [a for line in self.journal for a in line.get("actions", ()) if a.get("kind") == kind]

    def notes(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.journal if line.get("note") == what]


def fault(kind: str, rank: int, at: str, step: int | None = None, times: int = 1) -> str:
    """One entry of a plan."""
    where = "" if step is None else f"step = {step}\n"
    return f'[[fault]]\nkind = "{kind}"\nrank = {rank}\nat = "{at}"\n{where}times = {times}\n'


def kill(rank: int, at: str, step: int | None = None) -> str:
    return fault("kill", rank, at, step)


def environment(folder: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    dropped = ("FTRUN_", "PET_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    runs = folder / "runs"
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs.chmod(0o700)
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "FTRUN_RUNS_ROOT": str(runs),
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONWARNINGS": "ignore",
        **(extra or {}),
    }


def torchrun(folder: Path, arguments: Sequence[str], ranks: int = RANKS, env: dict[str, str] | None = None) -> Outcome:
    """The same script, stock torch, started by the command `torchrun`."""
    return _reference(folder, arguments, ranks, env, torchrun=True)


def stock(folder: Path, arguments: Sequence[str], ranks: int = RANKS) -> Outcome:
    """The same with forked workers and no agent: what everything is compared with."""
    return _reference(folder, arguments, ranks, None, torchrun=BY_TORCHRUN)


def _reference(folder: Path, arguments: Sequence[str], ranks: int, env: dict[str, str] | None, torchrun: bool) -> Outcome:
    words = [str(REFERENCE), "--backend", "gloo", "--out", str(folder / "out"), *arguments]
    return by_torch(folder, words, ranks, {"PYTHONPATH": str(ROOT), **(env or {})}, workers=ranks, torchrun=torchrun)


def by_torch(
    folder: Path,
    words: Sequence[str],
    ranks: int = RANKS,
    env: dict[str, str] | None = None,
    timeout: float = TIMEOUT,
    *,
    workers: int = RANKS,
    torchrun: bool = BY_TORCHRUN,
    enough: Callable[[Outcome], bool] = lambda _: False,
) -> Outcome:
    """A run of stock torch in a folder of its own: by `tests.e2e.stock`, or by `torchrun` itself.

    A failure of torchrun's run is no finding about ftrun: it is shown, and tried once more. Where a script ends right after a
    collective, a Gloo thread that gives up a tensor may find no interpreter, and abort the process: that is tried again five times,
    unless what was written until then is `enough`.

    Args:
        words: The script, or "-m" and a module, and its arguments.
        ranks: How many results are read.
    """
    if not torchrun:
        begun = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            code = plain.run(folder, workers, words, environment(folder, env), timeout)
        except TimeoutError:
            raise StillRunning(f"still running after {timeout:g} s\n{read(folder, 0, 0.0, 0).tail()}") from None
        return read(folder, code, time.monotonic() - begun, ranks)
    command = [tool("torchrun"), "--standalone", "--nproc-per-node", str(workers), *words]
    outcome = _finish(start(folder, command, env), ranks, timeout)
    for attempt in range(5):
        if not outcome.code or enough(outcome) or (attempt and _ABORTED not in outcome.output):
            break
        warnings.warn(f"the stock run ended with {outcome.code}, once more:\n{outcome.tail(4)}", stacklevel=2)
        shutil.rmtree(folder)
        outcome = _finish(start(folder, command, env), ranks, timeout)
    return outcome


def unhurried(arguments: Sequence[str]) -> tuple[str, ...]:
    """The same arguments of the reference script without --stretch: it only sleeps, and no result depends on it."""
    kept = list(arguments)
    if "--stretch" in kept:
        at = kept.index("--stretch")
        del kept[at : at + 2]
    return tuple(kept)


def ftrun(
    folder: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    *,
    ranks: int = RANKS,
    spares: int = 1,
    options: Sequence[str] = ("--max-replacements", "50"),
    env: dict[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Outcome:
    """The script under ftrun, with the faults of a plan if any."""
    command = ftrun_command(folder, arguments, faults, ranks=ranks, spares=spares, options=options)
    return _finish(start(folder, command, env), ranks, timeout)


def ftrun_command(
    folder: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    *,
    ranks: int = RANKS,
    spares: int = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """The command of a run of the reference script."""
    arguments = ["--out", str(folder / "out"), *arguments]
    return script_command(folder, REFERENCE, arguments, faults, ranks=ranks, spares=spares, options=options)


def script_command(
    folder: Path,
    script: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    *,
    ranks: int = RANKS,
    spares: int = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """The command of a run of any script, with the faults of a plan if any."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [tool("ftrun"), "--nproc-per-node", str(ranks), "--spares", str(spares), *options]
    if faults:
        plan = folder / "plan.toml"
        plan.write_text("seed = 1\n" + "".join(faults))
        command += ["--fault-plan", str(plan)]
    return [*command, str(script), *arguments]


@dataclass
class Running:
    """A started run: its process leads a group of its own, its output goes to a file."""

    process: subprocess.Popen[bytes]
    folder: Path
    begun: float

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def run_dir(self, timeout: float = 30.0) -> Path:
        """The run directory, once it is there."""
        deadline = time.monotonic() + timeout
        while True:
            found = [p.parent for p in (self.folder / "runs").glob("*/board") if not p.parent.name.startswith(".")]
            if found:
                return found[0]
            assert self.process.poll() is None, f"ended before it made a run directory\n{self.output}"
            assert time.monotonic() < deadline, f"no run directory\n{self.output}"
            time.sleep(0.01)

    def wait(self, timeout: float) -> int:
        """Exit code. A run that does not end within `timeout` is killed and fails the test."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            state = self.describe()
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            lines = "\n".join(self.output.splitlines()[-40:])
            raise StillRunning(f"still running after {timeout:.0f} s\n{state}\n{lines}") from None

    def describe(self) -> str:
        """The last lines of the live journal: where the run stands."""
        journals = sorted((self.folder / "runs").glob("*/journal.jsonl"))
        return "\n".join(journals[0].read_text().splitlines()[-12:]) if journals else "(no journal)"


def start(folder: Path, command: Sequence[str], env: dict[str, str] | None = None) -> Running:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(process, folder, time.monotonic())


def finish(running: Running, ranks: int = RANKS, timeout: float = TIMEOUT) -> Outcome:
    """Wait for the end and gather what was written."""
    return _finish(running, ranks, timeout)


def _finish(running: Running, ranks: int, timeout: float = TIMEOUT) -> Outcome:
    code = running.wait(timeout)
    check_journal(running.folder)
    return read(running.folder, code, time.monotonic() - running.begun, ranks)


def read(folder: Path, code: int, seconds: float, ranks: int = RANKS) -> Outcome:
    """What an ended run in `folder` left there."""
    results: list[dict[str, Any] | None] = []
    for rank in range(ranks):
        path = folder / "out" / f"rank-{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else None)
    output = (folder / "output.txt").read_text(errors="replace")
    return Outcome(code, seconds, output, folder, results, read_journal(folder))


def journal_lines(folder: Path) -> list[str]:
    found = sorted((folder / "ftrun-logs").glob("**/journal.jsonl"))
    return found[-1].read_text().splitlines() if found else []


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The copy of the journal that a run leaves in its log folder; empty under torchrun."""
    return [json.loads(line) for line in journal_lines(folder)]


def check_journal(folder: Path) -> None:
    """The machine was in charge: fed with the journal's events it orders what the journal says, and refuses none."""
    lines = journal_lines(folder)
    if lines:
        found = replay(lines)
        assert not found, "\n".join(["the journal does not replay:", *found[:8]])
        refused = [line for line in lines if '"note": "illegal"' in line]
        assert not refused, f"events that the machine refused: {refused[:4]}"


def differences(one: Outcome, other: Outcome, ignore: Sequence[str] = ()) -> list[str]:
    """Every compared value that is not equal, in words; the first is the first step that went apart if known."""
    found = []
    for rank, (a, b) in enumerate(zip(one.need(), other.need(), strict=True)):
        for key in COMPARED:
            if key not in ignore and a.get(key) != b.get(key):
                found.append(f"rank {rank}: {key}: {_first(a.get(key), b.get(key))}")
    return found


def _first(a: Any, b: Any) -> str:
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{len(a)} against {len(b)} entries"
        index = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        return f"first at step {index}: {a[index]} against {b[index]}"
    return f"{str(a)[:24]} against {str(b)[:24]}"


def same(one: Outcome, other: Outcome, ignore: Sequence[str] = ()) -> None:
    """Fail with the first differences and both ends of output."""
    found = differences(one, other, ignore)
    assert not found, "\n".join([*found[:12], "--- output", other.tail()])


def replaced_ranks(outcome: Outcome) -> set[int]:
    """Ranks that were held by more than one process."""
    published = outcome.actions("Publish")
    return {rank for action in published for rank in action["replaced"]}


def deaths(outcome: Outcome) -> list[dict[str, Any]]:
    """Deaths by SIGKILL of workers that had begun to train (a parked spare is killed when the run ends)."""
    late = {n["worker"]: n["code"] for n in outcome.notes("exit")}  # codes that came after the death was acted on

    def by_sigkill(event: dict[str, Any]) -> bool:
        return event["cause"] == "SIGKILL" or (event["cause"] == "died" and late.get(event["worker"]) == 128 + 9)

    return [e for e in outcome.events("Died") if by_sigkill(e) and e["step"] is not None]


def check_survivors(outcome: Outcome) -> None:
    """Ranks that were never replaced were held by one process from the first step to the last."""
    replaced = replaced_ranks(outcome)
    for rank, result in enumerate(outcome.need()):
        if rank not in replaced:
            assert [h["pid"] for h in result["history"]] == [result["pid"]], f"rank {rank} changed its process"


def strays(folder: Path) -> list[int]:
    """Live processes that belong to a run made in `folder` (they carry its FTRUN_RUNS_ROOT)."""
    return list(_with_variable(f"FTRUN_RUNS_ROOT={folder / 'runs'}".encode()))


def _with_variable(wanted: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def check_no_strays(folder: Path, timeout: float = 10.0) -> None:
    """Nothing of the run lives on: no process, no run directory."""
    deadline = time.monotonic() + timeout
    while (left := strays(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes left behind: {left}"
    runs = [p.name for p in (folder / "runs").iterdir()] if (folder / "runs").exists() else []
    assert not runs, f"run directories left behind: {runs}"
