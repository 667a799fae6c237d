"""A rank's death is told at once, and again with its exit code as soon as that shows, or without one after a second."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.control import events as ev
from ftrun.core.faults import Fault
from ftrun.core.shared.board import F, Flag
from ftrun.host.workers.pool import Worker, WorkerPool
from tests.host.parts import Recorder, launch_context


class Dying:
    """A worker pool of one rank whose liveness lock is gone while its process still runs: it ends when and how the test says."""

    def __init__(self, folder: Path) -> None:
        context = launch_context(folder, Recorder(self._hear))
        self.loop = context.loop
        self.told: list[ev.Died] = []
        self.dying = 0
        self.finished = 0
        nothing: Any = None
        self.pool = WorkerPool(context, nothing, set)
        self.worker = self.pool.workers[0] = Worker(context.board.cell(0), 0)
        self.worker.cell[F.FLAGS] = Flag.LOOPING
        self.worker.flags = int(Flag.LOOPING)
        ear, self._mouth = os.pipe()
        pid = os.fork()
        if pid == 0:
            os._exit(int.from_bytes(os.read(ear, 1), "big"))
        os.close(ear)
        self.pool.forked(0, pid)

    def _hear(self, event: ev.Event) -> None:
        if isinstance(event, ev.Finished):
            self.finished += 1
        elif isinstance(event, ev.Dying):
            self.dying += 1
        else:
            assert isinstance(event, ev.Died), event
            self.told.append(event)

    def life_lost(self) -> None:
        self.pool._lock_lost(self.worker)

    def exits(self, code: int) -> None:
        """The process has ended and nobody has reaped it."""
        os.write(self._mouth, bytes([code]))
        os.waitid(os.P_PID, self.worker.pid, os.WEXITED | os.WNOWAIT)

    def hear(self) -> ev.Died:
        for _ in range(1000):
            if self.told:
                return self.told[0]
            self.loop.run_once(1.0)
        pytest.fail("the death was never told")

    def close(self) -> None:
        os.close(self._mouth)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.worker.pid, 0)
        self.pool._release(self.worker)
        self.loop.close()


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[Dying]:
    dying = Dying(tmp_path)
    yield dying
    dying.close()


@pytest.mark.parametrize("code", [3, 0])
def test_a_code_that_shows_late_is_waited_for(dying: Dying, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftrun.core.grace.EXIT_CODE", 60.0)
    dying.life_lost()
    dying.loop.run_once(1.0)
    assert dying.dying == 1 and not dying.told, "it still runs"
    dying.exits(code)
    death = dying.hear()
    assert (death.code, death.fault, death.cause) == (code, Fault.EXIT.value, f"exit {code}")
    assert dying.dying == 1


def test_a_code_that_does_not_show_is_done_without(dying: Dying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftrun.core.grace.EXIT_CODE", 0.05)
    dying.life_lost()
    death = dying.hear()
    assert dying.dying == 1 and (death.code, death.cause) == (None, "started another program in place of itself (exec)")
    dying.exits(3)
    assert dying.pool.exited(dying.worker.pid, 3)
    assert len(dying.told) == 1 and dying.worker.cell[F.EXIT_STATUS] == 3


def test_one_that_is_condemned_meanwhile_is_told_once(dying: Dying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftrun.core.grace.EXIT_CODE", 60.0)
    dying.life_lost()
    dying.pool.condemn(dying.worker, "frozen", Fault.FROZEN, "its process is stopped")
    dying.exits(3)
    for _ in range(3):  # the end of the process, and the look that was due when it was condemned
        dying.loop.run_once(0.05)
    assert [(death.code, death.cause) for death in dying.told] == [(None, "frozen")]


def test_one_that_we_kill_while_it_ends_keeps_its_own_cause(dying: Dying) -> None:
    """A world that starts anew has it fenced before its exit code shows."""
    dying.life_lost()
    dying.pool.fence(0)
    death = dying.hear()
    assert (death.code, death.fault, death.cause) == (137, Fault.SIGNAL.value, "SIGKILL")


@pytest.mark.parametrize("killed", [True, False])
def test_one_that_the_fd_store_ends_is_cut_off(dying: Dying, killed: bool) -> None:
    """Unless it had left by itself: the fd store saw it live a moment ago."""
    dying.worker.cell[F.CUT_OFF] = 1
    if killed:
        os.kill(dying.worker.pid, signal.SIGKILL)
    else:
        dying.exits(3)
    assert dying.hear().fault == (Fault.CUT_OFF.value if killed else Fault.EXIT.value)


@pytest.mark.parametrize("known_by", ["lock", "process"])
def test_a_script_that_is_over_has_time_to_end(dying: Dying, monkeypatch: pytest.MonkeyPatch, known_by: str) -> None:
    """Its lock is gone, and neither its process nor the fork server's word of it comes within the usual time."""
    monkeypatch.setattr("ftrun.core.grace.EXIT_CODE", 0.05)
    dying.worker.cell[F.FLAGS] = dying.worker.flags = int(Flag.LOOPING | Flag.LOOP_DONE | Flag.EXITING)
    if known_by == "lock":
        dying.life_lost()
        for _ in range(3):
            dying.loop.run_once(0.1)
        assert not dying.told and not dying.finished and not dying.dying
    dying.exits(0)
    for _ in range(100):
        if dying.finished:
            break
        dying.loop.run_once(0.1)
    assert dying.finished == 1 and not dying.told


def test_one_that_was_reaped_by_a_fork_server_that_died_before_it_said_so(
    dying: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody will ever say with which code; the run must not wait for it at its end."""
    monkeypatch.setattr("ftrun.host.workers.pool._CODE_LATEST", 0.2)
    dying.exits(3)
    os.waitpid(dying.worker.pid, 0)
    for _ in range(100):
        dying.loop.run_once(0.1)
        if dying.worker.ended:
            break
    assert dying.worker.ended and not dying.pool.living()
    assert [death.code for death in dying.told] == [None]


def test_one_that_ended_well_and_whose_fork_server_died_before_it_said_so(
    dying: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script was over: a death would have a rank replaced, or all start again, for nothing."""
    monkeypatch.setattr("ftrun.host.workers.pool._CODE_LATEST", 0.2)
    dying.worker.cell[F.FLAGS] = dying.worker.flags = int(Flag.LOOPING | Flag.LOOP_DONE | Flag.EXITING)
    dying.exits(0)
    os.waitpid(dying.worker.pid, 0)
    for _ in range(100):
        dying.loop.run_once(0.1)
        if dying.worker.ended:
            break
    assert dying.worker.ended and (dying.finished, dying.told) == (1, [])
