"""What an incident costs the control plane with many nodes: 64 to 4,096 ranks on 1 to 64 nodes, all of them on this machine.

    python tests/bench/scale.py [--rounds N] [--nodes N] [--ranks N] [--results FOLDER]      about three minutes

Each node is two processes: the product's code of an agent, and stubs that answer for its ranks (tests/bench/stubs.py). Nothing is
trained, and no state is restored. Control part: from the creation of the record `stop`, for a rank that died, to the last node whose
gate opens again. "Times one node": the goal is less than 3 for 4,096 ranks over 64. All nodes share this machine's processors, so that
64 nodes have 64 times the work of one there, and this machine cannot show whether nodes with processors of their own reach the goal.
"Times as many runs at once" is no substitute for it: it compares with 64 runs of one node, each with an incident of its own at the same
moment, from the first `stop` to the last gate, and so shows what agreeing adds to the same work, but not how long one node takes. It is
somewhat kind: a node alone looks more often while it waits for a processor, which makes those runs slower. Counted at the carrier in this
time, mean of the nodes: looks; records read because they had changed, the others' beats among them (the longer it takes, the more);
records written or created; bells. Processor time: of an agent from its first look at `stop` on, and of all ranks of a node. Left out:
making and ending processes, detection, journal, messages for people, a network. The folder is in memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftrun.host.base.settings import Nodes
from tests.bench import stubs, tables
from tests.bench.stubs import Tally
from tests.e2e.harness import free_port

ROUNDS = 2
NODES, RANKS = 64, 64
STEPS = (1, 16)  # nodes, up to the most
INCIDENTS = 2  # in each world of a round
QUIET = 0.3  # seconds before each
DEADLINE = 120.0  # seconds for each thing that is waited for
SHARED = "/dev/shm"
CARRIERS = {"file": "a folder", "c10d": "a TCP server"}


class Shape(NamedTuple):
    """A world, or with `apart` as many runs of one node."""

    nodes: int
    ranks: int
    apart: bool = False

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.apart:
            return f"{self.nodes} runs at once of 1 node of {ranks}"
        return f"{self.nodes} node{'s' * (self.nodes > 1)} of {ranks}"


@dataclass
class Incident:
    """One repair. `control`: ms; of each node: what its agent did, bytes of the world file, ms of processor time of its ranks."""

    control: float
    agents: list[Tally]
    read: list[int]
    ranks_ms: list[float]

    def mean(self, what: str) -> float:
        return statistics.mean(getattr(tally, what) for tally in self.agents)


class World:
    """Running nodes with stub ranks."""

    def __init__(self, folder: Path, backend: str, shape: Shape) -> None:
        context = multiprocessing.get_context("fork")
        self._agents: list[Connection] = []
        self._ranks: list[Connection] = []
        self._processes: list[Any] = []
        self._apart = shape.apart
        folder.mkdir(mode=0o700)
        size, endpoint = 1 if shape.apart else shape.nodes, ""
        for number in range(shape.nodes):
            first = shape.apart or not number
            if first:
                endpoint = str(folder) if backend == "file" else f"127.0.0.1:{free_port()}"
            conf = {"is_host": str(first).lower(), "keep_alive": "60", "last_call_timeout": "0"}
            # a node that may have company uses the records as many do, also while it is alone
            nodes = Nodes(size, max(size, 2), backend, endpoint, conf, local_addr="127.0.0.1")
            (agent, agents_end), (ranks, ranks_end) = context.Pipe(), context.Pipe()
            node = stubs.Node(folder / f"node{number}", nodes, f"run{number if shape.apart else 0}", shape.ranks, shape.ranks + INCIDENTS)
            process = context.Process(target=stubs.run, args=(node, agents_end, ranks_end))
            process.start()
            self._agents.append(agent)
            self._ranks.append(ranks)
            self._processes.append(process)

    def wait(self) -> None:
        """Wait until all ranks of all nodes run."""
        self._hear(self._agents, "running")
        self._hear(self._ranks, "read")

    def fail(self, node: int, rank: int) -> Incident:
        """Let a rank of that node die, of each run of one node, and return what it took until all run again."""
        failing = self._agents if self._apart else [self._agents[node]]
        self._tell(failing, "fail", rank)
        until = max(at for (at,) in self._hear(self._agents, "opened"))
        self._hear(self._agents, "running")
        read = self._hear(self._ranks, "read")
        self._tell(failing, "began")
        began = min(at for (at,) in self._hear(failing, "began"))
        self._tell(self._agents, "report", began, until)
        agents = [tally for (tally,) in self._hear(self._agents, "report")]
        return Incident((until - began) / 1e6, agents, [size for size, _ in read], [ms for _, ms in read])

    def close(self) -> None:
        self._tell(self._agents, "leave")
        for process in self._processes:
            process.join(DEADLINE)
            assert process.exitcode == 0, f"a node ended with {process.exitcode}"

    def kill(self) -> None:
        """End what `close` has not ended."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
            process.join()

    def _tell(self, ends: Sequence[Connection], *what: Any) -> None:
        for end in ends:
            end.send(what)

    def _hear(self, ends: Sequence[Connection], wanted: str) -> list[tuple[Any, ...]]:
        """Return what each of these says next, which must be of the kind `wanted`.

        Raises:
            AssertionError: One says something else, or nothing in time.
        """
        deadline = time.monotonic() + DEADLINE
        heard: dict[Connection, tuple[Any, ...]] = {}
        while len(heard) < len(ends):
            ready = wait([end for end in ends if end not in heard], max(0.0, deadline - time.monotonic()))
            assert ready, f"{len(ends) - len(heard)} of {len(ends)} nodes are not {wanted!r} after {DEADLINE:g} s"
            for end in ready:
                assert isinstance(end, Connection)
                kind, *rest = end.recv()
                assert kind == wanted, f"{kind} {rest} while waiting for {wanted!r}"
                heard[end] = tuple(rest)
        return [heard[end] for end in ends]


