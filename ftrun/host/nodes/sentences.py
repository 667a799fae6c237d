"""Sentences for a person about the other nodes. Words only."""

from __future__ import annotations

from ftrun.core.amounts import count
from ftrun.host.nodes.membership.table import NodePlace


def waiting_for_nodes(here: int, least: int, most: int, patience: float, last_call: float) -> str:
    if here < least:
        return f"{count(here, 'node')} of {least} here; waiting at most {patience:g} s for the others"
    return f"{count(here, 'node')} here, room for {most}; waiting {last_call:g} s for more"


def world_ready(place: NodePlace, workers: int, store: str, why: str) -> str:
    last = place.first_rank + workers - 1
    ranks = f"rank {last}" if workers == 1 else f"ranks {place.first_rank} to {last}"
    after = f" after: {why}" if why else ""
    again = (
        f" (restart {place.restarts} of the run{after})" if place.restarts else f" ({after.strip()})" if after else ""
    )
    return (
        f"world of {count(place.world_size, 'worker')} on {count(place.nodes, 'node')}{again}; "
        f"this is node {place.node} with {ranks}, store at {store}"
    )


def node_done(nodes: int) -> str:
    return f"every worker of this node is done; waiting for the other{'s' if nodes > 2 else ''}"
