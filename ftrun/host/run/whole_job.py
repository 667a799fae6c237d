"""What the launcher of one of several nodes shows the others of this one, and does for them. A run on one node has nothing of it."""

from __future__ import annotations

from collections.abc import Iterable

from ftrun.control.events import Action
from ftrun.faults.requests import Request
from ftrun.host.account.incident_reporter import Narrator
from ftrun.host.account.node_incidents import NodeIncidents
from ftrun.host.account.node_status import NodeStatus
from ftrun.host.account.run_head import Stall
from ftrun.host.base.context import LaunchContext
from ftrun.host.nodes.node_group import Peers
from ftrun.host.run.drains import DrainDesk


class WholeJob:
    """One per launch."""

    def __init__(self, context: LaunchContext, nodes: Peers, narrator: Narrator) -> None:
        self._narrator = narrator
        self._status = NodeStatus(context.board, nodes, context.run_dir.name, context.settings.spares)
        self._incidents = NodeIncidents(context, nodes)
        self._drains = DrainDesk(context, nodes, lambda: narrator.holders, lambda: narrator.account)

    def saw(self, actions: Iterable[Action], generation: int) -> None:
        """Note what the machine ordered, after the account of it."""
        self._incidents.saw(actions, self._narrator.account, generation, self._narrator.holders)

    def look(self, stall: Stall | None, quarantined: int) -> None:
        """Show how this node is, and go on with drains. `quarantined` counts devices."""
        self._status.show(self._narrator.account, self._narrator.holders, stall, quarantined)
        self._drains.look()

    def passes_on(self, request: Request) -> None:
        """Ask another node, or this one, for what a command asked of this launcher."""
        self._drains.passes_on(request)
