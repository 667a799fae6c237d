"""Reading journals: torn lines, the account, `ftrun events`, and which run is meant."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ftrun.control.hangs import Standstill
from ftrun.control.phases import INTERRUPTED
from ftrun.core.account import Account, Fact, Incident, Victim
from ftrun.core.journal import Tail, lines
from ftrun.core.shared.board import RUN_BYTES, Board
from ftrun.host.account.incident import measured
from ftrun.host.account.run_head import RunHead
from ftrun.view.journal import History
from tests.view import boards
from tests.view.conftest import Looking


def recorded() -> list[bytes]:
    return boards.journal_text(json.loads(boards.RECORDED.read_text())["journal"]).encode().splitlines()


def test_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"t": 1}\n{"t": 2, "no')
    tail = Tail(path)
    assert list(tail.read()) == [b'{"t": 1}']
    with path.open("ab") as file:
        file.write(b'te": "end"}\n')
    assert list(tail.read()) == [b'{"t": 2, "note": "end"}']
    assert list(tail.read()) == []
    tail.close()


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"t": 1}\n\x00\xff{{\n[3]\n{"t": 2}\n{"torn')
    assert [line["t"] for line in lines(path)] == [1, 2]


def test_account_of_the_recorded_run() -> None:
    history = History()
    history.add_all(recorded())
    account = history.account
    assert [i["victims"][0]["rank"] for i in account.incidents] == [2, 1]
    assert (account.phase, account.generation, len(account.replaced), account.restarts) == ("RUNNING", 3, 2, 0)
    now = history.latest
    lost = sum(i["total_ms"] for i in account.incidents) / 1000
    assert account.lost(now) == pytest.approx(lost) and account.training is not None
    wanted = (now - account.training - lost) / (now - account.began)
    assert account.effective(now) == pytest.approx(wanted) and account.since is None


def test_account_at_every_moment() -> None:
    history, goes_on = History(), set()
    for line in recorded():
        history.add(line)
        ratio = history.account.effective(history.latest)
        assert ratio is None or 0 <= ratio <= 1
        goes_on.add(history.account.since)
    assert len(goes_on - {None}) == 2, "two incidents, and each began once"


def test_the_board_at_every_moment(tmp_path: Path) -> None:
    """However far the run came: an incident that goes on is known by its rank and stage, and one that is over is not."""
    stages: dict[int, list[str]] = {}
    for head in boards.follow(Board.create(tmp_path / "board", 8), b"\n".join(recorded()).decode()):
        incident = head["incident"]
        assert (incident is not None) >= (head["phase"] in INTERRUPTED)
        if incident is not None and incident["victims"]:
            stages[incident["victims"][0]["rank"]] = [phase for phase, _ in incident["stages"]]
    assert head == {"phase": "RUNNING", "incident": None, "stall": None}
    whole = ["STOPPING", "CLEANING", "RESETTING", "RESTORING", "RESUMING", "FIRST_STEP"]
    assert stages == {2: whole, 1: whole}


def test_skipping_lines_changes_nothing() -> None:
    """The quick way past lines without news gives what reading all of them gives."""
    quick, whole = History(), History()
    for line in recorded():
        quick.add(line)
        whole.add(
            b" " + line.replace(b'"actions": [], ', b'"actions":[], ').replace(b'"event": {"kind"', b'"event":{"kind"')
        )
    assert quick.account == whole.account


def test_events_for_people(looking: Looking) -> None:
    looking.finished()
    done = looking.pipe("events", "lab")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "rank 2 (worker 2) died in backward of step 10: SIGKILL" in said
    assert "world 2: step 10, rank 2 to worker 4" in said and "STOPPING (generation 2)" in said
    assert "recovered: SIGKILL → rank 2 in backward of step 10" in said
    assert all(line[2] == ":" and line[8] == "." for line in said.splitlines())


def test_events_as_json_are_the_journal(looking: Looking) -> None:
    folder = looking.finished()
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"t": 9, "torn')
    done = looking.pipe("events", "lab", "--json")
    assert done.stdout.splitlines() == (folder / "journal.jsonl").read_text().splitlines()[:-1]


def test_events_exit_codes(looking: Looking) -> None:
    assert looking.pipe("events").returncode == 4
    assert looking.pipe("events", "nobody").returncode == 4
    assert "Examples: `ftrun events`" in looking.pipe("events", "--help").stdout


def test_events_follow_until_the_end(looking: Looking) -> None:
    boards.put(looking.root)
    journal = looking.root / "lab" / "journal.jsonl"
    with (looking.base / "out").open("wb") as out:
        process = subprocess.Popen(
            looking.command("events", "lab", "--follow"), env=looking.env, stdout=out, stdin=subprocess.DEVNULL
        )
    try:
        wait(lambda: b"recovered" in (looking.base / "out").read_bytes())
        assert process.poll() is None
        with journal.open("a") as file:
            file.write('{"t": 1.0, "note": "hello", "who": "me"}\n{"t": 1.0, "no')
        wait(lambda: b"hello: who me" in (looking.base / "out").read_bytes())
        with journal.open("a") as file:
            file.write('te": "end"}\n')
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert (looking.base / "out").read_bytes().endswith(b"  end\n")


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_reader_that_leaves_ends_it(looking: Looking) -> None:
    looking.finished()
    reader, writer = os.pipe()
    os.close(reader)
    command = looking.command("events", "lab")
    done = subprocess.run(command, cwd=looking.base, env=looking.env, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.returncode != 0 and not done.stderr


def test_which_run_is_meant(looking: Looking) -> None:
    """A live run before one that ended, the newest of two that ended under one name, a killed one by its run directory."""
    old, new = looking.finished("twin"), looking.finished("twin_0123abcd")
    os.utime(old / "journal.jsonl", (1, 1))
    new_lines = (new / "journal.jsonl").read_text().splitlines()
    (new / "journal.jsonl").write_text("\n".join(new_lines[:20]) + "\n")
    assert "no incident" in looking.pipe("timeline", "twin").stdout
    boards.put(looking.root, "twin")
    assert "2 incidents in all" in looking.pipe("timeline", "twin").stdout
    other = looking.finished("elsewhere").rename(looking.base / "elsewhere")
    assert looking.pipe("timeline", "elsewhere").returncode == 4
    assert looking.pipe("timeline", "./elsewhere").returncode == 0 and other.exists()
    line = {"run": "gone_0123abcd", "logs": str(new), "began": 1.0, "ended": 2.0}
    (looking.base / "state" / "ftrun").mkdir(parents=True)
    (looking.base / "state" / "ftrun" / "ended.jsonl").write_text(json.dumps(line) + "\n")
    assert looking.pipe("timeline", "gone").returncode == 0
    assert looking.pipe("timeline", "elsewhere", PET_LOG_DIR=str(looking.base)).returncode == 0


def test_a_run_whose_processes_were_all_killed(looking: Looking) -> None:
    """Its journal is read from where it is, and kept with the logs when the next run clears up."""
    from ftrun.host.rundir import rundir

    boards.put(looking.root, "killed")
    logs = looking.base / "ftrun-logs" / "killed"
    logs.mkdir(parents=True)
    rundir.amend(looking.root / "killed", {"pid": 2**22 + 1, "logs": str(logs)})
    assert "2 incidents in all" in looking.pipe("timeline", "killed").stdout
    rundir.amend(looking.root / "killed", {"pids": "pid:[1]"})
    lock = looking.root / "killed" / "lock"
    rundir.remove_stale(looking.root)  # another container's: nothing tells whether it lives
    lock.touch(mode=0o600)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rundir.remove_stale(looking.root)
        assert (looking.root / "killed").exists()
    done = looking.pipe("status", "killed")
    assert done.returncode == 3 and "was cut off" in done.stdout
    rundir.remove_stale(looking.root)
    assert not (looking.root / "killed").exists()
    assert "2 incidents in all" in looking.pipe("timeline", "killed").stdout


def test_every_field_is_documented(looking: Looking) -> None:
    """Whoever reads the journal or the picture finds each field in SCHEMA.md."""
    import ftrun.view

    known = set(re.findall(r"[a-z][a-z_0-9]*", (Path(ftrun.view.__file__).with_name("SCHEMA.md")).read_text()))
    boards.put(looking.root)
    picture = json.loads(looking.pipe("status", "--json").stdout)
    victim = vars(Victim(0, 0, 0, "", ""))
    incident = measured(Incident(0, 0), Board.open(looking.root / "lab" / "board"), {})
    for fields in (picture, picture["workers"][0], picture["incidents"][0], victim, incident):
        assert set(fields) <= known, set(fields) - known


def test_a_text_about_the_run_is_cut_to_its_room(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 8)
    head = RunHead(board, lambda rank: rank, lambda *_, **__: None)
    workers = tuple(range(400))
    account = Account().then(Fact(1.0, "Publish", {"workers": workers, "replaced": ()}))
    for rank in workers:
        died = Fact(2.0, "Died", {"worker": rank, "cause": "SIGKILL", "step": 7, "phase": "backward"})
        stuck = Fact(2.0, "Say", {"what": "stuck", "detail": "x" * 500})
        account = account.then(died, stuck, Fact(2.0, "phase", {"phase": "STOPPING", "generation": 2}))
        head.show(account, 2.0)
    shown = json.loads(board.run_text())
    assert len(board.run_text()) <= RUN_BYTES and shown["phase"] == "STOPPING" and shown["incident"]["since"] == 2.0
    assert [v["rank"] for v in shown["incident"]["victims"]][:3] == [0, 1, 2]


def test_a_stall_is_cut_to_its_room(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 8)
    head = RunHead(board, lambda rank: rank, lambda *_, **__: None)
    ranks = tuple(range(128))
    head.show(Account().then(Fact(1.0, "phase", {"phase": "RUNNING", "generation": 1})), 1.0)
    found = Standstill(12.0, 48.0, ranks, ranks, "\u8bad\U0001f600" * 300, "\u00e9" * 999, cells=ranks)
    head.stalled(found, lambda cell, still: "/\U0001f600" * 500, 2.0)
    stall = json.loads(board.run_text())["stall"]
    assert stall["where"].startswith("\u8bad") and stall["line"].startswith("/") and stall["held_up"] == 128
    assert len(board.run_text()) <= RUN_BYTES
    shown = board.run_text()
    board.show_run(b"x" * (RUN_BYTES + 1))
    assert board.run_text() == shown
