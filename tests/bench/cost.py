"""What ftrun costs per step: whole runs under ftrun and under torchrun take turns, on the same script without a fault.

    python tests/bench/cost.py [--rounds N] [--steps N] [--before PROGRAM] [--results FOLDER]

Wall clock and processor time of STEPS steps after WARM first ones, every check that ftrun makes included (replicas are
compared in every 100th step). Processor time: of all ranks, and of the launcher and every process beside them. Each round
is one pair of runs, so the cost of a round is of neighbours in time. ftrun has its defaults: one spare, all detectors.
`--before`: the ftrun of another commit, in an environment of its own; it takes turns with the two, and has a table of its own.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import runs, tables
from tests.bench.memory import descendants
from tests.e2e import harness

RANKS = 4
WARM = 20  # steps before the count begins: buckets are rebuilt, compilers and caches are filled
# what trains -> arguments of scripts/train.py
MODELS = {
    "GPT of 10.6 M parameters": ["--size", "10m"],
    "GPT of 0.1 M parameters": ["--size", "small", "--batch", "12", "--context", "64"],
}


@dataclass(frozen=True)
class Cost:
    """Milliseconds a step of one run; `ranks` and `others` are processor time."""

    wall: float
    ranks: float
    others: float

    @property
    def cpu(self) -> float:
        return self.ranks + self.others


@dataclass(frozen=True)
class System:
    """What takes its turn with the others: `name` heads its column.

    `program`: the ftrun of another commit. `env`: a switch that only tests know.
    """

    name: str
    launcher: str
    program: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


FTRUN, TORCHRUN = System("ftrun", "ftrun"), System("torchrun", "torchrun")


def one(system: System, folder: Path, arguments: Sequence[str], steps: int) -> Cost:
    """Run the script to its end; count from the end of step WARM - 1."""
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "hold").touch()  # at the end the processes wait to be read
    last = WARM + steps - 1
    words = ["--system", system.launcher, "--steps", str(last + 1), "--checkpoint-every", "0", *arguments]
    command = runs.command(system.launcher, folder, "train.py", words, RANKS, 0)
    running = harness.start(folder, [system.program or command[0], *command[1:]], dict(system.env))

    def others() -> float:
        workers = {done[0].pid for rank in range(RANKS) if (done := runs.read_times(folder, rank))}
        return sum(_cpu(pid) for pid in {running.process.pid, *descendants(running.process.pid)} - workers)

    def reached(step: int) -> bool:
        done = runs.read_times(folder, 0)
        return bool(done) and done[-1].step >= step

    runs.wait_for(running, "the first steps", lambda: reached(WARM - 1))
    before = others()
    runs.wait_for(running, "the last step", lambda: reached(last), 600)
    after = others()
    (folder / "out" / "hold").unlink()
    assert running.wait(60) == 0, running.output[-3000:]
    assert "only a host snapshot helps" not in running.output, running.output[-3000:]  # it has left out what costs
    walls, cpus = [], []
    for rank in range(RANKS):
        done = {d.step: d for d in runs.read_times(folder, rank)}
        walls.append((done[last].ns - done[WARM - 1].ns) / 1e6 / steps)
        cpus.append((done[last].cpu_ns - done[WARM - 1].cpu_ns) / 1e6 / steps)
    shutil.rmtree(folder)
    return Cost(statistics.mean(walls), sum(cpus), (after - before) * 1e3 / steps)


def _cpu(pid: int) -> float:
    """Seconds of processor time of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(
    model: str, arguments: Sequence[str], systems: Sequence[System], rounds: int, steps: int, root: Path
) -> dict[str, list[Cost]]:
    """The costs of each system's runs; in every other round they take turns in the other direction."""
    found: dict[str, list[Cost]] = {system.name: [] for system in systems}
    for number in range(rounds):
        for system in systems[:: 1 if number % 2 else -1]:
            cost = one(system, root / f"{systems.index(system)}-{number}", arguments, steps)
            found[system.name].append(cost)
            print(f"  {model}, round {number}, {system.name}: {cost}", flush=True)
    return found


def more(one: Sequence[float], other: Sequence[float]) -> str:
    """By how much the runs of one system cost more than their neighbours of another."""
    return tables.figure([100 * (a / b - 1) for a, b in zip(one, other, strict=True)], "%")


def parts(found: Mapping[str, list[Cost]], part: str) -> dict[str, list[float]]:
    """`wall`, `cpu` or `others` of all runs."""
    return {name: [float(getattr(cost, part)) for cost in costs] for name, costs in found.items()}


WHAT = (("wall clock", "wall"), ("processor time, all processes", "cpu"))
BESIDE = "of that, processes beside the ranks"


def main() -> int:
    parser = tables.arguments("Measure what a step costs under ftrun and under torchrun.")
    parser.add_argument("--steps", type=int, default=300, help="steps that are counted in each run")
    parser.add_argument("--before", metavar="PROGRAM", help="the ftrun of another commit, to be measured as well")
    args = parser.parse_args()
    lines = []
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    before = [System("before", "ftrun", os.path.abspath(args.before))] if args.before else []
    systems = [FTRUN, *before, TORCHRUN]
    for model, arguments in MODELS.items():
        found = compare(model, arguments, systems, args.rounds or 5, args.steps, root)
        for what, part in WHAT:
            values = parts(found, part)
            extra = [more(values[system.name], values[TORCHRUN.name]) for system in systems[:-1]]
            lines.append([model, what, *map(tables.figure, values.values()), *extra])
        beside = [tables.figure(values) for values in parts(found, "others").values()]
        lines.append([model, BESIDE, *beside, *[""] * (len(systems) - 1)])
    shutil.rmtree(root)
    head = ["model", "a step", *(system.name for system in systems), "cost", *(["cost before"] if args.before else [])]
    name = "step_cost_before_after" if args.before else "step_cost"
    tables.write(args.results, name, "Cost of a protected step", head, lines, notes(args.steps))
    return 0


def notes(steps: int) -> str:
    """What was measured, from where to where."""
    return (
        f"Whole runs of {steps} steps after {WARM}, {RANKS} ranks, one run of each system in turn, no fault, no checkpoint; "
        "medians of runs, with the smallest and the largest. Cost: of each pair of neighbouring runs."
    )


if __name__ == "__main__":
    sys.exit(main())
