"""An incident of several nodes: what each node shows of it, journals of the others, and what `events` and `timeline` say on one node."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ftrun.control import events as ev
from ftrun.core.account import Account
from ftrun.core.shared.board import Board, F
from ftrun.host.account.node_incidents import NodeIncidents
from ftrun.host.nodes.membership.table import NodePlace
from tests.host.parts import Recorder, launch_context
from tests.view.conftest import Looking

STOP, OVER = (ev.CloseGate(3),), (ev.Say("recovered"),)


class Node:
    """The launcher of a node that two ranks of the world are on."""

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir()
        self.place = NodePlace(0, number, 2, 2 * number, 4, 0)
        self.shown: list[dict[str, Any]] = []
        self.listener = Recorder()
        context = launch_context(folder, self.listener, 2)
        self.board: Board = context.board
        self.holders = {2 * number: 0, 2 * number + 1: 1}
        self.account = Account()
        self.incidents = NodeIncidents(context, self)  # type: ignore[arg-type]

    def shows(self, subject: str, facts: dict[str, Any]) -> None:
        assert subject == "incidents"
        self.shown = facts["newest"]

    def goes_through(self, number: int, victim: dict[str, Any] | None = None) -> None:
        """An incident of the world; one of a `victim` of this node is in its own account."""
        self.incidents.saw(STOP, self.account, 3, (0, number), self.holders)
        if victim is not None:
            told = {"generation": 3, "victims": [victim], "ms": {"detect": 4.0, "stop": 7.04}, "total_ms": 11.04}
            told["sources"] = {"2": {"name": "adopt", "bytes": 0, "cell": 4}}
            self.account = Account(incidents=(*self.account.incidents, told))
        else:
            for cell in (0, 1):
                for said, when in ((F.STOPPED, F.STOPPED_NS), (F.FIRST_DONE, F.FIRST_DONE_NS)):
                    self.board.cell(cell)[said], self.board.cell(cell)[when] = 3, time.monotonic_ns() + 50_000_000
            self.account = Account(incidents=tuple({**one, "generation": 2} for one in self.account.incidents))
        self.incidents.saw(OVER, self.account, 3, (0, number), self.holders)

    def as_seen(self, here: bool = False) -> dict[str, Any]:
        about = {"node": self.place.node, "id": f"id{self.place.node}", "host": "beta", "here": here}
        return {**about, "shows": {"incidents": {"newest": self.shown}}}

    @property
    def notes(self) -> list[dict[str, Any]]:
        return self.listener.notes


VICTIM = {"rank": 2, "cell": 1, "cause": "SIGKILL", "step": 6, "phase": "backward", "evidence": "long " * 99}


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Node, Node]:
    return Node(tmp_path / "node0", 0), Node(tmp_path / "node1", 1)


def test_each_node_tells_its_part(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    here.goes_through(1)
    there.goes_through(1, VICTIM)
    (told,) = there.shown
    assert told == {
        "round": 0,
        "number": 1,
        "victims": [{"rank": 2, "cause": "SIGKILL", "step": 6, "phase": "backward"}],
        "ms": {"detect": 4.0, "stop": 7.0},
        "total_ms": 11.0,
        "sources": {"2": "adopt"},
    }
    (mine,) = here.shown
    assert mine["victims"] == [] and 45.0 < mine["ms"]["stop"] < 1000.0 and mine["ms"]["detect"] == 0.0
    assert [(note["here"], note["own"]) for note in here.notes + there.notes] == [(True, None), (True, 1)]


def test_what_another_node_shows_is_journalled_once(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    there.goes_through(1, VICTIM)
    for _ in range(3):
        here.incidents.seen([here.as_seen(here=True), there.as_seen()])
    there.goes_through(2)
    here.incidents.seen([there.as_seen()])
    told = [(note["number"], note["node"], note["host"], note["here"]) for note in here.notes]
    assert told == [(1, 1, "beta", False), (2, 1, "beta", False)]


def test_only_the_newest_are_shown_and_they_are_small(nodes: tuple[Node, Node]) -> None:
    _, there = nodes
    for number in range(1, 30):
        there.goes_through(number, VICTIM)
    assert [told["number"] for told in there.shown] == [*range(22, 30)]
    assert len(json.dumps(there.shown)) < 2500


def test_a_restart_is_no_incident_of_the_nodes(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    here.incidents.saw(STOP, here.account, 2, (0, 1), here.holders)
    here.incidents.saw((ev.Publish(3, 0, (0, 1), (), (), fresh=True),), here.account, 3, (0, 1), here.holders)
    here.incidents.saw(OVER, here.account, 3, (0, 1), here.holders)
    assert not here.shown and not here.notes


# -- what a person reads -------------------------------------------------------------------------------------------------


def note(node: int, number: int, own: int | None = None, here: bool = False, **more: Any) -> dict[str, Any]:
    made = {"t": 0.0, "note": "node-incident", "node": node, "host": f"host{node}", "here": here, "own": own, "round": 0, "number": number}
    times = {"ms": {"detect": 0.0, "stop": 6.0, "reset": 44.0, "first_step": 50.0}, "total_ms": 100.0}
    return {**made, "victims": [], "sources": {}, **times, **more}


def journal(looking: Looking, *notes: dict[str, Any], again: str = "") -> None:
    """The recorded run with these notes, at the time of its last line; then the newest of its own of the kind `again`."""
    path = looking.finished() / "journal.jsonl"
    lines = path.read_text().splitlines()
    newest = json.loads(lines[-1])["t"]
    own = [raw for line in lines if (raw := json.loads(line)).get("note") == again][-1:]
    path.write_text("\n".join([*lines[:-1], *(json.dumps({**one, "t": newest}) for one in (*notes, *own)), lines[-1]]) + "\n")


FAILED = {"rank": 5, "cause": "SIGKILL", "step": 60, "phase": "update"}


def test_rows_for_the_other_nodes_below_an_incident_of_this_one(looking: Looking) -> None:
    journal(looking, note(0, 7, 2, here=True, victims=[FAILED]), note(1, 7, sources={"5": "adopt"}))
    drawn = looking.pipe("timeline", "lab", "--incident", "2").stdout
    assert "incident 2 of 2" in drawn
    at = drawn.index("on each node, from the failure, or from when it heard of it")
    lines = drawn[at:].splitlines()
    assert re.match(r"node 0 \(here\) +▚+█+░+", lines[1]) and "SIGKILL → rank 5 in update of step 60; 100 ms" in lines[2]
    assert re.match(r"node 1 host1 +▚+█+░+", lines[3]) and "100 ms: stop 6, reset 44, first step 50; rank 5 adopted in place" in lines[4]
    assert "on each node" not in looking.pipe("timeline", "lab", "--incident", "1").stdout
    told = json.loads(looking.pipe("timeline", "lab", "--incident", "2", "--json").stdout)
    assert [(one["node"], one["here"]) for one in told["nodes"]] == [(0, True), (1, False)]


def test_an_incident_in_which_only_other_nodes_ranks_failed(looking: Looking) -> None:
    journal(looking, note(0, 7, 2, here=True), note(1, 8, victims=[FAILED]), note(0, 8, here=True))
    drawn = looking.pipe("timeline", "lab").stdout
    assert drawn.startswith("an incident of run lab in which no rank of this node failed\n")
    assert "SIGKILL → rank 5 in update of step 60" in drawn and "node 0 (here)" in drawn and "node 1 host1" in drawn
    assert "1 incident in which only ranks of other nodes failed, each in ftrun events; 2 with failed ranks of this one" in drawn
    assert "incident 2 of 2" in looking.pipe("timeline", "lab", "--incident", "2").stdout
    assert "incident 2 of 2" not in looking.pipe("timeline", "lab", "-o", "drawn.txt").stdout
    assert (looking.base / "drawn.txt").read_text().startswith("an incident of run lab")


def test_events_name_the_node(looking: Looking) -> None:
    journal(looking, note(0, 7, 2, here=True), note(0, 8, here=True), note(1, 8, victims=[FAILED]))
    said = [line[14:] for line in looking.pipe("events", "lab").stdout.splitlines()]
    assert "this node recovered: 100 ms: stop 6, reset 44, first step 50" in said
    assert "node 1 (host1) recovered: SIGKILL → rank 5 in update of step 60; 100 ms: stop 6, reset 44, first step 50" in said
    assert sum("this node recovered" in line for line in said) == 1, "the incident itself has its own sentence"


def test_events_of_drains(looking: Looking) -> None:
    asked = {"note": "drain-asked", "key": "k", "to": "id", "node": 1, "seconds": 5.0, "by": 0}
    journal(
        looking,
        {**asked, "rank": 3},
        {**asked, "rank": None},
        {"note": "drain-outcome", "key": "k", "moved": False, "why": "no spare node with 2 ranks waits"},
        {"note": "drained", "node": 1, "host": "beta", "taker": "gamma"},
    )
    said = [line[14:] for line in looking.pipe("events", "lab").stdout.splitlines()]
    assert said[-4:] == [
        "rank 3 is to leave its worker, as asked on node 0",
        "this node is to be drained, as asked on node 0",
        "not moved: no spare node with 2 ranks waits",
        "this node, number 1, gives its place to gamma",
    ]


@pytest.mark.parametrize("damage", [{"ms": {"stop": "x"}}, {"node": None}, {"victims": [{"rank": "x"}]}])
def test_a_damaged_note_is_passed_over(damage: dict[str, Any], looking: Looking) -> None:
    journal(looking, {**note(1, 8), **damage})
    done = looking.pipe("timeline", "lab")
    assert done.returncode == 0 and "incident 2 of 2" in done.stdout and "1 line unlike those" in done.stderr, done.stderr


def test_the_newest_incident_may_be_one_that_no_other_node_had(looking: Looking) -> None:
    """A restart, or a repair after the loop."""
    journal(looking, note(1, 8, victims=[FAILED]), again="incident")
    assert "incident 3 of 3" in looking.pipe("timeline", "lab").stdout
