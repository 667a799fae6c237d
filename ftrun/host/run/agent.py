"""The launcher's mind loop: feeds the machine with events, in one place, and carries out what it orders.

Handlers elsewhere only enqueue events. Everything that is not an order of the machine (sentences, journal lines)
waits until no event is left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftrun.control import events as ev
from ftrun.control.machine import Config, IllegalEvent, Phase, State, advance, initial
from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, Head
from ftrun.core.shared.world import Place, World, write_world
from ftrun.core.system.procfs import reaped
from ftrun.host.account import messages
from ftrun.host.account.failure_report import Failures
from ftrun.host.account.incident_reporter import Narrator
from ftrun.host.base.loop import Loop
from ftrun.host.base.settings import Settings
from ftrun.host.detect.detectors import Detectors
from ftrun.host.devices.devices import DeviceWatch
from ftrun.host.nodes.node_group import Peers
from ftrun.host.output.logs import Logs
from ftrun.host.run import gates
from ftrun.host.run.fault_injection import FaultDesk
from ftrun.host.run.shutdown import Ending
from ftrun.host.run.signal_forwarding import Forwarder
from ftrun.host.run.spec import Specs
from ftrun.host.rundir.journal import Journal
from ftrun.host.rundir.reserve import Reserve
from ftrun.host.services.services import Services
from ftrun.host.workers.pool import WorkerPool

SERVICES_LOG = "services.log"
_SPARE_LOOK = 0.05  # seconds between two looks whether spares may start
_SPARE_PATIENCE = 3.0  # seconds after which they start anyhow: the script may never make a step
_RESERVE_AGAIN = 1.0  # seconds after a world was published until room for another one is looked for
_LOOK_AGAIN = 0.5  # seconds between two looks at the board when nobody rings


class Agent:
    """One run. `run` returns the exit code once every worker has ended."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        board: Board,
        loop: Loop,
        services: Services,
        journal: Journal,
        logs: Logs,
        say: Callable[..., None],
        peers: Peers | None = None,
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._run_dir = run_dir
        self._board = board
        self._loop = loop
        self._services = services
        self._journal = journal
        self._logs = logs
        run_id = settings.rdzv_id or (peers.run_id if peers else run_dir.name)
        self._specs = Specs(settings, run_dir, str(logs.folder.absolute()), run_id)
        self._say = say
        self._config = Config(
            nproc=settings.nproc,
            spares=settings.spares,
            max_restarts=settings.max_restarts,
            max_replacements=settings.max_replacements,
            start_timeout=settings.start_timeout,
            stop_timeout=settings.stop_timeout,
            recover_timeout=settings.recover_timeout,
            shutdown_timeout=settings.shutdown_timeout,
            shared=peers is not None,
            replacement_window=settings.window,
            device_faults=settings.device_faults,
            wait_for_device=settings.wait_for_device,
            policy=settings.policy,
        )
        self._state: State = initial(self._config)
        self._spares_due: list[ev.Spawn] = []
        self._queue: deque[ev.Event] = deque()
        self._later: list[Callable[[], None]] = []
        self._pool = WorkerPool(run_dir, board, loop, logs, self._queue.append, journal.note, services.pids)
        self._pool.locked = settings.kind != "program"
        self._narrator = Narrator(run_dir, board, logs.folder / SERVICES_LOG, say, journal.note)
        self._failures = Failures(self._pool.workers, logs.folder, settings.output, settings.max_restarts, say)
        self._ending = Ending(self._pool, board, loop, settings.shutdown_timeout, say, journal.note)
        self._forwarder = Forwarder(self._pool, loop, settings.nproc, say, journal.note)
        self._devices = DeviceWatch(run_dir, board, loop, services, self._pool, settings.quarantine_file)
        self._devices.tell(self._queue.append, say, journal.note)
        self._devices.ask(lambda: self._state, self._world_rank)
        self._detectors = Detectors(settings, run_dir, logs.folder, board, self._pool, self._queue.append)
        self._faults = FaultDesk(settings, run_dir, board, self._pool, journal.note, say, self._devices.heard)
        self._reserve = Reserve(run_dir, say)
        self._deadlines: dict[str, object] = {}
        self._store: tuple[str, int] | None = None
        self._store_asked = False
        self._store_port = settings.nodes.master_port if peers is None else 0  # where the next store is to listen
        self._store_addr = "127.0.0.1" if peers is None else ""  # "" = the store of this world is another node's
        self._began = False
        self._unpublished: ev.Publish | None = None
        self._end: ev.End | None = None
        self._stop_listening = False
        journal.header({**self._config.to_json(), "settings": settings.to_json()})

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.watch(bell, lambda: self._bell_rang(bell), urgent=True)
        listener = threading.Thread(target=self._listen, args=(bell,), name="ftrun-bell", daemon=True)
        listener.start()
        self._services.fork_server.attach(self._loop)
        self._services.fd_store.attach(self._loop)
        self._devices.start()
        if self._peers is not None:
            self._peers.start(self)
        self._loop.after(self._detectors.pause, self._watch_beats)
        try:
            while not self._over():
                self._loop.run_once(1.0 if self._end else 3600.0)
                self._pump()
        finally:
            self._stop_listening = True
            self._detectors.close()
            if self._peers is not None:
                self._peers.close()
            self._board.ring_launcher()
            listener.join(2.0)
            self._loop.forget(bell)
            os.close(bell)
        assert self._end is not None
        return self._end.code

    def _over(self) -> bool:
        if self._end is None:
            return False
        return self._state.phase is Phase.ENDED or not any(w.pid for w in self._pool.living())

    def _listen(self, bell: int) -> None:
        # a thread of its own, because a futex cannot be waited for together with descriptors
        while not self._stop_listening:
            seen = self._board.launcher_bell()
            os.eventfd_write(bell, 1)
            self._board.wait_launcher(seen, _LOOK_AGAIN)

    def _bell_rang(self, bell: int) -> None:
        os.eventfd_read(bell)
        self._pool.scan()
        self._faults.look()

    def _pump(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            try:
                self._state, actions = advance(self._config, self._state, event)
            except IllegalEvent as error:
                self._journal.note("illegal", event=event.to_json(), error=str(error))
                continue
            if isinstance(event, ev.GateClosed):
                self._later.append(lambda last=event.last: self._narrator.closed(last))  # type: ignore[misc]
            if self._peers is not None:
                self._peers.saw(event, actions)
            for action in actions:
                self._do(action)
            self._devices.waited_for(self._state.waiting)
            self._journal.event(event, actions, str(self._state.phase), self._state.generation)
            world = self._of_the_world(actions)
            self._later.append(lambda e=event, a=world: self._failures.saw(e, a))  # type: ignore[misc]
            told = (event, world, self._state.phase, self._loop.woke)
            self._later.append(lambda t=told: self._narrator.saw(*t))  # type: ignore[misc]
        later, self._later = self._later, []
        for call in later:
            call()
        self._journal.flush()

    # -- what the machine orders -------------------------------------------------------------------------------------

    def _do(self, action: ev.Action) -> None:
        handler = _ACTIONS.get(type(action))
        if handler is not None:  # Say is the narrator's
            handler(self, action)

    def _spawn(self, action: ev.Spawn) -> None:
        """Fork now; a spare waits for a quiet moment, since its start would slow the step that everyone waits for."""
        if action.rank is None:
            if not self._spares_due:
                self._loop.after(_SPARE_LOOK, lambda: self._start_spares(time.monotonic() + _SPARE_PATIENCE))
            self._spares_due.append(action)
        else:
            self._fork(action)

    def _start_spares(self, latest: float) -> None:
        settled = self._state.phase is Phase.RUNNING and not self._state.recovering
        stepped = gate.unpack(self._board.gate()).last >= 0
        if not (settled and stepped) and time.monotonic() < latest and self._end is None:
            self._loop.after(_SPARE_LOOK, lambda: self._start_spares(latest))
            return
        due, self._spares_due = self._spares_due, []
        for action in due:
            if self._state.worker(action.worker) is not None:
                self._fork(action)

    def _fork(self, action: ev.Spawn) -> None:
        if self._end is not None:
            return
        try:
            worker = self._pool.add(action.worker, self._world_rank(action.rank), self._attempt(self._state.attempt))
        except IndexError:
            self._say("this run has had more workers than it can count; it ends")
            self._queue.append(ev.Signalled(time.monotonic(), signal.SIGTERM))
            return
        if worker is None or worker.log is None:
            return
        store, place = self._store or ("127.0.0.1", 0), self._peers.place if self._peers else None
        spec = self._specs.of(worker, store, self._attempt(self._state.attempt), place)
        self._services.fork(worker.index, spec, worker.log.out_w, worker.log.err_w)

    def _close_gate(self, action: ev.CloseGate) -> None:
        last = gates.close(self._board, action.generation)
        self._queue.append(ev.GateClosed(time.monotonic(), action.generation, last))

    def _publish(self, action: ev.Publish) -> None:
        if self._store is None:
            self._unpublished = action  # nobody could meet in a store that is not there
            return
        host, port = self._store
        place = self._peers.place if self._peers else None
        first = place.first_rank if place else 0
        world = World(
            generation=action.generation,
            resume=action.resume,
            places=tuple(Place(first + local, local, cell) for local, cell in enumerate(action.workers)),
            store_host=host,
            store_port=port,
            replaced=action.replaced,
            lost={str(rank): cell for rank, cell in zip(action.replaced, action.lost, strict=True)},
            tail=action.tail,
            fresh=action.fresh,
            attempt=self._attempt(action.attempt),
            group_rank=place.node if place else 0,
            rollback=action.rollback,
            devices=action.devices,
        )
        if action.fresh and action.attempt:
            self._services.fd_store.send({"op": "drop"})
        if action.rollback:
            gates.rewind(self._board, action.generation, action.resume)
        self._board[Head.ATTEMPT] = world.attempt
        self._reserve.write(lambda: write_world(self._run_dir, world))
        self._board[Head.PUBLISHED] = action.generation
        self._board.ring_workers()
        self._later.append(lambda: self._published(action))

    def _published(self, action: ev.Publish) -> None:
        self._loop.after(_RESERVE_AGAIN, self._reserve.keep)
        spares: dict[int, int] = {}
        for rank, cell in enumerate(action.workers):
            worker = self._pool.workers.get(cell)
            if worker is not None:
                if worker.was_spare and worker.rank is None:
                    spares[rank] = cell
                self._pool.take_rank(cell, self._world_rank(rank), self._attempt(action.attempt))
        self._narrator.published(action, spares)

    def _deadline(self, action: ev.Deadline) -> None:
        token = object()
        self._deadlines[action.name] = token

        def passed() -> None:
            if self._deadlines.get(action.name) is token:
                self._queue.append(ev.Expired(time.monotonic(), action.name, action.generation))

        self._loop.after(action.seconds, passed)

    def _start_service(self, action: ev.StartService) -> None:
        if self._end is not None:
            return
        if action.service == "fork server":
            self._services.start_fork_server()
        elif action.service == "fd store":
            self._services.start_fd_store()
        else:
            if self._services.store_pid and self._peers is None:
                self._store_port = self._settings.nodes.master_port
            self._services.retire_store()
            if self._peers is None:
                self._ask_store()
            else:
                self._store, self._store_addr = None, ""
                self._peers.next_round()

    def _finish(self, action: ev.End) -> None:
        self._end = action

    # -- what the outside says ---------------------------------------------------------------------------------------

    def heard(self, service: str, message: dict[str, Any]) -> None:
        """A helper said something."""
        now, op = time.monotonic(), message["op"]
        if service == "nvml":
            self._devices.heard(message)
        elif op == "forked":
            self._pool.forked(message["cell"], message["pid"])
            if self._end is not None:
                self._pool.fence(message["cell"])
            self._pool.scan()
        elif op == "exit":
            self.exited(message["pid"], message["status"])
        elif op in ("store-forked", "store", "store-failed") and not self._services.is_current(message):
            return  # two orders crossed: workers would look for each other in a store that is gone
        elif op == "store-forked":
            self._services.store_pid = message["pid"]
        elif op == "store":
            self._services.store_pid = message["pid"]
            self._services.guard()
            if self._peers is None:
                self.meet((message["host"], message["port"]))
            else:
                self._peers.store_up(message["host"], message["port"])
        elif op == "store-failed":
            self._queue.append(ev.WorldEnded(now, 1, messages.cannot_listen(message)))
        elif op == "ready":
            self._ready(service, message, now)

    def _ready(self, service: str, message: dict[str, Any], now: float) -> None:
        self._journal.note("service", service=service, pid=self._services.helper(service).pid, facts=message)
        if message.get("unfit"):
            self._services.stop_preloading()
            self._say(messages.cannot_fork(message["unfit"]), "warning")
        if service == "fork server" and self._store is None and not self._store_asked and self._store_addr:
            self._ask_store()
        if service == "fd store":
            self._board[Head.FD_STORE_EPOCH] = self._board[Head.FD_STORE_EPOCH] + 1
            self._board.ring_workers()
        self._services.guard()
        if self._began:
            self._queue.append(ev.ServiceReady(now, service))

    def _ask_store(self) -> None:
        self._store = None
        self._store_asked = True
        self._services.start_store(self._store_addr, self._store_port, self._settings.nodes.master_port > 0)

    # -- several nodes -----------------------------------------------------------------------------------------------

    def happened(self, event: ev.Event) -> None:
        """Another node did something; the machine hears of it with the next turn of the loop."""
        self._queue.append(event)

    def serve_world(self, addr: str) -> None:
        """The workers of all nodes are to meet in a store of ours."""
        self._store_addr = addr
        self._services.retire_store()
        self._ask_store()

    def meet(self, store: tuple[str, int]) -> None:
        """The store is up and, with several nodes, everyone is there."""
        self._store = store
        self._logs.rank_offset = self._world_rank(0)
        if self._began:
            self._queue.append(ev.ServiceReady(time.monotonic(), "store"))
        else:
            self._began = True
            self._devices.once_known(lambda: self._queue.append(ev.Begin(time.monotonic())))
        if self._unpublished is not None:
            action, self._unpublished = self._unpublished, None
            if action.generation == self._state.generation:  # else the world was stopped again since
                self._publish(action)

    def _world_rank(self, local: int | None) -> Any:
        """The machine counts this node's ranks from 0; everybody else counts those of the world."""
        return local if local is None or self._peers is None else self._peers.global_rank(local)

    def _attempt(self, own: int) -> int:
        """The machine counts this node's worlds, everybody else the restarts that the run has spent."""
        return own if self._peers is None else self._peers.place.restarts

    def _of_the_world(self, actions: tuple[ev.Action, ...]) -> tuple[ev.Action, ...]:
        def seen(action: ev.Action) -> ev.Action:
            if isinstance(action, ev.Say):
                return replace(action, rank=self._world_rank(action.rank))
            return replace(action, attempt=self._attempt(action.attempt)) if isinstance(action, ev.Publish) else action

        return tuple(seen(action) for action in actions)

    def exited(self, pid: int, code: int) -> None:
        """A process was reaped, by us or by the fork server."""
        if self._pool.exited(pid, code):
            return
        service = self._services.which(pid)
        if service is None:
            return
        if service == "nvml":
            self._devices.ended(code)
            return
        self._journal.note("service-exit", service=service, pid=pid, code=code)
        if service == "fork server":
            self._services.fork_server.ended()
            self._pool.order_lost(self._services.fork_server.waiting_forks())
            if self._store is None and not self._services.store_pid:
                self._store_asked = False
        elif service == "fd store":
            self._services.fd_store.ended()
        else:
            self._services.store_pid = 0
            if self._store is not None and self._peers is None:
                self._store_port = self._store[1]
            self._store = None
        self._queue.append(ev.ServiceDied(time.monotonic(), service))

    def reap(self) -> None:
        """Collect our own ended children: helpers, and workers whose fork server died."""
        for pid, code in reaped():
            self.exited(pid, code)

    def signalled(self, signum: int) -> None:
        """The launcher got a signal that ends the run."""
        if not self._ending.got(signum):
            return
        self._queue.append(ev.Signalled(time.monotonic(), signum))
        if not self._began:
            self._end = ev.End(128 + signum, "signal before the start")

    def forward(self, signum: int) -> None:
        """The launcher got a signal that is meant for the script."""
        if self._end is None:
            self._forwarder.forward(signum)

    def _watch_beats(self) -> None:
        running = self._state.phase is Phase.RUNNING
        holders = [self._pool.workers[c] for c in self._state.holder if c in self._pool.workers]
        whole = len(holders) == self._config.nproc
        self._detectors.look(running, self._state.generation, holders, whole)
        self._loop.after(self._detectors.pause, self._watch_beats)

    def summarize(self) -> None:
        """Say and note what the run cost; after `run`."""
        self._narrator.end(self._end.code if self._end else 1)
        self._faults.end()
        if self._end is not None:
            ending = self._ending
            failure = self._failures.finish(self._end.code, ending.began, ending.signum, ending.killed)
            if failure is not None:
                self._journal.note("failure", **failure)


_ACTIONS: dict[type[ev.Action], Callable[[Agent, Any], None]] = {
    ev.Spawn: Agent._spawn,
    ev.CloseGate: Agent._close_gate,
    ev.OpenGate: lambda agent, action: gates.reopen(agent._board, action.generation),
    ev.ResetGate: lambda agent, action: gates.reset(agent._board, action.generation),
    ev.Publish: Agent._publish,
    ev.Deadline: Agent._deadline,
    ev.StartService: Agent._start_service,
    ev.Terminate: lambda agent, action: agent._ending.terminate(),
    ev.End: Agent._finish,
    ev.Quarantine: lambda agent, action: agent._devices.quarantine(action),
    ev.Probe: lambda agent, action: agent._devices.probe(action),
    ev.Dismiss: lambda agent, action: agent._pool.dismiss(action.worker),
    ev.Fence: lambda agent, action: agent._pool.fence(action.worker),
}
