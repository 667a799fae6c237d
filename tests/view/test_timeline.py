"""`ftrun timeline` in all its forms, from a recorded journal: what a person who never saw ftrun can read off it."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.account import Account
from ftrun.view import text
from ftrun.view.journal import History
from ftrun.view.timeline import model, svg, words
from ftrun.view.timeline.html import document as html_page
from ftrun.view.timeline.model import Story, story
from ftrun.view.timeline.scale import scale
from ftrun.view.timeline.svg_parts import COLOURS, LEFT, UPDATED, WIDTH
from ftrun.view.timeline.terminal import drawing
from tests.view import boards
from tests.view.conftest import Looking

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def account() -> Account:
    """The recorded run: rank 2 killed in backward of step 10, rank 1 in the update of step 20."""
    found = History()
    found.add_all(boards.journal_text(json.loads(boards.RECORDED.read_text())["journal"]).encode().split(b"\n"))
    return found.account


@pytest.fixture(params=[1, 2])
def told(request: pytest.FixtureRequest, account: Account) -> Story:
    return story(account, request.param, "lab")


def kinds(told: Story, role: str) -> set[str]:
    return {bar.kind for lane in told.lanes if lane.role == role for bar in lane.bars}


def test_text_says_who_when_why_and_what_it_cost(looking: Looking) -> None:
    looking.finished()
    done = looking.pipe("timeline", "lab")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert re.search(r"incident 2 of 2 of run lab, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)
    assert "what failed rank 1, in the optimizer step of step 20" in text
    assert "why its process was killed (SIGKILL" in text
    assert re.search(r"noticed [\d.]+ ms after it happened", text)
    assert "3 healthy ranks stopped, cleaned up and reset in place" in text
    assert "warm spare 5 took rank 1" in text
    assert "copied from another rank (1.4 MB moved)" in text
    assert re.search(r"cost \d+ ms from the failure until every rank had done a new step", text)
    assert "all finished steps are kept (0 to 20); training went on with step 21" in text
    rows = {line[:17].strip(): line[17:] for line in done.stdout.splitlines()}
    assert "Failure" in rows["rank 1 FAILED"] and "Restoration" in rows["spare 5 → 1"]
    assert "Backward" in rows["rank 0 healthy"] and "█" in rows["rank 0 healthy"]
    assert "( Controller )" in rows["Controller"] and "Gradient Synchronization Barrier" in done.stdout


def test_an_earlier_incident(looking: Looking) -> None:
    looking.finished()
    text = " ".join(looking.pipe("timeline", "lab", "--incident", "1").stdout.split())
    assert "what failed rank 2, in the backward pass of step 10" in text
    assert "adopted in place (0 B moved)" in text and "step 10 was done again" in text


def test_lanes_hold_what_the_figures_show(told: Story) -> None:
    assert [lane.role for lane in told.lanes] == [model.HEALTHY] * 3 + [model.FAILED, model.SPARE]
    assert {model.FORWARD, model.BACKWARD, model.RESET} <= kinds(told, model.HEALTHY)
    assert {model.RESTORATION, model.ROLLBACK, model.FORWARD, model.BACKWARD, model.OPTIMIZER} <= kinds(
        told, model.SPARE
    )
    assert model.FORWARD in kinds(told, model.FAILED)
    assert sum(told.parts.values()) == pytest.approx(told.done, abs=0.1)
    assert told.begins < 0 <= told.detected <= told.resumed <= told.done
    for lane in told.lanes:
        ordered = [bar for bar in lane.bars if bar.kind in model.TRAINING and not bar.new]
        assert all(a.end <= b.begin + 0.001 for a, b in pairwise(ordered))


def test_parameters_before_and_after_the_barrier(account: Account) -> None:
    """Figure 003: a failure before the barrier, nothing is updated; figure 002: after it, the others are."""
    before, after = story(account, 1), story(account, 2)
    for told, committed in ((before, False), (after, True)):
        assert told.committed is committed
        for lane in told.lanes:
            at = model.updated(lane, told.resumed, told)
            assert at == (0.5 if lane.fails is not None and committed else float(committed)), lane.label
    assert before.resume == before.step and after.resume == after.step + 1  # type: ignore[operator]
    assert len([b for b in after.barriers if b[1] < 0]) == 1 and not [b for b in before.barriers if b[1] < 0]


def test_updated_squares_lie_right_of_the_barrier(account: Account) -> None:
    """Figures 000 to 003: before the barrier parameters are consistent, from it on they are updated; also where an update is short."""
    raw = json.loads(json.dumps(account.incidents[1]))
    (victim,) = raw["victims"]
    for kept in raw["phases"]:
        if kept["cell"] == victim["cell"]:  # it dies a moment after it passed the barrier
            kept["steps"][-1][5:7] = [min(kept["steps"][-1][5], -0.02), -0.01]
    other = Account(incidents=(raw,))
    for told in (story(account, 1), story(account, 2), story(other, 1)):
        lines = [text.plain(line) for line in drawing(told, 132)]
        first = next(line for line in lines if line.startswith("all ranks")).index("┃")
        squares = [line for line in lines if line.startswith("  parameters")]
        if told.committed:  # those of the step in flight
            assert all(not set("■◧") & set(line[:first]) for line in squares), lines
            assert any("■" in line[first : first + 12] and "□" in line[first : first + 12] for line in squares)
        else:
            assert all("■" not in line[:first] for line in squares), lines
        root = ET.fromstring(svg.drawing(told))
        barrier = LEFT + scale(told, WIDTH).at(told.barriers[0][1])
        groups = [node for node in root.iter(f"{SVG}g") if node.get("class") == "parameters"]
        light = [float(r.get("x", "0")) for g in groups for r in g.iter(f"{SVG}rect") if r.get("fill") == UPDATED]
        assert all(x >= barrier - 1 for x in light)


def test_scale_never_goes_back(told: Story) -> None:
    to = scale(told, 1000)
    places = [to.at(told.begins + k * (told.done - told.begins) / 200) for k in range(201)]
    assert places[0] == 0 and places[-1] == pytest.approx(1000) and places == sorted(places)


def test_svg_is_well_formed_and_complete(looking: Looking) -> None:
    looking.finished()
    done = looking.pipe("timeline", "lab", "--format", "svg", "-o", "out.svg")
    assert done.returncode == 0 and not done.stdout
    root = ET.parse(looking.base / "out.svg").getroot()
    shown = {"".join(node.itertext()) for node in root.iter(f"{SVG}text")}
    wanted = "Controller, Failure, Stop+Clean+Reset, Restoration+Rollback, Barrier, Parameters updated, Parameters not updated"
    assert set(wanted.split(", ")) <= shown
    bars = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "bar"]
    colours = {node.get("data-kind"): node.get("fill") for node in bars}
    assert (colours["Forward"], colours["Backward"], colours["Optimizer Step"]) == ("#00BFFF", "#2E8B57", "#FFA500")
    width = float(root.get("width", "0"))
    for bar in bars:
        assert float(bar.get("width", "0")) > 0 and float(bar.get("x", "0")) + float(bar.get("width", "0")) <= width
    lanes = [node.get("data-role") for node in root.iter(f"{SVG}g") if node.get("class") == "lane"]
    assert lanes == ["healthy"] * 3 + ["failed", "spare"]
    assert [node for node in root.iter(f"{SVG}polygon") if node.get("class") == "failure"]


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tips = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self.links += [str(facts[key]) for key in ("src", "href") if key in facts]
        self.tips += "data-tip" in facts


def test_html_needs_nothing_else(looking: Looking) -> None:
    looking.finished()
    done = looking.pipe("timeline", "lab", "--format", "html")
    page = _Page()
    page.feed(done.stdout)
    assert done.returncode == 0 and not page.links and page.tips > 20
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", done.stdout)
    assert "rank 1, in the optimizer step of step 20" in done.stdout


def test_what_an_exception_says_is_escaped(account: Account) -> None:
    """A signature comes from the user's program: it must not become markup."""
    raw = json.loads(json.dumps(account.incidents[0]))
    raw["victims"][0]["cause"] = "ValueError <script>alert(1)</script> at a&b.py:3"
    other = Account(incidents=(raw,))
    from ftrun.view.timeline.html import document

    page = document(story(other, 1, "<b>"))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "<b>" not in page
    ET.fromstring(svg.drawing(story(other, 1, "<b>")))


