"""Take a picture of a live run: plain data from run.json, the board, the world file, devices.json and the journal.

A look only reads, takes no lock and asks no process, so the picture may be a moment old. In a large world it reads the ranks
that stand out one by one, and counts all others column by column.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftrun.control.phases import INTERRUPTED, OVER
from ftrun.control.phases import RunPhase as Machine
from ftrun.core import paths
from ftrun.core.account import Account
from ftrun.core.errors import PlatformError
from ftrun.core.journal import Tail
from ftrun.core.runs import RunInfo
from ftrun.core.shape import listed, loads, maybe, number, record, row, text, whole
from ftrun.core.shared import gate, health, left_out, notes
from ftrun.core.shared.board import (
    Board,
    Busy,
    Cell,
    F,
    Flag,
    Head,
    Inexact,
    collective_name,
    collective_of,
)
from ftrun.core.shared.moment import phase_of
from ftrun.core.shared.notes import KeptNote, ParkedNote
from ftrun.core.shared.world import World, newest_world
from ftrun.core.system import procfs
from ftrun.view import devices, fold, nodes
from ftrun.view.journal import History
from ftrun.view.records import VICTIM
from ftrun.view.state import DEGRADED, ENDED, HEALTHY, of_node
from ftrun.view.status.pace import Pace

SCHEMA = 1  # version of the picture that `ftrun status --json` prints; grows when a field changes its meaning or goes
_INCIDENT = record({"since": number, "victims": listed(VICTIM), "stages": listed(row(text, number)), "said": text})
_STALL = record(
    {"since": number, "until": maybe(number), "culprits": listed(whole), "held_up": whole, "waiting": listed(whole)}
    | dict.fromkeys(("where", "excuse", "line"), text)
)
_HEAD = record({"phase": text, "incident": maybe(_INCIDENT)}, {"stall": maybe(_STALL)})
_UNWELL = 8  # most ranks of this node to name that are not healthy
_INCIDENTS = 20  # newest incidents in a picture


def take(run: RunInfo, ranks: int | None = None) -> dict[str, Any]:
    """Take one picture of `run`; see `RunWatcher.look`.

    Raises:
        OSError: A file of the run cannot be read.
        PlatformError: The board or the world file is damaged or of another version.
    """
    watcher = RunWatcher(run)
    try:
        return watcher.look(ranks)
    finally:
        watcher.close()


class RunWatcher:
    """Looks at one run repeatedly; reads only new journal lines and new worlds.

    Raises:
        OSError: The board cannot be opened.
        PlatformError: The board is damaged or of another version.
    """

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.history = History()
        self._board = Board.open(run.path / paths.BOARD)
        self._tail: Tail | None = None
        self._world: World | None = None
        self._used = 0  # cells that a process ever used
        self._parked: dict[int, str] = {}

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

    def look(self, ranks: int | None = None) -> dict[str, Any]:
        """Take a picture. `ranks`: most ranks to describe one by one, None = all; `folded` counts the rest.

        Raises:
            OSError: The journal cannot be read.
            PlatformError: The world file is damaged.
        """
        board, now = self._board, time.monotonic_ns()
        self._read_journal()
        world = self._read_world()
        word = gate.unpack(board.gate())
        head = _head(board)
        self._used = health.used_cells(board)
        holders = {p.cell: p.rank for p in world.places} if world else {}
        spares = [i for i in health.living(board, self._used) if i not in holders]
        found, stall = devices.read(self.run.path), head["stall"]
        self.history.fold("standing still", {"since": stall["since"] if stall else None})
        account = self.history.account
        accused = stall["culprits"] if stall else ()
        shown, folded = fold.choose(board, self._used, holders, ranks, now, accused)
        workers = [self._worker(board.cell(i), holders[i], now, found, why) for i, why in shown.items()]
        workers += [self._worker(board.cell(i), None, now, found) for i in spares[:ranks]]
        first = board.cell(next(iter(holders))) if holders else None
        ill, oldest = health.unwell(board, holders, self._used, now, accused)
        well = len(holders) - len(ill)
        seconds, stopped = time.time() - self.run.started, _stopped(self.run.pid)
        protected, trained = health.protected(board, holders, self._used)
        own = self._state(head, len(spares), len(ill) + stopped, found, protected, seconds)
        pace, step, steps = Pace.of(board.openings(word.last), now), health.next_step(word.last, first), first[F.LOOP_END] if first else 0
        effective = account.effective(now / 1e9)
        live = {"step": step, "healthy": well, "unwell": sorted(ill)[:_UNWELL], "machine": head["phase"], "generation": word.generation}
        others = nodes.read(self.run.path, own, seconds, live)
        state = nodes.state(others, own)
        told, not_kept = notes.read(KeptNote, self.run.path), left_out.reasons(self.run.path)
        return {
            "schema": SCHEMA,
            "run": self.run.run_id,
            "state": state,
            "machine": head["phase"],
            "pid": self.run.pid,
            "launcher": "stopped" if stopped else "runs",
            "host": os.uname().nodename,
            "nodes": others,
            "seconds": round(seconds, 3),
            "argv": self.run.raw.get("argv", []),
            "cwd": self.run.raw.get("cwd", ""),
            "world_size": board[Head.WORLD_SIZE],
            "mesh": self.history.mesh or None,
            "healthy": well,
            "beat_age_max": _age(now, oldest),
            "spares_wanted": self.run.raw.get("spares", 0),
            "spares_ready": sum(board.cell(i).has(Flag.PARKED) for i in spares),
            "spares": len(spares),
            "generation": word.generation,
            "attempt": board[Head.ATTEMPT],
            "protected": protected,
            "trained": trained,
            "restarts_left": self._restarts_left(),
            "gate": {"closed": word.closed, "last": word.last},
            "step": step,
            "epoch": first.epoch if first else None,
            "steps": steps,
            "steps_per_second": _rounded(pace.rate),
            "step_times": list(pace.times),
            "step_age": _rounded(pace.age),
            "seconds_left": _rounded(pace.left(steps - step)) if state in (HEALTHY, DEGRADED) else None,
            "effective_training_time": _rounded(effective) if protected else None,
            "lost_seconds": round(account.lost(now / 1e9), 3),
            "replacements": len(account.replaced),
            "restarts": account.restarts,
            "inexact": self._inexact(),
            "kept": asdict(told) if told else None,
            "left_out": [*not_kept],
            "not_kept": not_kept,
            "stall": _stall(stall, now / 1e9),
            "current": self._current(now / 1e9, head["phase"], head["incident"]),
            "incidents": [_incident(i, account) for i in reversed(account.incidents[-_INCIDENTS:])],
            "incidents_total": len(account.incidents),
            "devices": found,
            "log_dir": self.run.raw.get("logs", ""),
            "workers": workers,
            "folded": folded,
        }

    # -- sources -----------------------------------------------------------------------------------------------------

    def _read_journal(self) -> None:
        if self._tail is None:
            with contextlib.suppress(FileNotFoundError):
                self._tail = Tail(self.run.path / paths.JOURNAL)
        if self._tail is not None:
            self.history.add_all(self._tail.read())

    def _read_world(self) -> World | None:
        newest = self._board[Head.PUBLISHED]
        if newest and (self._world is None or self._world.generation != newest):
            with contextlib.suppress(OSError):
                self._world = self._checked(newest_world(self.run.path, self._board))
        return self._world

    def _checked(self, world: World) -> World:
        """Return the world, or raise PlatformError if it names workers without a cell on the board."""
        if not all(0 <= place.cell < self._board.cells for place in world.places):
            raise PlatformError(
                f"the world file of run {self.run.run_id} is damaged: it names workers that the board has not"
            )
        return world

    # -- the run -----------------------------------------------------------------------------------------------------

    def _state(
        self, head: dict[str, Any], spares: int, unwell: int, found: list[dict[str, Any]], protected: bool | None, seconds: float
    ) -> str:
        if head["phase"] in OVER or not self.run.alive():
            return ENDED
        return of_node(
            head["phase"],
            repairing=head["incident"] is not None,
            stalled=head["stall"] is not None,
            impaired=unwell > 0 or any(d.get("quarantined") for d in found),
            spares_missing=spares < self.run.raw.get("spares", 0),
            protected=protected,
            seconds=seconds,
        )

    def _restarts_left(self) -> int:
        settings = self.history.config.get("settings", {})
        most = settings.get("max_restarts", 0)
        return max(0, int(most) - self.history.account.restarts) if whole(most) else 0

    def _inexact(self) -> list[str]:
        bits = 0
        for word in set(self._board.column(F.INEXACT, self._used)):
            bits |= word
        return [str(flag.name).lower() for flag in Inexact if flag & bits]

    def _current(self, now: float, machine: str, incident: dict[str, Any] | None) -> dict[str, Any] | None:
        if incident is None:
            return None
        moved, total = fold.moved(self._board, self._used)
        return {
            "phase": machine if machine in INTERRUPTED else "FIRST_STEP",
            "seconds": round(now - incident["since"], 3),
            "victims": incident["victims"],
            "said": incident["said"],
            "stages": [
                {"phase": phase, "after_ms": round((t - incident["since"]) * 1e3, 1)} for phase, t in incident["stages"]
            ],
            "bytes": {"moved": moved, "total": total} if total else None,
        }

    # -- one worker --------------------------------------------------------------------------------------------------

    def _worker(
        self, cell: Cell, rank: int | None, now: int, found: list[dict[str, Any]], stands_out: str = ""
    ) -> dict[str, Any]:
        flags, since = Flag(cell[F.FLAGS]), cell[F.COLLECTIVE_SINCE]
        device = devices.of(found, rank, cell[F.DEVICE])
        total = cell[F.MOVE_TOTAL]
        return {
            "cell": cell.index,
            "rank": rank,
            "mesh": self.history.places.get(str(rank)),
            "pid": cell[F.PID],
            "device": device.get("index") if device else (cell[F.DEVICE] - 1 if cell[F.DEVICE] else None),
            "uuid": device.get("uuid") if device else None,
            "step": cell.step,
            "phase": phase_of(cell),
            "attempt": cell[F.ATTEMPT],
            "generation": cell[F.GENERATION],
            "flags": [f.name.lower() for f in Flag if f & flags and f.name],
            "parked_at": self._parked_at(cell.index) if rank is None and Flag.PARKED in flags else None,
            "beat_age": _age(now, cell[F.BEAT]),
            "progress_age": _age(now, cell[F.PROGRESS]),
            "collective": collective_name(cell[F.COLLECTIVE_NAME]) if since else None,
            "collective_number": collective_of(cell[F.COLLECTIVE])[1] if since else None,
            "collective_age": _age(now, since),
            "work": round(cell[F.WORK] / 1e9, 6) if cell[F.WORK] else None,
            "memory": _resident(cell[F.PID]) if not cell[F.EXITED] else None,
            "bytes": {"moved": cell[F.MOVED], "total": total} if total else None,
            "exit": cell[F.EXIT_STATUS] if cell[F.EXITED] else None,
            "notes": _notes(cell, device),
            "stands_out": stands_out,
        }

    def _parked_at(self, cell: int) -> str | None:
        if cell not in self._parked and (note := notes.read(ParkedNote, self.run.path, cell)) is not None:
            self._parked[cell] = note.line
        return self._parked.get(cell)


def _head(board: Board) -> dict[str, Any]:
    """Read the launcher's report on the whole run: its phase, the current incident and the current stall."""
    with contextlib.suppress(ValueError):
        head = loads(board.run_text())
        if _HEAD(head):
            return {"stall": None, **head}
    return {"phase": str(Machine.NEW), "incident": None, "stall": None}


