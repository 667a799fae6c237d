"""What ftrun costs per step: whole runs under ftrun and under torchrun take turns, on the same script without a fault.

    python tests/bench/cost.py [--rows a,b,...] [--pairs N] [--quick] [--before PROGRAM] [--results FOLDER]
    python tests/bench/cost.py --parts [--pairs N] [--results FOLDER]     where the time of a step goes (step_parts.py)

Each row is a script and a number of ranks; a pair is one run of each program, neighbours in time, in a fresh process each. The cost is
that of each pair. ftrun has its defaults: one spare, all detectors, replicas compared in every 100th step. Processor time: of all ranks,
and of the launcher and every process beside them.
`--before`: the ftrun of another commit, in an environment of its own; it takes turns with the two, and has lines of its own.
`--rows`: only these are measured; without `--results` nothing is written then, as the table in results/ has all rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import injected
from tests.bench import runs, step_parts, tables
from tests.bench.memory import descendants
from tests.e2e import harness

PAIRS = 5


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
    """What takes its turn with the others. `program`: the ftrun of another commit. `env`: what is left out of it."""

    name: str
    launcher: str
    program: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, hash=False)


FTRUN, TORCHRUN = System("ftrun", "ftrun"), System("torchrun", "torchrun")
# without what is kept at a gate of a shard that no other rank holds (repair/update_region.py)
UNSEALED = System("gradients not sealed", "ftrun", env=injected.env(without="sealed"))


NOT_KEPT = System("variables not kept", "ftrun", env={"BENCH_VARIABLES": "off"})


@dataclass(frozen=True)
class Load:
    """What is run. `warm`: steps before the count begins, some seconds: caches are filled, the spare is ready.

    `steps` are counted, `middle`: by their median, not by their mean. `wall`, `cpu`: the goals, times torchrun's; of row f µs.
    """

    row: str
    name: str
    ranks: int
    script: str
    arguments: tuple[str, ...]
    warm: int
    steps: int
    middle: bool = False
    wall: float | None = None
    cpu: float | None = None
    more: tuple[System, ...] = ()


GPT = "GPT of 10.6 M parameters"
FEW, MANY = 8, 200  # tensors
FIXED_GOAL, TENSOR_GOAL = 150.0, 1.0  # µs
VALUES = (
    ("10 numbers that the loop changes", ("--values", "10"), 100.0),  # µs
    ("100 numbers that the loop changes", ("--values", "100"), None),
    ("1,000 numbers that the loop changes", ("--values", "1000"), None),
    ("a list of 1,000 entries that grows", ("--history", "1000"), None),
    ("a list of 1,000,000 entries that grows", ("--history", "1000000"), None),
)
LOADS = (
    Load("a", f"1 rank, {FEW} tiny tensors", 1, "many_tensors.py", ("--tensors", str(FEW)), 3000, 2000, middle=True),
    Load("a", f"1 rank, {MANY} tiny tensors", 1, "many_tensors.py", ("--tensors", str(MANY)), 1000, 2000, middle=True),
    Load("b", f"2 ranks, {GPT}, 512 tokens", 2, "train.py", ("--batch", "8", "--context", "64"), 6, 100, wall=1.01, cpu=1.01),
    Load("c", "2 ranks, GPT of 0.1 M parameters", 2, "train.py",
         ("--size", "small", "--batch", "12", "--context", "64"), 150, 300, wall=1.02),
    Load("d", f"4 ranks on 2 cores, {GPT}, 16 tokens", 4, "train.py", (), 20, 100, wall=1.04),
    Load("e", f"FSDP2, 2 ranks, {GPT}, 16 tokens", 2, "train.py", ("--layout", "fsdp2"), 20, 50, wall=1.03, more=(UNSEALED,)),
    Load("e", f"HSDP, 2 replicas of 1 shard, {GPT}, 16 tokens", 2, "train.py", ("--layout", "hsdp"), 20, 100, wall=1.03),
    *(Load("f", f"1 rank, {what}", 1, "many_tensors.py", arguments, 3000, 2000, middle=True, wall=goal, more=(NOT_KEPT,))
      for what, arguments, goal in VALUES),
)  # fmt: skip
ROWS = sorted({load.row for load in LOADS})
WALL, CPU, BESIDE = "wall clock", "processor time, all processes", "of that, processes beside the ranks"


# -- one run -------------------------------------------------------------------------------------------------------------


def one(system: System, load: Load, folder: Path) -> Cost:
    """Run the script to its end; count from the end of the last warm step."""
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "hold").touch()  # at the end the processes wait to be read
    first, last = load.warm - 1, load.warm + load.steps - 1
    words = ["--system", system.launcher, "--steps", str(last + 1), *load.arguments]
    if load.script == "train.py":
        words += ["--checkpoint-every", "0"]
    command = runs.command(system.launcher, folder, load.script, words, load.ranks, 0)
    running = harness.start(folder, [system.program or command[0], *command[1:]], dict(system.env))

    def others() -> float:
        workers = {done[0].pid for rank in range(load.ranks) if (done := runs.read_times(folder, rank))}
        return sum(_cpu(pid) for pid in {running.process.pid, *descendants(running.process.pid)} - workers)

    runs.wait_for(running, "the first steps", lambda: runs.last_step(folder, 0) >= first)
    before = others()
    runs.wait_for(running, "the last step", lambda: runs.last_step(folder, 0) >= last, 600)
    after = others()
    (folder / "out" / "hold").unlink()
    assert running.wait(60) == 0, running.output[-3000:]
    assert "only a host snapshot helps" not in running.output, running.output[-3000:]  # it has left out what costs
    cost = count([runs.read_times(folder, rank) for rank in range(load.ranks)], load, (after - before) * 1e3)
    shutil.rmtree(folder)
    return cost


def count(ranks: Sequence[Sequence[runs.Done]], load: Load, beside: float) -> Cost:
    """The cost of a run, from the steps that each rank finished. `beside`: ms of processor time of all other processes."""
    walls, cpu = [], 0.0
    for mine in ranks:
        done = [d for d in mine if load.warm - 1 <= d.step < load.warm + load.steps]
        assert len(done) == load.steps + 1, f"{len(done) - 1} steps in place of {load.steps}"
        each = [(b.ns - a.ns) / 1e6 for a, b in pairwise(done)]
        walls.append(statistics.median(each) if load.middle else statistics.mean(each))
        cpu += (done[-1].cpu_ns - done[0].cpu_ns) / 1e6
    return Cost(statistics.mean(walls), cpu / load.steps, beside / load.steps)


def _cpu(pid: int) -> float:
    """Seconds of processor time of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Found = dict[str, list[Cost]]  # name of a system -> costs of its runs; those at one place are neighbours in time