def test_trace_holds_the_whole_run(looking: Looking) -> None:
    looking.finished()
    done = looking.pipe("timeline", "lab", "--format", "trace")
    trace = json.loads(done.stdout)
    events = trace["traceEvents"]
    assert {"X", "i", "M"} == {e["ph"] for e in events}
    for event in events:
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {e["name"] for e in events}
    assert {"RUNNING", "STOPPING", "RESETTING", "Forward", "Backward", "Optimizer Step", "incident"} <= names
    assert "Failure: SIGKILL" in names
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} >= {"Controller", "rank 0", "rank 3"}
    phases = sorted((e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 0), key=lambda e: e["ts"])
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(phases))


def test_json(looking: Looking) -> None:
    looking.finished()
    raw = json.loads(looking.pipe("timeline", "lab", "--json").stdout)
    assert (raw["schema"], raw["run"], raw["victims"][0]["rank"], raw["last"]) == (1, "lab", 1, 20)


def test_many_ranks_fold(account: Account) -> None:
    raw = json.loads(json.dumps(account.incidents[0]))
    raw["ranks"] = {str(rank): dict(raw["ranks"]["0"], stop=10.0 + rank / 1000) for rank in range(512)}
    other = Account(incidents=(raw,))
    told = story(other, 1)
    assert len(told.lanes) <= model.LANES_MOST and {model.FAILED, model.SPARE} <= {lane.role for lane in told.lanes}
    assert told.folded + len(told.lanes) == 513
    assert any("more like the healthy ones" in "".join(t for t, _ in line) for line in drawing(told, 100))
    assert "more like the healthy ones" in svg.drawing(told)