def _stall(told: dict[str, Any] | None, now: float) -> dict[str, Any] | None:
    """Return the launcher's report on a stall, with ages in seconds instead of times."""
    if told is None:
        return None
    until = told["until"]
    return {
        "seconds": round(max(0.0, now - told["since"]), 3),
        "acts_in": None if until is None else round(max(0.0, until - now), 1),
        **{key: told[key] for key in ("culprits", "held_up", "waiting", "where", "excuse", "line")},
    }


def _stopped(pid: int) -> bool:
    return procfs.status(pid).get("State", "")[:1] in ("T", "t")


def _notes(cell: Cell, device: dict[str, Any] | None) -> list[str]:
    notes = []
    if cell[F.EXITED]:
        notes.append(f"ended with {cell[F.EXIT_STATUS]}")
    if cell[F.ATTEMPT]:
        notes.append(f"attempt {cell[F.ATTEMPT]}")
    if cell[F.BUSY] & Busy.COMPILING:
        notes.append("compiles")
    if device and device.get("quarantined"):
        notes.append(f"quarantined: {device['quarantined']}")
    if device and device.get("throttle"):
        notes.append(f"throttled: {', '.join(device['throttle'])}")
    return notes


def _incident(raw: dict[str, Any], account: Account) -> dict[str, Any]:
    """Return the fields of an incident that a list of incidents shows."""
    began = float(raw.get("began_ns", 0)) / 1e9
    return {
        "number": account.incidents.index(raw) + 1,
        "time": round(account.wall + began - account.began, 3),
        **{
            key: raw.get(key)
            for key in ("generation", "victims", "stuck", "restart", "redone", "going_on", "sources", "ms", "total_ms")
        },
    }


def _resident(pid: int) -> int | None:
    """Return the resident bytes of a process, shared memory included; None without the process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return None


def _age(now: int, then: int) -> float | None:
    return round(max(0, now - then) / 1e9, 3) if then else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
