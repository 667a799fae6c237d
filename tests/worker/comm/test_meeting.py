"""Ranks of one machine exchange their addresses through files in the run directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ftrun.core.shared.world import Place, World
from ftrun.worker.comm.backend import LOOPBACK, make_group
from ftrun.worker.comm.file_store import FileMeeting
from ftrun.worker.link.position import Interrupt

LONG = timedelta(seconds=60)


def meeting(
    run_dir: Path, generation: int = 1, timeout: timedelta = LONG, go_on: Callable[[], bool] = lambda: True
) -> FileMeeting:
    places = tuple(Place(rank, rank, rank) for rank in range(2))
    world = World(generation=generation, resume=0, places=places, store_host="", store_port=0)
    return FileMeeting(run_dir, world, "0.1", timeout, go_on)


def test_a_value_is_waited_for_and_read_whole(tmp_path: Path) -> None:
    value = bytes(range(256)) * 4096
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(meeting(tmp_path).get("cpu//0/1")))
    reader.start()
    time.sleep(0.05)
    meeting(tmp_path).set("cpu//0/1", value)
    reader.join(30)
    assert found == [value]


def test_a_value_that_nobody_sets(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"nobody set ports/1 within 0:00:00\.1"):
        meeting(tmp_path, timeout=timedelta(seconds=0.1)).multi_get(["ports/1"])


def test_time_does_not_count_while_a_member_is_on_its_way(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        meeting(tmp_path, timeout=timedelta(seconds=0.1), go_on=lambda: time.monotonic() - begin > 0.5).get("ports/1")
    assert time.monotonic() - begin > 0.5


def test_generations_do_not_meet(tmp_path: Path) -> None:
    meeting(tmp_path, generation=1).set("ports/0", "[1]")
    with pytest.raises(TimeoutError):
        meeting(tmp_path, generation=2, timeout=timedelta(seconds=0.1)).get("ports/0")


def test_what_earlier_meetings_left_is_removed(tmp_path: Path) -> None:
    for generation in (1, 2, 3):
        meeting(tmp_path, generation).set("ports/0", str(generation))
    meeting(tmp_path, 3).forget_earlier()
    assert [p.read_text() for p in tmp_path.rglob("ports*")] == ["3"]


def test_a_thread_left_behind_removes_nothing_of_a_later_meeting(tmp_path: Path) -> None:
    for generation in (2, 10):
        meeting(tmp_path, generation).set("ports/0", str(generation))
    meeting(tmp_path, 2).forget_earlier()
    assert sorted(p.read_text() for p in tmp_path.rglob("ports*")) == ["10", "2"]


def test_a_group_that_need_not_be_made_any_more_is_not_waited_for(tmp_path: Path) -> None:
    """Whether its peer has not come at all, or has said where it listens and then died."""
    begin = time.monotonic()

    def go_on() -> bool:
        if time.monotonic() - begin > 0.2:
            raise Interrupt
        return True

    with pytest.raises(Interrupt):
        make_group(meeting(tmp_path, go_on=go_on), 0, 2, LONG, LOOPBACK)
    meeting(tmp_path).set("ports/1", "[1]")
    with pytest.raises(Interrupt):
        make_group(meeting(tmp_path, go_on=go_on), 0, 2, LONG, LOOPBACK)
    assert time.monotonic() - begin < 20


def test_two_ranks_meet_and_reduce(tmp_path: Path) -> None:
    sums: dict[int, list[float]] = {}

    def member(rank: int) -> None:
        inner = make_group(meeting(tmp_path), rank, 2, LONG)
        tensor = torch.full((3,), float(rank + 1))
        inner.group.allreduce([tensor]).wait()
        sums[rank] = tensor.tolist()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: [3.0] * 3, 1: [3.0] * 3}
