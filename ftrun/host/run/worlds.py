"""Makes the worlds of a run: starts the store for their workers' rendezvous, and writes the world file, which maps ranks to workers.

The machine counts this node's ranks and restarts from 0; `nodes` translates them to those of the whole run.

Theory of operation. `serve_world` or `next_store` retires the old store. The fork server forks a new one and answers with its address
(`on_store`); the nodes exchange it and call `meet`, which lets the run begin or go on. `publish` writes the world file, then the
generation on the board, then rings; without a store it keeps the order until `meet`.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from ftrun.control import events as ev
from ftrun.control.states import NOWHERE
from ftrun.core import codes
from ftrun.core.shared.board import Head
from ftrun.core.shared.world import Place, World, forget_world, write_world
from ftrun.host.account import messages
from ftrun.host.base.context import LaunchContext
from ftrun.host.nodes.node_group import Peers, SoleNode
from ftrun.host.run import gates
from ftrun.host.rundir.reserve import Reserve
from ftrun.host.services.services import Services
from ftrun.host.workers.pool import WorkerPool

_KEPT = 2  # world files: a worker may be opening the previous one right now
_RESERVE_AGAIN = 1.0  # seconds from a published world to the renewal of the reserve, and between two tries


class WorldListener(Protocol):
    """Receives the news of worlds; the agent, which owns the machine, implements it."""

    def generation(self) -> int:
        """Return the machine's newest generation."""

    def on_met(self) -> None:
        """Begin the run: the workers of this node's first world can meet."""

    def on_published(self, action: ev.Publish) -> None:
        """Hear that a world was published."""


