"""One look at a live run: plain data from run.json, the board, the world file and the journal's last lines.

Reads only, takes no lock and asks nobody; a run that changes meanwhile gives a picture that is a moment old.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ftrun.core import gate, paths
from ftrun.core.board import Board, Cell, F, Flag, Head, Phase, collective_name
from ftrun.core.world import World, read_world
from ftrun.host.rundir import RunInfo

_TAIL = 1 << 16  # bytes of the journal that are looked at
HEALTHY, STARTING, RECOVERING, DEGRADED, ENDED = "healthy", "starting", "recovering", "degraded", "ended"


def take(run: RunInfo) -> dict[str, Any]:
    """The picture of `run`. Errors: OSError, PlatformError when the directory goes away meanwhile."""
    board = Board.open(run.path / paths.BOARD)
    world = _world(run.path, board)
    word = gate.unpack(board.gate())
    machine = _machine_phase(run.path)
    now = time.monotonic_ns()
    cells = [board.cell(i) for i in range(board.cells) if board.cell(i)[F.PID]]
    holders = {p.cell: p.rank for p in world.places} if world else {}
    workers = [_worker(run.path, c, holders.get(c.index), now) for c in cells if not c[F.EXITED] or c.index in holders]
    spares = [w for w in workers if w["rank"] is None]
    return {
        "run": run.run_id,
        "state": _state(run, machine, holders, spares),
        "machine": machine,
        "pid": run.pid,
        "seconds": round(time.time() - run.started, 3),
        "argv": run.raw.get("argv", []),
        "world_size": board[Head.WORLD_SIZE],
        "spares_wanted": run.raw.get("spares", 0),
        "generation": word.generation,
        "attempt": board[Head.ATTEMPT],
        "gate": {"closed": word.closed, "last": word.last},
        "log_dir": str(run.raw.get("logs", "")),
        "workers": sorted(workers, key=lambda w: (w["rank"] is None, w["rank"], w["cell"])),
    }


def _world(path: Path, board: Board) -> World | None:
    try:
        return read_world(path, board[Head.PUBLISHED])
    except FileNotFoundError:
        return None


def _machine_phase(path: Path) -> str:
    """The controller's phase after its last journalled decision."""
    try:
        with (path / paths.JOURNAL).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return "NEW"
    for line in reversed(lines):
        if b'"phase"' in line:
            try:
                return str(json.loads(line)["phase"])
            except (ValueError, KeyError):
                continue
    return "NEW"


def _state(run: RunInfo, machine: str, holders: dict[int, int], spares: list[dict[str, Any]]) -> str:
    if not run.alive or machine in ("ENDING", "ENDED"):
        return ENDED
    if machine in ("NEW", "STARTING"):
        return STARTING
    if machine in ("STOPPING", "CLEANING", "RESETTING", "RESTORING", "RESUMING", "RESTARTING"):
        return RECOVERING
    if machine == "RUNNING" and len(spares) < int(run.raw.get("spares", 0)):
        return DEGRADED
    return HEALTHY


def _worker(path: Path, cell: Cell, rank: int | None, now: int) -> dict[str, Any]:
    flags = Flag(cell[F.FLAGS])
    return {
        "cell": cell.index,
        "rank": rank,
        "pid": cell[F.PID],
        "step": cell.step,
        "phase": Phase(cell[F.PHASE]).name.lower(),
        "attempt": cell[F.ATTEMPT],
        "generation": cell[F.GENERATION],
        "flags": [f.name.lower() for f in Flag if f & flags and f.name],
        "parked_at": _parked(path, cell.index) if rank is None else None,
        "beat_age": _age(now, cell[F.BEAT]),
        "progress_age": _age(now, cell[F.PROGRESS]),
        "collective": collective_name(cell[F.COLLECTIVE_NAME]) if cell[F.COLLECTIVE_SINCE] else None,
        "exit": cell[F.EXIT_STATUS] if cell[F.EXITED] else None,
    }


def _parked(path: Path, cell: int) -> str | None:
    try:
        return str(json.loads((path / "errors" / f"parked-{cell}.json").read_text())["line"])
    except (OSError, ValueError, KeyError):
        return None


def _age(now: int, then: int) -> float | None:
    return round(max(0, now - then) / 1e9, 3) if then else None
