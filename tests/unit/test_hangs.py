"""Who is guilty when nothing moves, as a table of worlds; and the patience that is learned from the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ftrun.control import hangs
from ftrun.control.hangs import HangVerdict, Limits, Watch
from ftrun.control.waits import Rank, Sign
from ftrun.core.faults import Fault
from ftrun.core.shared import replicas

PAUSE = 0.05


@dataclass(frozen=True)
class Seen(Rank):
    """A rank and its signs of life; `python` 0 = some runs at each look."""

    mark: tuple[int, ...] = (1,)
    python: int = 0
    life: float = 0.0


def rank(index: int, /, **facts: object) -> Rank:
    """A rank that computes in the body of step 9."""
    plain = Seen(index, index, 9, True, False, False, 0, 0, "", "")
    return replace(plain, **facts)  # type: ignore[arg-type]


def inside(index: int, count: int = 3, **facts: object) -> Rank:
    return rank(index, **{"waiting": True, "number": count, "name": "allreduce", **facts})


def at_gate(index: int, count: int = 3) -> Rank:
    return rank(index, at_gate=True, number=count)


def inner(index: int, count: int, **facts: object) -> Rank:
    """One that waits in a collective of the group of ranks 0 to 3."""
    return inside(index, count, **{"group": 7, "members": (0, 1, 2, 3), "counts": ((7, count),), **facts})


def trio(index: int) -> Rank:
    """One that waits in the first collective of the group of ranks 1 to 3."""
    return inside(index, 1, group=8, members=(1, 2, 3), counts=((8, 1),))


def skipped(index: int, count: int) -> Rank:
    """One at the gate that has entered so many collectives of that group."""
    return rank(index, at_gate=True, group=7, number=count, counts=((7, count),))


def recv(index: int, peer: int, **facts: object) -> Rank:
    return rank(index, **{"waiting": True, "peer": peer, "name": "recv", "number": 1, "group": 9, **facts})


class World:
    """Looks at ranks every PAUSE seconds; `typical` gives it a past of even steps."""

    def __init__(self, limits: Limits | None = None, typical: float | None = 0.2, longest: float = PAUSE) -> None:
        self.watch = Watch(limits or Limits(), longest)
        self.now = 100.0
        self.last = -1
        self.ticks = 0
        for _ in range(0 if typical is None else 8):
            self.last += 1
            for _ in range(round((typical or 0) / PAUSE)):
                self.look([rank(0, mark=(self.ticks,)), rank(1, mark=(self.ticks,))])

    def look(self, ranks: list[Rank], pause: float = PAUSE) -> HangVerdict | None:
        self.now += pause
        self.ticks += 1
        self.watch.see(self.now, 1, self.last, [self.sign(r) for r in ranks])
        return self.watch.judge(self.last, ranks)

    def sign(self, seen: Rank) -> Sign:
        assert isinstance(seen, Seen)
        return Sign(seen.cell, seen.mark, seen.python or self.ticks, seen.waiting or seen.at_gate, seen.life)

    def wait(self, ranks: list[Rank], seconds: float = 1000.0) -> tuple[float, HangVerdict | None]:
        """Look until there is a verdict; how long that took."""
        begin = self.now
        while self.now - begin < seconds:
            verdict = self.look(ranks)
            if verdict is not None:
                return self.now - begin, verdict
        return self.now - begin, None


def blamed(verdict: HangVerdict | None) -> list[tuple[int, str]]:
    assert verdict is not None
    return [(a.cell, a.fault.value) for a in verdict.accused]


WORLDS: list[tuple[str, list[Rank], list[tuple[int, str]]]] = [
    ("one left a collective out", [inside(0), inside(1), at_gate(2, 2), inside(3)], [(2, "collective")]),
    ("one called one too many", [at_gate(0), at_gate(1), inside(2, 4), at_gate(3)], [(2, "collective")]),
    ("two against two", [inside(0), inside(1), at_gate(2, 2), at_gate(3, 2)], []),
    ("one left a subgroup's out", [*(inner(r, 3) for r in (0, 1, 3)), skipped(2, 2), at_gate(4)], [(2, "collective")]),
    ("and is in the world's", [inside(0, 1), trio(1), inside(2, 1), trio(3)], [(2, "collective")]),
    ("a pipeline behind", [*(inner(r, 3) for r in (0, 1, 3)), skipped(2, 2), recv(4, 1), recv(5, 4)], [(2, "collective")]),
    ("two replicas, one left it out", [inner(0, 3, members=(0, 1)), skipped(1, 2), at_gate(2), at_gate(3)], []),
    ("different names", [inside(0), inside(1, name="barrier"), inside(2), at_gate(3, 2)], []),
    ("all in the same, and it failed", [inside(0), inside(1, cut=True), inside(2), inside(3)], []),
    ("it failed, and is over for some", [inside(0, cut=True), inside(1), at_gate(2), inside(3)], []),
]

# the data may be on their way
UNDER_WAY: list[tuple[str, list[Rank], list[tuple[int, str]]]] = [
    ("all in the same", [inside(0), inside(1), inside(2), inside(3)], []),
    ("one is in an older one, as a gather", [inside(0), inside(1), inside(2, 2), inside(3)], [(2, "collective")]),
    ("over for some and not for others", [inside(0), inside(1), at_gate(2), inside(3)], []),
    ("a subgroup", [inside(0, group=7), inside(1, group=7), at_gate(2, 9), at_gate(3, 9)], []),
    ("it went on to a receive", [*(inner(r, 3) for r in (0, 1, 3)), recv(2, 0, counts=((7, 2),))], [(2, "collective")]),
    ("entered before, and past it", [inner(0, 3), inner(1, 3), inner(3, 3), recv(2, 0, counts=((7, 3),))], []),
    ("it has too many groups", [*(inner(r, 3) for r in (0, 1, 3)), rank(2, at_gate=True, all_counted=False)], []),
    ("receives are not counted", [recv(0, 1, number=5), recv(1, 2, number=7), recv(2, 3, number=7), recv(3, 0, number=7)], []),
    ("one counts from another repair on", [inside(0, 21), inside(1, 18, counted=2), inside(2, 21), inside(3, 21)], []),
    ("and the others are at the gate", [at_gate(0, 21), inside(1, 18, counted=2), at_gate(2, 21), at_gate(3, 21)], []),
]


@pytest.mark.parametrize(("name", "ranks", "expected"), WORLDS, ids=[w[0] for w in WORLDS])
def test_a_world_in_which_everybody_waits(name: str, ranks: list[Rank], expected: list[tuple[int, str]]) -> None:
    seconds, verdict = World().wait(ranks)
    assert blamed(verdict) == expected
    assert 0.9 <= seconds <= 1.0, "the floor, with steps of 0.2 s"
    assert verdict is not None and (verdict.accused or (verdict.what and "nothing moved" in verdict.evidence))


@pytest.mark.parametrize(("name", "ranks", "expected"), UNDER_WAY, ids=[w[0] for w in UNDER_WAY])
def test_data_that_may_be_under_way_get_the_time_of_a_hang(
    name: str, ranks: list[Rank], expected: list[tuple[int, str]]
) -> None:
    seconds, verdict = World().wait(ranks)
    assert blamed(verdict) == expected
    assert 60.0 <= seconds <= 60.1


@pytest.mark.parametrize(
    ("limits", "typical", "seconds"),
    [
        (Limits(floor=5.0), 0.2, 5.0),
        (Limits(floor=5.0), 1.0, 15.0),
        (Limits(300.0), 0.2, 300.0),
        (Limits(300.0), None, 300.0),
        (Limits(1.0), 0.2, 1.0),
        (Limits(floor=90.0), None, 90.0),
    ],
)
def test_how_long_one_collective_may_take_is_what_the_user_gave(
    limits: Limits, typical: float | None, seconds: float
) -> None:
    found, verdict = World(limits, typical).wait([inside(0), inside(1), inside(2)])
    assert found == pytest.approx(seconds, rel=0.05, abs=0.15) and blamed(verdict) == []


def test_collectives_that_end_one_after_another_are_life() -> None:
    """Each rank waits in the last of many that it began at once."""
    world = World(Limits(floor=2.0))
    for tick in range(2000):
        assert world.look([inside(0, mark=(tick // 30,)), inside(1), inside(2)]) is None


def test_three_typical_steps_where_those_are_longer_than_the_floor() -> None:
    seconds, _ = World(typical=1.0).wait(WORLDS[0][1])
    assert 2.8 <= seconds <= 3.0


@pytest.mark.parametrize(("excuse", "limit"), [("call", 600.0), ("outside", 600.0), ("first", 60.0)])
def test_everybody_may_wait_longer_where_work_is_of_another_kind(excuse: str, limit: float) -> None:
    seconds, _ = World().wait([inside(0), inside(1, excuse=excuse), inside(2)])
    assert limit <= seconds <= limit + 1


def test_a_rank_that_was_stopped_where_it_waits_gets_its_time_from_then_on() -> None:
    """A debugger lets it go after half a minute: its collective goes on only now."""
    world = World()
    held = [inside(0), inside(1, python=7), inside(2)]
    for _ in range(600):
        assert world.look(held) is None, "nobody knows yet what it would do"
    seconds, verdict = world.wait([inside(0), inside(1, cut=True), inside(2)])
    assert 0.9 <= seconds <= 1.0 and verdict is not None and not verdict.accused


def test_a_new_attempt_is_as_patient_as_the_first() -> None:
    world = World()
    world.last = -1
    seconds, verdict = world.wait([inside(0), inside(1), inside(2)])
    assert hangs.STUCK_FIRST <= seconds <= hangs.STUCK_FIRST + 1 and verdict is not None


def test_a_connection_that_was_cut_is_known_before_the_length_of_a_step_is() -> None:
    world = World()
    world.last = -1
    seconds, verdict = world.wait([inside(0), inside(1, cut=True), inside(2)])
    assert hangs.STUCK_LEAST <= seconds <= 1.0 and verdict is not None and not verdict.accused


def test_the_second_look_at_the_same_gate_is_more_patient() -> None:
    world = World()
    ranks = [inside(0), inside(1, cut=True), inside(2)]
    world.wait(ranks)
    world.watch.quiet()
    seconds, verdict = world.wait(ranks)
    assert 0.9 * hangs.STUCK_AGAIN <= seconds <= 5.0 and verdict is not None and not verdict.accused


@pytest.mark.parametrize(("excuse", "limit"), [("", 60.0), ("first", 600.0), ("outside", 600.0), ("compiling", 600.0)])
def test_a_busy_rank_gets_its_time(excuse: str, limit: float) -> None:
    world = World()
    seconds, verdict = world.wait([inside(0), inside(1), rank(2, excuse=excuse), inside(3)])
    assert blamed(verdict) == [(2, "hang")]
    assert limit <= seconds <= limit + 1
    assert verdict is not None and "ranks 0, 1, 3 wait for it in allreduce #3 of step 9" in verdict.accused[0].evidence


@pytest.mark.parametrize(
    ("limits", "typical", "excuse", "patience"),
    [
        (Limits(), 4.0, "", 60.0),
        (Limits(), 90.0, "", 600.0),
        (Limits(), None, "", 600.0),
        (Limits(floor=2.0), 0.2, "", 3.0),
        (Limits(5.0), 0.2, "", 5.0),
        (Limits(5.0), None, "outside", 5.0),
        (Limits(5.0), 0.2, "first", 50.0),
        (Limits(5.0), 0.2, "call", 600.0),
    ],
)
def test_patience(limits: Limits, typical: float | None, excuse: str, patience: float) -> None:
    assert World(limits, typical).watch.patience(excuse) == pytest.approx(patience, rel=0.05)


def test_ten_times_a_typical_step_is_no_hang() -> None:
    for typical in (0.1, 1.0, 5.0):
        _, verdict = World(typical=typical).wait([inside(0), inside(1), rank(2)], 10 * typical)
        assert verdict is None


def test_a_held_gil_is_told_from_a_busy_python() -> None:
    """Its control thread does not look any more, so its own word about a collective is worth nothing either."""
    for state in (rank(2, python=5), inside(2, 2, python=5)):
        seconds, verdict = World().wait([inside(0), inside(1), state])
        assert blamed(verdict) == [(2, "gil")] and 60.0 <= seconds <= 61.0


def test_what_a_paused_launcher_missed_is_not_counted() -> None:
    world = World()
    ranks = [inside(0), inside(1), rank(2)]
    for _ in range(20):
        assert world.look(ranks, pause=30.0) is None


def test_nobody_is_accused_while_all_are_busy_or_before_the_first_step() -> None:
    assert World().wait([rank(0), rank(1)], 900)[1] is None
    assert World().wait([inside(0, looping=False), rank(1, looping=False)], 900)[1] is None
    assert blamed(World().wait([rank(0)])[1]) == [(0, "hang")], "alone nobody else waits"


def test_rare_looks_accuse_as_soon_as_frequent_ones() -> None:
    """The time of the last sign of life is on the board, and the next look comes when patience ends."""
    world = World(longest=0.23)
    skipped_one = [inside(0), inside(1), at_gate(2, 2)]
    stopped = world.now + 0.01  # just after a look
    pause: float = 0.23
    verdict = None
    while verdict is None and world.now < stopped + 10:
        verdict = world.look([replace(r, mark=(2,), life=stopped) for r in skipped_one], pause)
        pause = min(0.23, max(0.01, world.watch.due))
    assert blamed(verdict) == [(2, "collective")]
    assert hangs.STUCK_LEAST <= world.now - stopped < hangs.STUCK_LEAST + 0.05


def test_a_sign_of_life_from_before_the_last_look_dates_nothing() -> None:
    """It is another change that was seen now, and nobody knows when that came."""
    world = World()
    world.look([inside(0), inside(1), at_gate(2, 2)])
    seconds, _ = world.wait([replace(r, mark=(2,), life=world.now - 5.0) for r in (inside(0), inside(1), at_gate(2, 2))])
    assert seconds >= hangs.STUCK_LEAST


def test_a_world_whose_gates_open_is_not_judged() -> None:
    world = World()
    assert world.watch.moves
    world.wait([inside(0), inside(1), rank(2)], 1.0)
    assert not world.watch.moves


def test_signs_of_life_start_the_clock_again() -> None:
    world = World()
    for tick in range(2000):
        assert world.look([inside(0), inside(1), rank(2, mark=(tick // 100,))]) is None


@pytest.mark.parametrize(
    ("sums", "trusted", "guilty", "undecided"),
    [
        ([1, 1, 1], [True] * 3, (), False),
        ([1, 2, 1], [True] * 3, (1,), False),
        ([2, 1, 1, 3, 1], [True] * 5, (0, 3), False),
        ([1, 2], [True] * 2, (), True),
        ([1, 1, 2, 2], [True] * 4, (), True),
        ([1, 2, 1], [False] * 3, (), False),
        ([1, 2, 3], [False] * 3, (), False),
        ([1, 2, 1], [False, False, True], (1,), False),
    ],
)
def test_which_replica_is_corrupt(
    sums: list[int], trusted: list[bool], guilty: tuple[int, ...], undecided: bool
) -> None:
    assert replicas.corrupt(sums, trusted) == guilty
    assert replicas.undecided(sums, trusted) is undecided


def test_each_group_of_replicas_judges_its_own() -> None:
    """Two shards with three replicas each: of one a replica is corrupt, of the other all three differ."""
    sums = {0: 1, 2: 1, 4: 9, 1: 5, 3: 6, 5: 7}
    rows = [replicas.SumRow(rank, rank % 2 + 1, value, 0, trusted=True) for rank, value in sums.items()]
    groups = replicas.grouped(rows)
    assert {name: [row.rank for row in those] for name, those in groups.items()} == {1: [0, 2, 4], 2: [1, 3, 5]}
    assert replicas.corrupt_ranks(groups.values()) == {4}
    assert replicas.corrupt_ranks([[row._replace(trusted=False) for row in groups[1]]]) == frozenset()
    four = replicas.name_of(range(4))
    assert replicas.corrupt_ranks([[row._replace(replicas=four) for row in groups[1]]]) == frozenset(), "one of four is not there"


def test_every_accusation_is_a_fault_that_policies_know() -> None:
    assert {Fault.COLLECTIVE, Fault.GIL, Fault.HANG, Fault.LINK} <= set(Fault)


def still_after(world: World, ranks: list[Rank], seconds: float) -> hangs.Standstill | None:
    world.wait(ranks, seconds)
    return world.watch.standstill(world.last, ranks)


def test_people_are_told_who_holds_whom_up_long_before_anybody_is_accused() -> None:
    ranks = [inside(0), inside(1), rank(2), inside(3)]
    world = World()
    assert still_after(world, ranks, 1.5) is None
    told = still_after(world, ranks, 3.5)
    assert told is not None and (told.culprits, told.waiting, told.cells) == ((2,), (0, 1, 3), (2,))
    assert told.where == "in allreduce #3 of step 9" and told.still == pytest.approx(5.0, abs=0.2)
    assert told.left == pytest.approx(60.0 - told.still, abs=0.2), "that is when it is accused"
    after, verdict = world.wait(ranks, 1000)
    assert verdict is not None and after == pytest.approx(told.left, abs=0.2)


def test_a_world_that_waits_in_a_circle_has_no_culprit() -> None:
    told = still_after(World(), [inside(0), inside(1), at_gate(2, 2), at_gate(3, 2)], 0.6)
    assert told is not None and told.culprits == () and told.left is not None and told.left < 0.5


def test_work_that_may_take_long_is_no_standstill_for_as_long() -> None:
    ranks = [at_gate(0), rank(1, excuse="call")]
    world = World()
    assert still_after(world, ranks, 299.0) is None
    told = still_after(world, ranks, 2.0)
    assert told is not None and told.excuse == "call" and told.where == "at the gate of step 9"


def test_a_checkpoint_between_two_steps_is_no_standstill_for_half_a_minute() -> None:
    world = World()
    for ranks in ([at_gate(0), rank(1, excuse="outside")], [rank(0, excuse="outside"), rank(1, excuse="outside")]):
        world.watch.quiet()
        assert still_after(world, ranks, 29.0) is None
        told = still_after(world, ranks, 2.0)
        assert told is not None and told.still == pytest.approx(31.0, abs=0.2)


def test_all_busy_is_a_standstill_that_nobody_ends() -> None:
    told = still_after(World(), [rank(0), rank(1)], 100.0)
    assert told is not None and (told.culprits, told.left) == ((), None)


def test_a_step_that_goes_on_is_no_standstill() -> None:
    world = World()
    for mark in range(100):
        ranks = [inside(0), rank(1, mark=(mark,))]
        assert still_after(world, ranks, 1.0) is None
