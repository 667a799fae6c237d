"""Spare nodes: who waits, who takes a lost one's place, and what the others hear of it; with records in memory."""

from __future__ import annotations

from typing import Any

import pytest

from ftrun.core.errors import UsageError
from ftrun.host.base.settings import Nodes
from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.membership.member import News
from ftrun.host.nodes.membership.open import check
from ftrun.host.nodes.membership.seats import Seats
from tests.host.nodes.test_membership import Agent, Play

LOST = 6.0  # seconds in which a silent node is missed


def play_of(nodes: str = "ab", waiting: str = "s", **terms: Any) -> Play:
    play = Play(len(nodes), len(nodes), keep_alive=5.0, join_timeout=20.0, **{"spares": 1, **terms})
    for who in nodes:
        play.add(who)
    play.run()
    for who in waiting:
        play.add(who)
        play.run(1.0)
    return play


def newest(agent: Agent, kind: str) -> News:
    return next(news for news in reversed(agent.heard) if news.kind == kind)


def members(news: News) -> list[str]:
    assert news.table is not None
    return [member.id for member in news.table.members]


def test_a_spare_node_waits_as_long_as_it_takes() -> None:
    play = play_of()
    play.run(60.0)
    spare = play.agents["s"]
    assert spare.error is None and spare.kinds() == []
    told = spare.heard[-1].record or {}
    assert told["spare"] and told["fits"]
    for who in "ab":
        play.agents[who].member.finished()
    play.run()
    assert spare.kinds() == ["over"] and (spare.heard[-1].record or {})["code"] == 0


def test_it_takes_the_place_of_a_lost_node_in_the_same_world() -> None:
    play = play_of("abc")
    stamp = play.agents["a"].ready().table.stamp()  # type: ignore[union-attr]
    play.frozen.add("b")
    play.run(LOST)
    for who in "ac":
        heard = newest(play.agents[who], "stops")
        assert (heard.record or {})["incident"] == 1 and members(heard) == ["a", "s", "c"]
        assert (heard.record or {})["cause"] == "node 1 (host-b) is gone, and host-s takes its place"
        assert "broken" not in play.agents[who].kinds() and "unstored" not in play.agents[who].kinds()
    seated = play.agents["s"].ready()
    assert (seated.record or {})["incident"] == 1 and (seated.record or {})["host"] == "addr-a" and members(seated) == ["a", "s", "c"]
    assert seated.table is not None and seated.table.stamp() == stamp, "marks of checkpoints rest on it"
    assert seated.table.place("s").first_rank == 2
    assert play.agents["s"].kinds() == ["ready", "stops"]


def test_a_node_whose_guardian_says_that_it_has_ended_is_replaced_at_once() -> None:
    play = play_of()
    play.agents["b"].member.serves(4711)
    play.run()
    watched = play.agents["a"].member.neighbour
    assert watched is not None and (watched.node, watched.address, watched.port) == ("b", "addr-b", 4711) and watched.secret
    play.frozen.add("b")
    play.agents["a"].member.ended("b")
    play.run(0.5)
    for who in "as":
        assert members(newest(play.agents[who], "stops")) == ["a", "s"]
    play.agents["s"].member.serves(4712)
    play.run()
    watched = play.agents["a"].member.neighbour
    assert watched is not None and (watched.node, watched.port) == ("s", 4712)


def test_each_node_knows_where_the_one_before_it_serves_its_memory() -> None:
    """Also when a spare node has taken that one's place."""
    play = play_of("abc")

    def told(who: str) -> tuple[object, ...]:
        news = play.agents[who].before
        return (*members(news), *((news.record or {})[name] for name in ("node", "address", "port")))

    assert told("c") == ("a", "b", "c", 1, "addr-b", 0), "it does not serve it yet"
    for at, who in enumerate("abcs"):
        play.agents[who].member.serves(4711 + at)
    play.run()
    assert told("c") == ("a", "b", "c", 1, "addr-b", 4712)
    assert told("a") == ("a", "b", "c", 2, "addr-c", 4713)
    play.frozen.add("b")
    play.run(LOST)
    assert told("c") == ("a", "s", "c", 1, "addr-s", 4714) and told("s") == ("a", "s", "c", 0, "addr-a", 4711)


