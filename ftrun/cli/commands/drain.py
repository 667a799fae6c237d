"""`ftrun drain`: move a rank to another worker, or a node to a spare one, without losing anything.

Exit code 0 it was moved, 1 it was not, 2 usage, 3 the run is not running, 4 no such run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from ftrun.cli.main import app
from ftrun.core.errors import UsageError
from ftrun.core.text import tell

if TYPE_CHECKING:
    from ftrun.cli.live import Live
    from ftrun.core.shared.board import Cell

_WAIT = 60.0  # seconds
_LOOK = 0.1  # seconds between two looks when no bell rings


@app.command(
    "drain",
    help="Move a rank to a spare, between two steps, or a whole node to a spare node: for a device or a machine that is to be "
    "serviced, or that one does not trust.",
    epilog="Without RUN: the live run, if there is only one and it was started in this folder. "
    "Exit codes: 0 it was moved, 1 it was not, 2 usage, 3 the run is not running, 4 no such run.\n\n"
    "Examples: `ftrun drain brave-otter --rank 2`; `ftrun drain brave-otter --node 1` on any node of the run.",
)
def drain(
    run_id: str = typer.Argument(None, metavar="RUN", help="The run's name."),
    rank: int = typer.Option(None, "--rank", metavar="R", help="The rank to move, of any node of the run."),
    node: int = typer.Option(None, "--node", metavar="N", help="The node to move to a spare one; its ftrun ends with exit code 0."),
    wait: float = typer.Option(_WAIT, "--wait", metavar="S", help="Seconds to wait until it is done."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask; needed without a terminal."),
    as_json: bool = typer.Option(False, "--json", help="JSON instead of text."),
) -> int:
    from ftrun.cli import live

    if (rank is None) is (node is None):
        raise UsageError("ftrun drain needs --rank R or --node N; see: ftrun drain --help")
    if not 0 < wait < float("inf"):
        raise UsageError("--wait is a number of seconds above 0")
    try:
        found = live.Live.find(run_id, f"drain RUN --rank {rank}" if node is None else f"drain RUN --node {node}")
        question, move = _rank(found, rank, wait, as_json) if node is None else _node(found, node, wait, as_json)
        if not live.confirmed(f"{question}?", yes):
            tell("nothing was moved")
            return 1
        return move()
    except OSError as error:
        tell(f"error: nothing was moved: {error}")
        return 1


def _rank(found: Live, rank: int, wait: float, as_json: bool) -> tuple[str, Callable[[], int]]:
    """What is to be done, and the function that does it and returns the exit code."""
    from ftrun.cli import elsewhere
    from ftrun.faults import requests

    other = elsewhere.node_of(found, rank)
    if other is not None:
        what = f"move rank {rank} of run {found.run.run_id}, on node {other['node']} ({other['host']}), to another worker"
        return what, lambda: elsewhere.move_rank(found, other, rank, wait, as_json)
    cell = found.cell(rank)
    if why := requests.why_not_moved(rank, cell):
        raise UsageError(why)
    return f"move rank {rank} of run {found.run.run_id} away from process {_pid(cell)}", lambda: _move(found, rank, wait, as_json)


def _node(found: Live, number: int, wait: float, as_json: bool) -> tuple[str, Callable[[], int]]:
    from ftrun.cli import elsewhere

    node, spare = elsewhere.spare_for(found, number)
    what = f"move node {number} ({node['host']}) of run {found.run.run_id} to the spare node {spare['host']}"
    return what, lambda: elsewhere.move_node(found, node, wait, as_json)


def _pid(cell: Cell) -> int:
    from ftrun.core.shared.board import F

    return cell[F.PID]


def _move(found: Live, rank: int, wait: float, as_json: bool) -> int:
    from ftrun.cli.commands.inject import ask
    from ftrun.core.faults import Fault
    from ftrun.core.shared.board import F
    from ftrun.faults import requests

    begun = time.monotonic()
    wanted = requests.Request(requests.DRAIN, Fault.DRAIN.value, rank=rank, at="idle")
    _, firing = ask(found, wanted, wait)
    if firing is None:
        why = f"it began no new step in {wait:g} s" if found.alive() else "the run ended"
        return _not_moved(found, rank, why, as_json)
    while found.alive():
        seen = found.board.launcher_bell.count()
        new = found.cell(rank)
        if new[F.PID] not in (0, firing.pid) and new[F.RESUMED] >= found.world().generation:
            seconds = time.monotonic() - begun
            facts = {
                "run": found.run.run_id,
                "rank": rank,
                "step": firing.step,
                "from": firing.pid,
                "to": new[F.PID],
                "cell": new.index,
            }
            if as_json:
                print(json.dumps({"moved": True, **facts, "seconds": round(seconds, 3)}))
            else:
                tell(
                    f"rank {rank} of run {found.run.run_id} moved from process {firing.pid} to {new[F.PID]} before step {firing.step}; "
                    f"{seconds * 1000:.0f} ms"
                )
            return 0
        if time.monotonic() - begun > wait:
            return _not_moved(
                found, rank, f"its new worker is not at work after {wait:g} s; see: {_status(found)}", as_json,
                outcome="is being moved",
            )  # fmt: skip
        found.board.launcher_bell.wait(seen, _LOOK)
    return _not_moved(found, rank, "the run ended", as_json)


def _status(found: Live) -> str:
    return f"ftrun status {found.run.run_id}"


def _not_moved(found: Live, rank: int, why: str, as_json: bool, outcome: str = "was not moved") -> int:
    if as_json:
        print(json.dumps({"moved": False, "run": found.run.run_id, "rank": rank, "why": why}))
    tell(f"error: rank {rank} of run {found.run.run_id} {outcome}: {why}")
    return 1
