"""Runs the launcher's decision loop: feeds events to the machine and carries out its orders, in one place.

Theory of operation. Handlers elsewhere only enqueue events. `_pump` takes one event at a time, calls `machine.advance`, carries out the
actions at once, and repeats until the queue is empty. Only then do the reports run (messages, incident account, head of the board).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ftrun.control import events as ev
from ftrun.control import incidents
from ftrun.control.machine import Config, IllegalEvent, RunPhase, State, advance, initial
from ftrun.core import codes, paths
from ftrun.core.errors import EXIT_UNAVAILABLE
from ftrun.core.shared.board import Board, F, Head
from ftrun.core.system.procfs import reaped
from ftrun.host.account import messages
from ftrun.host.account.failure_report import Failures
from ftrun.host.account.incident_reporter import Narrator
from ftrun.host.account.run_head import RunHead
from ftrun.host.base.context import LaunchContext
from ftrun.host.base.settings import Settings
from ftrun.host.detect.detectors import Detectors
from ftrun.host.detect.helpers import HelperWatch
from ftrun.host.devices.devices import DeviceWatch
from ftrun.host.nodes.node_group import Peers, SoleNode
from ftrun.host.output.logs import Logs
from ftrun.host.run import gates
from ftrun.host.run.fault_injection import FaultDesk
from ftrun.host.run.listener import RunListener
from ftrun.host.run.shutdown import Ending
from ftrun.host.run.signal_forwarding import Forwarder
from ftrun.host.run.spares import Spares
from ftrun.host.run.spec import Specs
from ftrun.host.run.whole_job import WholeJob
from ftrun.host.run.worlds import Worlds
from ftrun.host.rundir.journal import Journal
from ftrun.host.rundir.reserve import Reserve, trouble
from ftrun.host.services.metrics_exporter import Monitoring
from ftrun.host.services.services import Services
from ftrun.host.workers.pool import Worker, WorkerPool

_LOOK_AGAIN = 10.0  # seconds between two looks at the board without a ring: only a death loses a ring, and a death is noticed anyway
_SPARE_LATER = 30.0  # seconds until another try to fork a spare whose cell found no room


class Agent:
    """Runs one launch to its end; `run` returns the exit code once every worker has ended."""

    def __init__(
        self,
        context: LaunchContext,
        listener: RunListener,
        services: Services,
        journal: Journal,
        logs: Logs,
        nodes: Peers | SoleNode,
        monitoring: Monitoring,
    ) -> None:
        settings = context.settings
        self._run_dir = context.run_dir
        self._board = context.board
        self._loop = context.loop
        self._queue = listener.queue
        self._log = listener.log
        self._services = services
        self._logs = logs
        self._journal = journal
        self._nodes = nodes
        self._specs = Specs(settings, context.run_dir, str(context.logs.absolute()), settings.rdzv_id or nodes.run_id)
        self._config = _config(settings, shared=isinstance(nodes, Peers))
        self._state: State = initial(self._config)
        self._later: list[Callable[[], None]] = []
        self._deadlines: dict[str, object] = {}
        self._end: ev.End | None = None
        self._told_fresh = False  # the user knows why workers are no forks
        self._stop_listening = False
        self._pool = WorkerPool(context, logs, services.pids)
        self._narrator = Narrator(context, nodes.global_rank)
        self._head = RunHead(context.board, nodes.global_rank, journal.note)
        self._job = WholeJob(context, nodes, self._narrator) if isinstance(nodes, Peers) else None
        self._failures = Failures(context, self._pool.workers)
        self._ending = Ending(context, self._pool)
        self._forwarder = Forwarder(context, self._pool)
        self._devices = DeviceWatch(context, services, self._pool, lambda: self._state, nodes.global_rank)
        self._detectors = Detectors(context, self._pool, nodes)
        self._helpers = HelperWatch(context, services, lambda pid: self.exited(pid, None))
        self._monitoring = monitoring
        self._faults = FaultDesk(context, self._pool, self._devices.on_message, self._job)
        self._reserve = Reserve(context.run_dir, listener.log)
        self._worlds = Worlds(context, services, self._pool, nodes, self, self._reserve)
        self._spares = Spares(context, self._settled, self._start_spare)
        self._told_of_room = False  # the user knows that a spare lacks room
        journal.header({**self._config.to_json(), "settings": settings.to_json()})

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.watch(bell, lambda: self._bell_rang(bell), urgent=True)
        listener = threading.Thread(target=self._listen, args=(bell,), name="ftrun-bell", daemon=True)
        listener.start()
        self._services.attach(self._loop)
        self._devices.start()
        self._nodes.start(self._worlds)
        self._loop.after(self._detectors.pause, self._detect)
        try:
            while not self._over():
                try:
                    self._loop.run_once(1.0 if self._end else 3600.0)
                    self._pump()
                except OSError as error:
                    self._end_without_folder(error)
        finally:
            self._stop_listening = True
            self._detectors.close()
            self._nodes.close()
            self._board.launcher_bell.ring()
            listener.join(2.0)
            self._loop.forget(bell)
            os.close(bell)
        assert self._end is not None
        return self._end.code

    def _end_without_folder(self, error: OSError) -> None:
        """End the run when its folder is gone or full.

        Raises:
            OSError: The given `error`, when it has another cause or the run already ends.
        """
        why = trouble(self._run_dir, error)
        if not why or self._end is not None:
            raise error
        self._queue.append(ev.WorldEnded(time.monotonic(), EXIT_UNAVAILABLE, why + codes.read_on("F370")))

    def _over(self) -> bool:
        if self._end is None:
            return False
        return self._state.phase is RunPhase.ENDED or not any(w.pid for w in self._pool.living())

    def _listen(self, bell: int) -> None:
        # a separate thread, because one call cannot wait for a futex and for descriptors
        while not self._stop_listening:
            seen = self._board.launcher_bell.count()
            os.eventfd_write(bell, 1)
            self._board.launcher_bell.wait(seen, _LOOK_AGAIN)

    def _bell_rang(self, bell: int) -> None:
        os.eventfd_read(bell)
        self._pool.scan()
        self._faults.look()
        self._narrator.values.look()
        if self._state.phase is RunPhase.RUNNING and self._whole():
            self._detectors.compare(self._state.generation, [w for w in self._holders() if not w.reported])

    def _pump(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            rank = self._rank_of(event)
            if isinstance(event, ev.WorldStops) and not self._nodes.is_news(event):
                continue  # a rank of this node died at the same time: it is stopped for this repair already
            if isinstance(event, ev.WorldRestored):
                self._hear_of_others(event)
            try:
                self._state, actions = advance(self._config, self._state, event)
            except IllegalEvent as error:
                self._journal.note("illegal", event=event.to_json(), error=str(error))
                continue
            if isinstance(event, ev.WorldDecided):
                self._later.append(lambda last=event.resume - 1: self._narrator.closed(last))  # type: ignore[misc]
            elif isinstance(event, ev.GateClosed) and not self._config.shared:
                self._later.append(lambda last=event.last: self._narrator.closed(last))  # type: ignore[misc]
            self._nodes.saw(event, actions, rank)
            for action in actions:
                self._do(action)
            self._devices.waited_for(self._state.waiting)
            self._journal.event(event, actions, self._state.told, self._state.generation)
            world = tuple(map(self._of_the_world, actions))
            self._later.append(lambda e=event, a=world: self._failures.saw(e, a))  # type: ignore[misc]
            phase, told, woke = self._state.phase, self._state.told, self._loop.woke
            seen = event, world, phase, told, self._state.generation, woke, time.monotonic()
            self._later.append(lambda s=seen: self._narrator.saw(*s))  # type: ignore[misc]
            if self._job is not None:
                self._later.append(self._job.saw(actions, self._state.generation))
            self._later.append(lambda now=seen[-1]: self._head.show(self._narrator.account, now))  # type: ignore[misc]
        later, self._later = self._later, []
        for call in later:
            call()
        self._journal.flush()

    def _hear_of_others(self, event: ev.WorldRestored) -> None:
        """Put on the board what the ranks of this node must know of replacements on others, before its gate opens."""
        if event.generation == self._state.generation:
            self._board[Head.MISSED] = event.missed
            self._board[Head.MADE] = self._board[Head.MADE] or int(event.made)

    def _tell_restored(self, action: ev.TellRestored) -> None:
        missed = max((self._board.cell(w.cell)[F.MISSED] for w in self._state.ranked()), default=0)
        self._nodes.restored(action, missed, bool(self._board[Head.MADE]))

    def _rank_of(self, event: ev.Event) -> int | None:
        """Return this node's rank that an event is about, before the event moves it."""
        cell = getattr(event, "worker", None)
        worker = None if cell is None else self._state.worker(cell)
        return None if worker is None else worker.rank

    def _of_the_world(self, action: ev.Action) -> ev.Action:
        """Translate an action from this node's ranks and restart count to those of the whole run."""
        if isinstance(action, ev.Say) and action.rank is not None:
            return replace(action, rank=self._nodes.global_rank(action.rank))
        return (
            replace(action, attempt=self._nodes.attempt(action.attempt)) if isinstance(action, ev.Publish) else action
        )

    # -- what the machine orders -------------------------------------------------------------------------------------

    def _do(self, action: ev.Action) -> None:
        handler = _ACTIONS.get(type(action))
        if handler is not None:  # the narrator handles Say
            handler(self, action)

    def _spawn(self, action: ev.Spawn) -> None:
        if action.rank is None:
            self._spares.add(action)
        else:
            self._fork(action)

    def _settled(self) -> bool:
        return self._end is not None or (self._state.phase is RunPhase.RUNNING and not self._state.recovering)

    def _start_spare(self, action: ev.Spawn) -> None:
        if self._state.worker(action.worker) is not None:
            self._fork(action)

    def _fork(self, action: ev.Spawn) -> None:
        if self._end is not None:
            return
        if action.worker < self._board.cells and not self._room_for(action):
            return
        rank = None if action.rank is None else self._nodes.global_rank(action.rank)
        attempt = self._nodes.attempt(self._state.attempt)
        try:
            worker = self._pool.add(action.worker, rank, attempt)
        except IndexError:
            self._log("this run has had more workers than it can count; it ends")
            self._queue.append(ev.Signalled(time.monotonic(), signal.SIGTERM))
            return
        if worker is None or worker.log is None:
            return
        spec = self._specs.of(worker, self._worlds.store or ("127.0.0.1", 0), attempt, self._nodes.place)
        self._services.fork(worker.index, spec, worker.log.out_w, worker.log.err_w)

    def _room_for(self, action: ev.Spawn) -> bool:
        """Allocate the worker's cell on the board; return False and retry later for a spare without room: the reserve is for ranks.

        Raises:
            OSError: The board cannot grow.
        """
        board = self._run_dir / paths.BOARD
        if action.rank is not None:
            self._reserve.write(lambda: Board.make_room(board, action.worker))
            return True
        try:
            Board.make_room(board, action.worker)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._told_of_room:
                self._told_of_room = True
                self._log(f"no space is left in {self._run_dir.parent} for another spare (a full /dev/shm?); it is tried again")
            self._loop.after(_SPARE_LATER, lambda: self._spares.add(action))
            return False
        return True

    def _close_gate(self, action: ev.CloseGate) -> None:
        last = gates.close(self._board, action.generation, undecided=self._config.shared)
        self._queue.append(ev.GateClosed(time.monotonic(), action.generation, last))

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
            self._worlds.next_store()

    def _finish(self, action: ev.End) -> None:
        self._end = action

    # -- WorldListener -----------------------------------------------------------------------------------------------

    def generation(self) -> int:
        return self._state.generation

    def on_met(self) -> None:
        self._devices.once_known(lambda: self._queue.append(self._nodes.begins()))

    def on_published(self, action: ev.Publish) -> None:
        self._later.append(lambda: self._narrator.published(action, self._worlds.hand_over(action)))

    # -- messages, signals, exits ------------------------------------------------------------------------------------

    def on_message(self, service: str, message: dict[str, Any]) -> None:
        """Handle a message from a helper."""
        op = message["op"]
        if service == "nvml":
            self._devices.on_message(message)
        elif op == "forked":
            if message["fresh"] and not self._told_fresh:
                self._told_fresh = True
                self._log(messages.cannot_fork(message["fresh"]))
            self._pool.forked(message["cell"], message["pid"])
            if self._end is not None:
                self._pool.fence(message["cell"])
            self._pool.scan()
        elif op == "exit":
            self.exited(message["pid"], message["status"])
        elif op == "ready":
            self._ready(service, message)
        elif op == "serving":
            self._nodes.serves(int(message["port"]))
        elif op == "uncopied":
            self._log(str(message["why"]), "warning")
        else:
            self._worlds.on_store(message)

    def _ready(self, service: str, message: dict[str, Any]) -> None:
        self._journal.note("service", service=service, pid=self._services.helper(service).pid, facts=message)
        if message.get("unfit"):
            self._services.stop_preloading()
            self._log(messages.cannot_fork(message["unfit"]), "warning")
        if service == "fork server":
            self._worlds.fork_server_ready()
        if service == "fd store":
            self._board[Head.FD_STORE_EPOCH] = self._board[Head.FD_STORE_EPOCH] + 1
            self._board.ring_workers()
            self._nodes.fd_store_ready()
        self._services.guard()
        if self._worlds.met:
            self._queue.append(ev.ServiceReady(time.monotonic(), service))

    def exited(self, pid: int, code: int | None) -> None:
        """Handle the end of a process that we or the fork server reaped, or gave up. `code` None: nobody knows its exit code."""
        if self._pool.exited(pid, code):
            return
        helper = self._services.which(pid)
        if helper is None:
            return
        helper.ended()
        if helper is self._services.nvml:
            self._devices.ended(code)
            return
        self._journal.note("service-exit", service=helper.name, pid=pid, code=code)
        if helper is self._services.metrics:
            self._metrics_ended()
            return
        if helper is self._services.fork_server:
            self._pool.order_lost(helper.waiting_forks())
            self._worlds.fork_server_ended()
        elif helper is self._services.store:
            self._worlds.store_ended()
        self._queue.append(ev.ServiceDied(time.monotonic(), helper.name))

    def _metrics_ended(self) -> None:
        if self._end is None:
            why_not = self._monitoring.start(self._services)
            self._log(why_not or messages.said(ev.Say("service_died", detail="metrics")) or "", "warning")

    def reap(self) -> None:
        """Collect our own ended children: helpers, and workers whose fork server died."""
        for pid, code in reaped():
            self.exited(pid, code)

    def signalled(self, signum: int) -> None:
        """Handle a signal that ends the run."""
        if not self._ending.got(signum):
            return
        self._queue.append(ev.Signalled(time.monotonic(), signum))
        if not self._worlds.met:
            self._end = ev.End(128 + signum, "signal before the start")

    def forward(self, signum: int) -> None:
        """Pass a signal on to the script (--forward-signals)."""
        if self._end is None:
            self._forwarder.forward(signum)

    def resized(self) -> None:
        """Pass a new size of our terminal on to the workers."""
        self._logs.resized()
        for worker in self._pool.living():
            if worker.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGWINCH)

    def _holders(self) -> list[Worker]:
        """Return the workers that hold a rank now, in the order of their ranks."""
        return [self._pool.workers[c] for c in self._state.holder if c in self._pool.workers]

    def _whole(self) -> bool:
        """Does every rank of this node have a worker?"""
        return len(self._holders()) == self._config.nproc

    def _detect(self) -> None:
        self._helpers.look()
        running = self._state.phase is RunPhase.RUNNING
        slow = [] if self._end is not None else incidents.awaited(self._state)
        awaited = [(w.cell, incidents.in_its_script(self._state, w)) for w in slow]
        self._detectors.look(running, self._state.generation, self._holders(), self._whole(), awaited)
        self._head.stalled(self._detectors.standstill, self._detectors.where, time.monotonic())
        if self._job is not None:
            self._job.look(self._head.stall, sum(device in self._state.quarantine for device in self._state.devices))
        self._loop.after(self._detectors.pause, self._detect)

    def summarize(self) -> None:
        """Log and journal the cost of the run and its failure, if any. Call after `run`."""
        assert self._end is not None
        self._narrator.end(self._end.code, self._nodes.doubts)
        self._faults.end()
        ending = self._ending
        failure = self._failures.finish(self._end.code, self._narrator.account, ending.began, ending.signum, ending.killed)
        if failure is not None:
            self._journal.note("failure", **failure)


