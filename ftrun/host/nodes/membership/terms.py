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


def check_terms(me: Me, terms: MemberTerms, others: Iterable[Record]) -> None:
    """Compare the options of other agents, as their records have them, with this one's. Raises UsageError if they do not fit together."""
    for record in others:
        if record.get("version") != VERSION:
            raise UsageError(f"node {record.get('host')} runs another version of ftrun; use the same on every node")
        if (record.get("least"), record.get("most")) != (terms.least, terms.most):
            raise UsageError(
                f"node {record.get('host')} was started with --nnodes {record.get('least')}:{record.get('most')}, this "
                f"one with {terms.least}:{terms.most}; use the same on every node"
            )
        if record.get("spares") != terms.spares:
            raise UsageError(
                f"node {record.get('host')} was started with --spare-nodes {record.get('spares')}, this one with {terms.spares}; "
                "use the same on every node, also on the spare ones"
            )
        if record.get("keep_alive") != terms.keep_alive:
            raise UsageError(
                f"node {record.get('host')} was started with keep_alive={record.get('keep_alive'):g}, this one with {terms.keep_alive:g}; "
                "use the same --rdzv-conf on every node"
            )
        if record.get("replacements") != terms.replacements:
            raise UsageError(
                f"node {record.get('host')} was started with another --node-loss or --max-node-replacements; use the same on every node"
            )
        if terms.by_rank and record.get("node_rank") == me.node_rank and str(record.get("id")) < me.id:
            raise UsageError(f"node rank {me.node_rank} is taken by {record.get('host')}; give every node another --node-rank")