def test_one_with_other_options_takes_no_place() -> None:
    play = play_of(waiting="")
    other = play.add("c", spares=0, keep_alive=60.0)
    other.member._compare_terms = lambda *_: None  # type: ignore[method-assign]  # as long as it has not seen the others move
    play.run()
    play.add("s")
    play.run(1.0)
    play.frozen.add("b")
    play.run(LOST)
    assert members(newest(play.agents["a"], "stops")) == ["a", "s"]


def test_a_record_that_is_missing_for_a_moment_ends_no_spare_node() -> None:
    play = play_of()
    kept = play.memory.records.pop("agent.a")
    play.frozen |= {"a", "b"}
    play.run(0.3)
    play.memory.records["agent.a"] = kept
    play.frozen.clear()
    play.run()
    assert play.agents["s"].error is None


def test_who_takes_a_place_again_hears_again_whose_snapshots_it_copies() -> None:
    """Its fd store may be another one by then."""
    play = play_of()
    play.frozen.add("b")
    play.run(LOST)
    play.frozen.remove("b")
    play.run()
    del play.agents["b"].before
    play.frozen.add("s")
    play.run(LOST)
    assert members(play.agents["b"].ready()) == ["a", "b"]
    assert members(play.agents["b"].before) == ["a", "b"]


def test_all_answer_for_the_new_member() -> None:
    play = play_of()
    play.frozen.add("b")
    play.run(LOST)
    play.agents["a"].member.stopped(0, 1, 7, [])
    play.run()
    assert "go.0.1" not in play.memory.records, "the spare node has not answered"
    play.agents["s"].member.stopped(0, 1, -1, [2, 3])
    play.run()
    assert play.memory.records["go.0.1"]["resume"] == 8 and play.memory.records["go.0.1"]["replaced"] == [2, 3]
    for who in "as":
        assert newest(play.agents[who], "decided")
        play.agents[who].member.restored(0, 1, 0, False)
    play.run()
    assert all(play.agents[who].kinds()[-1] == "restored" for who in "as")


def test_the_first_node_takes_the_store_with_it() -> None:
    play = play_of()
    play.frozen.add("a")
    play.run(LOST)
    assert play.agents["s"].kinds() == ["host", "ready", "stops"]
    store = play.agents["s"].ready().record or {}
    assert store["host"] == "addr-s"
    other = play.agents["b"]
    assert other.kinds()[:2] == ["ready", "unstored"] and sorted(other.kinds()[2:]) == ["stops", "stored"]
    assert (newest(other, "stored").record or {})["host"] == "addr-s"
    play.agents["b"].member.stopped(0, 1, 3, [])
    play.agents["s"].member.stopped(0, 1, -1, [0, 1])
    play.run()
    assert (newest(other, "decided").record or {})["resume"] == 4, "the node in the first place leads"


def test_one_that_comes_back_is_a_spare_node() -> None:
    """It was only frozen: it ends its workers, and waits for the next loss."""
    play = play_of()
    play.frozen.add("b")
    play.run(LOST)
    play.frozen.clear()
    play.run()
    back = play.agents["b"]
    assert "another one has its place" in str((newest(back, "broken").record or {})["cause"])
    assert (back.heard[-1].record or {})["spare"]
    play.frozen.add("s")
    play.run(LOST)
    assert members(newest(play.agents["a"], "stops")) == ["a", "b"]
    assert (back.ready().record or {})["incident"] == 2
    assert [(seat.node, seat.taken_by.id) for seat in Seats(play.memory.records, 0).taken] == [(1, "s"), (1, "b")]


@pytest.mark.parametrize("what", ["a rank failed", "a repair", "the end"])
def test_what_fails_on_a_node_that_lost_its_place_is_nothing_to_the_others(what: str) -> None:
    """Its workers lost their peers, and its agent hears of that before it looks at the records."""
    play = play_of()
    play.frozen.add("b")
    play.run(LOST)
    back = play.agents["b"]
    if what == "a rank failed":
        back.member.next_round({"kind": "failed", "rank": 2, "cause": "exit 1", "node": 1, "host": "host-b"})
    elif what == "a repair":
        back.member.stops(0, 2, {"kind": "failed", "rank": 2, "cause": "SIGKILL"})
    else:
        back.member.end({"code": 1, "detail": "rank 2 failed"})
    play.frozen.clear()
    play.run()
    assert not {"break.0", "stop.0.2", "over"} & {*play.memory.records}
    assert (back.heard[-1].record or {})["spare"]


