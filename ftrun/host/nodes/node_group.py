"""Connects an agent with the other nodes: turns their news into events of the machine, and reports to them what happens here.

Everything here runs in the agent's loop; the session's thread does the waiting.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ftrun.control import events as ev
from ftrun.control.states import NOWHERE
from ftrun.core import paths
from ftrun.core.amounts import count
from ftrun.core.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_SIGNAL
from ftrun.core.shared import lease
from ftrun.core.shared.board import Head, snapshots_of
from ftrun.core.shared.world import AllNodes
from ftrun.core.system import files
from ftrun.host.base.context import LaunchContext
from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.membership.member import News
from ftrun.host.nodes.membership.open import Rendezvous
from ftrun.host.nodes.membership.session import Session
from ftrun.host.nodes.membership.table import NodePlace, RoundTable, sentence, weight

_WRITES = 0.5  # seconds between two writings of what the nodes show


class StoreHost(Protocol):
    """Runs this node's store, and publishes worlds."""

    def serve_world(self, addr: str) -> None:
        """Start a store that listens on `addr`; the host passes its address to `store_up`."""

    def meet(self, store: tuple[str, int], seated: bool = False) -> None:
        """Let the workers of a complete world meet at `store`. `seated`: this node takes a place in it."""

    def move(self, store: tuple[str, int] | None) -> None:
        """Let the workers of the next generations meet at another store; None: it is not known yet."""

    def serve_memory(self, address: str, secret: str) -> None:
        """Let other nodes that know `secret` read this node's memory, on `address`; the host passes the port to `serves`."""

    def copy_snapshots(self, source: Record) -> None:
        """Copy the host snapshots of the node before this one from now on.

        `source`: its index `node`, `address`, `port` (0 = it serves none), `secret`, and its ranks from `first` to before `end`.
        """


class JobListener(Protocol):
    """Hears what other nodes show, and what persons ask of this one, on any node."""

    def seen(self, nodes: list[Record]) -> None:
        """Take in what each node of the run shows of itself: see `News`."""

    def asked(self, request: Record) -> None:
        """Move a rank, or this node, as a request says; see membership.drains."""

    def refused(self, why: str) -> None:
        """Hear why this node cannot give its place up."""


class SoleNode:
    """Replaces `Peers` in a run on one node. `stamp`: no other run has the same."""

    place: NodePlace | None = None

    def __init__(self, context: LaunchContext) -> None:
        self.run_id = context.run_dir.name
        self.doubts: Record = {}
        self.stamp = secrets.token_hex(4)
        self.store_port = context.settings.nodes.master_port
        self._host: StoreHost | None = None

    def start(self, host: StoreHost) -> None:
        self._host = host
        self.next_round()

    def close(self) -> None:
        """Do nothing: there are no others to leave."""

    def global_rank(self, local: int) -> int:
        return local

    def attempt(self, own: int) -> int:
        return own

    def went_back(self, own: int) -> int:
        return own

    def same_port(self, port: int) -> int:
        return port

    def shows(self, subject: str, facts: Record) -> None:
        """Do nothing: there are no others to show it to."""

    def shown(self, subject: str) -> tuple[str, dict[str, Record]]:
        """Return nothing: there are no others."""
        return "", {}

    def serves(self, port: int) -> None:
        """Do nothing: there are no others to tell."""

    def fd_store_ready(self) -> None:
        """Do nothing: there are no others to serve."""

    def span(self) -> None:
        """Return None: this node has the whole world."""

    def is_news(self, event: ev.WorldStops) -> bool:
        """Return False: no other node stops anything."""
        return False

    def begins(self) -> ev.Event:
        """Return the event with which the run begins."""
        return ev.Begin(time.monotonic())

    def restored(self, action: ev.TellRestored, missed: int, made: bool) -> None:
        """Do nothing: there are no others to tell."""

    def finished(self, doubts: Record) -> None:
        """Do nothing: there are no others to tell."""

    def saw(self, event: ev.Event, actions: Iterable[ev.Action], rank: int | None) -> None:
        """Do nothing: there are no others to tell."""

    def next_round(self) -> None:
        assert self._host is not None
        self._host.serve_world("127.0.0.1")

    def store_up(self, host: str, port: int) -> None:
        assert self._host is not None
        self._host.meet((host, port))


