"""Holds what each agent brings to a rendezvous: who it is, and the terms that its options set, which must fit those of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ftrun.core.errors import UsageError
from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.messages import VERSION


@dataclass(frozen=True)
class MemberTerms:
    """The terms that the options set. Times in seconds. `by_rank`: node ranks are given, and each must come.

    `spares`: how many spare nodes are expected beside `most`, 0 = a lost node is not replaced; `replacements`: the most in a round.
    """

    least: int
    most: int
    by_rank: bool = False
    max_restarts: int = 0
    join_timeout: float = 600.0
    last_call: float = 30.0
    keep_alive: float = 10.0
    beat: float = 1.0
    grow: bool = True
    spares: int = 0
    replacements: int = 3
    snapshot_every: int = 0

    @property
    def replaces(self) -> bool:
        """May a spare node take the place of another one within a round?"""
        return self.spares > 0 and self.replacements > 0


@dataclass(frozen=True)
class Me:
    """Describes this agent. `addr`: where the others reach this machine."""

    id: str
    host: str
    addr: str
    nproc: int
    node_rank: int | None = None


# What must be the same on every node: the option or setting by which a person says it. The values are from the agents' records.
_SAME = (
    ("--nnodes {}:{}", ("least", "most")),
    ("--spare-nodes {}", ("spares",)),
    ("--rdzv-conf keep_alive={:g}", ("keep_alive",)),
    ("--max-node-replacements {} (0 by --node-loss restart)", ("replacements",)),
    ("--snapshot-every {}", ("snapshot_every",)),
)


def shared_terms(terms: MemberTerms) -> Record:
    """Return what other agents compare with their own terms."""
    return {"version": VERSION} | {name: getattr(terms, name) for _, names in _SAME for name in names}


def fits(terms: MemberTerms, record: Record) -> bool:
    """Can the agent of this record take part where these terms hold?"""
    return all(record.get(name) == value for name, value in shared_terms(terms).items())


def check_terms(me: Me, terms: MemberTerms, others: Iterable[Record], members: bool) -> None:
    """Compare the options of other agents, as their records have them, with this one's. Raises UsageError if they do not fit together.

    `members`: the others are at work already, and this one is not.
    """
    mine = shared_terms(terms)
    for record in others:
        if record.get("version") != VERSION:
            raise UsageError(f"node {record.get('host')} runs another version of ftrun; use the same on every node")
        for option, names in _SAME:
            theirs, ours = ([each[name] for name in names] for each in (record, mine))
            if theirs != ours:
                raise UsageError(
                    f"node {record.get('host')} was started with {option.format(*theirs)}, this one with {option.format(*ours)}; "
                    "use the same on every node, also on spare ones"
                )
        if terms.by_rank and record.get("node_rank") == me.node_rank and (members or str(record.get("id")) < me.id):
            raise UsageError(f"node rank {me.node_rank} is taken by {record.get('host')}; give every node another --node-rank")