def test_a_spare_node_that_ends_is_nothing_to_the_others() -> None:
    """Also one that had a place before."""
    play = play_of()
    play.frozen.add("b")
    play.run(LOST)
    play.frozen.clear()
    play.run()
    play.agents["b"].member.end({"code": 143, "detail": "SIGTERM"})
    play.run()
    assert "over" not in play.memory.records


@pytest.mark.parametrize("spares", ["s", ""])
def test_a_node_at_its_end_gives_its_place_to_a_spare_one_or_ends_the_run(spares: str) -> None:
    """Also in the middle of an incident that it has begun, and another one that another node has begun meanwhile."""
    play = play_of("ab", spares)
    here, there = play.agents["b"], play.agents["a"]
    here.member.stops(0, 1, {"kind": "failed", "cause": "exit 1"})
    there.member.stops(0, 2, {"kind": "failed", "cause": "exit 1"})
    here.member.withdraws({"code": 75, "detail": "rank 2 on node 1 (host-b) failed: 4 times"}, False)
    here.member.leave()
    play.frozen.add("b")
    play.run()
    if not spares:
        assert play.memory.records["over"]["code"] == 75
        return
    heard = newest(there, "stops").record or {}
    assert heard["cause"] == "rank 2 on node 1 (host-b) failed: 4 times, and host-s takes its place" and heard["incident"] == 3
    assert members(play.agents["s"].ready()) == ["a", "s"]
    assert "over" not in play.memory.records and "break.0" not in play.memory.records


def test_no_spare_node_is_given_two_places() -> None:
    """Another node seats it between this one's look and its record."""
    play = play_of("abc", "st", spares=2)
    here, memory = play.agents["c"], play.memory
    create = memory.create

    def later(name: str, record: Record) -> bool:
        if name == "stop.0.1" and name not in memory.records:
            first = next(member for member in play.agents["a"].ready().table.members)  # type: ignore[union-attr]
            seat = {"id": "s", "host": "host-s", "addr": "addr-s", "nproc": first.nproc}
            create(name, {"incident": 1, "kind": "lost", "node": 1, "host": "host-b", "cause": "node 1 is gone", "seat": seat})
        return create(name, record)

    memory.create = later  # type: ignore[method-assign]
    here.member.withdraws({"code": 75, "detail": "node 2 (host-c) ended: no healthy device is left"}, False)
    play.frozen |= {"b", "c"}
    play.run()
    assert members(newest(play.agents["a"], "stops")) == ["a", "s", "t"]


def test_a_connection_that_closed_is_not_the_end_of_its_ranks() -> None:
    """They live until the lease of their node is over; who only waits has none."""
    play = play_of("ab", "st", spares=2)
    play.frozen |= {"b", "s"}
    for who in "bs":
        play.memory.put(f"agent.{who}", {**play.memory.records[f"agent.{who}"], "gone": True})
    play.run(3.0)
    assert "stop.0.1" not in play.memory.records
    play.run(LOST)
    assert members(newest(play.agents["a"], "stops")) == ["a", "t"]


@pytest.mark.parametrize("repaired", [False, True])
def test_a_loss_that_cannot_be_repaired_is_no_charge(repaired: bool) -> None:
    """What fails later is."""
    play = play_of("ab", "s", max_restarts=1)
    play.frozen.add("b")
    play.run(LOST)
    if repaired:
        for who, ranks in (("a", []), ("s", [2, 3])):
            play.agents[who].member.stopped(0, 1, 3, ranks)
        play.run()
        for who in "as":
            play.agents[who].member.restored(0, 1, 0, False)
        play.run()
    play.agents["s"].fail(2, "its state cannot be restored")
    play.run()
    assert play.the_world("a", "s") == (1, ["a", "s"], int(repaired))


def test_one_that_waited_for_long_still_waits_for_a_restart() -> None:
    play = play_of(replacements=0)
    play.run(60.0)
    play.frozen.add("b")
    play.run(LOST)
    assert play.agents["s"].error is None
    play.run()
    assert members(play.agents["a"].ready()) == ["a", "s"]


