"""What the launcher of one of several nodes shows the others of this one, and does for them. A run on one node has nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ftrun.control.events import Action
from ftrun.faults.requests import Request
from ftrun.faults.trigger import Firing
from ftrun.host.account.incident_reporter import Narrator
from ftrun.host.account.node_incidents import NodeIncidents
from ftrun.host.account.node_status import NodeStatus
from ftrun.host.account.run_head import Stall
from ftrun.host.base.context import LaunchContext
from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.node_group import Peers
from ftrun.host.run.drains import DrainDesk


class WholeJob:
    """One per launch."""

    def __init__(self, context: LaunchContext, nodes: Peers, narrator: Narrator) -> None:
        self._nodes = nodes
        self._narrator = narrator
        self._status = NodeStatus(context.board, nodes, context.run_dir.name, context.settings.spares)
        self._incidents = NodeIncidents(context, nodes)
        self._drains = DrainDesk(context, nodes, lambda: narrator.holders, lambda: narrator.account)
        nodes.listen(self)

    # -- JobListener -------------------------------------------------------------------------------------------------

    def seen(self, nodes: list[Record]) -> None:
        self._incidents.seen(nodes)

    def asked(self, request: Record) -> None:
        self._drains.asked(request)

    def refused(self, why: str) -> None:
        self._drains.refused(why)

    # -- the agent ---------------------------------------------------------------------------------------------------

    def saw(self, actions: Iterable[Action], generation: int) -> Callable[[], None]:
        """Return what is to be done about the machine's orders once the account has them."""
        incident = self._nodes.incident  # the next one may have begun by then
        narrator = self._narrator
        return lambda: self._incidents.saw(actions, narrator.account, generation, incident, narrator.holders)

    def fired(self, firing: Firing) -> None:
        """Hear that a rank waits between two steps for its end."""
        self._drains.fired(firing)

    def look(self, stall: Stall | None, quarantined: int) -> None:
        """Show how this node is, and go on with drains. `quarantined` counts devices."""
        self._status.show(self._narrator.account, self._narrator.holders, stall, quarantined)
        self._drains.look()

    def passes_on(self, request: Request) -> None:
        """Ask another node, or this one, for what a command asked of this launcher."""
        self._drains.passes_on(request)