class Worlds:
    """Makes the worlds of one run; `agent` receives the news of each."""

    def __init__(
        self,
        context: LaunchContext,
        services: Services,
        pool: WorkerPool,
        nodes: Peers | SoleNode,
        agent: WorldListener,
        reserve: Reserve,
    ) -> None:
        self._context = context
        self._board = context.board
        self._emit = context.listener.on_event
        self._services = services
        self._pool = pool
        self._nodes = nodes
        self._agent = agent
        self._reserve = reserve
        self._written: list[int] = []  # generations whose files exist
        self.store: tuple[str, int] | None = None  # host and port
        self.met = False  # a store was up once
        self._asked = False
        self._addr = ""  # address on which our store listens; "" = another node has the store
        self._port = nodes.store_port  # 0 = any free port
        self._unpublished: ev.Publish | None = None
        self._went_back = 0  # generation of the last rollback

    # -- the store ---------------------------------------------------------------------------------------------------

    def serve_world(self, addr: str) -> None:
        """Order a store on this node, at `addr`, for the workers' rendezvous."""
        self._addr = addr
        self._services.retire_store()
        self._ask_store()

    def next_store(self) -> None:
        """Retire the store and ask the nodes for another one."""
        if self._services.store.pid:
            self._port = self._nodes.store_port
        self._services.retire_store()
        self.store, self._addr = None, ""
        self._nodes.next_round()

    def _ask_store(self) -> None:
        self.store = None
        self._asked = True
        self._services.start_store(self._addr, self._port, self._context.settings.nodes.master_port > 0)

    def serve_memory(self, address: str, secret: str) -> None:
        """Let other nodes that know `secret` read this node's memory, on `address`."""
        self._services.fd_store.send({"op": "serve", "address": address, "secret": secret})

    def copy_snapshots(self, source: dict[str, Any]) -> None:
        """Copy the host snapshots of the node before this one from now on."""
        self._services.fd_store.send({"op": "copy", **source})

    def fork_server_ready(self) -> None:
        """Repeat an order for a store that went down with the last fork server."""
        if self.store is None and not self._asked and self._addr:
            self._ask_store()

    def fork_server_ended(self) -> None:
        if self.store is None and not self._services.store.pid:
            self._asked = False

    def on_store(self, message: dict[str, Any]) -> None:
        """Handle the fork server's answer to the order for a store."""
        if not self._services.is_current(message):
            return  # two orders crossed: the workers would meet in a store that is gone
        if message["op"] == "store-failed":
            self._emit(ev.WorldEnded(time.monotonic(), 1, messages.cannot_listen(message) + codes.read_on("F106")))
            return
        self._services.store.began(message["pid"])
        if message["op"] == "store":
            self._services.guard()
            self._nodes.store_up(message["host"], message["port"])

    def store_ended(self) -> None:
        """Record the end of the store's process. Workers that have not connected yet will look for the next one on its port."""
        if self.store is not None:
            self._port = self._nodes.same_port(self.store[1])
        self.store = None

    def meet(self, store: tuple[str, int], seated: bool = False) -> None:
        """Let the workers meet at `store` (host and port), after it came up and all nodes joined.

        `seated`: this node takes the place of a lost one in the middle of a repair.
        """
        self._pool.logs.rank_offset = self._nodes.global_rank(0)
        if seated:
            self._forget()  # it may have had a place before, and lost it
        if self.met and not seated:
            self._emit(ev.ServiceReady(time.monotonic(), "store"))
        else:
            self.met = True
            self._agent.on_met()
        self.move(store)

    def move(self, store: tuple[str, int] | None) -> None:
        """Let the workers of the next generations meet at `store`; None: it is not known yet."""
        self.store = store
        if store is None:
            return
        if self._unpublished is not None:
            action, self._unpublished = self._unpublished, None
            if action.generation == self._agent.generation():  # otherwise the world has been stopped again
                self.publish(action)

    # -- the world file ----------------------------------------------------------------------------------------------

    def publish(self, action: ev.Publish) -> None:
        """Write the world file and ring the workers; wait for `meet` while there is no store."""
        if self.store is None:
            self._unpublished = action
            return
        host, port = self.store
        place, attempt = self._nodes.place, self._nodes.attempt(action.attempt)
        if action.rollback:
            self._went_back = action.generation
        replaced = tuple(self._nodes.global_rank(local) for local in action.replaced)
        world = World(
            generation=action.generation,
            resume=action.resume,
            places=tuple(
                Place(self._nodes.global_rank(local), local, cell) for local, cell in enumerate(action.workers)
            ),
            store_host=host,
            store_port=port,
            replaced=replaced,
            lost={rank: cell for rank, cell in zip(replaced, action.lost, strict=True) if cell != NOWHERE},
            tail=action.tail,
            fresh=action.fresh,
            attempt=attempt,
            group_rank=place.node if place else 0,
            rollback=action.rollback,
            devices=action.devices,
            stamp=f"{self._nodes.stamp}-{attempt}-{self._nodes.went_back(self._went_back)}",
            span=self._nodes.span(),
        )
        if action.fresh and action.attempt:
            self._forget()
        if action.rollback:
            gates.decide(self._board, action.generation, action.resume)
            self._board[Head.COPIED] = 0
            self._board.show_snapshot(action.resume)  # every rank has it, and forgets those that came after it
        self._board[Head.ATTEMPT] = world.attempt
        self._reserve.write(lambda: write_world(self._context.run_dir, world))
        self._board[Head.PUBLISHED] = action.generation
        self._board.ring_workers()
        self._written.append(action.generation)
        while len(self._written) > _KEPT:
            forget_world(self._context.run_dir, self._written.pop(0))
        self._agent.on_published(action)

    def _forget(self) -> None:
        """Forget what workers of an earlier world left here."""
        self._board[Head.COPIED] = 0
        self._board.show_snapshot(-1)  # before the fd store drops copies: it makes none again
        self._services.fd_store.send({"op": "drop"})
        self._board[Head.DIFFER] = self._board[Head.EQUAL] = self._board[Head.MADE] = self._board[Head.MISSED] = 0

    def _keep_reserve(self) -> None:
        if not self._reserve.keep():
            self._context.loop.after(_RESERVE_AGAIN, self._keep_reserve)  # somebody may free some room

    def hand_over(self, action: ev.Publish) -> dict[int, int]:
        """Give the workers of a published world their ranks; return the local ranks that spares took, with their cells."""
        self._context.loop.after(_RESERVE_AGAIN, self._keep_reserve)
        spares: dict[int, int] = {}
        for local, cell in enumerate(action.workers):
            worker = self._pool.workers.get(cell)
            if worker is not None:
                if worker.was_spare and worker.rank is None:
                    spares[local] = cell
                self._pool.take_rank(cell, self._nodes.global_rank(local), self._nodes.attempt(action.attempt))
        return spares