def test_two_losses_are_two_incidents() -> None:
    play = play_of("abc", "st", spares=2)
    play.frozen |= {"b", "c"}
    play.run(LOST)
    assert members(newest(play.agents["a"], "stops")) == ["a", "s", "t"]
    assert (newest(play.agents["a"], "stops").record or {})["incident"] == 2
    assert [(play.agents[who].ready().record or {})["incident"] for who in "st"] == [1, 2]


def test_a_spare_node_takes_one_place_only() -> None:
    """Both losses are seen before the spare nodes look again."""
    play = play_of("abc", "st", spares=2)
    play.frozen |= {"b", "c"}
    play.run(LOST - 2.0)
    play.frozen |= {"s", "t"}
    play.run(2.5)
    taken = [seat.taken_by.id for seat in Seats(play.memory.records, 0).taken]
    assert taken == ["s", "t"]
    play.frozen -= {"s", "t"}
    play.run()
    assert members(newest(play.agents["a"], "stops")) == ["a", "s", "t"]


@pytest.mark.parametrize("why", ["no spare", "another size", "spent", "turned off"])
def test_otherwise_all_start_anew(why: str) -> None:
    terms = {"spent": {"replacements": 1}, "turned off": {"replacements": 0}}.get(why, {})
    play = play_of("ab", "", **terms)
    if why == "another size":
        play.add("s", nproc=1)
    elif why != "no spare":
        play.add("s")
    if why == "spent":
        play.add("t")
        play.run()
        play.frozen.add("b")
        play.run(LOST)
        assert play.agents["s"].kinds()[:1] == ["ready"]
        play.frozen.add("s")
    else:
        play.run()
        if why == "another size":
            assert not (play.agents["s"].heard[-1].record or {})["fits"]
        play.frozen.add("b")
    play.run(LOST)
    assert newest(play.agents["a"], "broken")
    play.run()
    if why not in ("no spare", "another size"):
        assert play.agents["a"].ready().round == 1, "the spare node takes part from the start"


def request(to: str, key: str = "k", **more: Any) -> dict[str, Any]:
    return {"to": to, "key": key, "node": 1, "rank": None, "seconds": 5.0, "by": 0, **more}


def give_up(play: Play, who: str) -> Agent:
    """Let an agent give its place up, if it may: its workers end, and it leaves."""
    agent = play.agents[who]
    agent.member.gives_up(agent.ready().round)
    if agent.kinds()[-1] == "drained":
        agent.member.withdraws({"code": 75, "detail": "drained"}, True)
        agent.member.leave()
        del play.agents[who]
    play.run(1.0)
    return agent


def test_a_request_reaches_the_one_whom_it_is_for_and_once() -> None:
    play = play_of("abc")
    play.agents["a"].member.asks(request("b", "first"))
    play.agents["c"].member.asks(request("b", "second", rank=3))
    play.agents["c"].member.asks(request("b", "first"))  # an order that failed halfway is tried again
    play.run()
    heard = {who: [news.record for news in play.agents[who].heard if news.kind == "drain"] for who in "abcs"}
    assert heard == {"a": [], "b": [request("b", "first"), request("b", "second", rank=3)], "c": [], "s": []}


def test_a_drained_node_gives_its_place_to_a_spare_one() -> None:
    """The others repair as after a loss, and that is no failure."""
    play = play_of("abc")
    drained = give_up(play, "b")
    assert newest(drained, "drained").record == {"node": 1, "host": "host-b", "taker": "host-s"}
    heard = newest(play.agents["a"], "stops")
    assert (heard.record or {})["cause"] == "node 1 (host-b) is drained, and host-s takes its place" and members(heard) == ["a", "s", "c"]
    seated = play.agents["s"].ready()
    assert (seated.record or {})["incident"] == 1 and (seated.record or {})["drained"]
    play.run(20.0)
    assert not {"break.0", "over", "stop.0.2"} & {*play.memory.records}


def test_a_node_that_is_lost_later_is_told_apart() -> None:
    play = play_of("ab", "st", spares=2)
    give_up(play, "b")
    answer(play, {"a": [], "s": [2, 3]})
    play.frozen.add("s")
    play.run(LOST)
    assert not (play.agents["t"].ready().record or {})["drained"]
    taken = Seats(play.memory.records, 0)
    assert [seat.drained for seat in taken.taken] == [True, False] and taken.lost == 1


