"""Several nodes judge one world by what they tell each other: simulated worlds, with records that come late and clocks that differ."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from ftrun.control import far_waits
from ftrun.control.far_waits import Facts, Others
from ftrun.control.hangs import HangVerdict, Limits, Standstill, Watch
from ftrun.control.waits import Rank, Sign

TICK = 0.05
PAUSE = 0.2  # seconds between two looks
GROUP = 7
FLOOR = 8.0
COLLECTIVES = 3  # of a step
NEVER = 1e9


@dataclass
class Place:
    """Where a rank is: in its step's work, in one of the step's collectives, or (when all are over) at the gate."""

    step: int = 0
    entered: int = 0  # collectives of the step
    busy_until: float = 0.0
    left_out: bool = False  # it goes to the gate without the last collective


@dataclass
class Node:
    """A launcher with a clock of its own, and its record as the others see it: (from when, what)."""

    ranks: list[int]
    watch: Watch
    offset: float
    last: int = -1
    look_at: float = 0.0
    beat_at: float = 0.0
    shows: Facts = field(default_factory=dict)
    records: deque[tuple[float, str]] = field(default_factory=deque)
    verdict: HangVerdict | None = None


class World:
    """Ranks that train over nodes. `late`: the most seconds by which work and data are sometimes late; `stale`: records and looks."""

    def __init__(self, nodes: tuple[int, ...], seed: int, late: float, stale: float, limits: Limits) -> None:
        self.random = random.Random(seed)
        self.late, self.stale = late, stale
        self.now = 1000.0
        self.places = [Place() for _ in range(sum(nodes))]
        self.nodes: dict[str, Node] = {}
        for number, count in enumerate(nodes):
            first = sum(nodes[:number])
            watch = Watch(limits, PAUSE)
            self.nodes[f"n{number}"] = Node([*range(first, first + count)], watch, self.random.uniform(0, 1e5))
        self.excuses: dict[int, str] = {}
        self.under_way: dict[tuple[str, int, int], float] = {}  # node, step and collective (or COLLECTIVES: the gate) -> when it ends there

    # -- the training --------------------------------------------------------------------------------------------------

    def upto(self, most: float, share: float = 0.2) -> float:
        return self.random.uniform(0, most) if self.random.random() < share else 0.0

    def at_gate(self, place: Place) -> bool:
        return place.entered > COLLECTIVES

    def train(self) -> None:
        for who, node in self.nodes.items():
            for rank in node.ranks:
                place = self.places[rank]
                if place.entered == 0 and self.now >= place.busy_until:
                    place.entered = 1
                elif 0 < place.entered <= COLLECTIVES and self.over(who, place.step, place.entered - 1):
                    place.entered += 1 + (place.left_out and place.entered == COLLECTIVES - 1)
            if self.over(who, node.last + 1, COLLECTIVES):
                node.last += 1
                for rank in node.ranks:
                    self.places[rank] = Place(node.last + 1, busy_until=self.now + 0.1 + self.upto(self.late))

    def over(self, node: str, step: int, number: int) -> bool:
        """Is a collective, or the gate, over on that node? Sooner or later, once all ranks have come."""
        key = node, step, number
        if key not in self.under_way and all((p.step, p.entered) > (step, number) for p in self.places):
            skipped = any(p.left_out and p.step == step for p in self.places) and number == COLLECTIVES - 1
            self.under_way[key] = NEVER if skipped else self.now + self.upto(self.late)
        return self.now >= self.under_way.get(key, NEVER)

    # -- the launchers -------------------------------------------------------------------------------------------------

    def rank(self, number: int, last: int) -> Rank:
        place = self.places[number]
        waiting, at_gate = 0 < place.entered <= COLLECTIVES, self.at_gate(place)
        entered = min(place.entered, COLLECTIVES) - (place.left_out and at_gate)
        members = tuple(range(len(self.places))) if waiting else ()
        group = GROUP + place.step % 2  # every other step is in another group of all ranks
        where = number, number, place.step, True, waiting, at_gate and place.step > last, group, entered, "allreduce"
        return Rank(*where, self.excuses.get(number, ""), members=members, counts=((group, entered),))

    def seen(self, who: str) -> dict[str, Facts]:
        found = {}
        for other, node in self.nodes.items():
            while len(node.records) > 1 and node.records[1][0] <= self.now:
                node.records.popleft()
            old = not node.records or node.records[0][0] > self.now
            found[other] = {} if old or other == who else json.loads(node.records[0][1])
        return found

    def look(self, who: str, node: Node) -> None:
        ranks, clock = [self.rank(number, node.last) for number in node.ranks], self.now + node.offset
        signs = [Sign(r.cell, (r.step, r.number, r.waiting), int(self.now * 100), r.waiting or r.at_gate) for r in ranks]
        node.watch.see(clock, 1, node.last, signs)
        node.verdict = None
        if node.watch.moves:
            node.shows = {}
            return
        told = self.seen(who)
        others = far_waits.others(who, clock, 1, node.last, told)
        if node.watch.tells:
            heard = {other: facts for other, facts in told.items() if other != who}
            node.shows = far_waits.facts(clock, 1, node.last, node.watch.told(ranks), heard)
        if others is not None:
            node.verdict = node.watch.judge(node.last, ranks, others)

    def run(self, seconds: float, train: bool = True) -> tuple[str, HangVerdict] | None:
        """Go on until a node has a verdict."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            if train:
                self.train()
            for who, node in self.nodes.items():
                if self.now >= node.look_at:
                    node.look_at = self.now + PAUSE + self.upto(self.stale, 0.01)
                    self.look(who, node)
                    if node.verdict is not None:
                        return who, node.verdict
                if self.now >= node.beat_at:
                    node.beat_at = self.now + 1.0
                    seen_from = max(self.now + 0.1 + self.upto(self.stale, 0.3), node.records[-1][0] if node.records else 0.0)
                    node.records.append((seen_from, json.dumps(node.shows)))
        return None

    def standstill(self, who: str) -> Standstill | None:
        node = self.nodes[who]
        ranks = [self.rank(number, node.last) for number in node.ranks]
        others = far_waits.others(who, self.now + node.offset, 1, node.last, self.seen(who))
        return node.watch.standstill(node.last, ranks, others)

    def at_step(self, step: int) -> None:
        while min(place.step for place in self.places) < step:
            assert self.run(TICK) is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nodes", [(2, 2), (1, 1), (1, 2, 1)], ids=str)