class Peers:
    """Speaks for the other agents. `place`: this node's place in the present world; `stamp`: no other world of any run has the same."""

    store_port = 0  # a store of ours listens on any free port

    def __init__(self, context: LaunchContext, meeting: Rendezvous) -> None:
        self.run_id = meeting.run_id
        self._nproc = context.settings.nproc
        self.place = NodePlace(-1, 0, 1, 0, self._nproc, 0)
        self.stamp = ""
        self.doubts: Record = {}  # why the result of some node may not be called exact, once the run is over: see `Member.finished`
        self._name = os.uname().nodename
        self._me = ""  # this node's id in the records, from its first world on
        self._terms = meeting.terms
        self._loop = context.loop
        self._listener = context.listener
        self._host: StoreHost | None = None
        self._inbox: deque[News] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._board = context.board
        self._fenced = 0  # how often the fd store ended the ranks of this node
        beaten = functools.partial(lease.renew, context.board, meeting.terms.keep_alive)
        self._session = Session(meeting.opener, meeting.terms, meeting.pause, self._on_news, beaten)
        self._table: RoundTable | None = None  # of the present world
        # number of the newest repair of the present world for which this node's gate closed, the same on every node,
        self._incident = 0
        self._stopped = 0  # and the generation that it has on this node
        self._heard: Record | None = None  # the last repair that another node began
        self._seated_in = 0  # the repair in which this node takes another one's place, until it does; 0 = none
        self._after_drain = False  # that one gave it up
        self._job: JobListener | None = None
        self._decision: Record = {}  # of the newest repair
        self._copied: Record | None = None  # whose host snapshots this node copies
        self._snapshots_are_copied = meeting.terms.replaces and context.settings.snapshot_every > 0
        self._failure: Record | None = None  # why our workers stop, if that came from this node
        self._ended = False  # everyone knows that the run is over, or nobody can be told
        self._replaceable = False  # may a spare node take this one's place?
        self._last: tuple[Record, bool] | None = None  # why a spare node is to take this one's place, and whether a person wants it
        self._seen_in = context.run_dir / paths.NODES
        self.nodes: list[Record] = []  # what each node of the run shows of itself: see `News`
        self._unwritten = False  # is that file to be written soon?

    def start(self, host: StoreHost) -> None:
        self._host = host
        self._loop.watch(self._bell, self._read_news)
        self._session.start()

    def close(self) -> None:
        """Leave the other agents, after every worker of ours has ended."""
        if self._last is not None:
            self._session.withdraws(*self._last)
        self._session.close()
        self._loop.forget(self._bell)

    @property
    def incident(self) -> tuple[int, int]:
        """Return the round, and the number in it of its newest incident."""
        return self.place.round, self._incident

    def global_rank(self, local: int) -> int:
        """Return the rank in the world of a rank that the machine counts from 0 on each node."""
        return self.place.first_rank + local

    def attempt(self, own: int) -> int:
        """Return the restarts that the run has spent; `own` are those that this node's machine counted."""
        return self.place.restarts

    def went_back(self, own: int) -> int:
        """Return a number of the last return to a host snapshot, the same on every node; `own` is the one that this node counted."""
        return int(self._decision.get("went_back", 0))

    def same_port(self, port: int) -> int:
        """Return the port of the next store, after one on `port` died: any, since the nodes meet anew and learn it."""
        return self.store_port

    def span(self) -> AllNodes | None:
        """Return the present world over all of its nodes, None if it is on this one alone."""
        if self._table is None or self.place.nodes < 2:
            return None
        addresses, ports = tuple(m.addr for m in self._table.members), tuple(map(int, self._decision.get("memories", ())))
        return AllNodes(
            size=self.place.world_size,
            firsts=self._table.firsts(),
            node=self.place.node,
            addresses=addresses,
            meeting=f"{self.stamp}/{self._incident}",
            ports=ports,
            secret=self._table.secret,
            replaced=tuple(map(int, self._decision.get("replaced", ()))),
            mirrored=self._terms.replaces,
        )

    # -- to the others -----------------------------------------------------------------------------------------------

    def saw(self, event: ev.Event, actions: Iterable[ev.Action], rank: int | None) -> None:
        """Note for the other nodes what the machine's answer `actions` to `event` means, before the agent carries it out.

        `rank`: which of this node's ranks the event is about, if any.
        """
        if self._board[Head.FENCED] != self._fenced:
            self._fenced = self._board[Head.FENCED]
            self._listener.log(_fenced(self._terms.keep_alive), "warning")
        for action in actions:
            if isinstance(action, ev.Say) and action.what == "world_stopped" and action.rank is not None:
                self._failure = {**self._about(action, "failed"), "weight": _weight_of(event)}
                if isinstance(event, ev.Unrestorable) and event.requeue:
                    self._failure["code"] = EXIT_REQUEUE
            elif isinstance(action, ev.Say) and action.what == "peer_failed" and isinstance(event, ev.WorldStops):
                self._failure = self._heard  # a repair that this node cannot take part in
            elif isinstance(action, ev.CloseGate):
                self._closes(event, action, rank)
            elif isinstance(action, ev.TellStopped) and action.generation == self._stopped:
                replaced = [self.global_rank(local) for local in action.replaced]
                kept = self._snapshots(action.cells)
                copies = sorted(self._board.copies())
                self._session.stopped(self.place.round, self._incident, action.last, replaced, kept, action.back, copies)
            elif isinstance(action, ev.End) and not self._ended:
                self._ended = True
                self._part(action, self._last_words(action, actions))
        if isinstance(event, ev.ServiceDied) and event.service == "store":
            self._failure = {"kind": "store", "cause": "the store of its workers died", **self._where()}

    def _snapshots(self, cells: Sequence[int]) -> list[int]:
        """Return the gate numbers of which each of these incarnations has a host snapshot."""
        return [] if NOWHERE in cells else sorted(snapshots_of(map(self._board.cell, cells)))

    def _part(self, end: ev.End, words: Record) -> None:
        """End the run for all; or, if only this machine is at its end, keep its place for a spare node until its workers have ended."""
        drained = end.code == EXIT_OK  # a spare node was there just now
        if not end.worn_out or not (drained or self._replaceable):
            self._session.end(words)
            return
        self._last = {**words, "code": EXIT_REQUEUE}, drained
        if not drained:
            self._session.claims(self.place.round)
            self._listener.log("this node's place goes to a spare node as soon as its workers have ended")

    def _closes(self, event: ev.Event, order: ev.CloseGate, rank: int | None) -> None:
        """Begin a repair for all nodes when this one's gate closes, unless another node has begun it."""
        if order.generation == self._stopped:
            return  # the same order again
        self._stopped = order.generation
        if isinstance(event, (ev.WorldStops, ev.Seated)):
            self._incident = event.incident
            return
        self._incident += 1
        world_rank = None if rank is None else self.global_rank(rank)
        said = next((str(text) for name in ("cause", "signature", "evidence", "why") if (text := getattr(event, name, ""))), "")
        cause = said or ("died" if rank is not None else "it stops for a repair")
        about = {"kind": "failed", "rank": world_rank, "local_rank": rank, "cause": cause, "weight": _weight_of(event)}
        self._session.stops(self.place.round, self._incident, {**about, **self._where()})

    def is_news(self, event: ev.WorldStops) -> bool:
        """Has this node's gate not closed for that repair yet?"""
        return event.incident > self._incident

    def begins(self) -> ev.Event:
        """Return the event with which the run begins on this node: in the middle of a repair, if it takes a lost one's place."""
        incident, self._seated_in = self._seated_in, 0
        return ev.Seated(time.monotonic(), incident, self._after_drain) if incident else ev.Begin(time.monotonic())

    def restored(self, action: ev.TellRestored, missed: int, made: bool) -> None:
        """Tell the other nodes that every rank of this one is restored; `missed` and `made` as in WorldRestored."""
        if action.generation == self._stopped:
            self._session.restored(self.place.round, self._incident, missed, made)

    def finished(self, doubts: Record) -> None:
        """Tell the other nodes that every worker of this one ended well, and why its result may not be called exact."""
        self._session.finished(doubts)
        self._listener.log(_node_done(self.place.nodes))

    def shows(self, subject: str, facts: Record) -> None:
        """Show the other nodes something of this one, with its next beat."""
        self._session.shows(subject, facts)

    def listen(self, job: JobListener) -> None:
        """Let `job` hear of the other nodes. Call it before `start`."""
        self._job = job

    def asks(self, request: Record) -> str:
        """Ask `node`, or the node that has `rank` (of the world), to move; return why nobody can be asked, "" = it is asked."""
        if self._table is None:
            return "this node has no place in the run"
        node, rank = request["node"], request["rank"]
        if rank is not None:
            node = bisect_right(self._table.firsts(), rank) - 1
        if not 0 <= node < self.place.nodes or (rank is not None and rank >= self.place.world_size):
            return f"there is no rank {rank}" if rank is not None else f"there is no node {node}"
        self._session.asks({**request, "node": node, "to": self._table.members[node].id, "by": self.place.node})
        return ""

    def gives_up(self) -> None:
        """Let a spare node take this one's place, when no repair goes on."""
        self._session.gives_up(self.place.round)

    def shown(self, subject: str) -> tuple[str, dict[str, Record]]:
        """Return this node's id, and what each node of the present world shows of `subject`, by its id and in their order.

        That is {} for one that shows nothing of it, and nothing at all if the world is on this node alone.
        """
        if self._table is None or self.place.nodes < 2:
            return "", {}
        seen = {node["id"]: node["shows"] or {} for node in self.nodes}
        return self._me, {member.id: seen.get(member.id, {}).get(subject, {}) for member in self._table.members}

    def serves(self, port: int) -> None:
        """Tell the other nodes the port at which they get at this node's memory; 0 = they cannot."""
        self._session.serves(port)

    def fd_store_ready(self) -> None:
        """Let a new fd store serve the other nodes as the last one did."""
        if self._host is not None and self._table is not None and self.place.nodes > 1 and self._table.secret:
            self._host.serve_memory(self._table.members[self.place.node].addr, self._table.secret)
        if self._host is not None and self._copied is not None:
            self._host.copy_snapshots(self._copied)

    def next_round(self) -> None:
        """Meet the other agents anew, after every worker of ours has ended."""
        failure, self._failure = self._failure, None
        self._session.next_round(failure)

    def store_up(self, host: str, port: int) -> None:
        self._session.store_up(host, port)

    def _where(self) -> Record:
        return {"node": self.place.node, "host": self._name}

    def _about(self, say: ev.Say, kind: str) -> Record:
        rank = None if say.rank is None else self.global_rank(say.rank)
        return {"kind": kind, "rank": rank, "local_rank": say.rank, "cause": say.detail, **self._where()}

    def _last_words(self, end: ev.End, actions: Iterable[ev.Action]) -> Record:
        here = f"node {self.place.node} ({self._name})"
        if end.code > EXIT_SIGNAL:
            return {"code": end.code, "detail": f"{here} was ended: {end.reason}", **self._where()}
        said = next((a for a in actions if isinstance(a, ev.Say) and a.rank is not None and a.what != "died"), None)
        if said is None:
            return {"code": end.code, "detail": f"{here} ended: {end.reason}", **self._where()}
        about = self._about(said, "failed")
        return {"code": end.code, "detail": f"rank {about['rank']} on {here} failed: {said.detail}", **about}

    # -- from the others ---------------------------------------------------------------------------------------------

    def _on_news(self, news: News) -> None:
        # in the session's thread
        self._inbox.append(news)
        os.eventfd_write(self._bell, 1)

    def _read_news(self) -> None:
        os.eventfd_read(self._bell)
        while self._inbox:
            news = self._inbox.popleft()
            _ON_NEWS[news.kind](self, news)

    def _waiting(self, news: News) -> None:
        assert news.record is not None
        here, least, most = (int(news.record[k]) for k in ("here", "least", "most"))
        self._listener.note("nodes", round=news.round, **news.record)
        if news.record["spare"]:
            self._listener.log(f"this node is a spare: the run has its {count(most, 'node')}; it takes the place of one that is lost")
            if not news.record["fits"]:
                self._listener.log(
                    f"but no node of the run has {count(self._nproc, 'worker')}, so that this one can replace none: "
                    "start it with the same --nproc-per-node",
                    "warning",
                )
        elif here < most:
            self._listener.log(
                _waiting_for_nodes(here, least, most, self._terms.join_timeout, self._terms.last_call)
            )

    def _unreached(self, news: News) -> None:
        assert news.record is not None
        self._listener.log(str(news.record["detail"]))

    def _stale(self, news: News) -> None:
        self._listener.log(
            f"found what an earlier run {self.run_id} left: none of its nodes moved for {self._terms.keep_alive:g} s; "
            "starting anew"
        )

    def _host_round(self, news: News) -> None:
        assert self._host is not None and news.record is not None
        self._host.serve_world(str(news.record["addr"]))

    def _ready(self, news: News) -> None:
        assert self._host is not None and news.table is not None and news.record is not None
        self._me = news.record["me"]
        self.place = news.table.place(self._me)
        self.stamp = news.table.stamp()
        self._table, self._incident, self._stopped, self._decision, self._copied = news.table, 0, 0, {}, None
        self.fd_store_ready()
        host, port = str(news.record["host"]), int(news.record["port"])
        # restarts are counted for the whole world: every node of it has this number
        self._listener.note("world", store=[host, port], **vars(self.place), table=news.table.shown())
        self._listener.log(_world_ready(self.place, self._nproc, f"{host}:{port}", news.table.why))
        self._failure, self._seated_in, self._after_drain = None, int(news.record["incident"]), bool(news.record["drained"])
        self._host.meet((host, port), seated=self._seated_in > 0)

    def _before(self, news: News) -> None:
        assert self._host is not None and news.record is not None and news.table is not None
        if self._snapshots_are_copied:
            at, table = int(news.record["node"]), news.table
            first = table.firsts()[at]
            self._copied = {**news.record, "secret": table.secret, "first": first, "end": first + table.members[at].nproc}
            self._host.copy_snapshots(self._copied)

    def _unstored(self, news: News) -> None:
        assert self._host is not None
        self._host.move(None)

    def _stored(self, news: News) -> None:
        assert self._host is not None and news.record is not None
        self._host.move((str(news.record["host"]), int(news.record["port"])))

    def _seen(self, news: News) -> None:
        assert news.record is not None
        self.nodes, self._replaceable = news.record["nodes"], news.record["replaceable"]
        if not self._unwritten:  # with many nodes there is news at each look
            self._unwritten = True
            self._loop.after(_WRITES, self._write_seen)

    def _write_seen(self) -> None:
        assert self._job is not None
        self._unwritten = False
        with contextlib.suppress(OSError):  # no room: commands show what was seen before
            files.replace(self._seen_in, json.dumps(self.nodes), private=True)
        self._job.seen(self.nodes)

    def _drain(self, news: News) -> None:
        assert self._job is not None and news.record is not None
        self._listener.note("drain-asked", **news.record)
        self._job.asked(news.record)

    def _kept(self, news: News) -> None:
        assert self._job is not None and news.record is not None
        self._job.refused(str(news.record["why"]))

    def _drained(self, news: News) -> None:
        assert news.record is not None
        self._listener.note("drained", **news.record)
        if not self._ended:
            detail = "node {node} ({host}) is drained, and {taker} takes its place".format(**news.record)
            self._listener.on_event(ev.WorldEnded(time.monotonic(), EXIT_OK, detail, drained=True))

    def _broken(self, news: News) -> None:
        assert news.record is not None
        reason = news.record
        self._listener.note("world-broken", **reason)
        evicted = reason.get("kind") == "evicted"
        happened = ev.PeerFailed(time.monotonic(), sentence(reason), reason.get("node"), reason.get("rank"), evicted)
        self._listener.on_event(happened)

    def _stops(self, news: News) -> None:
        assert news.record is not None
        incident = int(news.record["incident"])
        if news.round == self.place.round:
            self._table = news.table or self._table
        if news.round == self.place.round and incident > self._incident:
            if self._seated_in:
                self._seated_in = incident
            self._heard = news.record
            self._listener.note("world-stops", **news.record)
            self._listener.on_event(ev.WorldStops(time.monotonic(), sentence(news.record), incident, "seat" in news.record))

    def _decided(self, news: News) -> None:
        assert news.record is not None
        if (news.round, news.record["incident"]) == (self.place.round, self._incident):
            self._decision = news.record
            self._listener.note("world-decided", **news.record)
            resume, rollback = int(news.record["resume"]), bool(news.record["rollback"])
            self._listener.on_event(ev.WorldDecided(time.monotonic(), self._stopped, resume, rollback))

    def _restored(self, news: News) -> None:
        assert news.record is not None
        if (news.round, news.record["incident"]) == (self.place.round, self._incident):
            missed, made = int(news.record["missed"]), bool(news.record["made"])
            self._listener.on_event(ev.WorldRestored(time.monotonic(), self._stopped, missed, made))

    def _over(self, news: News) -> None:
        assert news.record is not None
        record = news.record
        self._listener.note("world-over", **record)
        self.doubts = {name: record[name] for name in ("inexact", "left_out") if name in record}
        lease.end(self._board)
        if not self._ended:
            self._ended = True
            code = record["code"] if record["code"] in (EXIT_OK, EXIT_REQUEUE) else EXIT_FAILED
            elsewhere = record.get("node") != self.place.node
            self._listener.on_event(ev.WorldEnded(time.monotonic(), code, str(record["detail"]), elsewhere))

    def _lost(self, news: News) -> None:
        assert news.record is not None
        self._listener.note("world-lost", **news.record)
        if not self._ended:
            self._ended = True
            record: dict[str, Any] = news.record
            self._listener.on_event(ev.WorldEnded(time.monotonic(), int(record["code"]), str(record["detail"]), True))