def answer(play: Play, replaced: dict[str, list[int]]) -> None:
    """All nodes answer the newest incident, and open."""
    incident = max(int(name.rpartition(".")[2]) for name in play.memory.records if name.startswith("stop."))
    for who, ranks in replaced.items():
        play.agents[who].member.stopped(0, incident, 3, ranks)
    play.run(1.0)
    for who in replaced:
        play.agents[who].member.restored(0, incident, 0, False)
    play.run(1.0)


def test_drained_nodes_do_not_spend_what_lost_ones_may() -> None:
    play = play_of("ab", "st", spares=2, replacements=1)
    give_up(play, "b")
    answer(play, {"a": [], "s": [2, 3]})
    play.frozen.add("s")
    play.run(LOST)
    assert members(newest(play.agents["a"], "stops")) == ["a", "t"]


def test_one_spare_node_is_kept_for_one_place() -> None:
    """Two nodes are to be drained at once, and a third one is lost before the first has ended its workers."""
    play = play_of("abcd", "st", spares=2)
    for who in "bc":
        agent = play.agents[who]
        agent.member.gives_up(0)
    assert [newest(play.agents[who], "drained").record["taker"] for who in "bc"] == ["host-s", "host-t"]  # type: ignore[index]
    play.agents["a"].member.gives_up(0)
    assert play.agents["a"].kinds()[-1] == "kept"
    play.frozen.add("d")
    play.run(LOST)
    assert newest(play.agents["a"], "broken"), "nobody is left for it"


def test_a_node_that_is_lost_before_it_gave_its_place_up_is_replaced_by_the_one_that_was_kept() -> None:
    play = play_of()
    agent = play.agents["b"]
    agent.member.gives_up(0)
    play.frozen.add("b")
    play.run(LOST)
    assert members(newest(play.agents["a"], "stops")) == ["a", "s"]


def test_it_waits_until_nothing_is_repaired() -> None:
    play = play_of("abc")
    play.agents["c"].member.stops(0, 1, {"kind": "failed", "rank": 4, "cause": "SIGKILL"})
    play.run(1.0)
    assert give_up(play, "b").kinds()[-1] == "stops"
    answer(play, {"a": [], "b": [], "c": [4]})
    assert give_up(play, "b").kinds()[-1] == "drained"


@pytest.mark.parametrize(("waiting", "terms", "serves", "why"), [
    ("", {}, False, "no spare node with 2 ranks waits"),
    ("s", {"replacements": 0}, False, "spare nodes only take part in a restart here (--node-loss restart, --max-node-replacements 0)"),
    ("s", {}, True, "it serves the endpoint at which the nodes meet"),
])  # fmt: skip
def test_why_a_node_keeps_its_place(waiting: str, terms: dict[str, Any], serves: bool, why: str) -> None:
    play = play_of("ab", waiting, **terms)
    play.memory.serves = serves
    kept = give_up(play, "b")
    assert kept.kinds()[-1] == "kept" and kept.heard[-1].record == {"why": why}
    assert "stop.0.1" not in play.memory.records


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ({"spares": 0}, {"spares": 1}, "--spare-nodes 0, this one with --spare-nodes 1"),
        ({}, {"replacements": 0}, "--max-node-replacements 3 (0 by --node-loss restart), this one with --max-node-replacements 0 (0 by"),
        ({}, {"keep_alive": 20.0}, "--rdzv-conf keep_alive=5, this one with --rdzv-conf keep_alive=20"),
        ({}, {"snapshot_every": 8}, "--snapshot-every 0, this one with --snapshot-every 8"),
    ],
)
def test_the_same_terms_on_every_node(here: dict[str, Any], there: dict[str, Any], told: str) -> None:
    play = play_of(waiting="", **here)
    play.add("s", **there)
    play.run()
    assert f"was started with {told}" in str(play.agents["s"].error)
    assert not any(play.agents[who].error for who in "ab")


def test_fixed_node_ranks_leave_no_place_for_it() -> None:
    with pytest.raises(UsageError, match="--spare-nodes needs --rdzv-backend c10d, file, etcd or kubernetes"):
        check(Nodes(2, 2, "static", rank=0, spares=1), 0)
