"""Holds the table of a round: which nodes take part, in which order, and how often the whole world was restarted. Pure."""

from __future__ import annotations

import re
import signal
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from ftrun.core.errors import EXIT_FAILED
from ftrun.host.nodes.carriers.carrier import Record


@dataclass(frozen=True)
class Node:
    """An agent of a round. Its index in the table is its group rank."""

    id: str
    host: str
    addr: str
    nproc: int


@dataclass(frozen=True)
class NodePlace:
    """A node's place in the world of a round. `restarts` are those of the whole world."""

    round: int
    node: int
    nodes: int
    first_rank: int
    world_size: int
    restarts: int


@dataclass(frozen=True)
class RoundTable:
    round: int
    members: tuple[Node, ...]
    restarts: int = 0
    why: str = ""  # what ended the round before
    secret: str = field(default="", repr=False, compare=False)  # with which the nodes of the round get at each other's memory
    founders: tuple[str, ...] = ()  # ids of its first members, () = of the present ones

    def seat(self, at: int, node: Node) -> RoundTable:
        """Return the table in which `node` has the place of a lost one."""
        founders = self.founders or tuple(m.id for m in self.members)
        return replace(self, members=(*self.members[:at], node, *self.members[at + 1 :]), founders=founders)

    @staticmethod
    def follow(
        last: RoundTable | None, reason: Mapping[str, Any], gone: Sequence[Node], nodes: Sequence[Record], unrepaired: bool = False
    ) -> RoundTable:
        """Return the table after `last`, which ended for `reason`, and whose members `gone` did not come again.

        A failure is charged to the restarts of the world, unless a node was lost: then the failure is what the other nodes
        saw of that loss, or the loss was not repaired (`unrepaired`). If no member of `last` is left, this is another run of the same
        name, which starts from 0.
        """
        members = tuple(Node(r["id"], r["host"], r["addr"], int(r["nproc"])) for r in nodes)
        if last is None:
            return RoundTable(0, members)
        charged = reason.get("kind") == "failed" and not gone and not unrepaired
        if len(gone) == len(last.members):
            return RoundTable(last.round + 1, members)
        why = f"{', '.join(f'node {last.index(m.id)} ({m.host})' for m in gone)} lost" if gone else sentence(reason)
        return RoundTable(last.round + 1, members, last.restarts + int(charged), why)

    def index(self, who: str) -> int | None:
        return next((at for at, member in enumerate(self.members) if member.id == who), None)

    def place(self, who: str) -> NodePlace:
        """Return the place of agent `who`. Raises ValueError if it takes no part."""
        at = self.index(who)
        if at is None:
            raise ValueError(f"{who} is not in round {self.round}")
        world = sum(m.nproc for m in self.members)
        return NodePlace(self.round, at, len(self.members), self.firsts()[at], world, self.restarts)

    def firsts(self) -> tuple[int, ...]:
        """Return the first rank of each node."""
        return tuple(accumulate((m.nproc for m in self.members[:-1]), initial=0))

    def stamp(self) -> str:
        """Return a name that each node computes alike, and that no other round of any run has: an agent makes its `id` anew each time."""
        founders = self.founders or [m.id for m in self.members]
        return f"{zlib.crc32(' '.join(founders).encode()):08x}.{self.round}"

    def to_record(self) -> Record:
        return asdict(self)

    def shown(self) -> Record:
        """Return the record without its secret, for the journal."""
        return {name: value for name, value in self.to_record().items() if name != "secret"}

    @staticmethod
    def from_record(raw: Mapping[str, Any]) -> RoundTable:
        return RoundTable(
            int(raw["round"]),
            tuple(Node(**m) for m in raw["members"]),
            int(raw["restarts"]),
            str(raw["why"]),
            str(raw.get("secret", "")),
        )


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key that sorts names with numbers as people do: node7 before node66."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def weight(code: int | None, signature: str) -> int:
    """Return how likely a worker's death only follows from another one's: 0 hardly, 2 rather.

    A rank that loses its peers gets an exception from the collective, or is aborted by it. `code`: exit code, 128 + n for
    signal n; `signature`: "TYPE at FILE:LINE" of an uncaught exception.
    """
    if signature:
        kind = signature.partition(" ")[0]
        return 2 if kind in _OF_PEERS or kind.startswith("Dist") else 1
    return 2 if code == 128 + signal.SIGABRT else 0


_OF_PEERS = ("RuntimeError", "ConnectionError", "ConnectionResetError", "BrokenPipeError", "TimeoutError", "EOFError")


def root_cause(reason: Record, failures: Sequence[Record]) -> Record:
    """Return the failure that ended a round: `reason` was noticed first, `failures` are those of every node."""
    if reason.get("kind") != "failed":
        return reason
    return min((reason, *failures), key=lambda failure: int(failure.get("weight", 0)))


def sentence(reason: Mapping[str, Any]) -> str:
    """Return the event and its node as a sentence for people."""
    where = f"node {reason.get('node')} ({reason.get('host')})"
    if reason.get("kind") == "failed" and reason.get("rank") is None:
        return f"{where}: {reason.get('cause')}"
    if reason.get("kind") == "failed":
        return f"rank {reason.get('rank')} on {where} failed: {reason.get('cause')}"
    return f"{where}: {reason.get('cause')}" if reason.get("kind") == "store" else str(reason.get("cause"))


def all_doubts(each: Iterable[Record]) -> Record:
    """Return why the result of some node may not be called exact: the flags of all, and the names of what is not kept."""
    inexact, left_out = 0, set[str]()
    for one in each:
        inexact |= int(one.get("inexact", 0))
        left_out.update(one.get("left_out", ()))
    return {"inexact": inexact, "left_out": sorted(left_out)}


def over_after(reason: Mapping[str, Any], allowed: int) -> Record:
    """Return the record that ends a run for every node because `reason` is one failure too many."""
    spent = (
        "no restart is allowed (--max-restarts 0)" if not allowed else f"all {allowed} restarts of the run are spent"
    )
    return {"code": EXIT_FAILED, "detail": f"{sentence(reason)}; {spent}", **reason}