@pytest.mark.parametrize("width", [60, 80, 132])
def test_text_fits(told: Story, width: int) -> None:
    from ftrun.view.text import plain, width_of

    assert all(width_of(plain(line)) <= width for line in drawing(told, width))


def test_incident_without_a_guilty_rank() -> None:
    facts: dict[str, Any] = {
        "victims": [],
        "stuck": "allreduc",
        "restart": False,
        "resume": 4,
        "redone": 1,
        "survivors": 4,
        "last": 3,
        "sources": {},
        "ms": {"detect": 0.0, "stop": 5.0},
        "total_ms": 9.0,
        "ranks": {"0": {"stop": 5.0}},
        "began_ns": 0,
    }
    other = Account(incidents=({**facts, "generation": 2},))
    assert ("what failed", "nobody: every rank waited for the others in allreduc") in words.facts(story(other, 1))
    assert drawing(story(other, 1), 80)


def test_restart_of_the_world() -> None:
    facts: dict[str, Any] = {
        "victims": [{"rank": 1, "cell": 1, "step": None, "phase": "start", "cause": "exit 3"}],
        "restart": True,
        "resume": 0,
        "redone": 0,
        "sources": {},
        "ms": {"detect": 0.1},
        "total_ms": 2500.0,
        "ranks": {},
        "began_ns": 0,
    }
    other = Account(incidents=({**facts, "generation": 1},))
    said = dict(words.facts(story(other, 1)))
    assert said["why"] == "its process left with exit code 3" and said["cost"] == "2.50 s until all workers ran again"
    assert said["what failed"] == "rank 1, while its script started" and svg.drawing(story(other, 1))


def test_exit_codes(looking: Looking) -> None:
    folder = looking.finished()
    assert looking.pipe("timeline", "nobody").returncode == 4
    assert looking.pipe("timeline", "lab", "--incident", "3").returncode == 4
    assert looking.pipe("timeline", "lab", "--format", "png").returncode == 2
    assert looking.pipe("timeline", "lab", "--json", "--format", "svg").returncode == 2
    assert looking.pipe("timeline", "lab", "-o", "no/such/folder.txt").returncode == 1
    assert looking.pipe("timeline", folder).returncode == 0
    assert looking.pipe("timeline", folder / "journal.jsonl").returncode == 0
    assert looking.pipe("timeline").returncode == 0  # the newest that left a journal
    assert "Examples: `ftrun timeline`" in looking.pipe("timeline", "--help").stdout


def test_run_without_an_incident(looking: Looking) -> None:
    folder = looking.finished("clean")
    path = folder / "journal.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:20]) + "\n")
    done = looking.pipe("timeline", "clean")
    assert done.returncode == 0 and "no incident" in done.stdout
    assert looking.pipe("timeline", "clean", "--format", "svg").returncode == 4


