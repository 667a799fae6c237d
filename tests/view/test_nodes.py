"""`ftrun status` of a run over several nodes: what their launchers show, and what a person and a program read of all of them on one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ftrun.core import paths
from ftrun.core.account import Account, OpenIncident
from ftrun.core.shared.board import Board, F
from ftrun.host.account.node_status import NodeStatus
from ftrun.host.account.run_head import Stall
from ftrun.view.journal import History
from tests.view import boards
from tests.view.conftest import Looking

GB = 1_000_000_000


class Shown:
    """Takes what a launcher shows the other nodes."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.times = 0

    def shows(self, subject: str, facts: dict[str, Any]) -> None:
        assert subject == "status"
        self.facts, self.times = facts, self.times + 1


def board_of(looking: Looking, ranks: int = 4, name: str = "lab") -> Board:
    board = boards.put(looking.root, name, ranks=ranks)
    for cell in range(ranks + 1):
        board.cell(cell)[F.BEAT] = time.monotonic_ns() + 30 * GB
    return board


def account_of(run_dir: Path) -> Account:
    history = History()
    history.add_all((run_dir / paths.JOURNAL).read_bytes().splitlines())
    return history.account


def status(board: Board, run_dir: Path, ranks: int = 4, first: int = 0, stall: Stall | None = None, **changed: Any) -> dict[str, Any]:
    """What the launcher of this board shows."""
    shown = Shown()
    account = Account(**{**vars(account_of(run_dir)), **changed})
    NodeStatus(board, shown, run_dir.name, 1).show(account, {first + r: r for r in range(ranks)}, stall, 0)  # type: ignore[arg-type]
    return shown.facts


def entry(node: int | None, host: str, facts: dict[str, Any], **changed: Any) -> dict[str, Any]:
    made = {"node": node, "id": f"{host}-1", "host": host, "nproc": 4, "state": "in", "here": False, "silent": 0}
    return {**made, "shows": {"status": facts}, **changed}


def put(looking: Looking, *entries: dict[str, Any]) -> None:
    (looking.root / "lab" / paths.NODES).write_text(json.dumps(entries))


def section(looking: Looking, code: int) -> list[str]:
    done = looking.pipe("status", "lab", COLUMNS="160")
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("2 nodes"))
    return lines[at : lines.index("", at)]


def test_all_nodes_and_which_one_is_this(looking: Looking) -> None:
    facts = status(board_of(looking), looking.root / "lab")
    put(looking, entry(0, "alpha", facts), entry(1, "beta", facts, here=True), entry(None, "gamma", {}, state="joining"))
    title, head, *rows = section(looking, 0)
    assert title == "2 nodes and 1 spare node, 8/8 ranks healthy"
    assert head.split() == ["node", "host", "ranks", "state", "step", "healthy", "spares", "replaced", "note"]
    assert rows[0].split() == ["0", "alpha", "0", "to", "3", "healthy", "57", "4/4", "1/1", "2"]
    assert rows[1].split()[:7] == ["1", "beta", "4", "to", "7", "healthy", "57"] and rows[1].endswith("this node")
    assert rows[2].split()[:2] == ["gamma", "spare"] and rows[2].endswith("waits for a place")


def test_one_node_has_no_such_section(looking: Looking) -> None:
    board_of(looking)
    assert "node" not in looking.pipe("status", "lab").stdout.replace(str(looking.base), "")
    assert json.loads(looking.pipe("status", "lab", "--json").stdout)["nodes"] == []


def test_a_node_that_recovers_makes_the_job_recovering(looking: Looking) -> None:
    board = board_of(looking)
    well = status(board, looking.root / "lab")
    hurt = status(board, looking.root / "lab", phase="RESTORING", open=OpenIncident(1.0))
    put(looking, entry(0, "alpha", hurt), entry(1, "beta", well, here=True))
    _, _, there, here = section(looking, 1)
    assert there.split()[5:7] == ["recovering", "57"] and there.endswith("restoring")
    assert here.split()[5] == "healthy", "this one has nothing to repair"
    picture = json.loads(looking.pipe("status", "lab", "--json").stdout)
    assert picture["state"] == "recovering" and picture["machine"] == "RUNNING"
    assert [(e["node"], e["here"], e["ranks"], e["state"], e["machine"]) for e in picture["nodes"]] == [
        (0, False, [0, 3], "recovering", "RESTORING"),
        (1, True, [4, 7], "healthy", "RUNNING"),
    ]