def test_a_world_that_moves_is_never_accused(nodes: tuple[int, ...], seed: int) -> None:
    """What a node knows of the others may be several times as old as its patience, and each rank still for nearly as long."""
    world = World(nodes, seed, late=2.8, stale=15.0, limits=Limits(timeout=3.0))
    assert world.run(400.0) is None
    assert min(place.step for place in world.places) > 60


def stuck(nodes: tuple[int, ...], seed: int, late: float = 2.0) -> World:
    """A world in its twentieth step."""
    world = World(nodes, seed, late, late, Limits(floor=FLOOR))
    world.at_step(20)
    return world


SEEDS = pytest.mark.parametrize("seed", range(4))
NODES = pytest.mark.parametrize("nodes", [(2, 2), (1, 1), (1, 2, 1)], ids=str)


@SEEDS
@NODES
def test_a_rank_that_is_busy_for_ever_is_accused_by_its_own_node(nodes: tuple[int, ...], seed: int) -> None:
    world = stuck(nodes, seed)
    world.places[-1] = Place(world.places[-1].step, busy_until=NEVER)
    began, patience = world.now, [*world.nodes.values()][-1].watch.patience("")
    found = world.run(90.0)
    assert found is not None
    who, verdict = found
    assert who == [*world.nodes][-1] and [a.cell for a in verdict.accused] == [len(world.places) - 1]
    assert patience <= world.now - began < patience + 8.0


@SEEDS
def test_all_ranks_of_a_node_may_hang_at_once(seed: int) -> None:
    world = stuck((2, 2), seed)
    for number in (2, 3):
        world.places[number] = Place(world.places[number].step, busy_until=NEVER)
    found = world.run(60.0)
    assert found is not None and found[0] == "n1" and [a.cell for a in found[1].accused] == [2, 3]


@SEEDS
@pytest.mark.parametrize("guilty", [0, 3])
def test_one_that_is_missing_in_what_another_node_waits_in(guilty: int, seed: int) -> None:
    world = stuck((2, 2), seed, late=0.0)
    world.at_step(21)
    world.places[guilty].left_out = True
    began = world.now
    found = world.run(60.0)
    assert found is not None and found[0] == f"n{guilty // 2}"
    (accused,) = found[1].accused
    assert accused.cell == guilty and accused.fault.value == "collective"
    assert 0.9 <= world.now - began < 6.0, "it is certain, so only the age of what was told is waited for"