def test_an_output_that_fails_keeps_what_was_there(looking: Looking, tmp_path: Path) -> None:
    looking.finished()
    target = tmp_path / "old.svg"
    target.write_text("old")
    (tmp_path / "full").mkdir()
    assert looking.pipe("timeline", "lab", "--format", "svg", "-o", tmp_path / "full").returncode == 1
    assert looking.pipe("timeline", "lab", "--format", "svg", "-o", target).returncode == 0
    assert target.read_text().startswith("<?xml")


def test_in_a_terminal(looking: Looking) -> None:
    looking.finished()
    with looking.terminal("timeline", "lab", columns=110, rows=50) as terminal:
        assert terminal.end() == 0
        assert "rank 1 FAILED" in terminal.text and "( Controller )" in terminal.text
    assert b"\x1b[" in terminal.raw
    with looking.terminal("timeline", "lab", columns=110, rows=50, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", terminal.raw)


def test_bytes_that_moved_are_a_bar_of_their_own(account: Account) -> None:
    """A replacement that copied, and every rank when all went back to the host snapshot."""
    raw = json.loads(json.dumps(account.incidents[1]))
    raw["rollback"] = True
    for times in raw["ranks"].values():
        times["moving"] = times["restore"] - 0.5
    other = Account(incidents=(raw,))
    told = story(other, 1)
    for lane in told.lanes:
        moved = [bar for bar in lane.bars if bar.kind == model.RELOAD]
        assert len(moved) == (lane.role != model.FAILED) and all(
            bar.end - bar.begin == pytest.approx(0.5) for bar in moved
        )
    assert 'data-kind="Reload weights"' in svg.drawing(told)
    assert any("went back to the host snapshot of step 21" in said for _, said in words.facts(told))


def test_nothing_is_updated_after_a_rollback(account: Account) -> None:
    raw = {**account.incidents[1], "rollback": True}
    other = Account(incidents=(raw,))
    told = story(other, 1)
    assert not told.committed
    assert all(model.updated(lane, told.resumed, told) == 0.0 for lane in told.lanes if lane.role != model.FAILED)


def many_failed(account: Account, ranks: int) -> Story:
    """Every rank failed and took its state, chunk by chunk, from the host snapshot."""
    raw = json.loads(json.dumps(account.incidents[1]))
    victim = raw["victims"][0]
    raw["victims"] = [{**victim, "rank": rank, "cell": 100 + rank} for rank in range(ranks)]
    raw["sources"] = {str(rank): {"name": "snapshot", "bytes": 1000, "cell": ranks + rank} for rank in range(ranks)}
    raw["survivors"], raw["rollback"] = 0, True
    stages = [["h2d", 1.0, 2.0], ["broadcast_src", 2.0, 4.5], ["reload", 4.5, 5.0], ["broadcast_dst", 5.0, 6.0]]
    raw["moves"] = [
        {"rank": rank, "cell": ranks + rank, "moves": [[name, rank if name != "broadcast_dst" else 0, b, e] for name, b, e in stages]}
        for rank in range(ranks)
    ]  # fmt: skip
    other = Account(incidents=(raw,))
    return story(other, 1)


def test_a_transfer_has_a_row_for_what_is_sent_and_one_for_what_is_taken(account: Account) -> None:
    told = many_failed(account, 3).transfer
    assert told is not None and (told.begin, told.end, told.ranks) == (1.0, 6.0, 3)
    assert [(row.rank, row.sends, len(row.pieces)) for row in told.rows[:2]] == [(0, True, 2), (0, False, 2)]
    assert told.kinds() == ["H2D", "Broadcast (src)", "Broadcast (dst)", "Reload weights"]


@pytest.mark.parametrize("width", [60, 80, 132])
def test_many_failed_ranks_are_told_together(account: Account, width: int) -> None:
    told = many_failed(account, 64)
    lines = [text.plain(line) for line in drawing(told, width)]
    said = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width and len(lines) < 90
    assert "and 56 more ranks" in said and "no rank was left that could go on" in said
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more: the state came from the host snapshot (64.0 kB moved)" in said
    assert sum(line[9:14] in ("sends", "takes") for line in lines) == 16
    ET.fromstring(svg.drawing(told))


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ("no-end", "no incident up to where its journal ends, and it was cut off there"),
        ("failed", "no incident was repaired, and it ended with exit code 1"),
        ("well", "no incident, nothing failed"),
        ("repairing", "it was cut off while an incident was being repaired"),
    ],
)
def test_a_run_without_an_incident_is_called_well_only_if_it_was(looking: Looking, cut: str, said: str) -> None:
    lines = boards.journal_text(json.loads(boards.RECORDED.read_text())["journal"]).splitlines(keepends=True)
    died = next(at for at, line in enumerate(lines) if '"kind": "Died"' in line)
    kept = lines[: died + 1 if cut == "repairing" else died]
    if cut in ("failed", "well"):
        code = 1 if cut == "failed" else 0
        end = {"t": 1e9, "phase": "ENDED", "generation": 1, "actions": [{"kind": "End", "code": code, "reason": "x"}]}
        kept.append(json.dumps(end) + "\n")
    (looking.base / "cut").mkdir()
    (looking.base / "cut" / "journal.jsonl").write_text("".join(kept))
    done = looking.pipe("timeline", "./cut")
    assert done.returncode == 0 and done.stdout.startswith(f"run cut: {said}"), (done.stdout, done.stderr)
    assert looking.pipe("timeline", "./cut", "--json").returncode == 4


