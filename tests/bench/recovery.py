"""What a SIGKILL costs: ftrun against torchrun, and as a function of the length of a step.

    python tests/bench/recovery.py [--rounds N] [--only stall|steps] [--results FOLDER]

Stall: from just before kill(2), on the killer's clock, to the moment when the slowest rank has finished the first step that
nobody finished before. That step counts as this run's median step; "rest" is the stall without it. Lost: how much later a
later step ended than at the run's usual pace, measured so far behind that the new spare has started too.
torchrun runs with a fresh store for each restart (without it most of its restarts fail here) and a checkpoint every 10
steps; kills come 5 steps after one. Runs of both systems take turns.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import runs, tables

RANKS = 4
KILLS = 4  # of one run
ORDERS = {"early": "model built above the line where the rank is read", "late": "`LOCAL_RANK` read first"}
# model, and seconds that a step takes until its backward pass begins
STEPS = (("small", 0.045), ("10m", 0.1), ("10m", 0.4), ("10m", 0.9))
SIZES = {"small": "0.1 M", "10m": "10.6 M"}  # parameters
SPARE = 6.0  # seconds in which a new spare has started for sure


def stalls(root: Path, rounds: int) -> tuple[list[list[str]], list[list[str]]]:
    """Both systems and both orders of a script: a row for each order and quantity; and one for each stage of a repair."""
    found: dict[tuple[str, str], list[runs.Run]] = {}
    for number in range(rounds):
        for order in ORDERS:
            for system in ("ftrun", "torchrun"):
                victims = [(1 + number + k) % RANKS for k in range(KILLS)]
                run = runs.measure(system, root / "run", victims, ranks=RANKS, order=order)
                found.setdefault((system, order), []).append(run)
                print(f"  {system} {order} round {number}: stalls {[round(k.stall) for k in run.kills]} ms", flush=True)
                shutil.rmtree(root / "run")
    rows, stages = [], []
    for order, words in ORDERS.items():
        ours, theirs = found["ftrun", order], found["torchrun", order]
        for what, values in (
            ("SIGKILL to the end of the first new step", lambda r: [k.stall for k in r.kills]),
            ("of that, without the step that is done again", lambda r: [k.stall - r.step for k in r.kills]),
            ("finished steps lost", lambda r: [float(k.again) for k in r.kills]),
            ("a step, undisturbed", lambda r: [r.step]),
            ("command line to the end of the first step", lambda r: [r.cold_start]),
        ):
            unit = "steps" if what.endswith("lost") else "ms"
            both = [[v for run in these for v in values(run)] for these in (ours, theirs)]
            rows.append([words, what, *(tables.figure(b, unit) for b in both)])
        for part in ("detect", "stop", "clean", "reset", "restore"):
            measured = [k.parts[part] for run in ours for k in run.kills if part in k.parts]
            stages.append([words, part, tables.figure(measured)])
    return rows, stages


def by_step(root: Path, rounds: int) -> list[list[str]]:
    """No more ranks than cores: a row for each length of a step and number of spares."""
    ranks = min(RANKS, len(os.sched_getaffinity(0)))
    found: dict[tuple[str, float, int], list[runs.Run]] = {}
    for number in range(rounds):
        for size, fill in STEPS:
            for spares in (1, 0):
                victims = [(number + k) % ranks for k in range(KILLS)]
                apart = max(20, round(SPARE / fill) + 4)
                run = runs.measure(
                    "ftrun", root / "run", victims, ranks=ranks, size=size, fill=fill, spares=spares, apart=apart
                )
                found.setdefault((size, fill, spares), []).append(run)
                print(f"  {fill} s, spares {spares}: {[round(k.stall) for k in run.kills]} ms", flush=True)
                shutil.rmtree(root / "run")
    rows = []
    for (size, _, spares), these in found.items():
        rows.append(
            [
                SIZES[size],
                tables.figure([run.step for run in these]),
                str(spares),
                tables.figure([k.stall for run in these for k in run.kills]),
                tables.figure([k.stall - run.step for run in these for k in run.kills]),
                tables.figure([k.lost for run in these for k in run.kills]),
            ]
        )
    return rows


def main() -> int:
    parser = tables.arguments("Measure what a killed rank costs.")
    parser.add_argument("--only", choices=["stall", "steps"], help="one of the two tables")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    if args.only != "steps":
        rows, stages = stalls(root, args.rounds or 4)
        notes = (
            f"{RANKS} ranks, GPT of 10.6 M parameters, Adam, --spares 1, {KILLS} kills a run in the middle of a step, 5 steps after a "
            "checkpoint of torchrun's. From just before the kill, on the killer's clock, to the slowest rank's end of the first step "
            "that nobody had finished; what a run does 'undisturbed' is its median step."
        )
        head = ["script", "what", "ftrun", "torchrun"]
        tables.write(args.results, "stall", "A killed rank: ftrun and torchrun", head, rows, notes)
        notes = "The same kills, by ftrun's journal; each stage ends with its slowest rank. What is left is the step done again."
        tables.write(
            args.results, "stages", "A killed rank: stages of the repair", ["script", "stage", "ftrun"], stages, notes
        )
    if args.only != "stall":
        rows = by_step(root, args.rounds or 3)
        notes = (
            "ftrun, as many ranks as there are cores (at most 4), GPT; a step is lengthened by work of the "
            "processor. Rest: the stall without the step that is done again. Lost: how much later the run is after the incident, "
            f"when the new spare has started too (about {SPARE:g} s after the kill), than at its usual pace."
        )
        head = ["parameters", "a step", "`--spares`", "stall", "rest", "lost by an incident"]
        title = "A killed rank: by the length of a step"
        tables.write(args.results, "stall_by_step", title, head, rows, notes)
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
