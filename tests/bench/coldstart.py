"""From the command line to the end of a script that does next to nothing: ftrun beside torchrun.

    python tests/bench/coldstart.py [--rounds N] [--results FOLDER]

For 1, 2, 4 and 8 ranks, a script that does nothing and one that trains a small DDP model for three steps. Wall: from
exec to the launcher's end. CPU: user and system seconds of the launcher and of every process that it waited for. Memory:
proportional set size of all processes together while every rank waits at its end, in a run of its own. Systems take
turns; medians. ftrun runs with its default of one spare, whose cost is in every figure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import tables
from tests.bench.memory import descendants, memory
from tests.bench.runs import SCRIPTS
from tests.e2e import harness

SYSTEMS = ("ftrun", "torchrun")
# kind of script -> rounds; a start that takes half a second needs more of them
ROUNDS = {"noop": 11, "ddp": 5}
SCRIPT = {"noop": "nothing", "ddp": "DDP, three steps"}
RANKS = (1, 2, 4, 8)


def command(system: str, ranks: int, kind: str, out: Path) -> list[str]:
    own = [] if system == "ftrun" else ["--standalone"]
    script = [str(SCRIPTS / f"start_{kind}.py"), str(out)]
    return [harness.tool(system), *own, "--nproc-per-node", str(ranks), *script]


def launch(system: str, ranks: int, kind: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            command(system, ranks, kind, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=harness.environment(folder),
        )


def timed(system: str, ranks: int, kind: str, root: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    folder = Path(tempfile.mkdtemp(dir=root))
    begun = time.monotonic()
    process = launch(system, ranks, kind, folder)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (folder / "output").read_text()[-3000:]
    return wall, usage.ru_utime + usage.ru_stime


def held(system: str, ranks: int, kind: str, root: Path) -> float:
    """MB of all processes together while every rank waits."""
    folder = Path(tempfile.mkdtemp(dir=root))
    (folder / "hold").touch()
    process = launch(system, ranks, kind, folder)
    deadline = time.monotonic() + 60
    while not all((folder / f"here-{r}").exists() for r in range(ranks)):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()[-3000:]
        time.sleep(0.01)
    total = 0.0
    for pid in (process.pid, *descendants(process.pid)):
        try:
            total += memory(pid).proportional
        except OSError:
            continue  # a process that just ended, such as a spare that came too late
    (folder / "hold").unlink()
    assert process.wait(60) == 0, (folder / "output").read_text()[-3000:]
    return total


def measure(root: Path, kind: str, size: int, rounds: int) -> list[str]:
    """A row of the table."""
    found: dict[str, list[tuple[float, float]]] = {s: [] for s in SYSTEMS}
    for _ in range(rounds):
        for system in SYSTEMS:
            found[system].append(timed(system, size, kind, root))
    cells = [tables.figure([one[part] for one in found[s]], "s") for part in (0, 1) for s in SYSTEMS]
    return [SCRIPT[kind], str(size), *cells, *(f"{held(s, size, kind, root):.0f} MB" for s in SYSTEMS)]


def main() -> int:
    args = tables.arguments("Measure how ftrun starts beside torchrun.").parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    rows = []
    for kind, rounds in ROUNDS.items():
        for ranks in RANKS:
            rows.append(measure(root, kind, ranks, args.rounds or rounds))
            print("  " + ", ".join(rows[-1]), flush=True)
    shutil.rmtree(root)
    notes = (
        "From exec of the launcher to its end; systems take turns. Processor time: of the launcher and all that it waited for. Memory: "
        "of all processes together, shared pages counted once, while every rank waits at its end. ftrun has its one spare."
    )
    head = ["script", "ranks", "ftrun", "torchrun", "ftrun, CPU", "torchrun, CPU", "ftrun, memory", "torchrun, memory"]
    tables.write(args.results, "coldstart", "From the command line to the end of a short script", head, rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