def compare(load: Load, systems: Sequence[System], pairs: int, root: Path) -> Found:
    """The costs of each system's runs; in every other round they take turns in the other direction."""
    found: Found = {system.name: [] for system in systems}
    for number in range(pairs):
        for system in systems[:: 1 if number % 2 else -1]:
            cost = one(system, load, root / f"{systems.index(system)}-{number}")
            found[system.name].append(cost)
            print(f"  {load.row}: {load.name}, pair {number}, {system.name}: {cost}", flush=True)
    return found


# -- the table -----------------------------------------------------------------------------------------------------------

HEAD = ["run", "a step", "ftrun", "torchrun", "cost", "goal", "reached"]


def table(found: Mapping[Load, Found]) -> list[list[str]]:
    """The lines of all that was measured."""
    lines = [line for load, costs in found.items() if not load.middle for line in _compared(load, costs)]
    tiny = {load.name: (load, costs) for load, costs in found.items() if load.row == "a"}
    kept = [_kept(load, costs) for load, costs in found.items() if load.row == "f"]
    return [*(_overhead(*tiny.values()) if tiny else []), *lines, *kept]


def _kept(load: Load, found: Found) -> list[str]:
    """Microseconds more than where the same values are not kept."""
    ours, without, theirs = (found[system.name] for system in (FTRUN, NOT_KEPT, TORCHRUN))
    more = [(a.wall - b.wall) * 1e3 for a, b in zip(ours, without, strict=True)]
    of_goal = [f"{load.wall:g} µs more than not kept", reached(more, load.wall)] if load.wall else ["", ""]
    cells = [_micro([cost.wall for cost in costs]) for costs in (ours, theirs)]
    return [_named(load, FTRUN.name), WALL, *cells, f"{tables.figure(more, 'µs')} more than not kept", *of_goal]


def reached(values: Sequence[float], goal: float) -> str:
    """Is the median within the goal, or are at least some of the pairs?"""
    if statistics.median(values) <= goal:
        return "yes"
    return "no, but within the spread" if min(values) <= goal else "no"


def _compared(load: Load, found: Found) -> list[list[str]]:
    """Times torchrun's, for each of the others."""
    lines = []
    theirs = found[TORCHRUN.name]
    for name, ours in found.items():
        if name == TORCHRUN.name:
            continue
        run = _named(load, name)
        for what, part, goal in ((WALL, _wall, load.wall), (CPU, _all, load.cpu)):
            times = [part(a) / part(b) for a, b in zip(ours, theirs, strict=True)]
            cells = [tables.figure([part(cost) for cost in costs]) for costs in (ours, theirs)]
            of_goal = [f"{goal} times", reached(times, goal)] if goal and name == FTRUN.name else ["", ""]
            lines.append([run, what, *cells, tables.figure(times, "times", 3), *of_goal])
        cells = [tables.figure([cost.others for cost in costs]) for costs in (ours, theirs)]
        lines.append([run, BESIDE, *cells, "", "", ""])
    return lines