def _weight_of(event: ev.Event) -> int:
    return weight(event.code, event.signature) if isinstance(event, ev.Died) else 0


_ON_NEWS: dict[str, Callable[[Peers, News], None]] = {
    "waiting": Peers._waiting,
    "stale": Peers._stale,
    "unreached": Peers._unreached,
    "host": Peers._host_round,
    "ready": Peers._ready,
    "before": Peers._before,
    "unstored": Peers._unstored,
    "stored": Peers._stored,
    "seen": Peers._seen,
    "drain": Peers._drain,
    "kept": Peers._kept,
    "drained": Peers._drained,
    "broken": Peers._broken,
    "stops": Peers._stops,
    "decided": Peers._decided,
    "restored": Peers._restored,
    "over": Peers._over,
    "lost": Peers._lost,
}


def _waiting_for_nodes(here: int, least: int, most: int, patience: float, last_call: float) -> str:
    if here < least:
        return f"{count(here, 'node')} of {least} here; waiting at most {patience:g} s for the others"
    return f"{count(here, 'node')} here, room for {most}; waiting {last_call:g} s for more"


def _world_ready(place: NodePlace, workers: int, store: str, why: str) -> str:
    last = place.first_rank + workers - 1
    ranks = f"rank {last}" if workers == 1 else f"ranks {place.first_rank} to {last}"
    after = f" after: {why}" if why else ""
    again = (
        f" (restart {place.restarts} of the run{after})" if place.restarts else f" ({after.strip()})" if after else ""
    )
    return (
        f"world of {count(place.world_size, 'worker')} on {count(place.nodes, 'node')}{again}; "
        f"this is node {place.node} with {ranks}, store at {store}"
    )


def _fenced(keep_alive: float) -> str:
    return (
        f"no beat of this node counted for the others, who take it for lost after {keep_alive:g} s: its workers were ended before that. "
        "Was this ftrun stopped, or the rendezvous out of reach?"
    )


def _node_done(nodes: int) -> str:
    return f"every worker of this node is done; waiting for the other{'s' if nodes > 2 else ''}"
