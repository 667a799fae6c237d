"""A node whose ranks are stubs: one process has the agent's side of an incident, another one answers for all of its ranks.

The agent's side is the product's: Peers with its Session, Member and carrier, the machine, the scan of the board, the gate, the world file.
Left out are what makes and ends processes (fork server, fence), detection, the journal and the messages. A stub rank trains nothing:
it answers each stage of a stop on the board as soon as it may, and reads the world file as a worker does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ftrun.control import events as ev
from ftrun.control.machine import Config, RunPhase, advance, initial
from ftrun.core import paths
from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, F, Flag, Head
from ftrun.core.shared.world import newest_world, world_path
from ftrun.host.base.context import LaunchContext
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Nodes, Settings
from ftrun.host.nodes.carriers.carrier import Carrier, Record
from ftrun.host.nodes.membership.open import arrange
from ftrun.host.nodes.membership.session import Opener
from ftrun.host.nodes.membership.terms import Me
from ftrun.host.nodes.node_group import Peers
from ftrun.host.run import gates
from ftrun.host.run.worlds import Worlds
from ftrun.host.rundir.reserve import Reserve
from ftrun.host.workers.pool import Worker, WorkerPool


@dataclass(frozen=True)
class Node:
    """One node. `run`: the name of its run; `ranks`: how many it has; `cells`: of its board, one for each worker that it ever has."""

    folder: Path
    nodes: Nodes
    run: str
    ranks: int
    cells: int


@dataclass
class Tally:
    """What a node did in an incident. `agent_ms`: processor time of its agent, from the first look behind the failure to its open gate."""

    looks: int = 0
    reads: int = 0
    writes: int = 0
    creates: int = 0
    bells: int = 0
    agent_ms: float = 0.0


class Counting:
    """A carrier that notes what is asked of it, and when."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._seen: dict[str, Record] = {}
        self.notes: list[tuple[int, str, int]] = []  # ns, what, how many
        self.looked: list[tuple[int, int]] = []  # ns, and processor time of this process until then
        self.stop_ns = 0  # when this node last asked for a record `stop`

    def note(self, what: str, number: int = 1) -> None:
        self.notes.append((time.monotonic_ns(), what, number))

    @property
    def serves(self) -> bool:
        return self._carrier.serves

    def view(self) -> Mapping[str, Record]:
        self.looked.append((time.monotonic_ns(), time.process_time_ns()))
        view = self._carrier.view()
        self.note("looks")
        # a carrier makes a new object of each record that it reads
        self.note("reads", sum(self._seen.get(name) is not record for name, record in view.items()))
        self._seen = dict(view)
        return view

    def put(self, name: str, record: Record) -> None:
        self.note("writes")
        self._carrier.put(name, record)

    def create(self, name: str, record: Record) -> bool:
        if name.startswith("stop."):
            self.stop_ns = time.monotonic_ns()
        self.note("creates")
        return self._carrier.create(name, record)

    def close(self) -> None:
        self._carrier.close()

    def tally(self, since: int, until: int) -> Tally:
        """Add up what was noted between two times, and forget it."""
        found = Tally()
        for at, what, number in self.notes:
            if since <= at <= until:
                setattr(found, what, getattr(found, what) + number)
        self.notes, self.looked = [], self.looked[-1:]
        return found


class _Helper:
    """Stands for the fd store and the process of the store."""

    pid = 0

    def __init__(self, on_serve: Callable[[], None]) -> None:
        self._on_serve = on_serve

    def send(self, message: dict[str, Any]) -> None:
        if message["op"] == "serve":
            self._on_serve()

    def began(self, pid: int) -> None:
        """Do nothing: there is no process."""


