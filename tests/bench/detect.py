"""From a fault to the moment when it is known: by its name in ftrun's journal, and by the launcher's first word of it.

    python tests/bench/detect.py [--rounds N] [--only KIND] [--results FOLDER]

The rank that strikes itself writes the fault's time just before. The first word is read in the same way from every
launcher: ftrun, torchrun, and NVRx's ft_launcher where it is installed. Under those two a fault ends the run, so each is a
run of its own, with a collective timeout far below the default: nothing else ends a frozen rank there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import runs, tables
from tests.e2e import harness

SCRIPT = Path(__file__).resolve().parent / "scripts" / "detect.py"
RANKS = 4
BEAT = 0.2  # seconds, ftrun's default --heartbeat-interval
FLOOR = 2.0  # --hang-floor of these runs; the default is 60 s
STEP = 0.05  # seconds
THEIR_TIMEOUT = 20.0  # seconds of a collective under the others; torch's default is 1800
THEIR_BEATS = 5  # seconds without a heartbeat that NVRx is told to take for a hang
OTHERS_SAY = re.compile(r"failed \(exitcode|closing signal|hung|heartbeat|terminat", re.IGNORECASE)
WE_SAY = re.compile(r"ftrun: .*\brank \d+")


@dataclass(frozen=True)
class Kind:
    """`fault`: what the journal calls it; `target`: milliseconds, None = no target beside what the run asked for."""

    name: str
    fault: str
    target: float | None
    words: str


KINDS = (
    Kind("exit", "exit", 5, "exit code"),
    Kind("signal", "signal", 5, "SIGKILL"),
    Kind("exception", "exception", 5, "exception in a body"),
    Kind("frozen", "frozen", 2e3 * BEAT, f"SIGSTOP, beats every {BEAT:g} s"),
    Kind("collective", "collective", 1e3 * max(1.0, 3 * STEP), "a collective left out"),
    Kind("nonfinite", "nonfinite", None, "NaN in the loss"),
    Kind("corrupt", "corrupt", None, "a flipped bit of a weight, replicas compared each step"),
    Kind("hang", "hang", None, f"busy Python, --hang-floor {FLOOR:g}"),
    Kind("gil", "gil", None, f"held GIL, --hang-floor {FLOOR:g}"),
)


def fired(folder: Path) -> list[int]:
    """When faults struck, ns."""
    path = folder / "out" / "fired"
    return [int(line.split()[2]) for line in path.read_text().splitlines()] if path.exists() else []


class Watched:
    """A launcher whose output is read line by line, with the moment of each line."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        (folder / "out").mkdir(parents=True)
        self.lines: list[tuple[int, str]] = []
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=harness.environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic_ns(), line))

    def said(self, after: int, words: re.Pattern[str]) -> int | None:
        """When the launcher first said something like `words` after that moment."""
        mine = (at for at, line in self.lines if at >= after and words.search(line) and not line.startswith("[rank"))
        return next(mine, None)

    def wait(self, seconds: float) -> int:
        """Exit code, when all output was read.

        Raises:
            TimeoutExpired
        """
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def end(self) -> None:
        """Kill everything: each leads a process of its own, and a stopped one hears nothing else."""
        for pid in {self.process.pid, *harness.strays(self.folder)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait(20)


def ours(folder: Path, kind: Kind, times: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each detection under ftrun: until the journal's event, and until the first word of it."""
    options = ["--nproc-per-node", str(RANKS), "--spares", "1", "--max-replacements", "99", "--check-every", "1"]
    options += ["--hang-floor", str(FLOOR), "--heartbeat-interval", str(BEAT)]
    arguments = ["--out", str(folder / "out"), "--kind", kind.name, "--times", str(times), "--step", str(STEP)]
    run = Watched(folder, [harness.tool("ftrun"), *options, str(SCRIPT), *arguments])
    try:
        assert run.wait(120 + 10 * times) == 0, "".join(line for _, line in run.lines[-40:])
    finally:
        run.end()
    events = [e for line in harness.read_journal(folder) if (e := line.get("event", {})).get("fault")]
    wrong = [e for e in events if e["fault"] != kind.fault]
    assert not wrong, f"{kind.name} was taken for {wrong}"
    struck = fired(folder)
    assert len(struck) == times, f"{len(struck)} of {times} faults struck"
    named = [min(e["t"] * 1e3 for e in events if e["t"] * 1e9 >= at) - at / 1e6 for at in struck]
    words = [((run.said(at, WE_SAY) or run.lines[-1][0]) - at) / 1e6 for at in struck]
    return named, words


def theirs(folder: Path, system: str, kind: str) -> float | None:
    """Milliseconds until another launcher says that a worker failed; None when it did not in time."""
    if system == "torchrun":
        launcher = [harness.tool("torchrun"), "--standalone"]
    else:
        port = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--ft-initial-rank-heartbeat-timeout=60"]
        launcher = [harness.tool("ft_launcher"), *port, f"--ft-rank-heartbeat-timeout={THEIR_BEATS}"]
    arguments = ["--out", str(folder / "out"), "--kind", kind, "--times", "1", "--step", str(STEP), "--backend", "gloo"]
    arguments += ["--timeout", str(THEIR_TIMEOUT), *(["--nvrx"] if system != "torchrun" else [])]
    run = Watched(folder, [*launcher, "--nproc-per-node", str(RANKS), str(SCRIPT), *arguments])
    deadline = time.monotonic() + THEIR_TIMEOUT + 60
    said = None
    while said is None and run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        said = run.said(fired(folder)[0], OTHERS_SAY) if fired(folder) else None
    run.end()
    said = said or (run.said(fired(folder)[0], OTHERS_SAY) if fired(folder) else None)
    return None if said is None else (said - fired(folder)[0]) / 1e6


def by_memory(folder: Path, megabytes: int, times: int) -> list[float]:
    """Milliseconds from a kill from outside to the launcher's record of it, by the victim's resident memory."""
    run = runs.measure("ftrun", folder, [1] * times, ranks=2, size="small", ballast=megabytes)
    return [k.parts["detect"] for k in run.kills if k.parts]


def main() -> int:
    parser = tables.arguments("Measure how soon faults are detected.")
    parser.add_argument("--only", choices=[k.name for k in KINDS], help="one kind, and only ftrun")
    args = parser.parse_args()
    times = args.rounds or 12
    # run directories are in shared memory unless somebody moves them, as the harness does
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    others = ["torchrun", *(["ft_launcher"] if Path(harness.tool("ft_launcher")).exists() else [])]
    rows = []
    try:
        for kind in KINDS:
            if args.only not in (None, kind.name):
                continue
            named, words = ours(root / kind.name, kind, times)
            cells = [tables.figure(named), tables.figure(words)]
            for system in others:
                asked = args.only is None and kind.name in ("signal", "frozen")
                found = (
                    [theirs(root / f"{system}-{kind.name}-{n}", system, kind.name) for n in range(times)]
                    if asked
                    else []
                )
                values = [value for value in found if value is not None]
                missed = f", not in time: {len(found) - len(values)}" if len(values) < len(found) else ""
                cells.append((tables.figure(values) if values else "") + missed)
            target = "" if kind.target is None else f"{kind.target:.0f} ms"
            rows.append([f"`{kind.fault}`", kind.words, cells[0], target, *cells[1:]])
            print("  " + ", ".join(rows[-1]), flush=True)
        for megabytes in () if args.only else (100, 1000):
            values = by_memory(root / f"memory-{megabytes}", megabytes, times)
            more = ["", tables.figure(values), "", "", *("" for _ in others)]
            rows.append(["`signal`", f"SIGKILL from outside, {megabytes} MB resident, 2 ranks", *more[1:]])
    finally:
        shutil.rmtree(root)
    notes = (
        f"{RANKS} ranks, steps of about {STEP * 1e3:.0f} ms, the struck rank writes the time just before. Journal: until the event "
        "with the fault's name. First word: until a line of the launcher's says that something happened to a rank, read in the same "
        f"way from every launcher. torchrun{' and ft_launcher' if others[1:] else ''}: "
        f"collective timeout {THEIR_TIMEOUT:g} s instead of 1800, a run for each fault."
    )
    head = ["found as", "fault", "journal", "target", "first word", *(f"{name}, first word" for name in others)]
    if args.only is None:
        tables.write(args.results, "detection", "From a fault to its detection", head, rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
