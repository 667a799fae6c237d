"""A run in which nothing moves is not called healthy: who waits for whom, what that costs, and what a watcher cannot see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ftrun.control.hangs import Standstill
from ftrun.core.account import Account, Fact
from ftrun.core.shared.board import Board, F, Flag
from ftrun.core.system import procfs
from ftrun.host.account.run_head import RunHead
from ftrun.host.rundir import rundir
from ftrun.view import fold, text
from ftrun.view.status import sentences
from ftrun.view.status.pace import Pace
from tests.e2e import harness
from tests.e2e.conftest import folder
from tests.view import boards
from tests.view.conftest import Looking

__all__ = ["folder"]  # a fixture

S = 1_000_000_000
HELD = Standstill(12.0, 48.0, (2,), (0, 1, 3), "in allreduce #7 of step 57", cells=(2,))


class Head:
    """The launcher's account of a run of four ranks, on a recorded board."""

    def __init__(self, board: Board, ranks: int = 4) -> None:
        self.notes: list[dict[str, Any]] = []
        self.head = RunHead(board, lambda rank: rank, self._note)
        self.board = board
        self.account = Account().then(Fact(1.0, "Publish", {"workers": range(ranks), "replaced": ()}))
        self.enter("RUNNING", time.monotonic())

    def enter(self, phase: str, at: float, cause: str = "") -> None:
        """The controller is in `phase`; rank 2 died of `cause`."""
        died = {"worker": 2, "cause": cause, "step": 57, "phase": "backward"}
        events = [Fact(at, "Died", died)] if cause else []
        self.account = self.account.then(*events, Fact(at, "phase", {"phase": phase, "generation": 1}))
        self.head.show(self.account, at)

    def _note(self, what: str, **facts: Any) -> None:
        self.notes.append({"t": time.monotonic(), "note": what, **facts})

    def stall(self, found: Standstill | None = HELD, at: float | None = None) -> None:
        self.head.stalled(found, lambda cell, still: "train.py:52 (in sleep)", time.monotonic() if at is None else at)


def test_a_stall_is_told_with_its_culprit(looking: Looking) -> None:
    Head(boards.put(looking.root)).stall()
    done = looking.pipe("status")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "stalled (RUNNING)" in said and "3/4 ranks healthy" in said
    told = r"stalled for 1\d.\d s: ranks 0, 1, 3 wait in allreduce #7 of step 57 for rank 2 \(last seen at train.py:52 \(in sleep\)\); "
    assert re.search(told + r"replaced in 4\d.\d s unless it moves", said)
    (row,) = [line for line in done.stdout.splitlines() if re.match(r" +2 +\d", line)]
    assert row.endswith("all wait for it")
    picture = json.loads(looking.pipe("status", "--json").stdout)
    assert picture["state"] == "stalled" and picture["seconds_left"] is None
    stall = picture["stall"]
    assert (stall["culprits"], stall["waiting"], stall["held_up"]) == ([2], [0, 1, 3], 3)
    assert 10 < stall["seconds"] < 20 and 40 < stall["acts_in"] < 50


@pytest.mark.parametrize(("columns", "rows"), [(80, 12), (80, 24), (200, 60)])
def test_the_culprit_is_never_folded_away(looking: Looking, columns: int, rows: int) -> None:
    board = boards.put(looking.root, ranks=512)
    Head(board, 512).stall(Standstill(12.0, 48.0, (300,), tuple(range(300)), "in allreduce #7 of step 57", cells=(300,)))
    with looking.terminal("status", columns=columns, rows=rows) as terminal:
        terminal.see(lambda: terminal.lines[rows - 1].startswith("q leave"))
        assert any(line.split()[:1] == ["300"] and "all wait for it" in line for line in terminal.lines), terminal.text
        assert "300 ranks wait in allreduce #7" in " ".join(terminal.text.split())
        assert b"43" in terminal.raw  # on yellow
        terminal.press("q")
        assert terminal.end() == 1