@contextmanager
def world(root: Path, backend: str, shape: Shape) -> Iterator[World]:
    running = World(root / "world", backend, shape)
    try:
        running.wait()
        yield running
        running.close()
    finally:
        running.kill()
        shutil.rmtree(root / "world")


def incidents(root: Path, backend: str, shape: Shape) -> list[Incident]:
    """Start a world, let ranks of it die one after the other, and end it."""
    found = []
    with world(root, backend, shape) as running:
        for number in range(INCIDENTS):
            time.sleep(QUIET)
            found.append(running.fail((number + 1) % shape.nodes, number % shape.ranks))
    return found


def shapes(nodes: int, ranks: int) -> list[Shape]:
    few = [Shape(number, ranks) for number in STEPS if number < nodes]
    return [*dict.fromkeys([*few, Shape(nodes, 1), Shape(nodes, ranks, apart=True), Shape(nodes, ranks)])]


def measure(root: Path, nodes: int, ranks: int, rounds: int) -> list[list[str]]:
    """The lines of the table."""
    found: dict[tuple[str, Shape], list[list[Incident]]] = {}
    for number in range(rounds):
        for backend in CARRIERS if number == 0 else list(CARRIERS)[:1]:  # the server once: a round takes a minute
            for shape in shapes(nodes, ranks)[:: 1 if number % 2 else -1]:
                some = incidents(root, backend, shape)
                found.setdefault((backend, shape), []).append(some)
                print(f"  {backend}, {shape}: {', '.join(f'{one.control:.0f}' for one in some)} ms", flush=True)
    rows = []
    for backend, words in CARRIERS.items():
        for shape in shapes(nodes, ranks):
            mine, one, apart = (found.get((backend, s)) for s in (shape, Shape(1, ranks), Shape(nodes, ranks, apart=True)))
            assert mine is not None
            compared = [_ratio(mine, one) if shape.ranks == ranks and shape.nodes > 1 and not shape.apart else ""]
            compared.append(_ratio(mine, apart) if shape == Shape(nodes, ranks) else "")
            rows.append([words, str(shape), *_figures([i for some in mine for i in some]), *compared])
    return rows


def _figures(some: Sequence[Incident]) -> list[str]:
    def of(value: Callable[[Incident], float], unit: str, digits: int | None = None) -> str:
        return tables.figure([value(one) for one in some], unit, digits)

    return [
        of(lambda one: one.control, "ms"),
        of(lambda one: one.mean("agent_ms"), "ms"),
        of(lambda one: max(tally.agent_ms for tally in one.agents), "ms"),
        of(lambda one: statistics.mean(one.ranks_ms), "ms"),
        of(lambda one: max(one.read), "bytes", 0),
        of(lambda one: one.mean("looks"), "looks", 1),
        of(lambda one: one.mean("reads"), "reads", 1),
        of(lambda one: one.mean("writes") + one.mean("creates"), "writes", 1),
        of(lambda one: one.mean("bells"), "bells", 1),
    ]


def _ratio(mine: Sequence[Sequence[Incident]], others: Sequence[Sequence[Incident]] | None) -> str:
    """The medians of each round, one over the other."""

    def medians(of: Sequence[Sequence[Incident]]) -> list[float]:
        return [statistics.median(one.control for one in some) for some in of]

    if others is None:
        return ""
    return tables.figure([a / b for a, b in zip(medians(mine), medians(others), strict=True)], "times", 2)


HEAD = [
    "records in",
    "world",
    "control part of an incident",
    "processor time of an agent",
    "of the busiest one",
    "of a node's ranks",
    "world file that each rank reads",
    "a node's looks",
    "records read",
    "written and created",
    "bells",
    "times one node",
    "times as many runs at once",
]


def arguments() -> argparse.ArgumentParser:
    parser = tables.arguments("Measure what an incident costs the control plane with many nodes.")
    parser.add_argument("--nodes", type=int, default=NODES, metavar="N", help="the most nodes")
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help="ranks of each")
    return parser


def main() -> int:
    args = arguments().parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-", dir=SHARED))
    try:
        rows = measure(root, args.nodes, args.ranks, args.rounds or ROUNDS)
    finally:
        shutil.rmtree(root)
    tables.write(args.results, "scale", "Many nodes", HEAD, rows, " ".join((__doc__ or "").split("\n\n")[2].split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