def _overhead(few: tuple[Load, Found], many: tuple[Load, Found]) -> list[list[str]]:
    """Microseconds more than torchrun's, and what of it is fixed and what each tensor's."""
    lines = []
    for load, found in (few, many):
        for name, ours in found.items():
            if name != TORCHRUN.name:
                for what, part in ((WALL, _wall), (CPU, _all), (BESIDE, _others)):
                    cells = [_micro([part(cost) for cost in costs]) for costs in (ours, found[TORCHRUN.name])]
                    lines.append([_named(load, name), what, *cells, _micro(_more(found, name, part)), "", ""])
    for name in few[1]:
        if name != TORCHRUN.name:
            both = list(zip(_more(few[1], name, _wall), _more(many[1], name, _wall), strict=True))
            tensor = [(more - less) / (MANY - FEW) for less, more in both]
            fixed = [less - FEW * each for (less, _), each in zip(both, tensor, strict=True)]
            for what, values, goal in ((FIXED, fixed, FIXED_GOAL), (TENSOR, tensor, TENSOR_GOAL)):
                of_goal = [f"{goal:g} µs", reached([v * 1e3 for v in values], goal)] if name == FTRUN.name else ["", ""]
                run = what if name == FTRUN.name else f"{what}; {name}"
                lines.append([f"a: {run}", WALL, "", "", _micro(values), *of_goal])
    return lines


FIXED, TENSOR = "1 rank, of that fixed", "1 rank, of that for each tensor"
Part = Callable[[Cost], float]


def _wall(cost: Cost) -> float:
    return cost.wall


def _all(cost: Cost) -> float:
    return cost.cpu


def _others(cost: Cost) -> float:
    return cost.others


def _more(found: Found, name: str, part: Part) -> list[float]:
    """ms a step by which the runs of one system cost more than their neighbours of torchrun."""
    return [part(a) - part(b) for a, b in zip(found[name], found[TORCHRUN.name], strict=True)]


def _micro(values: Sequence[float]) -> str:
    return tables.figure([value * 1e3 for value in values], "µs")


def _named(load: Load, system: str) -> str:
    return f"{load.row}: {load.name}" + (f"; {system}" if system != FTRUN.name else "")


# -- the command ---------------------------------------------------------------------------------------------------------


def chosen(words: str) -> list[str]:
    """Rows named on the command line.

    Raises:
        Argparse's.
    """
    rows = [word.strip() for word in words.split(",")]
    if unknown := sorted({*rows} - {*ROWS}):
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return rows


def place(results: Path | None, rows: Sequence[str]) -> Path | None:
    """Where the table goes: some rows alone are not written over all of them."""
    return results or (tables.RESULTS if set(rows) == set(ROWS) else None)


def main() -> int:
    parser = tables.arguments("Measure what a step costs under ftrun and under torchrun.", "--pairs")
    parser.set_defaults(results=None)
    parser.add_argument("--rows", type=chosen, default=ROWS, metavar="A,B", help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--before", metavar="PROGRAM", help="the ftrun of another commit, to be measured as well")
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    parser.add_argument("--parts", action="store_true", help="where the time of a step goes, in place of all else")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    if args.parts:
        step_parts.measure(args.rounds or 3, root, args.results)
        shutil.rmtree(root)
        return 0
    before = [System("before", "ftrun", os.path.abspath(args.before))] if args.before else []
    loads = [load for load in LOADS if load.row in args.rows]
    if args.quick:
        loads = [replace(load, warm=max(6, load.warm // 5), steps=load.steps // 5) for load in loads]
    found = {load: compare(load, [FTRUN, *before, *load.more, TORCHRUN], args.rounds or PAIRS, root) for load in loads}
    shutil.rmtree(root)
    name = "step_cost_before_after" if args.before else "step_cost"
    tables.write(place(args.results, args.rows), name, "Cost of a protected step", HEAD, table(found), notes(loads))
    return 0


def notes(loads: Sequence[Load]) -> str:
    """What was measured, from where to where."""
    steps: dict[str, list[str]] = {}
    for load in loads:
        steps.setdefault(load.row, []).append(f"{load.steps} after {load.warm}")
    counted = "; ".join(f"{row} {', '.join(words)}" for row, words in steps.items())
    return (
        "Whole runs, one of each program in turn, no fault, no checkpoint, ftrun with its defaults; medians of runs, with the smallest and "
        "the largest. Cost: of each pair of neighbouring runs, goal: of its median. Rows a, f: the median step of a run, elsewhere the "
        "mean. "
        f"Steps that are counted: {counted}."
    )


if __name__ == "__main__":
    sys.exit(main())