@pytest.mark.parametrize("content", ["", "\x00\x01 not a journal\n"])
def test_a_file_that_is_no_journal_is_not_good_news(looking: Looking, content: str) -> None:
    (looking.base / "cut").mkdir()
    (looking.base / "cut" / "journal.jsonl").write_text(content)
    done = looking.pipe("timeline", "./cut")
    assert done.returncode == 69 and not done.stdout and "it is no journal, or was damaged" in done.stderr


def test_a_journal_of_another_version(looking: Looking) -> None:
    """What cannot be understood is said, never a traceback."""
    lines = json.loads(boards.RECORDED.read_text())["journal"]
    for line in lines:
        if line.get("note") == "incident":
            del line["victims"][0]["cell"]
    lines.insert(5, {"t": 1.0, "event": {"kind": "Protected", "who": 3}})
    (looking.base / "other").mkdir()
    (looking.base / "other" / "journal.jsonl").write_text(boards.journal_text(lines))
    done = looking.pipe("timeline", "./other")
    assert (
        done.returncode == 0
        and "no incident in the lines that could be read; what there is: ftrun events" in done.stdout
    )
    assert "3 lines unlike those of this version passed over" in done.stderr
    assert looking.pipe("timeline", "./other", "--json").returncode == 4
    assert looking.pipe("events", "./other", "--json").stdout.count('"note": "incident"') == 2
    assert looking.pipe("timeline", "./other", "--format", "trace").returncode == 0
    assert looking.pipe("events", "./other").returncode == 0


def shapes(
    told: Story,
) -> tuple[list[tuple[float, float, float, float]], list[list[tuple[float, float]]], list[tuple[float, float]]]:
    """Bars and words of an SVG as boxes, the corners of the controller's ways, and where those with an arrow's head end."""
    root = ET.fromstring(svg.drawing(told))
    boxes = []
    for node in root.iter(f"{SVG}rect"):
        if node.get("class") == "bar" and node.get("data-kind") not in (model.CONSISTENT, model.UPDATING):
            x, y, wide, high = (float(node.get(key, "0")) for key in ("x", "y", "width", "height"))
            boxes.append((x, y, x + wide, y + high))
    for node in root.iter(f"{SVG}text"):
        x, y, said = float(node.get("x", "0")), float(node.get("y", "0")), "".join(node.itertext())
        x -= {"middle": 3.0, "end": 6.0}.get(node.get("text-anchor", ""), 0.0) * len(said)
        boxes.append((x, y - 8, x + 6 * len(said), y))
    ways, ends = [], []
    for node in root.iter(f"{SVG}path"):
        if node.get("class") != "arrow":
            continue
        at, corners = (0.0, 0.0), []
        for order, numbers in re.findall(r"([MHV])([-\d. ]+)", node.get("d", "")):
            values = [float(value) for value in numbers.split()]
            at = (values[0], values[1]) if order == "M" else (values[0], at[1]) if order == "H" else (at[0], values[0])
            corners.append(at)
        ways.append(corners)
        ends += [at] if node.get("marker-end") else []
    return boxes, ways, ends