@pytest.mark.parametrize(
    ("changed", "state", "said"),
    [
        ({"state": "lost"}, "recovering", "lost"),
        ({"silent": 4}, "degraded", "nothing heard of it for 4 s"),
        ({"state": "finished"}, "healthy", "finished"),
        ({"shows": {}}, "starting", "starting"),
    ],
)
def test_what_another_node_is_known_by(changed: dict[str, Any], state: str, said: str, looking: Looking) -> None:
    facts = status(board_of(looking), looking.root / "lab")
    put(looking, entry(0, "alpha", facts, here=True), entry(1, "beta", facts, **changed))
    assert said in section(looking, 0 if state == "healthy" else 1)[3]
    assert json.loads(looking.pipe("status", "lab", "--json").stdout)["state"] == state


def test_ranks_that_are_not_healthy_and_a_stall_elsewhere(looking: Looking) -> None:
    board_of(looking)
    there = board_of(looking, name="there")
    there.cell(2)[F.BEAT] = time.monotonic_ns() - 60 * GB
    held = Stall(time.monotonic() - 12.0, None, [5], 3, [4, 6, 7], "in allreduce #14", "", "train.py:31")
    facts = status(there, looking.root / "there", first=4, stall=held)
    put(looking, entry(0, "alpha", {}, here=True), entry(1, "beta", facts))
    row = section(looking, 1)[3]
    assert " stalled " in row and " 2/4 " in row and "ranks 5, 6 not healthy" in row
    assert "stalled for 12.0 s: ranks 4, 6, 7 wait" in row.replace("ranks 4, 6-7", "ranks 4, 6, 7")


def test_a_spare_node_that_looks_sees_how_the_job_is(looking: Looking) -> None:
    facts = status(board_of(looking), looking.root / "lab")
    (looking.root / "lab" / paths.JOURNAL).write_text("")
    put(looking, entry(0, "alpha", facts), entry(1, "beta", facts), entry(None, "gamma", {}, state="joining", here=True))
    board = Board.open(looking.root / "lab" / paths.BOARD)
    board.show_run(json.dumps({"phase": "NEW", "incident": None, "stall": None}).encode())
    rows = section(looking, 0)
    assert rows[4].split()[:2] == ["gamma", "spare"] and "this node" in rows[4]


@pytest.mark.parametrize("damage", ["{", "[1]", json.dumps([{"node": 0}]), json.dumps({"node": 0})])
def test_a_damaged_file_tells_nothing(damage: str, looking: Looking) -> None:
    board_of(looking)
    (looking.root / "lab" / paths.NODES).write_text(damage)
    assert json.loads(looking.pipe("status", "lab", "--json").stdout)["nodes"] == []


def test_facts_of_another_version_are_unknown(looking: Looking) -> None:
    facts = status(board_of(looking), looking.root / "lab")
    put(looking, entry(0, "alpha", facts, here=True), entry(1, "beta", {**facts, "step": "57"}))
    assert json.loads(looking.pipe("status", "lab", "--json").stdout)["nodes"][1]["state"] == "starting"


def test_less_than_a_kilobyte_whatever_happened(looking: Looking) -> None:
    board = board_of(looking, ranks=8)
    long = "/a/folder/that/is/deep/" * 20
    stall = Stall(time.monotonic(), None, [*range(8)], 100, [*range(8)], long, "outside", long)
    account = account_of(looking.root / "lab")
    many = tuple((rank % 8, rank + 100) for rank in range(1000))
    worst = status(board, looking.root / "lab", 8, 1016, stall, replaced=many, incidents=account.incidents * 500)
    assert worst["replacements"] == 1000
    assert len(json.dumps(worst)) < 1000


def test_it_is_shown_once_a_second_at_most_and_only_when_it_changes(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    board, shown = board_of(looking), Shown()
    status = NodeStatus(board, shown, "lab", 1)  # type: ignore[arg-type]
    account, holders = account_of(looking.root / "lab"), {r: r for r in range(4)}
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(50):
        status.show(account, holders, None, 0)
        now[0] += 0.1
    assert shown.times == 1
    now[0] += 1.0
    changed = Account(**{**vars(account), "phase": "STOPPING"})
    status.show(changed, holders, None, 0)
    status.show(account, holders, None, 0)
    assert (shown.times, shown.facts["phase"]) == (2, "STOPPING")
    now[0] += 1.0
    status.show(account, holders, None, 0)
    assert (shown.times, shown.facts["phase"]) == (3, "RUNNING")
