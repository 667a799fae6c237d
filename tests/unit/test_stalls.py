"""When a repair stands still: time without progress counts, and no other."""

from __future__ import annotations

from collections.abc import Callable

from ftrun.control.stalls import PAUSE, Awaited, Stalls, Wait


def held_for(
    make: Callable[[float], Awaited], *, timeout: float = 600.0, start: float = 0.0, most: float = 5000.0
) -> float | None:
    """Seconds after which one that looks as `make(now)` says is given up, None: not within `most`."""
    stalls = Stalls(timeout)
    assert not stalls.due(0.0, 2), "not in a repair's first second"
    now = 0.0
    while now < most:
        now += PAUSE
        assert stalls.due(now, 2)
        if stalls.look(now, [make(now)], start)[0].over:
            return now - PAUSE  # it was seen first at the first look
    return None


def test_a_replacement_that_neither_works_nor_shows_a_sign_gets_half_a_minute() -> None:
    assert held_for(lambda _: Awaited(3, (1,), 0.0)) == 30.0


def test_one_that_works_gets_the_timeout() -> None:
    assert held_for(lambda now: Awaited(3, (1,), now)) == 600.0


def test_work_at_first_buys_no_patience_later() -> None:
    assert held_for(lambda now: Awaited(3, (1,), min(now, 100.0))) == 99.0 + 30.0
    assert held_for(lambda now: Awaited(3, (1,), min(now, 560.0))) == 559.0 + 30.0


def test_whoever_moves_bytes_may_take_as_long_as_it_takes() -> None:
    assert held_for(lambda now: Awaited(3, (int(now) // 20,), 0.0)) is None


def test_a_survivor_in_the_scripts_own_code_gets_the_timeout() -> None:
    assert held_for(lambda _: Awaited(0, (1,), 0.0, patient=True)) == 600.0


def test_a_short_timeout_holds_for_all() -> None:
    assert held_for(lambda _: Awaited(3, (1,), 0.0), timeout=3.0) == 3.0
    assert held_for(lambda now: Awaited(3, (1,), now), timeout=3.0) == 3.0


def test_a_replacement_has_twice_the_longest_start_of_this_run() -> None:
    assert held_for(lambda _: Awaited(3, (1,), 0.0), start=40.0) == 80.0
    assert held_for(lambda now: Awaited(3, (1,), now), start=500.0) == 1000.0


def test_what_a_paused_launcher_missed_is_nobodys_silence() -> None:
    stalls = Stalls(600.0)
    stalls.due(0.0, 2)
    stalls.look(1.0, [Awaited(3, (1,), 0.0)], 0.0)
    [wait] = stalls.look(1000.0, [Awaited(3, (1,), 0.0)], 0.0)
    assert wait.still <= 3 * PAUSE


def test_a_person_is_told_first_after_ten_seconds_and_then_ever_more_seldom() -> None:
    stalls = Stalls(600.0)
    stalls.due(0.0, 2)
    told = []
    for now in range(1, 200):
        waits = stalls.look(float(now), [Awaited(3, (now,), 0.0)], 0.0)
        if stalls.to_tell(waits):
            told.append(now - 1)
    assert told == [10, 20, 40, 80, 160]
    assert not stalls.to_tell([])
    short = Stalls(4.0)
    assert short.to_tell([Wait(3, 2.0, 2.0, 4.0)]), "before it is given up, at any rate"


def test_another_repair_begins_anew() -> None:
    stalls = Stalls(600.0)
    for generation in (2, 3):
        assert not stalls.due(100.0 * generation, generation)
        for second in range(1, 30):
            [wait] = stalls.look(100.0 * generation + second, [Awaited(3, (1,), 0.0)], 0.0)
            assert not wait.over
