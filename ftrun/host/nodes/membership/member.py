"""Holds the rules of a rendezvous for one agent: join a round, run in it, see it break, join the next one.

Theory of operation. Pure but for the carrier and the clock, which is this agent's own. `tick` looks at the records and does what is due;
to do it twice is harmless. Records:

- `agent.<id>`: who it is, a beat that grows, `state` (joining, in, finished, left), the round it is about, and its last failure.
- `round.<r>`: the table of round r, created by one joiner: who takes part, in which order, and the restarts so far.
- `store.<r>`: where the workers of round r meet, written by the first agent of the table.
- `break.<r>`: why round r is over (created by whoever notices first); everyone joins r + 1.
- `over`: the run is over for everyone, and why.
- `drain.<r>.<n>`: somebody wants a rank of round r moved, or a whole node: drains.py. A node that gives its place up begins an incident, as
  whoever sees a loss does.
- `claim.<r>.<id>`: spare node `id` is kept for a place, whose node ends its workers before it gives the place up.
- Those of repairs in place within a round, in which a spare node may take a lost one's place: together.py. A node that takes the first
  place writes `store.<r>.<i>`, for incident i: the first store was the lost node's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ftrun.core.amounts import count
from ftrun.host.nodes.carriers.carrier import OVER, Carrier, CarrierLost, Record
from ftrun.host.nodes.membership import shown
from ftrun.host.nodes.membership.bells import Bells
from ftrun.host.nodes.membership.drains import Drains
from ftrun.host.nodes.membership.guardian import Guarded
from ftrun.host.nodes.membership.seats import Seats
from ftrun.host.nodes.membership.sights import Sights
from ftrun.host.nodes.membership.table import Node, RoundTable, all_doubts, natural, over_after, root_cause
from ftrun.host.nodes.membership.takers import Takers
from ftrun.host.nodes.membership.terms import Me, MemberTerms, check_terms, shared_terms
from ftrun.host.nodes.membership.together import Together

_EAGER = 3.0  # seconds in which a joining agent beats fast, so that the others see soon that it lives
_EAGER_BEAT = 0.2


@dataclass(frozen=True)
class News:
    """A message from a member to its agent. `kind`, and what it comes with:

    - waiting: record with here, least, most; spare: as a spare node, which `fits` if some node has as many ranks
    - host: record with addr, where to start a store
    - ready: table, and record with host and port of the store, me, the incident in which this node takes another one's place, or 0, and
      whether that one was `drained`
    - before: table, and record with the index of the node before this one, its id, and the address and port at which it serves its memory
      (0 = it does not), whenever that changes and a spare node may take its place
    - unstored: the node that had the store is lost; stored: record with host and port of the next one
    - seen: record with `nodes`, what each node of the round and each spare one shows of itself, and whether this one is `replaceable` by a
      spare node, whenever that changes, also to a spare one
    - drain: a request to this agent, as in drains.py; kept: record with `why` this node cannot give its place up; drained: it can, record
      with node, host (its own), and taker, the host of the spare node
    - broken, over, lost: record with the reason; unreached, before the first look: record with detail
    - stale: an earlier run's round
    - in a repair stops (with the table), decided, restored: records as in together.py
    """

    kind: str
    round: int = -1
    record: Record | None = None
    table: RoundTable | None = None


class Member:
    """An agent's membership in a run. Every method may raise CarrierLost, OSError (for now) and UsageError."""

    def __init__(
        self,
        carrier: Carrier,
        me: Me,
        terms: MemberTerms,
        shows: Mapping[str, Record],
        on_news: Callable[[News], None],
        clock: Callable[[], float],
        bells: Bells | None = None,
    ) -> None:
        """`shows`: what this node shows the others of itself with each beat, by subject; its owner changes it."""
        self._carrier = carrier
        self._clock = clock  # seconds
        self._now = clock()  # when the newest look began
        self._me = me
        self._terms = terms
        self._on_news = on_news
        self._bells = bells
        self._view: Mapping[str, Record] = {}
        self._sights = Sights(me.id, terms, self._now)
        self._takers = Takers(carrier, me, terms, self._sights)
        self._state = "joining"
        self._about = 0  # the round that our record is about
        self._beat = 0
        self._beaten = self._now - 3600.0
        self._dirty = True  # our record is to be written, and all others are to look,
        self._answered = False  # or the first node alone
        self._joining_since = self._now
        self._last_call_since: float | None = None
        self._left = -1  # the last round that we have left, or were not in,
        self._left_in = 0  # and the incident in which another node took our place there
        self._table: RoundTable | None = None  # of the round that we are in, with the seats that spare nodes took
        self._ready = False
        self._met_at = ""  # the record that told this agent where the workers meet, "" = none, or that store is lost
        self._together: Together | None = None  # from when the workers of that round can meet
        self._drains: Drains | None = None
        self._hosting = False
        self._doubts: Record = {}  # of this agent's ranks, once they have finished
        self._memory = 0  # the port at which this node's memory is served, 0 = it is not
        self._failure: Record | None = None  # of our last round
        self._shows = shows
        self._before: Record = {}  # where the node before this one serves its memory, as it was last told
        self._seen: Record = {}  # what the nodes showed when it last changed
        self._reported: tuple[str, int, int] | None = None
        self.over = False

    @property
    def peers(self) -> int:
        """Count the other agents that this one ever saw."""
        return len(self._sights)

    @property
    def repairing(self) -> bool:
        """Is a repair going on, in which each look counts?"""
        return self._together is not None and self._together.busy

    @property
    def neighbour(self) -> Guarded | None:
        """Return the next node of the round, for this agent to hear of its end; None while there is none."""
        at = self._table.index(self._me.id) if self._table is not None and self._ready else None
        if self._table is None or at is None or len(self._table.members) < 2:
            return None
        following = self._table.members[(at + 1) % len(self._table.members)]
        port = int(self._record(following.id).get("memory", 0))
        return Guarded(following.id, following.addr, port, self._table.secret) if port else None

    def rung(self) -> None:
        """Do nothing: another agent rang, and the look follows."""

    def ended(self, who: str) -> None:
        """Count a node as lost at once: its guardian says that its launcher and its ranks have ended."""
        self._sights.ended(who)

    # -- what the agent asks -----------------------------------------------------------------------------------------

    def next_round(self, failure: Record | None) -> None:
        """Break this agent's round, unless it is broken already (`failure` None), and join the next one. Its workers have ended."""
        if self.over or self._table is None:
            return
        if not self._ready:
            self._hosting = False  # our store ended before anybody knew of it
            return
        self._look()
        if failure is not None and not self._lost_place(self._table):
            self._failure = {"round": self._table.round, **failure}
            self._break(self._table.round, failure)
        self._join_again()

    def store_up(self, host: str, port: int) -> None:
        """Publish the address of the store that this agent was asked for."""
        if self._table is not None and self._hosting and not self._ready:
            self._carrier.put(self._seats(self._table.round).store, {"host": host, "port": port})

    def finished(self, doubts: Record | None = None) -> None:
        """Record that every worker of this agent exited with 0.

        `doubts`: `inexact` (flags) and `left_out` (names), for the last words of all nodes.
        """
        if self._table is not None and self._ready:
            self._state, self._doubts, self._dirty = "finished", doubts or {}, True

    def serves(self, port: int) -> None:
        """Record where the others get at this node's memory."""
        self._memory, self._dirty = port, True

    def asks(self, request: Record) -> None:
        """Ask the agent `to` to move a rank, or its node; nobody is asked while the nodes meet."""
        if self._drains is not None:
            self._drains.ask(request)
            self._ring()

    def gives_up(self, number: int) -> None:
        """Say whether a spare node can take this one's place in round `number` now; say nothing while a repair goes on."""
        self._look()
        if self._table is None or self._table.round != number or self._together is None:
            return
        table = self._follow_seats(self._table)
        self._together.look(self._view)
        at = table.index(self._me.id)
        if at is None or self._together.busy:
            return
        spare = self._takers.claimed(self._view, table, at, drained=True)
        if spare is not None:
            self._on_news(News("drained", number, {"node": at, "host": self._me.host, "taker": spare.host}))
            return
        if not self._terms.replaces:
            why = "spare nodes only take part in a restart here (--node-loss restart, --max-node-replacements 0)"
        elif self._carrier.serves:
            why = "it serves the endpoint at which the nodes meet"
        else:
            why = f"no spare node with {count(self._me.nproc, 'rank')} waits"
        self._on_news(News("kept", number, {"why": why}))

    def claims(self, number: int) -> None:
        """Keep a spare node for this one's place in round `number`: its workers are about to end, since its machine is at its end."""
        self._look()
        at = self._table.index(self._me.id) if self._table is not None and self._table.round == number else None
        if self._table is not None and at is not None:
            self._takers.claimed(self._view, self._table, at)

    def withdraws(self, record: Record, drained: bool) -> None:
        """Let a spare node take this one's place, whose workers have ended; without one, end the run for every agent, as `record` says.

        `drained`: a person wants it, and nothing failed.
        """
        self._look()
        while self._table is not None and self._together is not None:
            table = self._follow_seats(self._table)
            at = table.index(self._me.id)
            if at is None or f"break.{table.round}" in self._view:
                return  # the others go on without this node already
            spare = self._takers.taker(self._view, table, at, drained)
            if spare is None:
                break
            self._together.look(self._view)
            kind, cause = ("drained", f"node {at} ({self._me.host}) is drained") if drained else ("lost", record["detail"])
            if self._takers.seat(self._together, table, at, spare, kind, cause):
                self._ring()
                return
            self._look()  # another incident began meanwhile, and may have given that spare node another place
        self.end(record)

    def stops(self, number: int, incident: int, why: Record) -> None:
        """Begin an incident of round `number` for every agent, because a rank of this one is to be repaired."""
        if self._together is not None and self._about == number and not self._is_out():
            self._together.stops(incident, why)
            self._ring()

    def stopped(
        self,
        number: int,
        incident: int,
        last: int,
        replaced: Sequence[int],
        kept: Sequence[int] = (),
        back: bool = False,
        copies: Sequence[int] = (),
    ) -> None:
        """Record that no rank of this agent moves any more, that its gate word opened gate `last`, and which ranks are to be replaced.

        `kept`, `back` and `copies` as in `Together.stopped`.
        """
        if self._together is not None and self._about == number:
            self._together.stopped(incident, last, replaced, kept, back, copies)
            self._answered = True

    def restored(self, number: int, incident: int, missed: int, made: bool) -> None:
        """Record that every rank of this agent is restored; `missed` and `made` as in the controller's WorldRestored."""
        if self._together is not None and self._about == number:
            self._together.restored(incident, missed, made)
            self._answered = True

    def end(self, record: Record) -> None:
        """End the run for every agent because this one ends for good, if it ever was in the run."""
        if not self.over and (self._table is not None or self._left >= 0) and not self._is_out():
            at = self._table.index(self._me.id) if self._table is not None else None
            self._carrier.create(OVER, {"node": at, "host": self._me.host, "by": self._me.id, **record})

    def _is_out(self) -> bool:
        """Look whether the run goes on without this node, as with a spare one: then the end of its workers is nothing to the others."""
        self._view = self._carrier.view()
        if self._table is not None:
            return self._lost_place(self._table)
        newest = self._latest()
        return newest is not None and f"break.{newest.round}" not in self._view

    def _lost_place(self, table: RoundTable) -> bool:
        return self._seats(table.round).table(table).index(self._me.id) is None

    def leave(self) -> None:
        """Record that nobody needs to wait for this agent any more."""
        self._state = "left"
        self._put()

    # -- one look ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the records, do what is due, and report what the agent must know."""
        if self.over:
            return
        self._look()
        if OVER in self._view:
            self.over = True
            self._on_news(News("over", self._about, self._view[OVER]))
            return
        if self._table is None:
            self._join()
        else:
            self._take_part(self._table)

    def _look(self) -> None:
        self._now = self._clock()
        self._view = self._carrier.view()
        self._sights.look(self._view, self._now)

    def beat(self) -> bool:
        """Write this agent's record if that is due. Return whether it was written, and no other agent has this one's place."""
        now = self._clock()
        eager = self._state == "joining" and now - self._joining_since < _EAGER
        pause = min(_EAGER_BEAT, self._terms.beat) if eager else self._terms.beat
        if self.over or not (self._dirty or self._answered or now - self._beaten >= pause):
            return False
        news, answered = self._dirty, self._answered
        self._put()
        self._beaten = now  # one that failed stays due
        if news:
            self._ring()
        elif answered and self._table is not None:
            self._ring(self._table.members[:1])  # nobody else waits for answers, and with many nodes there are many
        return self._table is None or self._table.index(self._me.id) is not None

    def _put(self) -> None:
        self._beat += 1
        me = self._me
        record = {"id": me.id, "host": me.host, "addr": me.addr, "nproc": me.nproc, "node_rank": me.node_rank}
        state = {"beat": self._beat, "state": self._state, "round": self._about, "failure": self._failure}
        state["doubts"], state["shows"] = self._doubts, dict(self._shows)
        state["memory"], state["bell"] = self._memory, self._bells.port if self._bells is not None else 0
        answers = self._together.answers if self._together is not None else {}
        self._carrier.put(f"agent.{me.id}", {**record, **shared_terms(self._terms), **state, **answers})
        self._dirty = self._answered = False

    def _ring(self, members: Sequence[Node] = ()) -> None:
        """Let `members`, or all of the round, look now, but for this agent."""
        if self._bells is not None and self._table is not None:
            others = [member for member in members or self._table.members if member.id != self._me.id]
            self._bells.ring((member.addr, int(self._record(member.id).get("bell", 0))) for member in others)

    # -- who is there ------------------------------------------------------------------------------------------------

    def _record(self, who: str) -> Record:
        return self._view.get(f"agent.{who}", {})

    # -- joining -----------------------------------------------------------------------------------------------------

    def _latest(self) -> RoundTable | None:
        rounds = [int(n.partition(".")[2]) for n in self._view if n.startswith("round.")]
        if not rounds:
            return None
        return self._seats(max(rounds)).table(RoundTable.from_record(self._view[f"round.{max(rounds)}"]))

    def _seats(self, number: int) -> Seats:
        return Seats(self._view, number)

    def _join(self) -> None:
        last = self._latest()
        broken = last is None or f"break.{last.round}" in self._view
        if last is not None and self._has_place(last):
            if not broken:
                self._enter(last)
                self._take_part(last)
                return
            self._left = last.round
        target = 0 if last is None else last.round + 1
        if self._about != target or self._state != "joining":
            self._about, self._state, self._dirty = target, "joining", True
            self._last_call_since = None
        joiners = self._sights.joiners(target)
        spare = self._terms.spares > 0 and not broken
        if self._left < 0:
            self._compare_terms(last, broken, target)
        if broken:
            self._form(last, target, joiners)
        elif last is not None and all(self._sights.vanished(m.id) for m in last.members):
            self._on_news(News("stale", last.round))
            self._break(last.round, {"kind": "vanished", "cause": "every node of it is gone"})
        if last is not None and spare:
            self._joining_since = self._now  # it may be needed much later, and then waits for the others as long as they do for it
            self._look_at_nodes(last)
        self._report_waiting(target, joiners, last if spare else None)
        if self._now - self._joining_since > self._terms.join_timeout:
            self._too_late(len(joiners), last)

    def _compare_terms(self, last: RoundTable | None, broken: bool, target: int) -> None:
        """Compare this agent, which was in no round, with those of the last one; if none of them lives, with the others that wait.

        Raises:
            UsageError
        """
        members = [member.id for member in last.members if self._sights.lives(member.id)] if last is not None else []
        others = members if members or not broken else self._sights.waiting(target)
        check_terms(self._me, self._terms, filter(None, map(self._record, others)), members=bool(members))

    def _has_place(self, last: RoundTable) -> bool:
        """Does this agent belong to the newest round, which it has not left?"""
        if last.index(self._me.id) is None:
            return False
        return (last.round, self._seats(last.round).incident_of(self._me.id)) > (self._left, self._left_in)

    def _report_waiting(self, target: int, joiners: list[str], running: RoundTable | None) -> None:
        spare = running is not None
        told = ("spare" if spare else "waiting", target, 0 if spare else len(joiners))
        if told != self._reported:
            self._reported = told
            facts = {"here": len(joiners), "least": self._terms.least, "most": self._terms.most, "spare": spare}
            if running is not None:
                facts["fits"] = any(member.nproc == self._me.nproc for member in running.members)
            self._on_news(News("waiting", target, facts))

    def _too_late(self, here: int, last: RoundTable | None) -> None:
        seconds, least = self._terms.join_timeout, self._terms.least
        if last is not None and here >= least:
            text = f"no place became free within {seconds:g} s: the run goes on with {len(last.members)} nodes"
        else:
            text = f"only {here} of {least} nodes came within {seconds:g} s (join_timeout); start ftrun on the others"
        if self._left >= 0:
            self.end({"code": 1, "detail": text})
        raise CarrierLost(text)

    def _form(self, last: RoundTable | None, target: int, joiners: list[str]) -> None:
        """Close round `target` if it is complete and this agent is the one to do so."""
        before = [m.id for m in last.members] if last is not None else []
        places = {who: k for k, who in enumerate(before)}
        late = len(before)
        if min(joiners, key=lambda who: (places.get(who, late), who)) != self._me.id:
            return
        missing = [who for who in before if who not in joiners and not self._sights.vanished(who)]
        if missing or not self._enough(joiners, bool(before)):
            return
        eldest = sorted(joiners, key=lambda who: (places.get(who, late), self._sights.order(who)))
        if self._terms.by_rank:
            of_rank = {self._about_node(who)["node_rank"]: who for who in reversed(eldest)}
            order = [of_rank[rank] for rank in sorted(of_rank)]
        else:
            first = eldest[: self._terms.most]
            order = sorted(first, key=lambda who: (places.get(who, late), natural(self._about_node(who)["host"]), natural(who)))
        gone = [m for m in last.members if self._sights.vanished(m.id)] if last is not None else []
        reason = self._why(last, joiners) if last is not None else {}
        unrepaired = last is not None and self._seats(last.round).unrepaired
        table = RoundTable.follow(last, reason, gone, [self._about_node(who) for who in order], unrepaired)
        if table.restarts > self._terms.max_restarts:
            self._carrier.create(OVER, over_after(reason, self._terms.max_restarts))
        else:
            self._carrier.create(f"round.{target}", replace(table, secret=secrets.token_hex(16)).to_record())

    def _why(self, last: RoundTable, joiners: list[str]) -> Record:
        records: list[Record] = [
            {"failure": self._failure} if who == self._me.id else self._record(who) for who in joiners
        ]
        known: list[Record] = [r["failure"] for r in records if r.get("failure")]
        failures = [failure for failure in known if failure["round"] == last.round]
        return root_cause(self._view.get(f"break.{last.round}", {}), failures)

    def _about_node(self, who: str) -> Record:
        me = self._me
        if who != me.id:
            return self._record(who)
        return {"id": me.id, "host": me.host, "addr": me.addr, "nproc": me.nproc, "node_rank": me.node_rank}

    def _enough(self, joiners: list[str], again: bool) -> bool:
        terms = self._terms
        if terms.by_rank:
            return {self._about_node(who)["node_rank"] for who in joiners} == set(range(terms.most))
        if len(joiners) < terms.least:
            self._last_call_since = None
            return False
        if len(joiners) >= terms.most or again:  # latecomers make the next round larger
            return True
        if self._last_call_since is None:
            self._last_call_since = self._now
        return self._now - self._last_call_since >= terms.last_call

    # -- in a round --------------------------------------------------------------------------------------------------

    def _enter(self, table: RoundTable) -> None:
        self._table, self._ready, self._hosting, self._together, self._drains = table, False, False, None, None
        self._about, self._state, self._dirty = table.round, "in", True
        self._met_at, self._before = "", {}
        if self._bells is not None:
            self._bells.use(table.secret)

    def _join_again(self) -> None:
        assert self._table is not None
        self._left, self._left_in = self._table.round, self._together.newest if self._together is not None else 0
        self._table, self._ready, self._together, self._drains = None, False, None, None
        self._joining_since, self._last_call_since = self._now, None
        self._join()
        self.beat()

    def _take_part(self, table: RoundTable) -> None:
        number = table.round
        reason = self._view.get(f"break.{number}")
        if reason is not None:
            if not self._ready:
                self._join_again()
            else:
                self._tell_broken(number, reason)
            return
        table = self._follow_seats(table)
        if table.index(self._me.id) is None:
            if not self._ready:
                self._join_again()
            else:
                cause = f"the others saw nothing of this node for {self._terms.keep_alive:g} s, and another one has its place"
                self._tell_broken(number, {"kind": "evicted", "cause": cause})
            return
        if not self._ready:
            self._meet(table)
        if all(self._finished(m.id, number) for m in table.members):
            doubts = [self._doubts if m.id == self._me.id else self._record(m.id).get("doubts", {}) for m in table.members]
            self._carrier.create(OVER, {"code": 0, "detail": "done", **all_doubts(doubts)})
            return
        lost = [at for at, m in enumerate(table.members) if self._sights.vanished(m.id) and not self._finished(m.id, number)]
        if lost and not self._replace(lost[0], table):
            return
        if self._together is not None and self._together.look(self._view):
            self._ring()
            self._view = self._carrier.view()
            self._together.look(self._view)  # it waits for what it wrote like the others
        for request in self._drains.look(self._view) if self._drains is not None else ():
            self._on_news(News("drain", number, request))
        if self._ready:
            self._look_at_nodes(table)
            self._look_before(table)
        self._look_for_more(table)

    def _tell_broken(self, number: int, why: Record) -> None:
        if self._reported != ("broken", number, 0):
            self._reported = ("broken", number, 0)
            self._on_news(News("broken", number, why))

    def _look_at_nodes(self, table: RoundTable) -> None:
        at = table.index(self._me.id)
        seen: Record = {"nodes": shown.nodes(self._view, table, self._sights, self._me.id)}
        seen["replaceable"] = at is not None and self._takers.taker(self._view, table, at) is not None
        if seen != self._seen:
            self._seen = seen
            self._on_news(News("seen", table.round, seen))

    def _look_before(self, table: RoundTable) -> None:
        me = table.index(self._me.id)
        if me is None or len(table.members) < 2 or not self._terms.replaces:
            return
        at = (me - 1) % len(table.members)
        before = table.members[at]
        port = int(self._record(before.id).get("memory", 0))
        found: Record = {"round": table.round, "node": at, "id": before.id, "address": before.addr, "port": port}
        if found != self._before:
            self._before = found
            self._on_news(News("before", table.round, found, table))

    def _follow_seats(self, table: RoundTable) -> RoundTable:
        """Take over what spare nodes changed: the members, and where the workers meet."""
        seats = self._seats(table.round)
        self._table = table = seats.table(table)
        if self._together is not None:
            self._together.members = tuple(member.id for member in table.members)
        if self._met_at not in ("", seats.store):
            self._met_at = ""
            self._on_news(News("unstored", table.round))
        if self._ready and not self._met_at and seats.store in self._view:
            self._met_at = seats.store
            self._on_news(News("stored", table.round, self._view[seats.store]))
        return table

    def _replace(self, at: int, table: RoundTable) -> bool:
        """Let a spare node take the place of a lost one. If none can, let all start anew and return False."""
        if not self._ready and len(self._seats(table.round)):
            return True  # this node has just taken a place: the others see to it
        lost = table.members[at]
        how = "left" if self._record(lost.id).get("state") == "left" else "is gone"
        cause, spare = f"node {at} ({lost.host}) {how}", self._takers.taker(self._view, table, at)
        if spare is None or self._together is None:
            self._break(table.round, {"kind": "vanished", "node": at, "host": lost.host, "cause": cause})
            return False
        self._takers.seat(self._together, table, at, spare, "lost", cause)
        self._ring()
        return True

    def _meet(self, table: RoundTable) -> None:
        if table.members[0].id == self._me.id and not self._hosting:
            self._hosting = True
            self._on_news(News("host", table.round, {"addr": self._me.addr}))
        seats = self._seats(table.round)
        store = self._view.get(seats.store)
        if store is not None:
            self._ready, self._met_at = True, seats.store
            members = [member.id for member in table.members]
            self._together = Together(self._carrier, self._me.id, table.round, members, self._tell(table.round))
            seat = seats.of(self._me.id)
            self._drains = Drains(self._carrier, self._me.id, table.round, {} if seat is None else self._view)
            about = {"me": self._me.id, "incident": seat.incident if seat else 0, "drained": seat is not None and seat.drained}
            self._on_news(News("ready", table.round, {**store, **about}, table))

    def _tell(self, number: int) -> Callable[[str, Record], None]:
        return lambda kind, record: self._on_news(News(kind, number, record, self._table))

    def _finished(self, who: str, number: int) -> bool:
        if who == self._me.id:
            return self._state == "finished"
        record = self._record(who)
        return record.get("state") == "finished" and record.get("round") == number

    def _look_for_more(self, table: RoundTable) -> None:
        """Have the first live member make room for latecomers."""
        if not self._ready or not self._terms.grow or len(table.members) >= self._terms.most:
            return
        if next(m.id for m in table.members if not self._sights.vanished(m.id)) != self._me.id:
            return
        if any(self._finished(m.id, table.round) for m in table.members):
            return
        _, *joiners = self._sights.joiners(table.round + 1)
        if joiners:
            host = self._record(joiners[0]).get("host")
            self._break(table.round, {"kind": "joined", "host": host, "cause": f"node {host} joins"})

    def _break(self, number: int, reason: Record) -> None:
        self._carrier.create(f"break.{number}", {"by": self._me.id, **reason})
