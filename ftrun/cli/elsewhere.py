"""What a command asks of other nodes of a run: through this node's launcher, which writes it into the records of the nodes.

The outcome is seen in the file in which this node's launcher keeps what the others show (`paths.NODES`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftrun.core.errors import UsageError
from ftrun.core.text import tell

if TYPE_CHECKING:
    from ftrun.cli.live import Live

_LOOK = 0.1  # seconds between two looks
_NEWS = 5.0  # seconds that an answer may be on its way

Node = dict[str, Any]


def nodes(found: Live) -> list[Node]:
    """The nodes of a run, as its launcher here sees them; see `ftrun.view.nodes.read`."""
    from ftrun.view.nodes import read

    return read(found.run.path)


def node_of(found: Live, rank: int) -> Node | None:
    """The other node that has `rank`, None if this one has it, or is the only one.

    Raises:
        UsageError: No node has it.
    """
    members = [node for node in nodes(found) if node["ranks"]]
    if not members or rank in {place.rank for place in found.world().places}:
        return None
    last = members[-1]["ranks"][1]
    if not 0 <= rank <= last:
        raise UsageError(f"there is no rank {rank}: the run has ranks 0 to {last}")
    return next(node for node in members if node["ranks"][0] <= rank <= node["ranks"][1])


def move_rank(found: Live, node: Node, rank: int, wait: float, as_json: bool) -> int:
    """Let another node move its rank; return the exit code."""
    begun = time.monotonic()
    key = _ask(found, wait, rank=rank)
    answer = _until(found, begun + wait + _NEWS, lambda: _outcome(found, key))
    whom = f"rank {rank} of run {found.run.run_id}"
    if not answer or not answer["moved"]:
        why = answer["why"] if answer else _no_answer(found, node, wait)
        return _not_moved(found, {"rank": rank, "node": node["node"]}, f"{whom}, on {_named(node)},", why, as_json)
    facts = {"rank": rank, "node": node["node"], **{name: answer[name] for name in ("step", "from", "to")}}
    words = f"{whom} moved from process {answer['from']} to {answer['to']} on {_named(node)} before step {answer['step']}"
    return _moved(found, facts, words, begun, as_json)


def spare_for(found: Live, number: int) -> tuple[Node, Node]:
    """The node of that number, and a spare node with as many ranks.

    Raises:
        UsageError
    """
    seen = nodes(found)
    members = [node for node in seen if node["node"] is not None]
    if not members:
        raise UsageError("--node N moves a node of a run over several nodes; this run has one: use --rank R")
    node = next((node for node in members if node["node"] == number), None)
    if node is None:
        raise UsageError(f"there is no node {number}: the run has nodes 0 to {len(members) - 1}")
    spare = next((s for s in seen if s["node"] is None and s["nproc"] == node["nproc"]), None)
    if spare is None:
        waiting = sum(s["node"] is None for s in seen)
        others = f"; {waiting} wait{'s' if waiting == 1 else ''} with another --nproc-per-node" if waiting else ""
        raise UsageError(
            f"no spare node with {node['nproc']} ranks waits to take the place of node {number}{others}: start one with --spare-nodes"
        )
    return node, spare


def move_node(found: Live, node: Node, wait: float, as_json: bool) -> int:
    """Let a node give its place to a spare one; return the exit code."""
    from ftrun.core import paths
    from ftrun.core.journal import Tail, whole
    from ftrun.view.state import DEGRADED, FINISHED, HEALTHY, STALLED, UNPROTECTED

    begun, number = time.monotonic(), node["node"]
    journal = Tail(found.run.path / paths.JOURNAL)  # open, it can be read after the run's folder is gone

    def given_up() -> dict[str, Any] | None:
        """The note of this node's launcher, when this is the node that is drained."""
        return next((raw for line in journal.read() if (raw := whole(line)) and raw.get("note") == "drained"), None)

    def taken() -> dict[str, Any] | None:
        answer = _outcome(found, key)
        now = next((n for n in nodes(found) if n["node"] == number), None)
        over = now is not None and now["id"] != node["id"] and now["state"] in (HEALTHY, DEGRADED, UNPROTECTED, STALLED, FINISHED)
        return answer or (now if over else None)

    try:
        key = _ask(found, wait, node=number)
        if node["here"]:
            answer = _until(found, begun + wait + _NEWS, lambda: given_up() or _outcome(found, key))
            found.ended_within(_NEWS)  # its last lines are written after it says that it ends
            answer = answer or given_up()
        else:
            answer = _until(found, begun + wait + _NEWS, taken)
    finally:
        journal.close()
    whom = f"node {number} ({node['host']}) of run {found.run.run_id}"
    if answer is None or answer.get("moved") is False:
        why = answer["why"] if answer else _no_answer(found, node, wait)
        return _not_moved(found, {"node": number}, whom, why, as_json)
    taker = str(answer["taker"] if node["here"] else answer["host"])
    return _moved(found, {"node": number, "from": node["host"], "to": taker}, f"{whom} gave its place to {taker}", begun, as_json)


def _ask(found: Live, wait: float, rank: int = -1, node: int = -1) -> str:
    from ftrun.cli.commands.inject import ring
    from ftrun.faults import requests

    key = secrets.token_hex(4)
    ring(found, requests.post(found.run.path, requests.Request(requests.MOVE, rank=rank, node=node, seconds=wait, key=key)))
    return key


def _outcome(found: Live, key: str) -> dict[str, Any] | None:
    from ftrun.view.nodes import outcomes

    return outcomes(found.run.path).get(key)


def _until(found: Live, deadline: float, look: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """What `look` returns once it returns something; None when the run here ended or the time is over."""
    while time.monotonic() < deadline:
        alive = found.alive()
        answer = look()
        if answer is not None or not alive:
            return answer
        found.board.launcher_bell.wait(found.board.launcher_bell.count(), _LOOK)
    return None


def _no_answer(found: Live, node: Node, wait: float) -> str:
    if not found.alive():
        return "the run ended"
    return f"{_named(node)} did not do it, or did not say so, in {wait:g} s; see: ftrun status {found.run.run_id}"


def _named(node: Node) -> str:
    return f"node {node['node']} ({node['host']})"


def _moved(found: Live, facts: dict[str, Any], words: str, begun: float, as_json: bool) -> int:
    seconds = time.monotonic() - begun
    if as_json:
        print(json.dumps({"moved": True, "run": found.run.run_id, **facts, "seconds": round(seconds, 3)}))
    else:
        tell(f"{words}; {seconds:.1f} s")
    return 0


def _not_moved(found: Live, facts: dict[str, Any], whom: str, why: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"moved": False, "run": found.run.run_id, **facts, "why": why}))
    tell(f"error: {whom} was not moved: {why}")
    return 1
