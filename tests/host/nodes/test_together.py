"""The rules by which nodes stop, decide and go on together, with records in memory: in every order of looks and answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.membership.together import Together
from tests.host.nodes.test_membership import Memory

IDS = ("a", "b", "c")


class Node:
    """One agent: it writes its answers into its record, as a member does."""

    def __init__(self, memory: Memory, who: str, number: int = 0, ids: tuple[str, ...] = IDS) -> None:
        self.memory, self.who = memory, who
        self.heard: list[tuple[str, Record]] = []
        self.together = Together(memory, who, number, ids, lambda kind, record: self.heard.append((kind, record)))

    def put(self) -> None:
        self.memory.put(f"agent.{self.who}", {"beat": 1, **self.together.answers})

    def look(self) -> list[tuple[str, Any]]:
        """What is new: (kind, incident or the step to go on with)."""
        self.heard.clear()
        self.together.look(self.memory.view())
        return [(kind, record["resume"] if kind == "decided" else record["incident"]) for kind, record in self.heard]

    def answer(self, incident: int, last: int, kept: tuple[int, ...] = (), back: bool = False, copies: tuple[int, ...] = ()) -> None:
        self.together.stopped(incident, last, (), kept, back, copies)
        self.put()

    def restored(self, incident: int) -> None:
        self.together.restored(incident)
        self.put()


def three() -> tuple[Memory, list[Node]]:
    memory = Memory()
    return memory, [Node(memory, who) for who in IDS]


def test_the_furthest_gate_decides_and_every_answer_is_needed() -> None:
    memory, nodes = three()
    nodes[1].together.stops(1, {"cause": "died"})
    assert [node.look() for node in nodes] == [[("stops", 1)]] * 3
    nodes[1].answer(1, 5)
    nodes[0].answer(1, 4)
    assert [node.look() for node in nodes] == [[]] * 3
    nodes[2].answer(1, 4)
    assert nodes[1].look() == [], "only the first node decides"
    nodes[0].look()
    decision = {"incident": 1, "resume": 6, "replaced": [], "memories": [0, 0, 0], "rollback": False, "went_back": 0}
    assert memory.records["go.0.1"] == decision
    assert [node.look() for node in nodes] == [[("decided", 6)]] * 3
    for node in nodes[:2]:
        node.restored(1)
        nodes[0].look()
    assert "open.0.1" not in memory.records
    nodes[2].restored(1)
    nodes[0].look()
    assert [node.look() for node in nodes] == [[("restored", 1)]] * 3
    assert not any(node.together.busy for node in nodes)


def test_two_nodes_that_stop_at_once_begin_one_incident() -> None:
    memory, nodes = three()
    nodes[1].together.stops(1, {"cause": "one"})
    nodes[2].together.stops(1, {"cause": "two"})
    assert nodes[0].look() == [("stops", 1)] and memory.records["stop.0.1"]["cause"] == "one"


def test_a_later_incident_supersedes_the_one_before() -> None:
    memory, nodes = three()
    nodes[1].together.stops(1, {})
    nodes[0].look()
    for node in nodes:
        node.answer(1, 3)
    nodes[2].together.stops(2, {})
    assert nodes[0].look() == [("stops", 2)] and "go.0.1" not in memory.records, "answers to the first one are not final any more"
    for node in nodes:
        node.answer(2, 4)
    nodes[0].look()
    assert nodes[1].look() == [("stops", 2), ("decided", 5)], "it slept through the first one"


def test_answers_of_another_round_count_for_nothing() -> None:
    memory = Memory()
    for who in IDS:
        Node(memory, who, 0).answer(1, 9)
    nodes = [Node(memory, who, 1) for who in IDS]
    nodes[0].together.stops(1, {})
    nodes[0].look()
    assert [name for name in memory.records if name.startswith("go")] == []


def test_all_go_back_to_the_newest_host_snapshot_that_every_node_has() -> None:
    """One node's rank needs one; the number of that incident is the world's until the next that goes back."""
    memory, nodes = three()
    nodes[1].together.stops(1, {"cause": "no source"})
    nodes[0].look()
    for node, kept, back in zip(nodes, [(4, 6), (2, 4), (2, 4)], [False, True, False], strict=True):
        node.answer(1, 7, kept, back)
    nodes[0].look()
    assert [node.look()[-1] for node in nodes[1:]] == [("decided", 4)] * 2
    assert memory.records["go.0.1"]["rollback"] and memory.records["go.0.1"]["went_back"] == 1
    nodes[2].together.stops(2, {"cause": "died"})
    nodes[0].look()
    for node in nodes:
        node.answer(2, 5, (4,))
    nodes[0].look()
    assert [memory.records["go.0.2"][name] for name in ("resume", "rollback", "went_back")] == [6, False, 1]


@pytest.mark.parametrize(
    ("kept", "copies", "resume"),
    [
        ([(2, 4), (), (2, 4)], [(), (), (2, 4)], 4),  # node 1 was lost, and node 2 has copies
        ([(2, 4), (), (2, 4)], [(), (2, 4), (2,)], 2),  # those of the newest are not made yet
        ([(), (4, 6), (4, 6)], [(), (4, 6), ()], 6),  # of the first node
        ([(4, 6), (4, 6), ()], [(4, 6, 9), (4,), ()], 6),  # of the last node; 9 is of a time from which all went back
        ([(), (2, 4), ()], [(2, 4), (4,), ()], 4),  # two that are no neighbours were lost
    ],
)
def test_copies_on_the_next_node_stand_for_the_host_snapshots_of_a_lost_one(
    kept: list[tuple[int, ...]], copies: list[tuple[int, ...]], resume: int
) -> None:
    memory, nodes = three()
    nodes[1].together.stops(1, {"cause": "no source"})
    nodes[0].look()
    for node, own, others in zip(nodes, kept, copies, strict=True):
        node.answer(1, 7, own, node is nodes[1], others)
    nodes[0].look()
    assert memory.records["go.0.1"]["rollback"] and memory.records["go.0.1"]["resume"] == resume


def test_a_node_that_is_lost_with_the_one_that_copied_its_host_snapshots_is_named() -> None:
    memory, nodes = three()
    nodes[1].together.stops(1, {"cause": "no source"})
    nodes[0].look()
    for node, own, others in zip(nodes, [(4, 6), (), ()], [(4, 6), (), ()], strict=True):
        node.answer(1, 7, own, node is nodes[1], others)
    nodes[0].look()
    why = "the nodes have no host snapshot of one step in common (nobody has one of all ranks of node 1)"
    assert memory.records["break.0"]["cause"] == f"no source; {why}" and "go.0.1" not in memory.records


def test_without_a_host_snapshot_in_common_the_round_is_over_with_the_code_of_lost_state() -> None:
    memory, nodes = three()
    stop = {"cause": "no source", "node": 1, "host": "b", "rank": 2, "local_rank": 0, "kind": "failed"}
    nodes[1].together.stops(1, stop)
    nodes[0].look()
    for node, kept in zip(nodes, [(4, 6), (2, 4), ()], strict=True):
        node.answer(1, 7, kept, node is nodes[1])
    nodes[0].look()
    assert "go.0.1" not in memory.records
    reason = memory.records["break.0"]
    assert reason["cause"] == "no source; the nodes have no host snapshot of one step in common (nobody has one of all ranks of node 2)"
    assert [reason[name] for name in ("kind", "code", "node", "rank")] == ["failed", 75, 1, 2]


@pytest.mark.parametrize("seed", range(50))
def test_all_nodes_hear_the_same_decision_whatever_the_order(seed: int) -> None:
    chance = random.Random(seed)
    _, nodes = three()
    lasts = {who: chance.choice([6, 7]) for who in IDS}
    begun, decided, opened = False, dict.fromkeys(IDS, 0), dict.fromkeys(IDS, 0)
    stopped, restored = set(), set()
    for _ in range(2000):
        node = chance.choice(nodes)
        if not begun and chance.random() < 0.3:
            begun = True
            node.together.stops(1, {})
        for kind, what in node.look():
            if kind == "stops":
                stopped.add(node.who)
            elif kind == "decided":
                decided[node.who] = what
            else:
                assert restored == set(IDS)
                opened[node.who] = 1
        if node.who in stopped and chance.random() < 0.5:
            node.answer(1, lasts[node.who])
        if decided[node.who] and chance.random() < 0.5:
            restored.add(node.who)
            node.restored(1)
        if all(opened.values()):
            break
    assert set(decided.values()) == {1 + max(lasts.values())} and all(opened.values())
