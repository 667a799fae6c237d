"""From the command line to the end of a script that does next to nothing: ftrun beside torchrun.

    python tests/bench/coldstart.py [--quick] [--json FILE]

For 1, 2, 4 and 8 ranks, a script that does nothing and one that trains a small DDP model for three steps. Wall: from
exec to the launcher's end. CPU: user and system seconds of the launcher and of every process that it waited for. Memory:
proportional set size of all processes together while every rank waits at its end, in a run of its own. Systems take
turns; medians. ftrun runs with its default of one spare, whose cost is in every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.memory import descendants, memory
from tests.bench.runs import SCRIPTS
from tests.e2e import harness

SYSTEMS = ("ftrun", "torchrun")
# kind of script -> rounds; a start that takes half a second needs more of them
ROUNDS = {"noop": 11, "ddp": 5}
QUICK = {"noop": 1, "ddp": 1}


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


def growth(figures: dict[int, float]) -> float:
    """Least-squares slope: how much each further rank adds."""
    count, total = len(figures), sum(figures)
    mean_x, mean_y = total / count, sum(figures.values()) / count
    return sum((x - mean_x) * (y - mean_y) for x, y in figures.items()) / sum((x - mean_x) ** 2 for x in figures)


def measure(root: Path, ranks: Sequence[int], rounds_of: dict[str, int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind, rounds in rounds_of.items():
        for size in ranks:
            walls: dict[str, list[float]] = {s: [] for s in SYSTEMS}
            cpus: dict[str, list[float]] = {s: [] for s in SYSTEMS}
            for _ in range(rounds):
                for system in SYSTEMS:
                    wall, cpu = timed(system, size, kind, root)
                    walls[system].append(wall)
                    cpus[system].append(cpu)
            for system in SYSTEMS:
                results.setdefault(kind, {}).setdefault(system, {})[size] = {
                    "wall_s": statistics.median(walls[system]),
                    "cpu_s": statistics.median(cpus[system]),
                    "memory_mb": held(system, size, kind, root),
                }
            ours, theirs = (results[kind][s][size] for s in SYSTEMS)
            print(
                f"  {kind} {size} ranks: wall {ours['wall_s']:.2f} s, torchrun {theirs['wall_s']:.2f} s "
                f"({theirs['wall_s'] / ours['wall_s']:.1f} times faster); CPU {ours['cpu_s']:.2f} s, {theirs['cpu_s']:.2f} s; "
                f"memory {ours['memory_mb']:.0f} MB, {theirs['memory_mb']:.0f} MB",
                flush=True,
            )
        slopes = {s: growth({n: e["cpu_s"] for n, e in results[kind][s].items()}) for s in SYSTEMS}
        results[kind]["cpu_s_per_rank"] = slopes
        part = slopes["ftrun"] / slopes["torchrun"]
        print(
            f"  {kind}: each further rank adds {slopes['ftrun']:.2f} CPU s, torchrun {slopes['torchrun']:.2f} "
            f"({part:.2f} of it)",
            flush=True,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how ftrun starts beside torchrun.")
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    print(f"cold start, {os.cpu_count()} cores")
    results = measure(root, (1, 2) if args.quick else (1, 2, 4, 8), QUICK if args.quick else ROUNDS)
    shutil.rmtree(root)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