def test_the_accused_stand_out_in_small_and_large_worlds(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 100)
    for cell in range(100):
        board.cell(cell)[F.PID], board.cell(cell)[F.FLAGS] = 1, Flag.ALIVE
    for most in (None, 8):
        shown, _ = fold.choose(board, 100, {cell: cell for cell in range(100)}, most, 10 * S, (77,))
        assert shown[77] == fold.REASONS[1] and len([why for why in shown.values() if why]) == 1


def test_a_stall_and_its_cost_are_counted_once(tmp_path: Path) -> None:
    """12 s in which rank 2 held the run up; they are a part of the incident when it was replaced for that."""
    told = Head(Board.create(tmp_path / "board", 8))
    told.stall(at=100.0)
    told.stall(at=100.1)
    assert json.loads(told.board.run_text())["stall"]["since"] == 88.0
    told.stall(None, at=100.2)
    assert json.loads(told.board.run_text())["stall"] is None
    (note,) = told.notes
    assert (note["note"], note["seconds"], note["culprits"]) == ("stall", 12.2, [2])
    account = Account(training=20.0).then(Fact(0.0, "stall", note))
    assert account.lost(200.0) == 12.2 and account.effective(200.0) == pytest.approx((200 - 20 - 12.2) / 200)
    assert account.then(Fact(0.0, "standing still", {"since": 190.0})).lost(200.0) == 22.2
    incident = next(line for line in json.loads(boards.RECORDED.read_text())["journal"] if line.get("note") == "incident")
    account = account.then(Fact(0.0, "incident", {**incident, "began_ns": 88 * S, "total_ms": 13000.0, "again_ms": 0.0}))
    assert account.lost(200.0) == pytest.approx(13.0)
    account = account.then(Fact(0.0, "stall", {"since": 90.0, "seconds": 14.0}))  # in the first step after that repair, and 3 s beyond
    assert account.lost(200.0) == pytest.approx(16.0)


def test_an_incident_ends_a_stall(tmp_path: Path) -> None:
    told = Head(Board.create(tmp_path / "board", 8))
    told.stall(at=100.0)
    told.enter("STOPPING", 101.0, "no progress")
    told.stall(at=101.1)  # a look that was under way
    shown = json.loads(told.board.run_text())
    assert shown["stall"] is None and shown["incident"] is not None and len(told.notes) == 1
    told.enter("RUNNING", 102.0)
    told.stall(at=120.0)  # a rank hangs in the first step after the repair
    shown = json.loads(told.board.run_text())
    assert shown["stall"]["culprits"] == [2] and shown["incident"] is not None


def test_a_repair_is_recovering_until_its_first_step(looking: Looking) -> None:
    """The controller runs again; the incident is over only when every rank has done a new step."""
    head = Head(boards.put(looking.root))
    now = time.monotonic()
    head.enter("STOPPING", now, "SIGKILL")
    head.enter("RUNNING", now)
    done = looking.pipe("status")
    assert done.returncode == 1 and "recovering (RUNNING)" in done.stdout and "recovering: first step for " in done.stdout


