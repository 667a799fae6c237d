"""A rank that is slow in most steps is told of once; slow steps now and then, or of everyone, are not."""

from __future__ import annotations

import random

from ftrun.control.stragglers import SAMPLES, Stragglers


def run(times: list[list[float]]) -> list[tuple[int, int, str]]:
    """(step, rank, evidence) of every report."""
    watch = Stragglers()
    return [(step, rank, why) for step, row in enumerate(times) for rank, why in watch.step(step, dict(enumerate(row)))]


def noisy(dice: random.Random, base: float) -> float:
    return base * dice.uniform(0.8, 1.25) * (10 if dice.random() < 0.05 else 1)


def test_one_slow_rank_is_told_once() -> None:
    dice = random.Random(1)
    found = run([[noisy(dice, 0.05 * (3 if r == 2 else 1)) for r in range(4)] for _ in range(200)])
    assert [(step, rank) for step, rank, _ in found] == [(SAMPLES - 1, 2)]
    assert "times as long as the others'" in found[0][2] and "a straggler" in found[0][2]


def test_noise_slow_steps_and_a_slow_world_are_no_stragglers() -> None:
    dice = random.Random(2)
    assert run([[noisy(dice, 0.05) for _ in range(4)] for _ in range(2000)]) == []
    assert run([[0.05 * (1 + step // 100)] * 4 for step in range(400)]) == []
    alternating = [[0.15 if r == step % 4 else 0.05 for r in range(4)] for step in range(400)]
    assert run(alternating) == []


def test_a_short_time_is_not_worth_a_word() -> None:
    assert run([[0.001, 0.001, 0.004, 0.001] for _ in range(100)]) == []


def test_it_is_told_again_after_it_was_over() -> None:
    slow, even = [[0.05, 0.05, 0.2, 0.05]] * 60, [[0.05] * 4] * 60
    assert [rank for _, rank, _ in run(slow + even + slow)] == [2, 2]


def test_of_two_ranks_nobody_can_tell() -> None:
    assert run([[0.05, 0.5]] * 100) == []


def test_looks_are_frequent_only_while_they_can_show_one() -> None:
    slow, even, watch = {0: 0.05, 1: 0.05, 2: 0.2}, {0: 0.05, 1: 0.05, 2: 0.05}, Stragglers()
    assert not watch.curious
    watch.step(0, even)
    assert not watch.curious
    curious = []
    for step in range(1, 2 * SAMPLES):
        found = watch.step(step, slow)
        curious.append(watch.curious)
        if found:
            break
    assert found and curious == [True] * (len(curious) - 1) + [False], "each step counts until it is told"
    watch.forget()
    for step in range(3 * SAMPLES):  # uneven for ever, and nobody is slow enough to be told of
        watch.step(1000 + step, {0: 0.05, 1: 0.06, 2: 0.08})
    assert not watch.curious
