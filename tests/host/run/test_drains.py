"""What a node does when a person on another one wants a rank of it moved, or the node; with a board, and a run directory without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftrun.control.phases import RunPhase
from ftrun.core.account import Account, OpenIncident
from ftrun.core.shared import gate
from ftrun.core.shared.board import F, Flag, Head
from ftrun.faults import requests, trigger
from ftrun.host.run import drains
from ftrun.host.run.drains import DrainDesk
from tests.host.parts import Recorder, launch_context


class Others:
    """Takes what is shown and asked."""

    def __init__(self) -> None:
        self.shown: dict[str, Any] = {}
        self.given_up = 0
        self.asked: list[dict[str, Any]] = []
        self.why = ""

    def asks(self, request: dict[str, Any]) -> str:
        self.asked.append(request)
        return self.why

    def gives_up(self) -> None:
        self.given_up += 1

    def shows(self, subject: str, facts: dict[str, Any]) -> None:
        assert subject == "drains"
        self.shown = dict(facts)


class Scene:
    """Ranks 2 and 3 are in cells 0 and 1, and train."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener, self.others = Recorder(), Others()
        context = launch_context(folder, self.listener, 2)
        self.board = context.board
        self.account = Account(phase=RunPhase.RUNNING, generation=1)
        self.holders = {2: 0, 3: 1}
        for cell in (0, 1):
            self.board.cell(cell)[F.PID] = 1000 + cell
            self.board.cell(cell)[F.FLAGS] = int(Flag.SCRIPT | Flag.GROUP | Flag.PROTECTED)
        assert self.board.swap_gate(self.board.gate(), gate.pack(gate.GateWord(1, False, 4)))
        self.drains = DrainDesk(context, self.others, lambda: self.holders, lambda: self.account)  # type: ignore[arg-type]

    def ask(self, rank: int | None, seconds: float = 60.0, key: str = "k") -> None:
        self.drains.asked({"key": key, "rank": rank, "node": 1, "to": "me", "by": 0, "seconds": seconds})

    def strike(self) -> None:
        """The worker of the rank takes the request, between two steps."""
        (request,) = requests.pending(self.folder)
        assert requests.take(self.folder, request.number)
        firing = trigger.claim(self.folder, request.as_fault(), "idle", 7, 0, 1001)
        assert firing is not None
        self.drains.fired(firing)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_rank_is_moved_as_by_a_request_here(scene: Scene) -> None:
    scene.ask(3)
    (request,) = requests.pending(scene.folder)
    assert (request.op, request.rank, request.at) == ("drain", 3, "idle") and scene.board[Head.REQUESTS] == request.number
    scene.drains.look()
    scene.strike()
    scene.drains.look()
    assert scene.others.shown == {}, "its new worker is not there yet"
    scene.holders[3], scene.account = 4, Account(phase=RunPhase.RUNNING, generation=2)
    scene.board.cell(4)[F.PID] = 2000
    scene.drains.look()
    assert scene.others.shown == {}, "it has not resumed yet"
    scene.board.cell(4)[F.RESUMED] = 2
    scene.drains.look()
    assert scene.others.shown == {"k": {"moved": True, "step": 7, "from": 1001, "to": 2000}}
    assert [note["note"] for note in scene.listener.notes] == ["drain-outcome"]


def test_a_rank_that_cannot_be_moved(scene: Scene) -> None:
    scene.board.cell(1)[F.FLAGS] = int(Flag.SCRIPT)
    scene.ask(3)
    assert "only ranks of a script that calls ftrun.protect can be moved" in scene.others.shown["k"]["why"]
    scene.ask(5, key="l")
    assert scene.others.shown["l"] == {"moved": False, "why": "rank 5 is on no worker just now"}
    assert not requests.pending(scene.folder)


def test_a_request_that_comes_to_nothing_is_taken_back(scene: Scene) -> None:
    scene.ask(3, seconds=0.0)
    scene.drains.look()
    assert scene.others.shown["k"] == {"moved": False, "why": "it began no new step in that time"}
    assert not requests.pending(scene.folder), "it strikes nobody later"


def test_a_node_gives_up_its_place_in_a_quiet_moment(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_AGAIN", 0.0)
    scene.ask(None)
    quiet = scene.account
    for unquiet in (Account(phase=RunPhase.STOPPING, generation=2), Account(phase=RunPhase.RUNNING, generation=2, open=OpenIncident(1.0))):
        scene.account = unquiet
        scene.drains.look()
    assert scene.others.given_up == 0, "a repair goes on"
    scene.account = quiet
    scene.drains.look()
    scene.drains.look()
    assert scene.others.given_up == 2, "it asks again until it has its answer"
    scene.drains.refused("no spare node with 2 ranks waits")
    scene.drains.look()
    assert scene.others.given_up == 2 and scene.others.shown == {"k": {"moved": False, "why": "no spare node with 2 ranks waits"}}


def test_a_node_waits_for_its_first_gate(scene: Scene) -> None:
    assert scene.board.swap_gate(scene.board.gate(), gate.pack(gate.GateWord(1, False, -1)))
    scene.ask(None, seconds=0.05)
    scene.drains.look()
    assert scene.others.given_up == 0
    while not scene.others.shown:
        scene.drains.look()
    assert "no moment came in that time" in scene.others.shown["k"]["why"]


def test_a_node_whose_ranks_have_finished_their_loop_keeps_its_place(scene: Scene) -> None:
    scene.board.cell(0)[F.FLAGS] = int(Flag.SCRIPT | Flag.GROUP | Flag.PROTECTED | Flag.LOOP_DONE)
    scene.ask(None)
    scene.drains.look()
    assert scene.others.given_up == 0 and "rank 2 has finished its steps" in scene.others.shown["k"]["why"]


def test_what_a_command_asks_is_passed_on(scene: Scene) -> None:
    scene.drains.passes_on(requests.Request(requests.MOVE, rank=1, seconds=5.0, key="a"))
    scene.drains.passes_on(requests.Request(requests.MOVE, node=0, seconds=6.0, key="b"))
    assert scene.others.asked == [
        {"key": "a", "node": -1, "rank": 1, "seconds": 5.0},
        {"key": "b", "node": 0, "rank": None, "seconds": 6.0},
    ]
    scene.others.why = "there is no node 9"
    scene.drains.passes_on(requests.Request(requests.MOVE, node=9, seconds=6.0, key="c"))
    assert scene.others.shown == {"c": {"moved": False, "why": "there is no node 9"}}


def test_only_the_newest_outcomes_are_shown(scene: Scene) -> None:
    for number in range(10):
        scene.ask(9, key=str(number))
    assert [*scene.others.shown] == ["6", "7", "8", "9"]