def test_the_controllers_arrows_end_where_its_orders_begin_and_cross_nothing(told: Story) -> None:
    boxes, ways, ends = shapes(told)
    to = scale(told, WIDTH)
    begins = {round(LEFT + to.at(bar.begin)) for lane in told.lanes for bar in lane.bars if bar.kind in (model.STOP, model.RESTORATION)}
    assert len(ends) == 5, "one to the controller, three to ranks that stop, one to the spare"
    assert {round(x) for x, _ in ends[1:]} <= begins
    for way in ways:
        for (x1, y1), (x2, y2) in pairwise(way):
            left, right, top, bottom = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
            struck = [box for box in boxes if left < box[2] and right > box[0] and top < box[3] and bottom > box[1]]
            assert not struck, (way, struck)


def test_parameters_are_consistent_but_for_the_optimizer_step(account: Account) -> None:
    """Figures 000 and 001; an update that a death tore lasts until the replacement has whole parameters."""
    before, torn = model.bands(story(account, 1)), model.bands(story(account, 2))
    assert [kind for kind, _, _ in before][:2] == [model.CONSISTENT, model.UPDATING]
    assert [kind for kind, _, _ in torn][:3] == [model.CONSISTENT, model.UPDATING, model.CONSISTENT]
    assert torn[1][1] < 0 and torn[1][2] == story(account, 2).resumed
    for found in (before, torn):
        assert all(a[2] == b[1] for a, b in pairwise(found)), "without gaps"


def test_a_step_done_again_is_marked(account: Account) -> None:
    told, again = story(account, 1), svg.drawing(story(account, 1))
    assert again.count('class="again"') >= 8 and "done again" in again and "step 10 again" in again
    redone = {lane.label: {bar.kind for bar in lane.bars if model.done_again(bar, told)} for lane in told.lanes}
    assert model.FORWARD in redone["spare 4"] and not redone["rank 2"], "also by a worker that had not begun it itself"
    assert "again" in " ".join(text.plain(line) for line in drawing(story(account, 1), 132)[12:30])


def test_the_legend_names_what_is_drawn_and_no_two_colours_are_alike(told: Story) -> None:
    drawn = svg.drawing(told)
    shown = {"".join(node.itertext()) for node in ET.fromstring(drawn).iter(f"{SVG}text")}
    assert {"Stop", "Reset", "Restoration"} <= shown
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert drawn.count('class="break"') == 2 and "prefers-color-scheme: dark" in drawn
    assert any("Stop" in text.plain(line) and "Restoration" in text.plain(line) for line in drawing(told, 200))


def test_a_page_says_its_title_once(told: Story) -> None:
    page = html_page(told)
    body = page[page.index("<body>") :]
    assert re.sub(r'aria-label="[^"]*"', "", body).count(words.title(told)) == 1 and svg.drawing(told).count(words.title(told)) == 2


def test_squares_turn_light_in_the_optimizer_step(account: Account) -> None:
    raw = json.loads(json.dumps(account.incidents[0]))
    for kept in raw["phases"]:  # an optimizer step that takes long enough to be seen
        for row in kept["steps"]:
            if row[6] is not None and row[7] is not None and row[6] > 0:
                row[6], row[5] = row[7] - 60.0, min(row[5], row[7] - 60.0)
    other = Account(incidents=(raw,))
    root = ET.fromstring(svg.drawing(story(other, 1)))
    turning = [node for node in root.iter(f"{SVG}g") if node.get("class") == "parameters turning"]
    assert turning
    light = [float(r.get("height", "0")) for r in turning[0].iter(f"{SVG}rect") if r.get("fill") == UPDATED]
    assert light == sorted(light) and len(light) > 2 and light[0] < light[-1]


def test_buffers_and_idle_time_of_a_transfer(account: Account) -> None:
    told = many_failed(account, 2).transfer
    assert told is not None
    assert [(name, len(pieces)) for name, pieces in told.buffers()] == [("H2D buffer", 2), ("IPC buffer", 4)]
    assert told.idle() == [] and told.scale(100.0, 5.0).at(3.5) == 50.0
    late = replace(told.rows[0], rank=9, pieces=(replace(told.rows[0].pieces[0], begin=1000.0, end=1001.0),))
    long = replace(told, rows=(*told.rows, late), end=1001.0)
    assert long.idle() == [(6.0, 1000.0)]
    to = long.scale(100.0, 10.0)
    assert to.at(6.0) == pytest.approx(75.0) and to.at(1000.0) == pytest.approx(85.0) and to.at(1001.0) == pytest.approx(100.0)
    whole = svg.drawing(many_failed(account, 2))
    assert "H2D buffer" in whole and "IPC buffer" in whole