class _Services:
    """Stands for the services: a store that is up at once, at an address where nobody meets."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self.store = _Helper(lambda: None)
        self.fd_store = _Helper(lambda: loop.after(0.0, lambda: self.on_serving(1)))
        self.on_serving: Callable[[int], None] = lambda port: None
        self.on_store: Callable[[dict[str, Any]], None] = lambda message: None

    def start_store(self, addr: str, port: int, fixed: bool) -> None:
        self._loop.after(0.0, lambda: self.on_store({"op": "store", "pid": 0, "host": addr, "port": port or 1}))

    def retire_store(self) -> None:
        """Do nothing."""

    def guard(self) -> None:
        """Do nothing."""

    def is_current(self, message: dict[str, Any]) -> bool:
        return True


class _Listener:
    def __init__(self) -> None:
        self.queue: deque[ev.Event] = deque()
        self.on_event = self.queue.append
        self.said: list[str] = []

    def note(self, what: str, **facts: Any) -> None:
        """Do nothing: there is no journal."""

    def log(self, line: str, level: str = "info") -> None:
        self.said.append(line)


class StubAgent:
    """The agent of one node. `parent` hears when the node is up, when its gate opened, and when it runs again."""

    def __init__(self, node: Node, parent: Connection) -> None:
        self._folder = node.folder
        self._parent = parent
        self._listener = _Listener()
        self._board = Board.open(node.folder / paths.BOARD)
        self._loop = EventLoop()
        # a "program": the pool watches no locks, which stub ranks do not hold
        settings = Settings(argv=("stub",), kind="program", nproc=node.ranks, spares=0, nodes=node.nodes)
        context = LaunchContext(settings, node.folder, node.folder / "logs", self._board, self._loop, self._listener)
        meeting = arrange(node.nodes, node.run, node.ranks, max_restarts=0)
        assert meeting is not None
        self._carrier: Counting | None = None
        self._peers = Peers(context, replace(meeting, opener=self._counted(meeting.opener)))
        self._peers.listen(self)
        services = _Services(self._loop)
        logs: Any = type("NoLogs", (), {"rank_offset": 0})()
        self._pool = WorkerPool(context, logs, set)
        stands_for: Any = services
        self._worlds = Worlds(context, stands_for, self._pool, self._peers, self, Reserve(node.folder, self._listener.log))
        services.on_store, services.on_serving = self._worlds.on_store, self._peers.serves
        self._config = Config(nproc=node.ranks, shared=True, max_replacements=1000)
        self._state = initial(self._config)
        self._opened_cpu = self._failed_cpu = 0
        self._over = False

    def _counted(self, opener: Opener) -> Opener:
        def opened(stopped: Callable[[], bool], on_trouble: Callable[[str], None]) -> tuple[Carrier, Me] | None:
            found = opener(stopped, on_trouble)
            if found is None:
                return None
            self._carrier = Counting(found[0])
            return self._carrier, found[1]

        return opened

    def run(self) -> None:
        bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._loop.watch(bell, lambda: self._rang(bell), urgent=True)
        self._loop.watch(self._parent.fileno(), self._asked)
        sys.addaudithook(self._heard_of)
        threading.Thread(target=self._listen, args=(bell,), daemon=True).start()
        self._peers.start(self._worlds)
        parent = os.getppid()
        while not self._over and os.getppid() == parent:
            self._loop.run_once(1.0)
            self._pump()
        self._board[Head.ENDING] = 1
        self._board.ring_workers()
        self._peers.close()

    # -- what the product's agent does ---------------------------------------------------------------------------------

    def _listen(self, bell: int) -> None:
        while not self._over:
            seen = self._board.launcher_bell.count()
            os.eventfd_write(bell, 1)
            self._board.launcher_bell.wait(seen, 1.0)

    def _rang(self, bell: int) -> None:
        os.eventfd_read(bell)
        self._pool.scan()

    def _pump(self) -> None:
        queue = self._listener.queue
        while queue:
            event = queue.popleft()
            worker = self._state.worker(event.worker) if isinstance(event, (ev.Dying, ev.Died)) else None
            if isinstance(event, ev.WorldStops) and not self._peers.is_news(event):
                continue
            before = self._state
            self._state, actions = advance(self._config, self._state, event)
            self._peers.saw(event, actions, None if worker is None else worker.rank)
            for action in actions:
                self._do(action)
            ready = self._state.phase is RunPhase.RUNNING and not self._state.recovering and self._state.armed
            if ready and not (before.phase is RunPhase.RUNNING and not before.recovering and before.armed):
                self._parent.send(("running", self._state.generation))

    def _do(self, action: ev.Action) -> None:
        if isinstance(action, ev.Spawn):
            Board.make_room(self._folder / paths.BOARD, action.worker)
            self._pool.workers[action.worker] = Worker(self._board.cell(action.worker), self._peers.global_rank(action.rank or 0))
        elif isinstance(action, ev.CloseGate):
            last = gates.close(self._board, action.generation, undecided=True)
            self._listener.queue.append(ev.GateClosed(time.monotonic(), action.generation, last))
        elif isinstance(action, ev.DecideGate):
            gates.decide(self._board, action.generation, action.resume)
        elif isinstance(action, ev.ResetGate):
            gates.reset(self._board, action.generation)
        elif isinstance(action, ev.Publish):
            self._worlds.publish(action)
        elif isinstance(action, ev.TellRestored):
            self._peers.restored(action, 0, made=False)
        elif isinstance(action, ev.OpenGate):
            gates.reopen(self._board, action.generation)
            self._opened_cpu = time.process_time_ns()
            self._parent.send(("opened", time.monotonic_ns()))
        elif isinstance(action, ev.Fence):
            self._board.cell(action.worker)[F.FENCED] = 1
            self._pool.workers.pop(action.worker, None)
        elif isinstance(action, ev.End):
            self._parent.send(("ended", f"{action.reason}; {self._listener.said}"))
            self._over = True

    # -- WorldListener -------------------------------------------------------------------------------------------------

    def generation(self) -> int:
        return self._state.generation

    def seen(self, nodes: list[Record]) -> None:
        """Do nothing: nobody looks at the other nodes."""

    def asked(self, request: Record) -> None:
        raise AssertionError(f"nobody asks for {request}")

    def refused(self, why: str) -> None:
        raise AssertionError(why)

    def on_met(self) -> None:
        self._listener.on_event(self._peers.begins())

    def on_published(self, action: ev.Publish) -> None:
        self._worlds.hand_over(action)

    # -- what the benchmark asks ---------------------------------------------------------------------------------------

    def _heard_of(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.sendto" and self._carrier is not None:  # only bells send datagrams
            self._carrier.note("bells")

    def _asked(self) -> None:
        what, *arguments = self._parent.recv()
        assert self._carrier is not None
        if what == "fail":
            self._failed_cpu = time.process_time_ns()
            cell, now = self._state.holder[arguments[0]], time.monotonic()
            assert cell is not None
            self._listener.on_event(ev.Dying(now, cell))
            self._listener.on_event(ev.Died(now, cell, "SIGKILL", 137, 0))
        elif what == "began":
            self._parent.send(("began", self._carrier.stop_ns))
        elif what == "report":
            since, until = arguments
            began = self._failed_cpu or next((cpu for at, cpu in self._carrier.looked if at >= since), self._opened_cpu)
            found = self._carrier.tally(since, until)
            found.agent_ms, self._failed_cpu = (self._opened_cpu - began) / 1e6, 0
            self._parent.send(("report", found))
        else:
            self._over = True


class StubRanks:
    """Answers for all ranks of a node. `parent` hears how many bytes each of them read, and the processor time of all."""

    def __init__(self, node: Node, parent: Connection) -> None:
        self._folder = node.folder
        self._parent = parent
        self._board = Board.open(node.folder / paths.BOARD)
        self._cells: list[int] = []
        self._stopped = self._entered = self._resumed = 0  # generations

    def run(self) -> None:
        board, began, read, parent = self._board, time.process_time_ns(), 0, os.getppid()
        while not board[Head.ENDING] and os.getppid() == parent:
            seen = board.worker_bell.count()
            word = gate.unpack(board.gate())
            if self._cells and word.closed and word.generation > self._stopped:
                began = time.process_time_ns()
                self._stopped = word.generation
                self._answer(F.STOPPED, F.CLEANED)
            if board[Head.PUBLISHED] > self._entered:
                read = self._enter()
            if not word.closed and self._resumed < word.generation == self._entered:
                self._resumed = word.generation
                self._parent.send(("read", read, (time.process_time_ns() - began) / 1e6))
                if self._stopped:
                    self._answer(F.RESUMED, F.FIRST_DONE)
            board.worker_bell.wait(seen, 0.5)

    def _answer(self, *stages: int) -> None:
        for index in self._cells:
            cell = self._board.cell(index)
            if not cell[F.FENCED]:
                for stage in stages:
                    cell[stage] = self._stopped
                    self._board.launcher_bell.ring()

    def _enter(self) -> int:
        """Read the new world once for each rank, as each worker does, and meet in it; return the bytes that each has read."""
        world = newest_world(self._folder, self._board)
        for _ in world.places[1:]:
            newest_world(self._folder, self._board)
        self._entered, self._cells = world.generation, [place.cell for place in world.places]
        for index in self._cells:
            self._board.cell(index).add_flag(Flag.ALIVE | Flag.GROUP | Flag.PROTECTED | Flag.LOOPING)
        self._board.launcher_bell.ring()
        if not world.fresh:
            self._answer(F.READY)
            self._answer(F.RESET, F.RESTORED)
        return world_path(self._folder, world.generation).stat().st_size


def run(node: Node, agent: Connection, ranks: Connection) -> None:
    """Be a node, in two processes, until the parent says that it may leave."""
    node.folder.mkdir(mode=0o700)
    Board.create(node.folder / paths.BOARD, node.cells)
    child = os.fork()
    if not child:
        code = 1
        try:
            StubRanks(node, ranks).run()
            code = 0
        finally:
            os._exit(code)
    try:
        StubAgent(node, agent).run()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
