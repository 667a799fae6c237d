"""`ftrun status` piped and in a terminal, on recorded boards: what a person reads, keys, sizes, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ftrun.core.shared.board import Board, F, Flag
from ftrun.core.system import procfs
from ftrun.host.rundir import rundir
from tests.view import boards
from tests.view.conftest import Looking
from tests.view.terminal import Terminal

GB = 1_000_000_000
COLOUR = re.compile(rb"\x1b\[[0-9;]*(3|4|9)[0-9][0-9;]*m")


def recovering(root: Path) -> Board:
    """In the middle of a restore: 1.2 of 4 GB are there."""
    board = boards.put(root, until="RESTORING")
    cell = board.cell(1)
    cell[F.MOVED], cell[F.MOVE_TOTAL] = 12 * GB // 10, 4 * GB
    return board


def fresh(board: Board, ranks: int) -> None:
    """Every rank has just given a sign of life."""
    import time

    for rank in range(ranks):
        board.cell(rank)[F.BEAT] = time.monotonic_ns() + 30 * GB


def test_healthy(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    done = looking.pipe("status")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"run lab +healthy \(RUNNING\) +generation 3 +up \d", lines[0])
    assert os.uname().nodename in lines[0] and re.match(r".*\.py.*   logs /", lines[1])
    assert "4/4 ranks healthy   1/1 spares ready" in lines[2]
    assert re.search(r"step 57 +[\d.]+ steps/s +(ETA .+ +)?effective training time [\d.]+ %", lines[2])
    assert re.match(r"step time [▁▂▃▄▅▆▇█]{3,}  \d+ ms \(fastest \d+ ms, slowest \d+ ms\)", lines[3])
    at = lines.index("") + 1
    assert lines[at].split()[:4] == ["rank", "pid", "phase", "step"]
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["0", "1", "2", "3"]
    assert "parked" in lines[at + 5] or "ready" in lines[at + 5]
    newest = lines.index("2 incidents, newest first")
    assert "#2" in lines[newest + 1] and "SIGKILL → rank 1 in update of step 20" in lines[newest + 1]
    assert re.search(r"\d+ ms: detect .*, first step \d+; rank 1 from a peer, 1.4 MB; 1 step again", lines[newest + 2])
    assert "\x1b" not in done.stdout


def test_values_that_are_kept(looking: Looking) -> None:
    """How many; a file that is damaged, or of another version, tells nothing."""
    fresh(boards.put(looking.root), 5)
    notes = looking.root / "lab" / "notes"
    notes.mkdir()
    told = {"rank": 0, "step": 3, "looked": 3, "values": [{"names": ["losses"], "bytes": 90}, {"names": ["a", "b"], "bytes": 40}]}
    (notes / "kept.json").write_text(json.dumps(told))
    (notes / "left-out-2.json").write_text(json.dumps({"cell": 2, "names": {"feed": "is a range_iterator"}}))
    assert "kept 3 values, 1 not" in looking.pipe("status").stdout
    picture = json.loads(looking.pipe("status", "--json").stdout)
    assert (picture["kept"], picture["not_kept"], picture["left_out"]) == (told, {"feed": "is a range_iterator"}, ["feed"])
    assert looking.pipe("explain", "lab").stdout.splitlines()[1:3] == ["  losses   90 B", "  a and b  40 B"]
    for damaged in ("{", "[]", json.dumps({**told, "values": [["losses", 90]]}), json.dumps({**told, "step": "x"})):
        (notes / "kept.json").write_text(damaged)
        (notes / "left-out-2.json").write_text(damaged)
        assert "kept" not in looking.pipe("status").stdout.replace(str(looking.base), "")
        done = looking.pipe("explain", "lab")
        assert done.returncode == 0 and done.stdout.startswith("run lab: no rank has told of values"), done.stderr


def test_recovering(looking: Looking) -> None:
    recovering(looking.root)
    done = looking.pipe("status")
    assert done.returncode == 1
    assert "recovering (RESTORING)" in done.stdout
    why = next(line for line in done.stdout.splitlines() if line.startswith("recovering: restoring for "))
    assert "SIGKILL → rank 1 in update of step 20" in why
    assert re.search(r"█{12}░{28} 1.2 GB of 4.0 GB restored", done.stdout)


def test_degraded(looking: Looking) -> None:
    board = boards.put(looking.root)
    board.cell(4)[F.EXITED] = 1  # the spare
    done = looking.pipe("status")
    assert done.returncode == 1
    assert "degraded" in done.stdout and "0/1 spares ready" in done.stdout


def test_rank_that_stopped_beating_is_not_healthy(looking: Looking) -> None:
    board = boards.put(looking.root)
    fresh(board, 4)
    board.cell(2)[F.BEAT] -= 60 * GB
    done = looking.pipe("status")
    assert done.returncode == 1 and "3/4 ranks healthy" in done.stdout


def test_512_ranks_fold_to_those_that_stand_out(looking: Looking) -> None:
    board = boards.put(looking.root, ranks=512)
    fresh(board, 512)
    board.cell(77)[F.BEAT] -= 90 * GB
    board.cell(99)[F.STEP] -= 3
    board.cell(200)[F.EXITED], board.cell(200)[F.EXIT_STATUS] = 1, 137
    done = looking.pipe("status")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line[:4].strip().isdigit()}
    assert {"77", "99", "200"} <= set(rows) and len(rows) == 64
    assert "gone" in rows["200"] and "ended with 137" in rows["200"]
    assert re.search(r"and 448 more ranks: \d+ backward of step 57", done.stdout)
    assert "510/512 ranks healthy" in done.stdout
    whole = json.loads(looking.pipe("status", "--json").stdout)
    assert len([w for w in whole["workers"] if w["rank"] is not None]) == 512


def test_512_ranks_in_a_small_terminal(looking: Looking) -> None:
    board = boards.put(looking.root, ranks=512)
    fresh(board, 512)
    board.cell(200)[F.EXITED], board.cell(200)[F.EXIT_STATUS] = 1, 137
    with looking.terminal("status", columns=80, rows=24) as terminal:
        terminal.see(lambda: terminal.lines[23].startswith("q leave"))
        assert re.search(r"and \d+ more ranks:", terminal.text)
        assert any("gone" in line and line.split()[0] == "200" for line in terminal.lines), terminal.text
        assert "incidents, newest first" in terminal.text
        terminal.press("q")
        assert terminal.end() == 1


def test_json_has_a_schema_version_and_every_fact(looking: Looking) -> None:
    recovering(looking.root)
    done = looking.pipe("status", "lab", "--json")
    picture = json.loads(done.stdout)
    assert done.returncode == 1
    assert (picture["schema"], picture["run"], picture["state"]) == (1, "lab", "recovering")
    assert picture["current"]["bytes"] == {"moved": 12 * GB // 10, "total": 4 * GB}
    assert picture["current"]["victims"][0]["rank"] == 1
    assert picture["incidents"][0]["sources"]["2"]["name"] == "adopt"
    assert 0 < picture["effective_training_time"] < 1
    assert {"pid", "phase", "step", "beat_age", "collective_age", "memory"} <= set(picture["workers"][0])


def test_devices_are_shown_when_somebody_watches_them(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    device = {
        "index": 3,
        "uuid": "GPU-8f3a-12ab34cd",
        "name": "H200",
        "utilisation": 97,
        "temperature": 66,
        "memory_used": 41 * GB,
        "memory_total": 80 * GB,
        "throttle": ["sw thermal"],
        "quarantined": None,
        "rank": 1,
    }
    spoiled = {**device, "index": 4, "uuid": "GPU-bad", "rank": 2, "quarantined": "Xid 79"}
    (looking.root / "lab" / "devices.json").write_text(json.dumps([device, spoiled]))
    done = looking.pipe("status")
    assert done.returncode == 1  # a device is quarantined
    (row,) = [line for line in done.stdout.splitlines() if line.strip().startswith("1 ")]
    assert re.search(r"3 …ab34cd .* 41.0 GB/80.0 GB +97 % +66 °C +.*throttled: sw thermal", row)
    assert "quarantined: Xid 79" in done.stdout


def test_no_such_run(looking: Looking) -> None:
    for args in ((), ("nobody",), ("nobody", "--json")):
        done = looking.pipe("status", *args)
        assert done.returncode == 4 and not done.stdout and done.stderr.startswith("ftrun: error: no ")


def test_run_that_ended(looking: Looking) -> None:
    looking.finished("over")
    done = looking.pipe("status", "over")
    assert done.returncode == 3 and "2 incidents" in done.stdout and "ftrun timeline over" in done.stdout
    assert json.loads(looking.pipe("status", "over", "--json").stdout)["incidents_total"] == 2


def test_usage(looking: Looking) -> None:
    assert looking.pipe("status", "--interval", "0").returncode == 2
    helped = looking.pipe("status", "--help")
    assert helped.returncode == 0 and "Examples: `ftrun status`" in helped.stdout


def test_ascii_for_an_ascii_pipe(looking: Looking) -> None:
    recovering(looking.root)
    done = looking.pipe("status", PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 1 and done.stdout.isascii() and "SIGKILL > rank 1" in done.stdout


def test_keys(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status", "--interval", "0.2") as terminal:
        terminal.see("4/4 ranks healthy")
        assert COLOUR.search(terminal.raw)
        terminal.press("p")
        terminal.see("PAUSED")
        terminal.press("p")
        terminal.see(lambda: "PAUSED" not in terminal.text)
        terminal.press("?")
        terminal.see("the run goes on")
        terminal.press("?")
        terminal.press("down", "down")
        terminal.see("►#1")
        terminal.press("enter")
        terminal.see("what failed     rank 2, in the backward pass of step 10")
        terminal.see("Controller")
        terminal.press("escape")
        terminal.see("4/4 ranks healthy")
        terminal.press("q")
        assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.raw  # the screen from before is back
    assert b"\x1b[?25h" in terminal.raw  # and the cursor


def test_recovering_in_a_terminal_without_colour(looking: Looking) -> None:
    recovering(looking.root)
    with looking.terminal("status", NO_COLOR="1") as terminal:
        terminal.see("1.2 GB of 4.0 GB restored")
        terminal.press("q")
        assert terminal.end() == 1
    assert not COLOUR.search(terminal.raw)


def test_once_in_a_terminal(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status", "--once", columns=80) as terminal:
        assert terminal.end() == 0
        assert "4/4 ranks healthy" in terminal.text
    assert b"\x1b[?1049h" not in terminal.raw


def test_dumb_terminal_gets_one_snapshot(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status", TERM="dumb") as terminal:
        assert terminal.end() == 0
        assert "4/4 ranks healthy" in terminal.text


@pytest.mark.parametrize("columns", [80, 132, 200])
def test_no_line_is_wider_than_the_terminal(looking: Looking, columns: int) -> None:
    recovering(looking.root)
    done = looking.pipe("status", COLUMNS=str(columns))
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert "rank" in done.stdout and "phase" in done.stdout and "beat" in done.stdout


def test_resize(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status", "--interval", "30", columns=120, rows=40) as terminal:
        terminal.see("4/4 ranks healthy")
        terminal.resize(80, 20)
        terminal.see(lambda: terminal.lines[19].startswith("q leave"))
        terminal.press("q")
        assert terminal.end() == 0


def test_suspend_and_go_on(looking: Looking) -> None:
    """Ctrl-Z gives the screen and the shell back; after `fg` the view is there again."""
    fresh(boards.put(looking.root), 5)
    shell = f"{shlex.join(looking.command('status', '--interval', '0.2'))}; echo SUSPENDED; read x; fg"
    with Terminal(["bash", "-mc", shell], looking.env, looking.base) as terminal:
        terminal.see("4/4 ranks healthy")
        terminal.press("ctrl-z")
        terminal.see("SUSPENDED")
        assert b"\x1b[?1049l" in terminal.raw
        before = len(terminal.raw)
        terminal.press("enter")
        terminal.see(lambda: b"ranks healthy" in terminal.raw[before:])
        assert b"\x1b[?1049h" in terminal.raw[before:]
        terminal.press("q")
        assert terminal.end() == 0


def test_interrupt_leaves_a_clean_terminal(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status") as terminal:
        terminal.see("4/4 ranks healthy")
        terminal.press("ctrl-c")
        assert terminal.end() == 130
    assert b"\x1b[?1049l" in terminal.raw and b"Traceback" not in terminal.raw


def test_spare_that_never_parked_is_warming_up(looking: Looking) -> None:
    board = boards.put(looking.root)
    board.cell(4).drop_flag(Flag.PARKED)
    assert "warming up" in looking.pipe("status").stdout


def test_the_view_ends_with_the_run(looking: Looking) -> None:
    """Its launcher dies and the run directory goes while somebody watches: a sentence, exit code 3, a clean terminal."""
    fresh(boards.put(looking.root), 5)
    launcher = subprocess.Popen(["sleep", "100"])
    try:
        start = procfs.process_start(launcher.pid)
        rundir.amend(looking.root / "lab", {"pid": launcher.pid, "start": start})
        with looking.terminal("status", "--interval", "0.2") as terminal:
            terminal.see("4/4 ranks healthy")
            rundir.remove(looking.root / "lab")
            launcher.kill()
            launcher.wait()
            assert terminal.end() == 3
            assert b"run lab was cut off" in terminal.raw and b"Traceback" not in terminal.raw
    finally:
        launcher.kill()
        launcher.wait()


def test_an_incident_scrolls_and_says_so(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status", columns=90, rows=14) as terminal:
        terminal.see("4/4 ranks healthy")
        terminal.press("enter")
        terminal.see(lambda: re.match(r"lines 1-13 of \d\d  ▼", terminal.lines[13]) is not None)
        assert "what failed     rank 1, in the optimizer step of step 20" in terminal.text
        terminal.press("down")
        terminal.see("lines 2-14 of ")
        terminal.press("end")
        terminal.see(lambda: re.match(r"lines \d+-(\d\d) of \1 ▲ ", terminal.lines[13]) is not None)
        assert "the step itself" in terminal.text
        terminal.press("right")
        terminal.see("rank 2, in the backward pass of step 10")
        terminal.press("q")
        terminal.see("4/4 ranks healthy")
        terminal.press("q")
        assert terminal.end() == 0


def test_a_tall_terminal_has_a_chart(looking: Looking) -> None:
    fresh(boards.put(looking.root), 5)
    with looking.terminal("status", columns=200, rows=60) as terminal:
        terminal.see(lambda: terminal.lines[59].startswith("q leave"))
        at = next(i for i, line in enumerate(terminal.lines) if line.startswith("step time  "))
        assert terminal.lines[at + 11].strip().startswith("0 █") and "█" not in terminal.lines[at]
        terminal.press("q")
        assert terminal.end() == 0
