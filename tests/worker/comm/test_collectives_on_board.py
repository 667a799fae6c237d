"""What the board says of the collectives that a rank is in: whoever looks for a hang judges by it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Work

from ftrun.core.shared.board import Board, F, collective_word
from ftrun.worker.comm.process_group import Registry, SwapGroup
from ftrun.worker.link.run_link import Context


class Begun(Work):
    """A collective of the inner group that ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


@pytest.fixture
def groups(tmp_path: Path) -> list[SwapGroup]:
    """Two groups in a body."""
    Board.create(tmp_path / "board", 2)
    registry = Registry(Context(tmp_path, 1))
    registry.position.enter_body()
    made = [SwapGroup(registry, key, 0, (0, 1), timedelta(seconds=9)) for key in ("one", "two")]
    registry.groups += made
    registry.shown.pending = [group.pending for group in made]
    return made


def inner(begin: Any) -> Any:
    return SimpleNamespace(group=SimpleNamespace(allreduce=begin), generation=0)


@pytest.mark.parametrize("other", [0, 1])
def test_one_that_ends_while_the_next_begins_does_not_hide_it(groups: list[SwapGroup], other: int) -> None:
    cell, first, second = groups[0].context.cell, Begun(), Begun()
    groups[0].inner = inner(lambda _: first)
    waiting = groups[0]._collective("allreduce", ([torch.ones(1)],), {})
    assert cell[F.COLLECTIVE_SINCE]

    def begin(_: Any) -> Work:
        first.future.set_result([])  # as by a thread of Gloo's, which runs while this one is in C++
        assert waiting.is_completed()
        return second

    groups[other].inner = inner(begin)
    groups[other]._collective("allreduce", ([torch.ones(1)],), {})
    assert cell[F.COLLECTIVE_SINCE], "a rank that waits seems to be busy with something else"
    second.future.set_result([])
    assert not cell[F.COLLECTIVE_SINCE]


def test_one_that_is_over_at_once_is_not_shown(groups: list[SwapGroup]) -> None:
    done = Begun()
    done.future.set_result([])
    groups[0].inner = inner(lambda _: done)
    groups[0]._collective("allreduce", ([torch.ones(1)],), {})
    assert not groups[0].context.cell[F.COLLECTIVE_SINCE]


def test_the_word_is_cleared_by_the_last_group(groups: list[SwapGroup]) -> None:
    works = [Begun(), Begun()]
    for group, work in zip(groups, works, strict=True):
        group.inner = inner(lambda _, work=work: work)
        group._collective("allreduce", ([torch.ones(1)],), {})
    works[1].future.set_result([])
    assert groups[0].context.cell[F.COLLECTIVE_SINCE]
    works[0].future.set_result([])
    assert not groups[0].context.cell[F.COLLECTIVE_SINCE]


def test_each_that_ends_is_a_sign_of_life_though_others_go_on(groups: list[SwapGroup]) -> None:
    works = [Begun(), Begun()]
    for work in works:
        groups[0].inner = inner(lambda _, work=work: work)
        groups[0]._collective("allreduce", ([torch.ones(1)],), {})
    cell = groups[0].context.cell
    since = cell[F.COLLECTIVE_SINCE]
    assert since and not cell[F.COLLECTIVE_ENDED]
    works[0].future.set_result([])
    assert cell[F.COLLECTIVE_ENDED] and cell[F.COLLECTIVE_SINCE] == since


def test_one_that_failed_tells_that_a_connection_may_be_closed(groups: list[SwapGroup]) -> None:
    registry, cell, work = groups[0].registry, groups[0].context.cell, Begun()
    groups[0].inner = inner(lambda _: work)
    groups[0]._collective("allreduce", ([torch.ones(1)],), {})
    assert registry.looping and not cell[F.CUT]
    work.future.set_exception(RuntimeError("Connection closed by peer"))
    assert cell[F.CUT] == 1 and cell[F.COLLECTIVE_SINCE], "of generation 0, and it waits for the stop that explains it"
    groups[0].release(1)


def test_collectives_are_counted_from_the_newest_repair(groups: list[SwapGroup]) -> None:
    cell, shown = groups[0].context.cell, groups[0].registry.shown
    for _ in range(3):
        shown.entered("allreduce", 0)
    cell[F.GENERATION] = 2
    shown.handed_out()
    assert cell[F.COUNTED] == 2 and cell[F.FIRST_COUNT] == collective_word(0, 1), "one more than there were"
    shown.entered("allreduce", 0)
    assert cell[F.COLLECTIVE] == collective_word(0, 1)
