"""Limits of what is judged by time, hit exactly and missed by little; and what is left of a world that is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftrun.control import events as ev
from ftrun.control import hangs, stragglers, waits
from ftrun.control.hangs import Limits, Watch
from ftrun.control.machine import Config
from ftrun.control.stalls import Awaited, Stalls, Wait
from ftrun.control.stragglers import SAMPLES, Stragglers
from ftrun.control.waits import Sign
from tests.unit.test_hangs import PAUSE, World, at_gate, inside, rank, recv

# ---- who waits for whom ----------------------------------------------------------------------------------------------


def test_rank_0_is_a_peer_like_any_other() -> None:
    one = recv(1, 0)
    assert not one.in_collective and not inside(0, waiting=False).in_collective and inside(0).in_collective
    assert one.lacks(9, 1) and not one.lacks(9, 0)
    assert hangs._place(one) == "in recv #1 from rank 0 of step 9"
    assert hangs._place(replace(one, name="send", peer=2, members=(1, 2))) == "in send #1 to rank 2 of step 9"
    assert hangs._place(inside(1, 3, group=7, members=(1, 2))) == "in allreduce #3 among ranks 1, 2 of step 9"
    assert hangs._place(inside(1, 3, members=(1, 2))) == "in allreduce #3 of step 9"


def test_a_receive_from_rank_0_waits_for_rank_0_alone() -> None:
    here = [inside(0), recv(1, 0), at_gate(2, 2), inside(3)]
    assert [r.rank for r in waits._awaited(here[1], here)] == [0]


def test_ranks_that_count_from_another_repair_on_are_not_known_to_wait_for_ever() -> None:
    here = [inside(0), inside(1), at_gate(2, 2)]
    assert waits.for_ever(here)
    assert not waits.for_ever([*here[:2], replace(here[2], counted=1)])


def test_who_waits_for_a_ring_of_others_says_nothing_of_who_is_to_blame_in_it() -> None:
    """Ranks 0 and 1 wait for 2, which waits for them in another group; 3 waits for 0, and nobody for 3."""
    ring = [inside(r, 5, group=7, members=(0, 1, 2), counts=((7, 5),)) for r in (0, 1)]
    ring.append(inside(2, 1, group=9, members=(0, 1, 2), counts=((9, 1),)))
    outside = inside(3, 1, group=8, members=(0, 3), counts=((8, 1),))
    assert [r.rank for r in waits.split([*ring, outside])[0]] == [2]


def test_whoever_waits_at_last_for_data_on_their_way_accuses_nobody() -> None:
    """Rank 2 left a collective out, but what it waits for at the gate are ranks 3 and 4, all of whom are in theirs."""
    waiting = [inside(r, 5, group=7, members=(0, 1, 2), counts=((7, 5),)) for r in (0, 1)]
    busy = [inside(r, 1, group=8, members=(3, 4), counts=((8, 1),)) for r in (3, 4)]
    assert waits.split([*waiting, at_gate(2, 2), *busy]) == ([], [])


def test_what_is_not_said_of_a_rank() -> None:
    plain = waits.Rank(0, 0, 9, True, False, False, 0, 0, "", "")
    assert (plain.peer, plain.members, plain.counts, plain.all_counted, plain.counted, plain.cut) == (-1, (), (), True, 0, False)
    assert Sign(0, (), 0, False).life == 0


# ---- hangs -----------------------------------------------------------------------------------------------------------


def test_a_step_is_known_after_three() -> None:
    world = World(typical=None)
    for gate in range(4):
        assert world.watch.typical is None
        world.last = gate
        world.look([rank(0, mark=(gate,))], 0.05)
    assert world.watch.typical == pytest.approx(0.05)


def test_gates_that_opened_between_two_looks_share_the_time() -> None:
    world = World(typical=None, longest=1.0)
    world.last = 0
    world.look([rank(0)], 1.0)
    world.last = 4
    world.look([rank(0)], 1.0)
    assert world.watch.typical == pytest.approx(0.25)


def test_a_new_attempt_learns_its_steps_anew() -> None:
    world = World(typical=1.0)
    assert world.watch.typical == pytest.approx(1.0)
    world.last = -1
    world.look([rank(0)])
    assert world.watch.typical is None
    for world.last in range(5):
        assert world.watch.typical is None or world.last == 4
        world.look([rank(0)])
    assert world.watch.typical == pytest.approx(PAUSE), "and no step of the old one is among them"


def test_a_new_generation_forgets_who_was_silent() -> None:
    world = World()
    ranks = [inside(0), inside(1), rank(2)]
    world.wait(ranks, 50.0)
    world.watch.see(world.now + PAUSE, 2, world.last, [world.sign(r) for r in ranks])
    assert world.watch.judge(world.last, ranks) is None and world.watch.moves


def test_quiet_times_are_nobodys_silence() -> None:
    world = World()
    ranks = [inside(0), inside(1), rank(2, python=5)]
    world.wait(ranks, 59.5)
    world.watch.quiet()
    assert world.watch.due == float("inf") and world.watch.moves
    assert world.look(ranks, 300.0) is None
    seconds, _ = world.wait(ranks)
    assert seconds == pytest.approx(60.0, abs=0.2)


def test_who_was_held_before_a_quiet_time_has_no_silence_behind_it() -> None:
    world = World(Limits(0.3))
    for _ in range(60):
        world.look([inside(0), rank(1, python=5)])
    world.watch.quiet()
    _, verdict = world.wait([inside(0, cut=True), inside(1, python=5)], 0.6)
    assert verdict is not None and not verdict.accused


def test_the_first_look_after_a_quiet_time_counts_from_itself() -> None:
    world = World(longest=10.0)
    world.watch.quiet()
    world.look([inside(0), rank(1)], 15.0)
    assert world.watch.moves


def test_the_next_look_is_due_when_the_first_patience_ends() -> None:
    world = World()
    world.look([inside(0), inside(1), rank(2), rank(3, excuse="call")])
    assert world.watch.due == pytest.approx(60.0, abs=0.1)
    world.look([inside(0), inside(1), inside(2, cut=True), inside(3)])
    assert 0.7 < world.watch.due < 0.9
    assert World().watch.due == float("inf")
    world.watch.see(world.now, 1, world.last, [])
    assert world.watch.due == float("inf")


def test_the_gate_at_which_the_links_were_suspected_is_forgotten_when_it_opens() -> None:
    world = World()
    ranks = [inside(0), inside(1, cut=True), inside(2)]
    world.wait(ranks)
    for _ in range(2):
        world.last += 1
        world.look([replace(r, mark=(world.last,)) for r in ranks])
    seconds, _ = world.wait(ranks)
    assert seconds < 1.1


def test_nor_does_a_new_attempt_remember_it() -> None:
    world = World()
    ranks = [inside(0), inside(1, cut=True), inside(2)]
    world.wait(ranks)
    linked = world.last + 1
    for world.last in (linked, *range(-1, linked)):
        world.look([replace(r, mark=(world.last, world.ticks)) for r in ranks], 0.2)
    seconds, _ = world.wait(ranks)
    assert seconds < 1.1


def test_a_world_is_judged_after_half_the_time_in_which_it_would_be_stuck() -> None:
    for seconds, moves in ((0.25, True), (0.35, False)):  # and 0.15 s of the last step
        world = World()
        world.wait([inside(0), rank(1)], seconds)
        assert world.watch.moves == moves


@pytest.mark.parametrize("timeout", [0.3, 300.0])
def test_an_explicit_timeout_may_only_shorten_what_is_certain(timeout: float) -> None:
    assert World(Limits(timeout)).watch.stuck_after == min(timeout, hangs.STUCK_LEAST)


def test_a_held_gil_is_one_for_half_of_the_silence() -> None:
    for seconds, fault in ((31.0, "gil"), (29.0, "hang")):
        world = World()
        world.wait([inside(0), inside(1), rank(2)], 60.0 - seconds)
        _, verdict = world.wait([inside(0), inside(1), rank(2, python=5)])
        assert verdict is not None and [a.fault.value for a in verdict.accused] == [fault]
        words = "something holds the GIL" if fault == "gil" else "Python runs and gets nowhere"
        assert words in verdict.accused[0].evidence


def test_a_rank_whose_python_does_not_run_for_three_quarters_of_a_second_is_not_known_to_wait() -> None:
    assert World().wait([inside(0), inside(1), inside(2, cut=True, python=5)], 1.5)[1] is None


def test_who_is_kept_waiting() -> None:
    assert hangs._kept_waiting(rank(2), []) == "" == hangs._kept_waiting(rank(2), [rank(2)][:0])
    assert hangs._kept_waiting(rank(2), [at_gate(0)]) == "; rank 0 waits for it at the gate"
    assert hangs._kept_waiting(rank(2), [at_gate(0), inside(1)]) == "; ranks 0, 1 wait for it in allreduce #3 of step 9"


def test_before_the_length_of_a_step_is_known_people_are_told_after_ten_seconds() -> None:
    ranks = [inside(0), rank(1)]
    world = World(typical=None)
    world.wait(ranks, 9.9)
    assert world.watch.standstill(world.last, ranks) is None
    world.wait(ranks, 0.3)
    assert world.watch.standstill(world.last, ranks) is not None


@pytest.mark.parametrize(("typical", "told"), [(0.2, 2.0), (2.0, 6.0)])
def test_then_after_two_seconds_or_three_steps(typical: float, told: float) -> None:
    ranks = [inside(0), rank(1)]
    world = World(typical=typical)
    world.wait(ranks, told - 0.1)
    assert world.watch.standstill(world.last, ranks) is None
    world.wait(ranks, 0.2)
    assert world.watch.standstill(world.last, ranks) is not None


def test_of_several_that_hold_others_up_the_longest_silence_and_the_first_end_are_told() -> None:
    world = World()
    world.wait([inside(0), rank(1), rank(2)], 5.0)
    ranks = [inside(0), rank(1), rank(2, mark=(2,))]
    world.wait(ranks, 3.0)
    found = world.watch.standstill(world.last, ranks)
    assert found is not None and found.culprits == (1, 2)
    assert found.still == pytest.approx(8.0, abs=0.2) and found.left == pytest.approx(52.0, abs=0.2)


@pytest.mark.parametrize("make", [rank, inside], ids=["busy", "waiting"])
def test_all_are_still_only_where_the_last_of_them_is(make: object) -> None:
    assert callable(make)
    world = World()
    world.wait([make(0), make(1)], 40.0)
    ranks = [make(0), make(1, mark=(2,))]
    world.wait(ranks, 0.5)
    assert world.watch.standstill(world.last, ranks) is None
    world.wait(ranks, 40.0)
    found = world.watch.standstill(world.last, ranks)
    assert found is not None and found.still == pytest.approx(40.5, abs=0.2)
    assert found.left is None if make is rank else found.left == pytest.approx(60.0 - found.still, abs=0.2)


def test_one_that_is_busy_alone_is_told_as_the_culprit_and_one_that_waits_is_told_of_those_it_waits_for() -> None:
    world = World()
    world.wait([rank(0)], 3.0)
    found = world.watch.standstill(world.last, [rank(0)])
    assert found is not None and found.culprits == (0,)
    world, ranks = World(), [inside(0), inside(1), at_gate(2, 2)]
    world.wait(ranks, 0.6)
    found = world.watch.standstill(world.last, ranks)
    assert found is not None and (found.culprits, found.waiting) == ((2,), (0, 1))


def test_a_gate_that_opened_is_a_sign_of_life_of_all() -> None:
    world, ranks = World(typical=2.0), [inside(0), rank(1)]
    world.wait(ranks, 20.0)
    world.last += 1
    world.wait(ranks, 2.5)
    assert not world.watch.moves and world.watch.standstill(world.last, ranks) is None


def test_ranks_that_are_all_at_the_gate_are_nobodys_hang() -> None:
    assert World().wait([at_gate(0), at_gate(1)], 100.0)[1] is None


def test_a_look_is_due_for_those_who_are_busy() -> None:
    world = World()
    world.wait([inside(0), rank(1)], 10.0)
    for seconds in (0.0, 5.0):
        world.wait([inside(0), rank(1, mark=(2,))], seconds or PAUSE)
        assert world.watch.due == pytest.approx(60.0 - seconds, abs=0.2)


def test_a_first_body_gets_as_long_as_a_collective_may_take() -> None:
    seconds, _ = World(typical=10.0).wait([inside(r, excuse="first") for r in range(3)])
    assert seconds == pytest.approx(150.0, rel=0.05)


def test_nothing_is_told_of_a_world_that_has_no_loop_or_moves() -> None:
    world = World()
    assert world.watch.standstill(world.last, []) is None
    world.wait([], 5.0)
    assert world.watch.standstill(world.last, []) is None


def test_a_watch_begins_with_nothing() -> None:
    watch = Watch(Limits(), 0.5)
    watch.see(1000.0, 1, 0, [])
    assert watch.typical is None and watch.moves
    watch.see(1002.0, 1, 1, [])  # a late look: twice the pause counts
    for gate in (2, 3):
        watch.see(1002.0, 1, gate, [])
    assert max(watch._steps) == 1.0


# ---- repairs that stand still ----------------------------------------------------------------------------------------


def one(work: float = 0.0, mark: int = 1, cell: int = 3) -> Awaited:
    return Awaited(cell, (mark,), work)


def test_work_is_more_than_a_fiftieth_of_a_processor() -> None:
    for work, still in ((0.02, 2.0), (0.021, 0.0)):
        stalls = Stalls(600.0)
        stalls.due(0.0, 2)
        stalls.look(1.0, [one()], 0.0)
        [wait] = stalls.look(3.0, [one(2 * work)], 0.0)
        assert wait.still == still


def test_a_late_look_counts_as_three_seconds() -> None:
    stalls = Stalls(600.0)
    stalls.due(0.0, 2)
    stalls.look(1.0, [one()], 0.0)
    [wait] = stalls.look(100.0, [one()], 0.0)
    assert (wait.waited, wait.still) == (3.0, 3.0)


def test_one_that_is_waited_for_again_begins_anew() -> None:
    stalls = Stalls(600.0)
    stalls.due(0.0, 2)
    stalls.look(1.0, [one()], 0.0)
    stalls.look(2.0, [one(cell=4)], 0.0)
    [wait] = stalls.look(3.0, [one()], 0.0)
    assert wait.waited == 0.0


def test_of_several_the_longest_wait_is_told_and_in_a_new_repair_anew() -> None:
    stalls = Stalls(600.0)
    for generation in (2, 3):
        stalls.due(0.0, generation)
        assert not stalls.to_tell([Wait(3, 9.9, 0.0, 600.0), Wait(4, 1.0, 0.0, 600.0)])
        assert stalls.to_tell([Wait(3, 10.0, 0.0, 600.0), Wait(4, 1.0, 0.0, 600.0)])
        assert not stalls.to_tell([Wait(3, 19.9, 0.0, 600.0)]) and stalls.to_tell([Wait(3, 20.0, 0.0, 600.0)])


def test_half_of_a_short_limit_is_when_a_person_is_told() -> None:
    assert not Stalls(4.0).to_tell([Wait(3, 1.9, 1.9, 4.0)]) and Stalls(4.0).to_tell([Wait(3, 2.0, 2.0, 4.0)])


# ---- stragglers ------------------------------------------------------------------------------------------------------


def reports(watch: Stragglers, mine: float, others: float, steps: int, begin: int = 0) -> int:
    return sum(len(watch.step(begin + n, {0: others, 1: others, 2: mine})) for n in range(steps))


@pytest.mark.parametrize(("ratio", "told"), [(1.75, 0), (1.85, 1)])
def test_how_much_slower_a_straggler_is(ratio: float, told: int) -> None:
    assert reports(Stragglers(), 0.1 * ratio, 0.1, SAMPLES) == told
    assert reports(Stragglers(), 0.1 * ratio, 0.1, SAMPLES - 1) == 0


@pytest.mark.parametrize(("lost", "told"), [(0.0095, 0), (0.0105, 1)])
def test_how_much_it_costs(lost: float, told: int) -> None:
    assert reports(Stragglers(), 0.005 + lost, 0.005, SAMPLES) == told


def test_what_it_costs_is_the_median_of_the_steps() -> None:
    watch = Stragglers()
    assert reports(watch, 0.0145, 0.005, SAMPLES - 1) == 0
    assert watch.step(900, {0: 0.005, 1: 0.005, 2: 0.016}) == []


def test_nobody_is_curious_for_longer_than_it_takes_to_tell() -> None:
    watch = Stragglers()
    for number in range(SAMPLES):  # uneven, and nobody is slow enough
        assert watch.step(number, {0: 0.05, 1: 0.06, 2: 0.08}) == [] and watch.curious
    watch.step(SAMPLES, {0: 0.05, 1: 0.06, 2: 0.08})
    assert not watch.curious


@pytest.mark.parametrize("longest", [0.004, 0.009])
def test_steps_that_lose_little_make_nobody_curious(longest: float) -> None:
    watch = Stragglers()
    watch.step(0, {0: longest / 3, 1: longest / 3, 2: longest})
    assert not watch.curious


@pytest.mark.parametrize(("even", "told"), [(6, 1), (7, 0)])
def test_a_fifth_of_the_steps_may_be_as_usual(even: int, told: int) -> None:
    watch = Stragglers()
    assert reports(watch, 0.1, 0.1, even) == 0
    assert reports(watch, 0.3, 0.1, SAMPLES - even, even) == told


def test_what_was_told_is_over_when_it_is_little_slower() -> None:
    for ratio, again in ((1.25, 1), (1.35, 0)):
        watch = Stragglers()
        assert reports(watch, 0.3, 0.1, SAMPLES) == 1
        assert reports(watch, 0.1 * ratio, 0.1, SAMPLES, 100) == 0
        assert reports(watch, 0.3, 0.1, SAMPLES, 200) == again


def test_another_world_is_measured_anew() -> None:
    watch = Stragglers()
    assert reports(watch, 0.3, 0.1, SAMPLES) == 1
    watch.forget()
    assert not watch.curious
    assert reports(watch, 0.3, 0.1, SAMPLES - 1, 100) == 0 and watch.curious
    assert reports(watch, 0.3, 0.1, 1, 200) == 1


def test_steps_without_times_and_steps_seen_twice_say_nothing() -> None:
    watch = Stragglers()
    for number in [0] * SAMPLES + list(range(1, SAMPLES - 1)):
        assert watch.step(number, {0: 0.1, 1: 0.1, 2: 0.3}) == []
    assert watch.step(900, {0: 0.0, 1: 0.1, 2: 0.3}) == [] == watch.step(901, {0: -1.0, 1: 0.1, 2: 0.3})
    assert len(watch.step(902, {0: 0.1, 1: 0.1, 2: 0.3})) == 1
    assert stragglers.SAMPLES == 30


# ---- data ------------------------------------------------------------------------------------------------------------


def test_what_a_run_is_asked_for_unless_it_says_otherwise() -> None:
    assert (Config(2).spares, Config(2).max_replacements, Config(2).replacement_window) == (0, 3, 3600.0)
    for wrong in ("spares", "max_restarts", "max_replacements", "device_faults"):
        with pytest.raises(ValueError, match="impossible"):
            Config(2, **{wrong: -1})


def test_what_an_event_says_unless_it_is_told() -> None:
    assert (ev.Died(0.0, 0, "x").age, ev.DeviceFault(0.0, "xid", ()).code, ev.DeviceFault(0.0, "xid", ()).recovery) == (0.0, 0, -1)
    assert ev.Unrestorable(0.0, 0, 1, "x").snapshot == -1
    assert not ev.WorldEnded(0.0, 1, "x").elsewhere and not ev.Publish(1, 0, (), (), ()).fresh
