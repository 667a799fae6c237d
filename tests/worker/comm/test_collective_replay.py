"""What a replacement is told of the collectives outside the loops: in their order, and nothing that came after a gap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftrun.core.errors import WorkerError
from ftrun.worker.comm import collective_replay
from ftrun.worker.comm.collective_replay import Recorder


def _given(log: list[dict[str, Any]], *names: str) -> list[float]:
    """What a replacement's collectives give with that log."""
    recorder, output = Recorder(), torch.zeros(())
    recorder.load(log)
    found = []
    for name in names:
        recorder.replay(name, [output])
        found.append(float(output))
    return found


def _ended(recorder: Recorder, name: str, value: float) -> None:
    recorder.reserve(name).store([torch.tensor(float(value))])


def test_what_came_between_loops_follows_what_came_before_them() -> None:
    recorder = Recorder()
    _ended(recorder, "allreduce", 1)
    log = recorder.opening(["world"])
    assert recorder.unsaved() == [], "it is in the log already"
    _ended(recorder, "broadcast", 2)
    log += recorder.unsaved()
    _ended(recorder, "allreduce", 3)
    log += recorder.unsaved()
    assert recorder.unsaved() == []
    assert _given(log, "allreduce", "broadcast", "allreduce") == [1, 2, 3]


def test_collectives_may_end_in_another_order_than_they_begin() -> None:
    recorder = Recorder()
    log = recorder.opening(["world"])
    first, second = recorder.reserve("allreduce"), recorder.reserve("allreduce")
    second.store([torch.tensor(2.0)])
    log += recorder.unsaved()
    with pytest.raises(WorkerError, match="not known"):
        _given(log, "allreduce")
    first.store([torch.tensor(1.0)])
    log += recorder.unsaved()
    assert _given(log, "allreduce", "allreduce") == [1, 2]


def test_what_a_snapshot_has_undone_is_not_given_again() -> None:
    first = Recorder()
    _ended(first, "allreduce", 1)
    log = first.opening(["world"])
    _ended(first, "broadcast", 2)
    log += first.unsaved()
    back, output = Recorder(), torch.zeros(())
    back.load(log)
    back.replaying = True
    back.replay("allreduce", [output])
    assert back.begun == 1
    log += back.end_replay()
    _ended(back, "broadcast", 3)
    log += back.unsaved()
    assert _given(log, "allreduce", "broadcast") == [1, 3]
    with pytest.raises(WorkerError, match="not known"):
        _given(log, "allreduce", "broadcast", "broadcast")


def test_a_failure_counts_once_the_script_has_got_over_it() -> None:
    recorder = Recorder()
    log = recorder.opening(["world"])
    recorder.reserve("allreduce").fail(RuntimeError("a peer died"))
    log += recorder.unsaved()
    with pytest.raises(WorkerError, match="not known"):
        _given(log, "allreduce")
    log += recorder.settled()
    with pytest.raises(RuntimeError, match="a peer died"):
        _given(log, "allreduce")


def test_another_collective_than_the_replaced_rank_called() -> None:
    recorder = Recorder()
    _ended(recorder, "allreduce", 1)
    with pytest.raises(WorkerError):
        _given(recorder.opening(["world"]), "broadcast")


def test_results_without_room_are_missed_only_by_a_script_that_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_replay, "CAP_BYTES", 10)
    recorder = Recorder()
    recorder.reserve("allgather").store([torch.zeros(100)])
    _ended(recorder, "allreduce", 1)
    log = recorder.opening(["world"])
    with pytest.raises(WorkerError, match="is not kept"):
        _given(log, "allgather")
    later, output = Recorder(), torch.zeros(())
    later.load(log)
    later.skip_to(1)
    later.replay("allreduce", [output])
    assert output == 1


def test_a_rank_without_a_first_step_left_nothing() -> None:
    with pytest.raises(WorkerError, match="before its first step"):
        Recorder().load([])
