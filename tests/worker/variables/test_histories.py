"""A long list that only grows is kept by what is added to it, for the same price however long it is."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ftrun.worker.memory.log import Log
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair.recovery_points import Slots
from ftrun.worker.variables import histories
from ftrun.worker.variables.copies import placed
from ftrun.worker.variables.histories import Histories, whole
from ftrun.worker.variables.variables import Variables
from tests.worker.variables.test_variables import LOOP

STEPS = 7
LONG = 400


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots.create(0)
    yield made
    made.segment.close()


def run(script: Callable[[Any], Any], slots: Slots, first: int = 0, saved: Any = None) -> tuple[Any, dict[int, Any], list[str]]:
    kept: dict[int, Any] = {}
    lost: list[str] = []
    variables = Variables([], {}, ["slots", "saved", "lost", "kept"])
    variables.told = lost.extend
    variables.histories.logs = slots.histories

    class Whole(dict[int, Any]):
        def __setitem__(self, step: int, state: dict[str, bytes]) -> None:
            super().__setitem__(step, state)
            kept[step] = {name: whole(data, slots.histories) for name, data in state.items()}, state

    return script(LOOP(variables, first, saved, Whole())), kept, lost


def floats(steps: Any) -> Any:
    losses: list[float] = []
    for step in steps:
        losses += [step + n / 7 for n in range(LONG)]
    return losses


def in_a_dict(steps: Any) -> Any:
    history: dict[str, list[Any]] = {"loss": [], "name": []}
    for step in steps:
        for n in range(LONG):
            history["loss"].append(float(step * n))
            history["name"].append(f"{step}-{n}")
    return history


def rows(steps: Any) -> Any:
    history: list[dict[str, Any]] = []
    for step in steps:
        for n in range(LONG):
            history.append({"step": step, "loss": n / 3, "at": (n, None)})
    return history


def scalars(steps: Any) -> Any:
    history: list[Any] = []
    for step in steps:
        history += [np.float32(step + n) for n in range(LONG)]
    return [(type(one).__name__, float(one)) for one in history]


def tensors(steps: Any) -> Any:
    history: list[Any] = []
    for step in steps:
        history += [torch.tensor(float(step * n)) for n in range(LONG)]
    return torch.stack(history).tolist()


def queue(steps: Any) -> Any:
    history: deque[float] = deque(maxlen=10_000)
    for step in steps:
        history.extend(step * n / 3 for n in range(LONG))
    return history


def the_last_entries_change(steps: Any) -> Any:
    history: list[Any] = []
    for step in steps:
        history += [step * n for n in range(LONG)]
        history[-1] = "last"
        history.pop()
    return history


def anew_each_time(steps: Any) -> Any:
    seen: list[int] = []
    for step in steps:
        seen = [step * n for n in range(LONG)]
    return seen


def old_entries_change(steps: Any) -> Any:
    history: list[int] = []
    for step in steps:
        history += [step * n for n in range(LONG)]
        history.sort()
    return history


def a_list_and_its_other_name(steps: Any) -> Any:
    history: list[int] = []
    other = {"all": history}
    for step in steps:
        history += [step * n for n in range(LONG)]
        other["all"].append(-1)
    return history, other, other["all"] is history


def of_objects(steps: Any) -> Any:
    shared = {"n": 0}
    history: list[Any] = []
    for step in steps:
        history += [shared for _ in range(LONG)]
        shared["n"] += step
    return [one["n"] for one in history], len({id(one) for one in history})


SCRIPTS = [floats, in_a_dict, rows, scalars, tensors, queue, the_last_entries_change, anew_each_time, old_entries_change,
           a_list_and_its_other_name, of_objects]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_replacement_has_the_whole_list(script: Callable[[Any], Any], cut: int, slots: Slots) -> None:
    wanted, kept, _ = run(script, slots)
    found, again, lost = run(script, slots, cut, kept[cut][0])
    assert found == wanted and not lost
    if cut < 4:
        assert run(script, slots, cut + 2, again[cut + 2][0])[0] == wanted


@pytest.mark.parametrize("script", [floats, in_a_dict, rows, scalars, tensors, queue, the_last_entries_change, a_list_and_its_other_name])
def test_what_a_slot_has_of_it_does_not_grow(script: Callable[[Any], Any], slots: Slots) -> None:
    _, kept, _ = run(script, slots)
    sizes = [sum(map(len, kept[step][1].values())) for step in (3, 6)]
    complete = [sum(map(len, kept[step][0].values())) for step in (3, 6)]
    assert complete[1] > 1.7 * complete[0]
    assert sizes[1] < 1.3 * sizes[0] and sizes[1] < complete[1] / 3, (sizes, complete)


def test_a_list_of_any_length_is_kept(slots: Slots) -> None:
    """A copy of it alone would be beyond what a slot takes."""
    ours = Histories()
    ours.logs = slots.histories
    data = [float(n) for n in range(1_000_000)]
    made = ours.copied("x", data, {}, True, False)
    assert len(made.data) < 1000
    pickled, named = histories.parts_of(whole(made.data, slots.histories))
    there: list[float] = []
    assert placed(there, pickled, {}, named=named) is there and there == data


def test_an_old_entry_that_changes_is_seen_at_a_look_and_at_a_stop(slots: Slots) -> None:
    ours = Histories()
    ours.logs = slots.histories
    data = [float(n) for n in range(20_000)]
    for _ in range(40):
        ours.copied("x", data, {}, True, False)
    assert not ours.changed_unseen()
    data[7] = -1.0
    assert ours.changed_unseen() == ["x"]
    for _ in range(20_000 // histories.BLOCK // 8 + 1):
        made = ours.copied("x", data, {}, True, True)
    assert not ours.changed_unseen()
    assert _read(made.data, slots) == data


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "beside another name"])
def test_an_old_entry_that_changes_unseen_is_lost_at_a_stop(shared: bool, slots: Slots) -> None:
    variables = Variables([], {}, ["slots", "lost"])
    lost: list[str] = []
    variables.told = lost.extend
    variables.histories.logs = slots.histories
    history: list[int] = []
    other = {"all": history} if shared else {}
    for step in LOOP(variables, 0, None, {}):
        history += [step * n for n in range(LONG)]
        if step == 6:
            history[7] = -1
            variables.stopped(rewind=False)
            break
    assert "history" in lost and ("other" in lost) is bool(other)


def test_a_list_that_was_put_back_is_not_written_anew(slots: Slots) -> None:
    ours = Histories()
    ours.logs = slots.histories
    data = [float(n) for n in range(1000)]
    for _ in range(2):  # the first time it is copied as a whole
        ours.copied("x", data, {}, True, False)
    written = slots.histories[0].used
    ours.let_go("x")
    data[:] = [float(n) for n in range(1000)]  # equal ones
    for _ in range(3):
        made = ours.copied("x", data, {}, True, False)
    assert slots.histories[0].used == written > 0 and _read(made.data, slots) == data


def test_the_log_of_a_value_that_does_not_grow_serves_another(slots: Slots) -> None:
    ours = Histories()
    ours.logs = slots.histories[:1]
    data = [float(n) for n in range(1000)]
    for first in range(4):
        data[:] = [float(n * first) for n in range(1000)]
        ours.copied("x", data, {}, True, True)  # it is written anew too soon
    assert slots.histories[0].used > 0
    for _ in range(2):
        made = ours.copied("y", data, {}, True, False)
    assert len(made.data) < 2000 and _read(made.data, slots) == data


def test_a_log_goes_on_at_its_front_once_nothing_there_counts() -> None:
    segment = Segment.create("log", 1 << 20)
    log = Log(segment, 0, 1 << 20)
    for _ in range(30):
        log.append(bytes(20_000))
    middle = log.used
    assert log.start_over(0) == middle  # what is at the front counts
    log.append(b"x" * 1000)
    assert log.start_over(middle) == 0
    log.append(b"front")
    assert [*map(bytes, log.records(0, log.used))] == [b"front"]
    assert [*map(bytes, log.records(middle, middle + 1016))] == [b"x" * 1000]
    segment.close()


def test_the_memory_of_what_was_written_anew_is_given_back(slots: Slots) -> None:
    ours = Histories()
    ours.logs = slots.histories
    used = []
    for turn in range(6):
        data = [float(n * turn) for n in range(100_000)]
        for _ in range(80):
            made = ours.copied("x", data, {}, True, False)
        assert _read(made.data, slots) == data
        used.append(os.fstat(slots.segment.fd).st_blocks * 512)
    assert used[-1] < 1.2 * used[1], used


def _read(data: bytes, slots: Slots) -> Any:
    pickled, named = histories.parts_of(whole(data, slots.histories))
    return placed([], pickled, {}, named=named)
