"""What the nodes of a run tell each other while nothing fails: ftrun beside torchrun, each node in a network namespace.

    python tests/bench/wire.py [--rounds N] [--results FOLDER]      as root

The worlds, script and systems are those of tests/bench/nodes.py; all meet by TCP. A tap at the hub of the cables reads each packet that
carries data, with its time; bare acknowledgements are left out. A connection is one of workers if a worker holds it at both ends. Of those,
one that carries more than a megabyte in a step is the gradients', with Gloo's notices in it. Counted are whole steps: from the end of one
on the last rank to the end of a later one on the last. A spare node is one of the machines, and none of the nodes of a step. Under torchrun
workers have no connection but the gradients': what ftrun has beside them is its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import nodes as several
from tests.bench import runs, tables
from tests.bench.tap import TCP, End, Message, Tap, owners
from tests.e2e import lan as lans
from tests.e2e.lan import Lan

FIRST, LAST = 20, 90  # steps between which messages are counted: ftrun compares replicas at the first gates and at the hundredth
LARGE = 1_000_000  # bytes of a connection in a step, from which on it is the gradients'
GRADIENTS, OURS, HELPERS = "gradients", "other connections of workers", "launchers and their helpers"


@dataclass
class Count:
    """`messages` and `bytes`: of the connections of workers a step and node that takes part, of `HELPERS` a second and machine."""

    messages: dict[str, float]
    bytes: dict[str, float]


def counted(
    messages: Sequence[Message], workers: set[frozenset[End]], nodes: int, machines: int, steps: int, seconds: float
) -> Count:
    """Sort `messages` by what they are. `workers`: the connections that a worker holds at both ends."""
    sizes: Counter[frozenset[End]] = Counter()
    for one in messages:
        sizes[frozenset((one.by, one.to))] += one.size

    def kind(one: Message) -> str:
        ends = frozenset((one.by, one.to))
        if one.protocol != TCP or ends not in workers:
            return HELPERS
        return GRADIENTS if sizes[ends] > LARGE * steps else OURS

    number: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    for one in messages:
        what = kind(one)
        share = 1 / machines / seconds if what == HELPERS else 1 / nodes / steps
        number[what] += share
        size[what] += one.size * share
    return Count(number, size)


def count(system: str, folder: Path, lan: Lan, nodes: Sequence[int]) -> Count:
    """Count the messages of a run without a fault."""
    machines, ranks = len(nodes) + (system == several.SPARE), range(sum(nodes))
    folder.mkdir(parents=True)
    tap = Tap(lan, machines, folder / "messages.json")
    begun = several.start(system, folder, lan, nodes, ["--steps", str(LAST + 5), "--checkpoint-every", "0"], lan.meeting())
    runs.wait_for(begun[0], "the first steps", lambda: min(runs.last_step(folder, rank) for rank in ranks) >= FIRST, 300)
    held = {ends: pid for machine in range(machines) for ends, pid in owners(lan, machine).items()}
    several.finish(begun)
    found = tap.messages()
    done = [runs.read_times(folder, rank) for rank in ranks]
    pids = {one.pid for each in done for one in each}
    workers = {frozenset((mine, other)) for (mine, other), pid in held.items() if pid in pids and held.get((other, mine)) in pids}
    begin, end = (max(one.ns for each in done for one in each if one.step == step) for step in (FIRST, LAST))
    shutil.rmtree(folder)
    return counted([one for one in found if begin < one.ns <= end], workers, len(nodes), machines, LAST - FIRST, (end - begin) / 1e9)


def measure(lan: Lan, root: Path, rounds: int) -> list[list[str]]:
    """The lines of the table."""
    rows = []
    for nodes in several.WORLDS:
        name = f"{len(nodes)} nodes of {nodes[0]} {'rank' if nodes[0] == 1 else 'ranks'}"
        found: dict[str, list[Count]] = {system: [] for system in several.SYSTEMS}
        for number in range(rounds):
            for system in several.SYSTEMS[:: 1 if number % 2 else -1]:
                found[system].append(count(system, root / "run", lan, nodes))
                print(f"  {name}, {system}, {number}: {found[system][-1]}", flush=True)
        for kind, per in ((OURS, "a step and node"), (GRADIENTS, "a step and node"), (HELPERS, "a second and machine")):
            for unit in ("messages", "bytes"):
                if (kind, unit) == (GRADIENTS, "messages"):
                    continue  # how the kernel cuts them says nothing
                cells = [tables.figure([getattr(one, unit).get(kind, 0.0) for one in found[system]], unit) for system in several.SYSTEMS]
                rows.append([name, f"{kind}, {unit} {per}", *cells])
    return rows


def main() -> int:
    args = tables.arguments("Count what several nodes tell each other, under ftrun and under torchrun.").parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    with lans.lan(1 + max(map(len, several.WORLDS))) as lan:
        rows = measure(lan, root, args.rounds or several.ROUNDS)
    shutil.rmtree(root)
    notes = " ".join((__doc__ or "").split("\n\n")[2].split())
    tables.write(args.results, "wire", "What nodes tell each other", ["world", "what", *several.SYSTEMS], rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
