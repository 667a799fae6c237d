"""The rules of a rendezvous with records in memory and a clock that only moves when a test moves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ftrun.core.errors import UsageError
from ftrun.host.nodes.carriers.carrier import CarrierLost, Record
from ftrun.host.nodes.membership.member import Member, News
from ftrun.host.nodes.membership.table import RoundTable, root_cause, weight
from ftrun.host.nodes.membership.terms import Me, MemberTerms

STEP = 0.1


class Memory:
    """A carrier."""

    serves = False

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def view(self) -> Mapping[str, Record]:
        return copy.deepcopy(self.records)

    def put(self, name: str, record: Record) -> None:
        self.records[name] = copy.deepcopy(record)

    def create(self, name: str, record: Record) -> bool:
        if name in self.records:
            return False
        self.put(name, record)
        return True

    def close(self) -> None:
        pass


class Agent:
    """A member whose agent starts a store when it is told to and stops its workers at once."""

    def __init__(self, play: Play, who: str, nproc: int, rank: int | None, offset: float, **terms: Any) -> None:
        self.who = who
        self.play = play
        self.offset = offset  # no two machines have the same clock
        self.heard: list[News] = []
        self.seen: list[Record] = []  # what the nodes showed last
        self.error: Exception | None = None
        wanted = MemberTerms(**{**play.terms, **terms})
        me = Me(who, f"host-{who}", f"addr-{who}", nproc, rank)
        self.shows: dict[str, Record] = {}
        self.member = Member(play.memory, me, wanted, self.shows, self.hear, self.now)

    def now(self) -> float:
        return self.play.t + self.offset

    def hear(self, news: News) -> None:
        if news.kind == "seen":
            self.seen = copy.deepcopy((news.record or {})["nodes"])
        elif news.kind == "before":
            self.before = copy.deepcopy(news)
        else:
            self.heard.append(copy.deepcopy(news))

    def tick(self) -> None:
        before = len(self.heard)
        try:
            self.member.tick()
            self.member.beat()
            for news in self.heard[before:]:
                if news.kind == "host":
                    self.member.store_up(str((news.record or {})["addr"]), 4000 + news.round)
                elif news.kind == "broken":
                    self.member.next_round(None)
        except (CarrierLost, UsageError) as error:
            self.error = error
            self.member.leave()

    def fail(self, rank: int, cause: str = "exit 1", weight: int = 0) -> None:
        failure = {"kind": "failed", "rank": rank, "cause": cause, "weight": weight, "host": f"host-{self.who}"}
        self.member.next_round({**failure, "node": self.ready().table.index(self.who)})  # type: ignore[union-attr]

    def ready(self) -> News:
        """The last world it was told."""
        return next(n for n in reversed(self.heard) if n.kind == "ready")

    def kinds(self) -> list[str]:
        return [n.kind for n in self.heard if n.kind != "waiting"]


class Play:
    """Several agents; those in `frozen` do not move."""

    def __init__(self, least: int, most: int, **terms: Any) -> None:
        self.memory = Memory()
        self.terms = {"least": least, "most": most, **terms}
        self.t = 1000.0
        self.agents: dict[str, Agent] = {}
        self.frozen: set[str] = set()

    def add(self, who: str, nproc: int = 2, rank: int | None = None, **terms: Any) -> Agent:
        agent = self.agents[who] = Agent(self, who, nproc, rank, 5000.0 * len(self.agents), **terms)
        return agent

    def run(self, seconds: float = 3.0) -> None:
        end = self.t + seconds
        while self.t < end:
            self.t += STEP
            for who, agent in self.agents.items():
                if who not in self.frozen and agent.error is None:
                    agent.tick()

    def the_world(self, *of: str) -> tuple[int, list[str], int]:
        """Round, order and restarts of the one world that all agents (or those named) were told last."""
        news = [self.agents[who].ready() for who in of or self.agents]
        assert news[0].table is not None and all(n.table == news[0].table for n in news)
        return news[0].round, [m.id for m in news[0].table.members], news[0].table.restarts


def test_a_world_begins_when_all_are_there() -> None:
    play = Play(3, 3)
    for who in "abc":
        play.add(who)
        play.run(2.0)
        assert ("ready" in play.agents["a"].kinds()) is (who == "c")
    assert play.the_world() == (0, ["a", "b", "c"], 0)
    store = play.agents["c"].ready().record or {}
    assert (store["host"], store["port"]) == ("addr-a", 4000)
    place = play.agents["c"].ready().table.place("c")  # type: ignore[union-attr]
    assert (place.node, place.nodes, place.first_rank, place.world_size) == (2, 3, 4, 6)


def test_the_last_call() -> None:
    play = Play(2, 4, last_call=30.0)
    for who in "ab":
        play.add(who)
    play.run(25.0)
    assert "ready" not in play.agents["a"].kinds()
    play.add("c")
    play.run(10.0)
    assert play.the_world()[1] == ["a", "b", "c"]


def test_node_ranks_decide_the_order() -> None:
    play = Play(3, 3, by_rank=True)
    for who, rank in (("a", 2), ("b", 0), ("c", 1)):
        play.add(who, rank=rank)
    play.run()
    assert play.the_world() == (0, ["b", "c", "a"], 0)


def test_without_node_ranks_the_names_decide_and_a_replacement_comes_last() -> None:
    play = Play(2, 3, last_call=1.0)
    for who in ("node66", "node7", "node100"):
        play.add(who)
    play.run()
    assert play.the_world() == (0, ["node7", "node66", "node100"], 0)
    play.frozen.add("node7")
    play.add("node8")
    play.run(30.0)
    assert play.the_world("node66", "node100", "node8")[1] == ["node66", "node100", "node8"]


def test_a_node_rank_given_twice() -> None:
    play = Play(2, 2, by_rank=True)
    play.add("a", rank=0)
    play.add("b", rank=0)
    play.run()
    assert play.agents["a"].error is None
    assert "node rank 0 is taken by host-a" in str(play.agents["b"].error)


def test_different_node_counts() -> None:
    play = Play(2, 2)
    play.add("a")
    play.add("b", most=3)
    play.run()
    assert any("--nnodes 2:" in str(agent.error) for agent in play.agents.values())


@pytest.mark.parametrize(
    ("most", "terms", "rank", "told"),
    [
        (4, {"snapshot_every": 9}, None, "--snapshot-every 0, this one with --snapshot-every 9"),
        (2, {"keep_alive": 60.0}, None, "--rdzv-conf keep_alive=5, this one with --rdzv-conf keep_alive=60"),
        (2, {}, 0, "node rank 0 is taken by host-b"),
    ],
)
def test_who_comes_with_other_options_is_refused_and_ends_nobody(most: int, terms: dict[str, Any], rank: int | None, told: str) -> None:
    play = Play(2, most, by_rank=rank is not None, last_call=1.0, max_restarts=1, keep_alive=5.0)
    for at, who in enumerate("bc"):
        play.add(who, rank=None if rank is None else at)
    play.run()
    play.add("a", rank=rank, **terms)
    play.run()
    assert told in str(play.agents["a"].error)
    play.agents["b"].fail(0)
    play.add("d", rank=rank, **terms)
    play.run(10.0)
    assert told in str(play.agents["d"].error)
    assert play.the_world("b", "c") == (1, ["b", "c"], 1)


def test_a_failure_is_charged_once_and_places_stay() -> None:
    play = Play(3, 3, max_restarts=2)
    for who in "abc":
        play.add(who)
    play.run()
    play.agents["c"].fail(5, "SIGKILL")
    play.agents["b"].fail(2, "RuntimeError at x.py:1", weight=2)
    play.run()
    assert play.the_world() == (1, ["a", "b", "c"], 1)
    assert "rank 5 on node 2 (host-c) failed: SIGKILL" in play.agents["a"].ready().table.why  # type: ignore[union-attr]
    assert play.agents["a"].kinds() == ["host", "ready", "broken", "host", "ready"]


def test_the_cause_outranks_what_followed_from_it() -> None:
    play = Play(2, 2)
    for who in "ab":
        play.add(who)
    play.run()
    play.agents["a"].fail(0, "RuntimeError at x.py:1", weight=2)
    play.agents["b"].fail(3, "exit 7")
    play.run()
    for agent in play.agents.values():
        over = agent.heard[-1]
        assert over.kind == "over" and over.record is not None and over.record["code"] == 1
        assert over.record["rank"] == 3 and "rank 3 on node 1 (host-b) failed: exit 7" in over.record["detail"]


def test_restarts_are_spent() -> None:
    play = Play(2, 2, max_restarts=1)
    for who in "ab":
        play.add(who)
    play.run()
    play.agents["a"].fail(0)
    play.run()
    assert play.the_world() == (1, ["a", "b"], 1)
    play.agents["b"].fail(2)
    play.run()
    assert all(agent.kinds()[-1] == "over" for agent in play.agents.values())


def test_a_lost_node_is_no_charge() -> None:
    play = Play(1, 2, keep_alive=10.0)
    for who in "ab":
        play.add(who)
    play.run()
    play.frozen.add("a")
    play.agents["b"].fail(2)  # its collectives failed before anybody could miss node 0
    play.run(9.0)
    assert play.agents["b"].ready().round == 0
    play.run(3.0)
    assert play.the_world("b") == (1, ["b"], 0)
    # it was only slow: it is told, and makes the world larger again
    play.frozen.clear()
    play.run(8.0)
    assert play.the_world() == (2, ["b", "a"], 0)


def test_too_few_are_left() -> None:
    play = Play(2, 2, keep_alive=5.0, join_timeout=60.0)
    for who in "ab":
        play.add(who)
    play.run()
    play.frozen.add("b")
    play.run(20.0)
    assert play.agents["a"].kinds()[-1] == "broken"
    play.add("c")
    play.run(5.0)
    assert play.the_world("a", "c") == (1, ["a", "c"], 0)


def test_nobody_comes_back() -> None:
    play = Play(2, 2, keep_alive=5.0, join_timeout=60.0)
    for who in "ab":
        play.add(who)
    play.run()
    play.frozen.add("b")
    play.run(80.0)
    assert "only 1 of 2 nodes came within 60 s" in str(play.agents["a"].error)
    assert play.memory.records["over"]["code"] == 1


def test_join_timeout_of_a_first_round_ends_nobody_else() -> None:
    play = Play(3, 3, join_timeout=20.0)
    play.add("a")
    play.run(15.0)
    play.add("b")
    play.run(10.0)
    assert "only 2 of 3 nodes came" in str(play.agents["a"].error)
    assert play.agents["b"].error is None and "over" not in play.memory.records


def test_a_full_world_takes_nobody_but_a_free_place_is_filled() -> None:
    play = Play(2, 2, keep_alive=5.0, join_timeout=60.0)
    for who in "abc":
        play.add(who)
        play.run(1.0)
    play.run()
    assert play.the_world("a", "b") == (0, ["a", "b"], 0)
    assert "ready" not in play.agents["c"].kinds()
    play.frozen.add("a")
    play.run(10.0)
    assert play.the_world("b", "c") == (1, ["b", "c"], 0)


@pytest.mark.parametrize("grow", [True, False])
def test_late_comers(grow: bool) -> None:
    play = Play(1, 3, last_call=1.0, grow=grow)
    play.add("a")
    play.run()
    play.add("b")
    play.run()
    assert play.the_world("a")[1] == (["a", "b"] if grow else ["a"])


def test_the_end_is_for_all() -> None:
    play = Play(2, 2)
    for who in "ab":
        play.add(who)
    play.run()
    play.agents["a"].member.finished()
    play.run(20.0)
    assert "over" not in play.memory.records
    play.agents["b"].member.finished()
    play.run()
    for agent in play.agents.values():
        assert agent.heard[-1].kind == "over" and (agent.heard[-1].record or {})["code"] == 0


def test_who_has_finished_is_not_missed() -> None:
    play = Play(2, 2, keep_alive=5.0)
    for who in "ab":
        play.add(who)
    play.run()
    play.agents["a"].member.finished()
    play.run(2.0)
    play.frozen.add("a")
    play.run(20.0)
    assert play.agents["b"].kinds() == ["ready"]
    play.agents["b"].member.finished()
    play.run()
    assert play.agents["b"].kinds() == ["ready", "over"]


def test_leaving_for_good_ends_all() -> None:
    play = Play(2, 2, max_restarts=3)
    for who in "ab":
        play.add(who)
    play.run()
    play.agents["b"].member.end({"code": 143, "detail": "node 1 was ended"})
    play.run()
    record = play.agents["a"].heard[-1].record or {}
    assert record["code"] == 143 and record["node"] == 1 and record["host"] == "host-b"


def test_what_a_dead_run_left() -> None:
    play = Play(2, 2, keep_alive=10.0, max_restarts=1)
    for who in "ab":
        play.add(who)
    play.run()
    play.agents["b"].fail(2)
    play.run()
    play.frozen |= {"a", "b"}
    for who in "cd":
        play.add(who)
    play.run(9.0)
    assert "ready" not in play.agents["c"].kinds()
    play.run(5.0)
    assert play.the_world("c", "d") == (2, ["c", "d"], 0)
    assert "stale" in play.agents["c"].kinds()


def test_other_options_than_those_of_a_dead_run() -> None:
    play = Play(2, 2, keep_alive=10.0, spares=1)
    for who in "ab":
        play.add(who)
    play.run()
    play.frozen |= {"a", "b"}
    for who in "cd":
        play.add(who, snapshot_every=9)
    play.run(14.0)
    assert play.the_world("c", "d") == (1, ["c", "d"], 0)


def test_a_break_before_the_store_is_up() -> None:
    play = Play(2, 2, keep_alive=5.0)
    a, b = play.add("a"), play.add("b")
    hosting = b if b.who < a.who else a
    hosting.member.store_up = lambda host, port: None  # type: ignore[method-assign]
    play.run()
    assert "ready" not in a.kinds() + b.kinds()
    play.frozen.add(hosting.who)
    play.add("c")
    play.run(12.0)
    other = next(w for w in "ab" if w != hosting.who)
    assert play.the_world(other, "c")[1] == [other, "c"]


def test_a_store_that_dies_before_anyone_knew_of_it_is_asked_for_again() -> None:
    play = Play(1, 1)
    a = play.add("a")
    a.member.store_up = lambda host, port: None  # type: ignore[method-assign]
    play.run()
    a.member.next_round(None)
    del a.member.store_up  # type: ignore[misc]
    play.run()
    assert a.kinds() == ["host", "host", "ready"]


def test_one_that_was_frozen_does_not_take_the_others_for_dead() -> None:
    play = Play(1, 2, keep_alive=5.0)
    for who in "ab":
        play.add(who)
    play.run()
    play.frozen |= {"a", "b"}
    play.t += 60.0  # the machine slept
    play.frozen.clear()
    play.run(10.0)
    assert play.the_world() == (0, ["a", "b"], 0)


class Slow(Memory):
    """Records of which each look takes some seconds; meanwhile `during` happens."""

    def __init__(self, play: Play, seconds: float) -> None:
        super().__init__()
        self.records = play.memory.records
        self.play, self.seconds = play, seconds
        self.during: Callable[[], object] = lambda: None

    def view(self) -> Mapping[str, Record]:
        self.play.t += self.seconds
        self.during()
        return super().view()


def slow(play: Play, who: str, seconds: float) -> Slow:
    """From now on the looks of this agent take so long."""
    carrier = play.agents[who].member._carrier = Slow(play, seconds)
    return carrier


def test_a_lost_one_is_missed_also_where_each_look_takes_long() -> None:
    play = Play(1, 2, keep_alive=5.0)
    for who in "ab":
        play.add(who)
    play.run()
    slow(play, "a", 4.0)
    play.frozen.add("b")
    play.run(60.0)
    assert play.the_world("a") == (1, ["a"], 0)


@pytest.mark.parametrize("order", [False, True])
def test_silence_counts_from_when_a_beat_was_seen_not_from_when_the_look_began(order: bool) -> None:
    """Else the others would have a node's places before its lease is over. Also behind an order that waited for a slow look."""
    play = Play(1, 2, keep_alive=5.0, beat=1.0)
    a, b = (play.add(who) for who in "ab")
    play.run()
    carrier = slow(play, "a", 4.0)
    play.frozen.add("b")
    carrier.during = b.tick
    a.tick()
    last = play.t  # b beat in the last moment of that look
    carrier.seconds, carrier.during = 0.0, lambda: None
    if order:
        a.member.gives_up(0)
    while "broken" not in a.kinds():
        play.run(STEP)
        assert play.t < last + 7.0
    assert play.t - last > 5.0