def test_an_excuse_of_another_node_counts() -> None:
    """A checkpoint may be gathered in one collective that takes minutes: outside of a body, for some of the ranks."""
    world = stuck((2, 2), 1)
    lose(world, 1, tuple(world.nodes))
    world.excuses[3] = "outside"
    assert world.run(200.0) is None
    world.excuses.clear()
    found = world.run(10.0)
    assert found is not None and found[0] == "n0" and not found[1].accused


def lose(world: World, number: int, nodes: tuple[str, ...]) -> None:
    """Let a collective of the next step, or its gate, never end on those nodes."""
    for node in nodes:
        world.under_way[node, max(place.step for place in world.places) + 1, number] = NEVER


@SEEDS
@NODES
@pytest.mark.parametrize("number", [1, COLLECTIVES], ids=["in a collective", "at the gate"])
def test_lost_packets_are_blamed_on_the_links_by_the_first_node(number: int, nodes: tuple[int, ...], seed: int) -> None:
    world = stuck(nodes, seed)
    lose(world, number, tuple(world.nodes))
    found = world.run(90.0)
    assert found is not None and found[0] == "n0" and not found[1].accused
    assert ("allreduce" if number == 1 else "the exchange of the nodes at the gate of step") in found[1].what
    everyone = f"ranks {'0, 1' if len(world.places) == 2 else '0-3'} "
    assert found[1].evidence.count("; ") == 0 and everyone in found[1].evidence, "they are named together"


@SEEDS
@pytest.mark.parametrize("behind", ["n0", "n1"])
def test_a_gate_that_opened_on_one_node_alone_is_nobodys_fault(behind: str, seed: int) -> None:
    """The rank behind seems to be missing in what those ahead wait in, and is not: the proof got lost on its way."""
    world = stuck((1, 3), seed)
    lose(world, COLLECTIVES, (behind,))
    found = world.run(90.0)
    assert found is not None and found[0] == "n0" and not found[1].accused
    lasts = [node.last for node in world.nodes.values()]
    assert abs(lasts[0] - lasts[1]) == 1


def test_nobody_is_judged_while_a_node_tells_nothing() -> None:
    world = stuck((2, 2), 1, late=0.0)
    world.places[0] = Place(world.places[0].step, busy_until=NEVER)
    world.nodes["n1"].look_at = NEVER  # its launcher is frozen; its record says what it said
    assert world.run(3 * FLOOR) is None
    world.nodes["n1"].look_at = 0.0
    found = world.run(3 * FLOOR)
    assert found is not None and found[0] == "n0"


def test_people_are_told_of_culprits_on_any_node() -> None:
    world = stuck((2, 2), 1, late=0.0)
    world.places[0] = Place(world.places[0].step, busy_until=NEVER)
    assert world.run(FLOOR - 2.0) is None
    for who, cells in (("n0", (0,)), ("n1", ())):
        told = world.standstill(who)
        assert told is not None and (told.culprits, told.waiting, told.cells) == ((0,), (1, 2, 3), cells)


def others(now: float, told: dict[str, Facts]) -> Others | None:
    return far_waits.others("a", now, 5, 9, told)


def test_the_age_of_what_was_told_is_read_from_ones_own_clock() -> None:
    watch = Watch(Limits(), PAUSE)
    rank = Rank(3, 0, 9, True, True, False, GROUP, 2, "allreduce", "", members=(0, 3), counts=((GROUP, 2),), counted=8)
    watch.see(50.0, 8, 9, [Sign(0, (1,), 1, True)])
    told = json.loads(json.dumps(far_waits.facts(50.0, 8, 9, watch.told([rank]), {"a": {"now": 700.0}, "c": {}})))
    found = others(702.5, {"a": {}, "b": told})
    assert found is not None and found.lag == 2.5 and found.first and not found.apart
    (far,) = found.ranks
    assert (far.rank, far.members, far.counts) == (3, (0, 3), ((GROUP, 2),))
    assert far.counted == 5, "it counts from this world on, as those here do"
    assert far.silence == (0.0, 0.0)
    assert others(702.5, {"a": {}, "b": told, "c": {}}) is None, "node c tells nothing"
    assert others(702.5, {"a": {}, "b": {**told, "heard": {}}}) is None, "node b has not heard of this one"
    gone = {**told, "ranks": [{**told["ranks"][0], "looping": False}]}
    assert others(702.5, {"a": {}, "b": gone}) is None, "a rank there is not in the loop"
    ahead = others(702.5, {"a": {}, "b": {**told, "last": 10}})
    assert ahead is not None and ahead.apart
