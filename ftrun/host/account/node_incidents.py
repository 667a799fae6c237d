"""Shows the other nodes what an incident of the world was on this one, under "incidents", and journals what it was on each of them.

No clocks are compared: each node's times are durations, from the fault where a rank of it failed, else from when it heard of the incident.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from ftrun.control.events import Action, CloseGate, Publish, Say
from ftrun.core.account import Account, Incident
from ftrun.host.account.incident import measured
from ftrun.host.base.context import LaunchContext
from ftrun.host.nodes.node_group import Peers

SUBJECT = "incidents"
_SHOWN = 8  # newest incidents
_NAMED = 4  # most victims to name
_VICTIM = ("rank", "cause", "step", "phase")


class NodeIncidents:
    """One per run."""

    def __init__(self, context: LaunchContext, nodes: Peers) -> None:
        self._board = context.board
        self._note = context.listener.note
        self._nodes = nodes
        self._heard = 0  # when this node first heard of the incident that goes on, monotonic ns; 0 = none does
        self._shown: list[dict[str, Any]] = []
        self._known: set[tuple[str, int, int]] = set()  # id of a node, round and number of an incident that is journalled

    def saw(
        self, actions: Iterable[Action], account: Account, generation: int, incident: tuple[int, int], holders: Mapping[int, int]
    ) -> None:
        """Note what the machine ordered.

        Args:
            account: That of this node, with what the machine ordered.
            generation: The machine's, as of then.
            incident: Round and number of the newest incident of the world, as of then.
            holders: Maps ranks of the world to the cells of their workers on this node.
        """
        for action in actions:
            if isinstance(action, CloseGate):
                self._heard = self._heard or time.monotonic_ns()
            elif isinstance(action, Publish) and action.fresh:
                self._heard = 0
            elif isinstance(action, Say) and action.what == "recovered" and self._heard:
                self._over(account, generation, incident, holders)

    def seen(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        """Journal what other nodes show of incidents, each once."""
        for entry in nodes:
            if entry["here"] or entry["node"] is None:
                continue
            for told in entry["shows"].get(SUBJECT, {}).get("newest", ()):
                key = str(entry["id"]), int(told["round"]), int(told["number"])
                if key not in self._known:
                    self._known.add(key)
                    self._note("node-incident", node=entry["node"], host=str(entry["host"]), here=False, own=None, **told)

    def _over(self, account: Account, generation: int, incident: tuple[int, int], holders: Mapping[int, int]) -> None:
        heard, self._heard = self._heard, 0
        own = len(account.incidents) if account.incidents and account.incidents[-1]["generation"] == generation else None
        facts = account.incidents[-1] if own else measured(Incident(heard, heard, generation=generation), self._board, holders)
        told = {
            "round": incident[0],
            "number": incident[1],
            "victims": [{name: victim[name] for name in _VICTIM} for victim in facts["victims"][:_NAMED]],
            "ms": {part: round(value, 1) for part, value in facts["ms"].items()},
            "total_ms": round(facts["total_ms"], 1),
            "sources": {rank: source["name"] for rank, source in [*facts["sources"].items()][:_SHOWN]},
        }
        self._shown = [*self._shown, told][-_SHOWN:]
        self._nodes.shows(SUBJECT, {"newest": self._shown})
        self._note("node-incident", node=self._nodes.place.node, host="", here=True, own=own, **told)