def _config(settings: Settings, shared: bool) -> Config:
    return Config(
        nproc=settings.nproc,
        spares=settings.spares,
        max_restarts=settings.max_restarts,
        max_replacements=settings.max_replacements,
        start_timeout=settings.start_timeout,
        stop_timeout=settings.stop_timeout,
        shutdown_timeout=settings.shutdown_timeout,
        shared=shared,
        replacement_window=settings.window,
        device_faults=settings.device_faults,
        wait_for_device=settings.wait_for_device,
        inexact_stops=settings.inexact == "stop",
        policy=settings.policy,
    )


_ACTIONS: dict[type[ev.Action], Callable[[Agent, Any], None]] = {
    ev.Spawn: Agent._spawn,
    ev.CloseGate: Agent._close_gate,
    ev.OpenGate: lambda agent, action: gates.reopen(agent._board, action.generation),
    ev.TellRestored: Agent._tell_restored,
    ev.NodeDone: lambda agent, action: agent._nodes.finished(agent._narrator.doubts()),
    ev.DecideGate: lambda agent, action: gates.decide(agent._board, action.generation, action.resume),
    ev.ResetGate: lambda agent, action: gates.reset(agent._board, action.generation),
    ev.Publish: lambda agent, action: agent._worlds.publish(action),
    ev.Deadline: Agent._deadline,
    ev.StartService: Agent._start_service,
    ev.Terminate: lambda agent, action: agent._ending.terminate(action.failed),
    ev.End: Agent._finish,
    ev.Quarantine: lambda agent, action: agent._devices.quarantine(action),
    ev.Probe: lambda agent, action: agent._devices.probe(action),
    ev.Dismiss: lambda agent, action: agent._pool.dismiss(action.worker),
    ev.Fence: lambda agent, action: agent._pool.fence(action.worker),
}