class Full(Memory):
    """Records that can be read, and for now not be written."""

    def put(self, name: str, record: Record) -> None:
        raise OSError(28, "No space left on device")


def test_a_beat_that_could_not_be_written_stays_due() -> None:
    """Each try fails then, and the session sees for how long."""
    play = Play(1, 1, beat=1.0)
    agent = play.add("a")
    play.run()
    full = agent.member._carrier = Full()
    full.records = play.memory.records
    play.t += 1.0
    for _ in range(5):
        play.t += STEP
        agent.member.tick()
        with pytest.raises(OSError, match="No space left"):
            agent.member.beat()
    agent.member._carrier = play.memory
    assert agent.member.beat()
    assert not agent.member.beat()


def test_each_node_sees_what_the_others_show() -> None:
    play = Play(2, 2, spares=1)
    agents = [play.add(who) for who in "abc"]
    play.run()
    agents[1].shows["progress"] = {"step": 7}
    play.run()
    for agent in agents:  # the spare one, too
        told = [(node["node"], node["host"], node["state"], node["shows"]) for node in agent.seen]
        wanted = [(0, "host-a", "in", {}), (1, "host-b", "in", {"progress": {"step": 7}}), (None, "host-c", "joining", {})]
        assert told == wanted, agent.who
        assert [node["host"] for node in agent.seen if node["here"]] == [f"host-{agent.who}"]
        assert not any(node["silent"] for node in agent.seen)


