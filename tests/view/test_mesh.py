"""A run on a device mesh, as `status`, `events` and `timeline` show it: the recorded run, with its four ranks on a mesh."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ftrun.core.shared.board import Board, F
from ftrun.view import text
from ftrun.view.journal import History
from ftrun.view.timeline import svg
from ftrun.view.timeline.html import document as html_page
from ftrun.view.timeline.model import Story, story
from ftrun.view.timeline.svg_parts import LEFT
from ftrun.view.timeline.terminal import drawing
from tests.view import boards
from tests.view.boards import MESH as NAMES
from tests.view.boards import place_on_mesh as at
from tests.view.conftest import Looking

LONG = ("data_parallel_replicate", "data_parallel_shard")


def journal(names: tuple[str, str] = NAMES) -> str:
    return boards.journal_text(boards.on_mesh(json.loads(boards.RECORDED.read_text())["journal"], names))


def put(looking: Looking) -> Board:
    board = boards.put(looking.root)
    (looking.root / "lab" / "journal.jsonl").write_text(journal())
    for rank in range(4):
        board.cell(rank)[F.BEAT] = time.monotonic_ns() + 30 * 10**9
    return board


def told(number: int = 2, names: tuple[str, str] = NAMES) -> Story:
    history = History()
    history.add_all(journal(names).encode().splitlines())
    assert not history.unread
    return story(history.account, number, "lab")


def test_status_as_json(looking: Looking) -> None:
    put(looking)
    picture = json.loads(looking.pipe("status", "--json").stdout)
    assert picture["mesh"] == {"replicate": 2, "shard": 2} and list(picture["mesh"]) == list(NAMES)
    held = [w for w in picture["workers"] if w["rank"] is not None]
    assert [w["mesh"] for w in held] == [at(rank) for rank in range(4)]
    assert [w["mesh"] for w in picture["workers"] if w["rank"] is None] == [None]


def test_nothing_is_shown_without_a_mesh(looking: Looking) -> None:
    boards.put(looking.root)
    picture = json.loads(looking.pipe("status", "--json").stdout)
    assert picture["mesh"] is None and {w["mesh"] for w in picture["workers"]} == {None}
    assert "mesh" not in looking.pipe("status").stdout and "mesh" not in looking.pipe("events", "lab").stdout
    looking.finished("old")
    for form in ("text", "svg", "trace"):
        assert "mesh" not in looking.pipe("timeline", "old", "--format", form).stdout


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 60)])
def test_status_on_a_terminal(looking: Looking, columns: int, rows: int) -> None:
    put(looking)
    with looking.terminal("status", columns=columns, rows=rows) as terminal:
        terminal.see(lambda: terminal.lines[rows - 1].startswith("q leave"))
        head = terminal.lines[: next(i for i, line in enumerate(terminal.lines) if not line.strip())]
        assert any("mesh replicate 2 × shard 2" in line for line in head), terminal.text
        titles = next(i for i, line in enumerate(terminal.lines) if line.split()[:2] == ["rank", "mesh"])
        wanted = "replicate 1, shard 0" if columns == 200 else "1,0 "
        assert re.match(rf" *2  {wanted}", terminal.lines[titles + 3]), terminal.text
        assert "beat" in terminal.lines[titles] and "waits for" in terminal.lines[titles]
        assert "2 incidents, newest first" in terminal.text
        terminal.press("q")
        assert terminal.end() == 0


def test_events(looking: Looking) -> None:
    put(looking)
    said = looking.pipe("events", "lab").stdout
    assert re.search(r"  mesh: replicate 2 × shard 2$", said, re.M)


@pytest.mark.parametrize("names", [NAMES, LONG])
@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_lanes_of_the_text_name_the_places_and_fit(names: tuple[str, str], width: int) -> None:
    lines = [text.plain(line) for line in drawing(told(2, names), width)]
    assert max(map(text.width_of, lines)) <= width
    assert not any("…" in line for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("where the "))])
    assert f"rank 1 ({names[0]} 0, {names[1]} 1), in the optimizer step of step 20" in " ".join(" ".join(lines).split())
    assert f" mesh {names[0]} 2 × {names[1]} 2 " in " ".join(" ".join(lines).split())
    for rank, label in ((0, "rank 0 healthy"), (3, "rank 3 healthy"), (1, "rank 1 FAILED"), (1, "spare 5 → 1")):
        below = lines[next(i for i, line in enumerate(lines) if line.startswith(label)) + 1]
        place = f"  {names[0]} {rank // 2}, {names[1]} {rank % 2} "
        short = f"  mesh {rank // 2}, {rank % 2} "
        assert below.startswith(place if len(place) <= width // 3 else short), (width, below)
        assert "■" in below or "□" in below


@pytest.mark.parametrize("names", [NAMES, LONG])
def test_lanes_of_the_drawing_name_the_places_and_fit(names: tuple[str, str]) -> None:
    drawn = svg.drawing(told(2, names))
    root = ET.fromstring(drawn)
    shown = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    ranks = (0, 2, 3, 1, 1)  # healthy ones, the failed one, the spare
    wanted = [f"replicate {rank // 2}, shard {rank % 2}" if names == NAMES else f"mesh {rank // 2}, {rank % 2}" for rank in ranks]
    assert [said for said in shown if said in wanted] == wanted
    assert all(16 + 6 * len(said) < LEFT - 20 for said in wanted), "left of the controller's ways"
    assert f"rank 3 ({names[0]} 1, {names[1]} 1): Forward" in drawn and f"spare 5 ({names[0]} 0, {names[1]} 1): Restoration" in drawn
    assert f"rank 1 ({names[0]} 0, {names[1]} 1), in the optimizer step" in html_page(told(2, names))


def test_trace_and_json_of_the_timeline(looking: Looking) -> None:
    folder = looking.finished()
    (folder / "journal.jsonl").write_text(journal())
    trace = json.loads(looking.pipe("timeline", "lab", "--format", "trace").stdout)["traceEvents"]
    tracks = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert {f"rank {rank} (replicate {rank // 2}, shard {rank % 2})" for rank in range(4)} <= tracks
    raw = json.loads(looking.pipe("timeline", "lab", "--json").stdout)
    assert raw["mesh"]["dims"] == {"replicate": 2, "shard": 2} and raw["victims"][0]["mesh"] == at(1)


def test_a_name_from_a_script_is_no_markup(tmp_path: Path) -> None:
    names = ("<b>", "\x1b[2J")
    page = html_page(told(2, names))
    assert "<b>" not in page[page.index("<body>") :] and "&lt;b&gt; 0" in page
    assert all("\x1b" not in text.plain(line) for line in drawing(told(2, names), 132))
