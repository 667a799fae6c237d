"""Run directories to look at: recorded from a real run, put back with times of today, also with many more ranks.

`python -m tests.view.boards RUN_DIR` records a live run into recorded.json; its journal is recorded with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftrun.control.events import Action, Event, Message
from ftrun.core import paths
from ftrun.core.shared import gate, steps
from ftrun.core.shared.board import Board, Cell, F, Head
from ftrun.core.shared.world import Place, World, read_world, write_world
from ftrun.core.system.procfs import process_start
from ftrun.host.account.run_head import RunHead

RECORDED = Path(__file__).with_name("recorded.json")
WORDS = 128
# words of a cell that hold a CLOCK_MONOTONIC time in ns; kept as an age
TIMES = {
    *(F.BEAT, F.PROGRESS, F.COLLECTIVE_SINCE, F.STOPPED_NS, F.CLEANED_NS, F.READY_NS, F.RESET_NS, F.RESTORED_NS),
    *(F.RESUMED_NS, F.FIRST_DONE_NS, F.RAISED_NS, F.REDONE_NS, F.FENCED_NS, F.DETECTED_NS, F.MOVE_SINCE),
    *(F.FIRST_ROW + 8 * row + word for row in range(5) for word in range(3, 8)),
}
MESH = ("replicate", "shard")
LOCKS = range(F.LIFE, F.LIFE + 8)


def record(run_dir: Path) -> dict[str, Any]:
    """What `put` needs of a live run."""
    board, now = Board.open(run_dir / paths.BOARD), time.monotonic_ns()
    cells = []
    for index in range(board.cells):
        words = board.cell(index).words().tolist()
        if not words[F.PID]:
            break
        kept = {w: v for w, v in enumerate(words) if v and w not in LOCKS and w not in TIMES}
        cells.append({"words": kept, "ages": {w: now - words[w] for w in sorted(TIMES) if words[w]}})
    world = read_world(run_dir, board[Head.PUBLISHED])
    raw = json.loads((run_dir / paths.RUN_FILE).read_text())
    return {
        "run": {key: raw[key] for key in ("run_id", "argv", "world_size", "spares")},
        "gate": board.gate(),
        "places": [p.cell for p in world.places],
        "generation": world.generation,
        "cells": cells,
        "age": time.time() - raw["started"],
        "journal": [json.loads(line) for line in (run_dir / paths.JOURNAL).read_text().splitlines()],
    }


def put(root: Path, name: str = "lab", ranks: int | None = None, until: str = "") -> Board:
    """Make the recorded run under `root`, as a run of this process. `ranks`: the recorded ones, again and again.

    `until`: the journal ends before the answer that leaves this phase (of its last incident).
    """
    recorded = json.loads(RECORDED.read_text())
    places, source = recorded["places"], recorded["cells"]
    ranks = len(places) if ranks is None else ranks
    held = set(places)
    spares = [c for at, c in enumerate(source) if at not in held and not c["words"].get(str(F.EXITED))]
    run_dir = root / name
    run_dir.mkdir(mode=0o700)
    pid, now = os.getpid(), time.monotonic_ns()
    board = Board.create(run_dir / paths.BOARD, ranks + len(spares) + 16)
    Board.make_room(run_dir / paths.BOARD, board.cells - 1)
    for rank in range(ranks):
        _fill(board.cell(rank), source[places[rank % len(places)]], now)
        board.cell(rank)[F.RANK] = rank + 1
    for at, spare in enumerate(spares):
        _fill(board.cell(ranks + at), spare, now)
    generation = recorded["generation"]
    board[Head.WORLD_SIZE], board[Head.PUBLISHED], board[Head.LAUNCHER_PID] = ranks, generation, pid
    assert board.swap_gate(board.gate(), recorded["gate"])
    for row in steps.rows(board.cell(0)):
        board.show_opening(row.step - board.cell(0).shift, row.update)
    write_world(run_dir, World(generation, 0, tuple(Place(r, r, r) for r in range(ranks)), "127.0.0.1", 1))
    facts = {"pid": pid, "start": process_start(pid), "started": time.time() - recorded["age"], "logs": str(root)}
    (run_dir / paths.RUN_FILE).write_text(json.dumps({**recorded["run"], **facts, "world_size": ranks}))
    journal = journal_text(recorded["journal"], until)
    (run_dir / paths.JOURNAL).write_text(journal)
    for _ in follow(board, journal):
        pass
    return board


def follow(board: Board, journal: str) -> Iterator[dict[str, Any]]:
    """Let the launcher's account of the run follow a journal: what the board says after each answer."""
    head = RunHead(board, lambda rank: rank, lambda *_, **__: None)
    for line in map(json.loads, journal.splitlines()):
        if "event" in line:
            event = Message.from_json(line["event"])
        elif "actions" in line:
            assert isinstance(event, Event)
            actions = [Message.from_json(action) for action in line["actions"]]
            head.saw(event, tuple(a for a in actions if isinstance(a, Action)), line["phase"], line["t"])
            yield json.loads(board.run_text())


def _fill(cell: Cell, recorded: dict[str, Any], now: int) -> None:
    words = cell.words()
    for word, value in recorded["words"].items():
        words[int(word)] = value
    for word, age in recorded["ages"].items():
        words[int(word)] = now - age


def place_on_mesh(rank: int, names: tuple[str, str] = MESH) -> dict[str, int]:
    """Of four ranks on a mesh of two by two."""
    return {names[0]: rank // 2, names[1]: rank % 2}


def on_mesh(lines: list[dict[str, Any]], names: tuple[str, str] = MESH) -> list[dict[str, Any]]:
    """The recorded journal as a run on such a mesh would have written it."""
    facts = {"dims": dict.fromkeys(names, 2), "ranks": {str(rank): place_on_mesh(rank, names) for rank in range(4)}}
    last = max(i for i, line in enumerate(lines) if line.get("event", {}).get("kind") == "Protected" and line["event"]["worker"] < 4)
    for line in lines:
        if line.get("note") == "incident":
            line["mesh"] = facts
            for victim in line["victims"]:
                victim["mesh"] = place_on_mesh(victim["rank"], names)
    return [*lines[: last + 2], {"t": lines[last + 1]["t"], "note": "mesh", **facts}, *lines[last + 2 :]]


def journal_text(lines: list[dict[str, Any]], until: str = "") -> str:
    """The journal, as if its last line had just been written."""
    if until:
        last = max(at for at, line in enumerate(lines) if line.get("phase") == until)
        lines = lines[: last + 1]
    shift = time.monotonic() - lines[-1]["t"]
    return "".join(json.dumps(_shifted(line, shift)) + "\n" for line in lines)


def _shifted(line: Any, shift: float) -> Any:
    if isinstance(line, list):
        return [_shifted(value, shift) for value in line]
    if not isinstance(line, dict):
        return line
    moved = {key: _shifted(value, shift) for key, value in line.items()}
    for key, factor in (("t", 1), ("wall", 1), ("began_ns", 10**9), ("detected_ns", 10**9)):
        if key in moved and isinstance(moved[key], (int, float)):
            moved[key] = moved[key] + (time.time() - time.monotonic() - moved[key] + line["t"] if key == "wall" else 0)
            moved[key] += int(shift * factor) if factor > 1 else shift
    return moved


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(Path(sys.argv[1])), separators=(",", ":")) + "\n")
    print(f"gate {gate.unpack(json.loads(RECORDED.read_text())['gate'])}", file=sys.stderr)