def test_each_node_sees_which_others_are_silent_and_finished() -> None:
    play = Play(2, 2, keep_alive=8.0)
    agents = [play.add(who) for who in "ab"]
    play.run()
    agents[0].member.finished()
    play.frozen.add("b")
    play.run(5.0)
    mine, other = agents[0].seen
    assert (mine["state"], mine["silent"]) == ("finished", 0) and (other["state"], other["silent"]) == ("in", 5)
    play.frozen.clear()
    play.run(1.0)
    assert agents[0].seen[1]["silent"] == 0


def test_weights() -> None:
    assert weight(137, "") == 0 and weight(3, "") == 0
    assert weight(1, "ValueError at train.py:3") == 1
    assert weight(1, "RuntimeError at train.py:3") == weight(1, "DistBackendError at x:1") == weight(134, "") == 2
    lost = {"kind": "vanished", "cause": "node 1 is gone"}
    assert root_cause(lost, [{"kind": "failed", "weight": 0}]) is lost


def test_the_stamp_of_a_round_is_that_of_no_other() -> None:
    def members(*ids: str) -> list[dict[str, Any]]:
        return [{"id": one, "host": "h", "addr": "a", "nproc": 2} for one in ids]

    first = RoundTable.follow(None, {}, (), members("a", "b"))
    told = RoundTable.from_record(first.to_record())  # to the other nodes
    again = RoundTable.follow(first, {"kind": "node"}, (), members("a", "b"))
    another = RoundTable.follow(None, {}, (), members("c", "d"))
    assert told.stamp() == first.stamp() and len({one.stamp() for one in (first, again, another)}) == 3


def test_the_first_node_goes_by_what_it_decides_at_once() -> None:
    play = Play(1, 2, last_call=0.0)
    play.add("a")
    play.run()
    agent = play.agents["a"]
    agent.member.stops(0, 1, {"cause": "died"})
    agent.tick()
    agent.member.stopped(0, 1, 4, [])
    agent.tick()
    agent.member.restored(0, 1, 0, made=False)
    agent.tick()
    assert agent.kinds()[-3:] == ["stops", "decided", "restored"], "each in the look in which it could be known"