def test_the_rate_falls_while_nothing_moves() -> None:
    opened = [at * S // 10 for at in range(50)]  # ten steps a second
    last = opened[-1]
    rates = [Pace.of(opened, last + ahead * S).rate or 0.0 for ahead in (0, 1, 10, 100)]
    assert rates == pytest.approx([10.0, 1.0, 0.1, 0.01])
    assert Pace.of(opened, last).left(20) == pytest.approx(2.0) and Pace.of(opened, last + 30 * S).left(20) is None
    assert Pace.of([], 0).rate is None and Pace.of([5 * S], 6 * S).rate is None


def test_openings_are_those_of_consecutive_gates(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1)
    assert board.openings(-1) == []
    for number in range(300):
        board.show_opening(number, number * 10)
    assert board.openings(299) == [number * 10 for number in range(44, 300)]
    board.show_opening(300, 9999)
    assert board.openings(299)[-1] == 2990 and board.openings(300)[-1] == 9999
    assert board.openings(302) == [], "the one that opened it has not said so yet"


def test_bars() -> None:
    assert text.spark([0.0, 1.0, 2.0, 9.0], 2.0) == "▁▅██" and text.spark([1.0], 0.0) == "▁"


def test_sentences() -> None:
    base = {"seconds": 3.0, "acts_in": 2.0, "culprits": [], "held_up": 4, "waiting": [0, 1, 2, 3], "where": "in recv #1 of step 3"}
    base |= {"excuse": "", "line": ""}
    assert sentences.stall(base) == (
        "for 3.0 s: all ranks wait in recv #1 of step 3; their connections are made anew in 2.0 s"
    )
    held = base | {"culprits": [4], "excuse": "debugger", "acts_in": None}
    assert sentences.stall(held).endswith("for rank 4 (held by a debugger); no timeout watches that")
    alone = base | {"culprits": [0], "held_up": 0, "waiting": [], "acts_in": 0.0}
    assert sentences.stall(alone) == "for 3.0 s: rank 0 is busy; replaced any moment now unless it moves"
    assert "restarts all workers (2 restarts left)" in sentences.unprotected(2, True)
    assert sentences.unprotected(0, False).startswith("not protected so far: ")


def test_a_run_that_is_not_protected_is_shown_as_that(looking: Looking) -> None:
    board = boards.put(looking.root)
    for cell in range(5):
        board.cell(cell)[F.BEAT] = time.monotonic_ns() + 30 * S
    for rank in range(4):
        board.cell(rank)[F.FLAGS] = Flag.ALIVE | Flag.SCRIPT | Flag.STEPPED
        board.cell(rank)[F.PHASE] = 0
    done = looking.pipe("status")
    assert done.returncode == 0, done.stdout
    assert "unprotected (RUNNING)" in done.stdout and "so a death ends the run" in done.stdout
    assert "step 57" not in done.stdout and "effective training time" not in done.stdout
    assert " script " in done.stdout and " start " not in done.stdout
    picture = json.loads(looking.pipe("status", "--json").stdout)
    assert (picture["state"], picture["protected"], picture["effective_training_time"]) == ("unprotected", False, None)


def test_a_launcher_that_is_stopped_watches_nothing(looking: Looking) -> None:
    boards.put(looking.root)
    launcher = subprocess.Popen(["sleep", "100"])
    try:
        start = procfs.process_start(launcher.pid)
        rundir.amend(looking.root / "lab", {"pid": launcher.pid, "start": start})
        os.kill(launcher.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)
        done = looking.pipe("status")
        assert done.returncode == 1 and "degraded" in done.stdout
        assert f"the launcher (process {launcher.pid}) is stopped: nothing is noticed or repaired" in done.stdout
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_before_it_is_replaced(folder: Path) -> None:
    """Real processes: rank 2 spins in its backward pass of step 6, the others wait in their all-reduce."""
    plan = (harness.fault("hang", 2, "backward", 6),)
    command = harness.ftrun_command(folder, ("--steps", "12"), plan, options=("--run-id", "held", "--hang-timeout", "15"))
    running = harness.start(folder, command)
    deadline, seen = time.monotonic() + 90.0, []
    while time.monotonic() < deadline and running.process.poll() is None:
        look = [harness.tool("ftrun"), "status", "held", "--json"]
        done = subprocess.run(look, env=harness.environment(folder), capture_output=True, text=True, timeout=60)
        seen.append(done)
        if '"state": "stalled"' in done.stdout:
            break
    picture = json.loads(seen[-1].stdout)
    assert picture["state"] == "stalled" and seen[-1].returncode == 1, seen[-1].stdout
    stall = picture["stall"]
    assert stall["culprits"] == [2] and stall["waiting"] == [0, 1, 3] and " of step 6" in stall["where"]
    assert 0 < stall["acts_in"] < 15 and stall["seconds"] + stall["acts_in"] == pytest.approx(15, abs=3)
    assert [w["rank"] for w in picture["workers"] if w["stands_out"] == fold.REASONS[1]] == [2]
    outcome = harness.finish(running)
    outcome.need()
    (note,) = outcome.notes("stall")
    assert note["culprits"] == [2] and note["seconds"] > 10
    assert harness.replaced_ranks(outcome) == {2}
