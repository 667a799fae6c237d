"""Holds the rules by which the nodes of a round stop, decide where to go on, and go on, for one agent.

Theory of operation. A node whose rank died closes its own gate word at once, and begins an incident: the next number of this round. Each
node that hears of it closes its word, and answers once none of its living ranks moves any more: from then on the last gate of its word
is final. The first node of the table leads. It adds the answers up to one decision, that all go on after the last gate that any word
opened; docs/design/protocol.md proves that every rank can. When every node has restored its ranks, the leader lets all gates open.

A fault in a repair begins the next incident, which supersedes the one before. Records, of round r and incident i:

- `stop.<r>.<i>`: incident i began, and why; whoever notices first creates it. For a lost or drained node: its index `node`, and the `seat`,
  a member.
- in `agent.<id>`: `stopped` [r, i, last gate, ranks to be replaced, gate numbers of which all of its ranks have host snapshots, whether one
  of them has nothing newer, gate numbers of which it has copies of those of all ranks of the node before], `restored` [r, i, missed, made],
  and `memory`, the port of its memory server. What replacements missed, and whether one made an update, survivors on other nodes must know.
- `go.<r>.<i>`: the gate number to go on with, all ranks to be replaced, and where each node serves its memory; the leader creates it.
  `rollback`: a rank of some node has nothing newer, and all go back to the newest host snapshot that all ranks of each node have, or the
  next node has copies of; `went_back`: the newest incident that did so, 0 = none. If there is no such snapshot, the leader creates
  `break.<r>` instead.
- `open.<r>.<i>`: every rank of every node is restored, with the largest `missed` and whether any `made`; the leader creates it.

A node that is lost answers nothing. If a spare node waits, whoever notices the loss begins an incident whose `stop` names the spare's seat,
the place of the lost one: from this incident on the spare is a member, and all of its ranks are to be replaced. Else the round breaks, and
everyone starts anew (member.py).

Records that say what all nodes do are created once and never changed, and follow from answers that never change: two nodes that both
think they lead create the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from ftrun.core.errors import EXIT_REQUEUE
from ftrun.host.nodes.carriers.carrier import Carrier, Record

BEGUN, DECIDED, RESTORED = range(3)  # how far an incident is
Told = Callable[[str, Record], None]


class Together:
    """One agent's part in the repairs of round `number`, whose nodes are `members` (ids). `told(kind, record)` hears of news.

    Kinds: stops (record: incident, and why), decided (the record `go`), restored (the record `open`).
    """

    def __init__(self, carrier: Carrier, me: str, number: int, members: Sequence[str], told: Told) -> None:
        self._carrier = carrier
        self._me = me
        self._number = number
        self.members = tuple(members)
        self._told = told
        self.newest = 0  # incident that this agent has heard of, 0 = none
        self._stage = 0  # of that incident
        self._own: Record = {}  # this agent's answers, as its record has them

    @property
    def busy(self) -> bool:
        """Is an incident going on that this agent has heard of?"""
        return self.newest > 0 and self._stage < RESTORED

    @property
    def answers(self) -> Record:
        """Return what this agent's record says of incidents."""
        return self._own

    def stops(self, incident: int, why: Record) -> bool:
        """Begin an incident, unless another node has: then return False."""
        return self._carrier.create(self._name("stop", incident), {"incident": incident, **why})

    def stopped(
        self,
        incident: int,
        last: int,
        replaced: Sequence[int] = (),
        kept: Sequence[int] = (),
        back: bool = False,
        copies: Sequence[int] = (),
    ) -> None:
        """Answer that no rank of this node moves any more, that its word opened gate `last`, and which ranks (of the world) are lost.

        `kept`: gate numbers of which every rank of this node has a host snapshot; `back`: one of them has nothing newer to go on with.
        `copies`: gate numbers of which this node has copies of the host snapshots of every rank of the node before.
        """
        self._own = {**self._own, "stopped": [self._number, incident, last, [*replaced], [*kept], back, [*copies]]}

    def restored(self, incident: int, missed: int = 0, made: bool = False) -> None:
        """Answer that every rank of this node is restored."""
        self._own = {**self._own, "restored": [self._number, incident, missed, made]}

    def look(self, view: Mapping[str, Record]) -> bool:
        """Do what is due, and tell what is new. Return True if this agent wrote what all others wait for."""
        while (stop := view.get(self._name("stop", self.newest + 1))) is not None:
            self.newest, self._stage = self.newest + 1, BEGUN
            if self._name("stop", self.newest + 1) not in view:
                self._told("stops", stop)
        if not self.newest:
            return False
        wrote = self.members[0] == self._me and self._lead(view)
        for stage, kind in ((DECIDED, "go"), (RESTORED, "open")):
            record = view.get(self._name(kind, self.newest))
            if record is not None and self._stage < stage:
                self._stage = stage
                self._told("decided" if kind == "go" else "restored", record)
        return wrote

    def _lead(self, view: Mapping[str, Record]) -> bool:
        """Decide, or let all gates open, once every node has answered. Return True if this did."""
        incident = self.newest
        go, opened = self._name("go", incident), self._name("open", incident)
        if go not in view:
            answers = self._answers(view, "stopped")
            if len(answers) == len(self.members):
                self._decide(view, answers)
                return True
        elif opened not in view:
            answers = self._answers(view, "restored")
            if len(answers) == len(self.members):
                missed, made = max(answer[2] for answer in answers), any(answer[3] for answer in answers)
                self._carrier.create(opened, {"incident": incident, "missed": missed, "made": made})
                return True
        return False

    def _decide(self, view: Mapping[str, Record], answers: Sequence[Any]) -> None:
        incident, back = self.newest, any(answer[5] for answer in answers)
        resume, replaced = 1 + max(answer[2] for answer in answers), sorted(rank for answer in answers for rank in answer[3])
        if back:
            following = [*answers[1:], answers[0]]
            each = [{*answer[4]} | {step for step in after[6] if step <= resume} for answer, after in zip(answers, following, strict=True)]
            kept = set.intersection(*each)
            if not kept:
                reason = _nothing_to_go_back_to(self._me, view[self._name("stop", incident)], each)
                self._carrier.create(f"break.{self._number}", reason)
                return
            resume = max(kept)
        earlier = (i for i in range(1, incident) if view.get(self._name("go", i), {}).get("rollback"))
        about = {"rollback": back, "went_back": incident if back else max(earlier, default=0)}
        ports = [view.get(f"agent.{who}", {}).get("memory", 0) for who in self.members]
        self._carrier.create(
            self._name("go", incident), {"incident": incident, "resume": resume, "replaced": replaced, "memories": ports, **about}
        )

    def _answers(self, view: Mapping[str, Record], kind: str) -> list[Any]:
        """Return the answers of all nodes to the newest incident."""
        records = (self._own if who == self._me else view.get(f"agent.{who}", {}) for who in self.members)
        return [answer for record in records if (answer := record.get(kind)) and answer[:2] == [self._number, self.newest]]

    def _name(self, kind: str, incident: int) -> str:
        return f"{kind}.{self._number}.{incident}"


def _nothing_to_go_back_to(me: str, stop: Record, each: Sequence[Set[int]]) -> Record:
    """Return why the round of an incident is over in which a rank needs a host snapshot, and the nodes have none in common.

    `each`: of which steps there are some of all ranks of each node.
    """
    bare = " and ".join(f"node {node}" for node, steps in enumerate(each) if not steps)
    whose = f" (nobody has one of all ranks of {bare})" if bare else ""
    cause = f"{stop.get('cause')}; the nodes have no host snapshot of one step in common{whose}"
    about = {name: stop.get(name) for name in ("node", "host", "rank", "local_rank")}
    return {"by": me, **about, "kind": "failed", "cause": cause, "code": EXIT_REQUEUE}
