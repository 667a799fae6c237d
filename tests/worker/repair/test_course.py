"""Which updates a rank is taken to have meant."""

from __future__ import annotations

from ftrun.worker.repair.course import Course


def course(*updates: list[int]) -> Course:
    made = Course()
    for one in updates:
        made.add(one)
    return Course(made.saved)


def test_what_a_rank_did_before_it_may_have_meant_again() -> None:
    assert course([0], [0, 1]).foretells(0, [0], 2)
    assert not course([0, 1], [0, 1]).foretells(0, [0], 2)
    assert not course([0], [1]).foretells(1, [0], 2)
    assert not course([0]).foretells(0, [], 1)
    assert not course([0]).foretells(None, [0], 1)
    assert course([0]).foretells(None, [], 1)
    assert not course([-1]).foretells(-1, [-1], 1)


def test_in_its_first_update_only_all_of_its_optimizers() -> None:
    assert course().foretells(1, [1, 0], 2)
    assert not course().foretells(0, [0], 2)


def test_ranks_part_by_one_update_in_another_step() -> None:
    mine = course([0], [])
    assert mine.leads_to([0], {course([0], [], [0]).sum, 5})
    assert not mine.leads_to([0], {course([], [0], [0]).sum})
    assert not mine.leads_to([0], {course([0], [0]).sum})
