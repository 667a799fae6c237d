"""Starts our helper processes and talks to them: fork server, store, fd store, device watcher, exporter.

Theory of operation. Each helper has one SOCK_SEQPACKET socket to the launcher. Requests wait in a queue here until the helper sends
"ready", and again while a dead helper is replaced. The launcher asks a silent helper "alive?"; the helper answers from its
working loop. A helper ends when its socket closes. This file never decides to restart one: the machine and the agent do.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftrun.core.shared import wire
from ftrun.core.system import shown_command
from ftrun.core.system.procfs import kill_group
from ftrun.core.waiting import wait_for
from ftrun.host.base.loop import EventLoop
from ftrun.host.services import spawn

_NVML = "from ftrun.helpers import nvml_reader; nvml_reader.main()"
_FD_STORE = "from ftrun.helpers import fd_store; fd_store.main()"
_METRICS = "from ftrun.view import exporter; exporter.main()"
_ALIVE = "alive?"


class Helper:
    """Holds one helper process and its socket; `pid` is 0 while there is none."""

    def __init__(self, name: str, code: str, on_message: Callable[[dict[str, Any]], None]) -> None:
        self.name = name
        self.pid = 0
        self.ready = False
        self._code = code
        self._on_message = on_message
        self._sock: socket.socket | None = None
        self._waiting: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._heard = time.monotonic_ns()
        self._asked = 0  # time of an unanswered "alive?" in ns; 0 = none
        self.loop: EventLoop | None = None

    def start(
        self, args: tuple[str, ...], env: Mapping[str, str], out: int, also: int | None = None, room: int = 0
    ) -> None:
        """Start the process; see `spawn.start`.

        Raises:
            OSError: The process cannot be started.
        """
        with self.connect() as theirs:
            self.pid = spawn.start(self._code, args, env, theirs.fileno(), out, also, room)

    def connect(self) -> socket.socket:
        """Make a new socket and return the helper's end of it. The helper ends when our end closes."""
        self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._sock = ours
        self._heard, self._asked = time.monotonic_ns(), 0
        if self.loop is not None:
            self.attach(self.loop)
        return theirs

    def attach(self, loop: EventLoop) -> None:
        """Let `loop` serve this helper's socket from now on."""
        self.loop = loop
        if self._sock is not None:
            loop.watch(self._sock.fileno(), self._receive, urgent=True)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send now, or once the helper is ready. Takes over `fds` and closes them after the send."""
        self._waiting.append((message, fds))
        if self.ready:
            self._flush()

    def _flush(self) -> None:
        while self._waiting and self._sock is not None:
            message, fds = self._waiting[0]
            try:
                wire.send(self._sock, message, fds)
            except BlockingIOError:
                if self.loop is not None:
                    self.loop.after(0.002, self._flush)
                return
            except OSError:
                return  # the helper died: keep the message for its successor
            del self._waiting[0]
            for fd in fds:
                os.close(fd)

    def _receive(self) -> None:
        while self._sock is not None:
            try:
                frame = wire.receive(self._sock)
            except BlockingIOError:
                return
            except ConnectionError:
                frame = None
            if frame is None:
                self._close()
                return
            message, fds = frame
            for fd in fds:
                os.close(fd)
            self._heard, self._asked = time.monotonic_ns(), 0
            if message["op"] == "alive":
                continue
            if message["op"] == "ready":
                self.ready = True
            self._on_message(message)
            if message["op"] == "ready":
                self._flush()

    def ask_alive(self, silent: float) -> None:
        """Ask the helper for a sign of life after `silent` seconds without a message. Does nothing before it is ready."""
        if self.ready and not self._asked and time.monotonic_ns() - self._heard > silent * 1e9:
            self._asked = time.monotonic_ns()
            self.send({"op": _ALIVE})

    def began(self, pid: int) -> None:
        """Record that the fork server started the helper as `pid`; its time to become ready begins now."""
        self.pid = pid
        self._heard = time.monotonic_ns()

    def shows_work(self) -> None:
        """Record a sign of work of a helper that is not ready yet."""
        self._heard = time.monotonic_ns()

    @property
    def silent_since(self) -> int:
        """Monotonic time in ns since which the helper owes an answer or "ready"; now, when it owes none."""
        return self._asked or (time.monotonic_ns() if self.ready else self._heard)

    def waiting_forks(self) -> set[int]:
        """Return the cells whose fork orders still wait here."""
        return {message["cell"] for message, _ in self._waiting if message["op"] == "fork"}

    def waits_for(self, op: str) -> bool:
        """Does a request `op` still wait here?"""
        return any(message["op"] == op for message, _ in self._waiting)

    def ended(self) -> None:
        """Read the last messages of the reaped process, then forget it."""
        self._receive()
        self._close()
        self.pid = 0

    def _close(self) -> None:
        self.ready = False
        self._waiting = [one for one in self._waiting if one[0]["op"] != _ALIVE]
        if self._sock is not None:
            if self.loop is not None:
                self.loop.forget(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def hang_up(self) -> None:
        """Close our end of the socket, at which the helper ends."""
        self._close()

    def kill(self) -> None:
        kill_group(self.pid)


class Services:
    """Holds the helpers of a run. `on_message(service, message)` takes their messages; `stdin` is the workers' descriptor 0.

    `shown`: the command that workers display in `ps`. `mode`: the way the fork server starts workers, see fork_server.ForkServer.
    """

    def __init__(
        self,
        run_dir: Path,
        env: Mapping[str, str],
        mode: str,
        on_message: Callable[[str, dict[str, Any]], None],
        stdin: int | None = None,
        shown: Sequence[str] = (),
    ) -> None:
        self._room = shown_command.room_for(shown)
        self._run_dir = run_dir
        self._env = env
        self._mode = (mode, *(() if stdin is None else ("stdin",)))
        self._stdin = stdin
        self._out = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self.fork_server = Helper("fork server", spawn.FORK_SERVER, lambda m: on_message("fork server", m))
        self.fd_store = Helper("fd store", _FD_STORE, lambda m: on_message("fd store", m))
        self.nvml = Helper("nvml", _NVML, lambda m: on_message("nvml", m))
        self.store = Helper("store", "", lambda m: None)  # the fork server forks it
        self._store_order = 0  # number of the last order; answers to earlier ones do not count
        self.metrics = Helper("metrics", _METRICS, lambda m: None)
        self._all = (self.fork_server, self.store, self.fd_store, self.nvml, self.metrics)

    def log_to(self, path: Path) -> None:
        """Append the helpers' output to this file; call before they start.

        Raises:
            OSError: The file cannot be opened.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.close(self._out)
        self._out = fd

    def start_fork_server(self) -> None:
        self.fork_server.start(self._mode, self._env, self._out, self._stdin, self._room)

    def stop_preloading(self) -> None:
        """Start later fork servers in mode "exec": the current one cannot fork after its imports and works in this mode already."""
        self._mode = ("exec", *self._mode[1:])

    def start_fd_store(self) -> None:
        self.fd_store.start((str(self._run_dir),), self._env, self._out)

    def start_metrics(self, file: str, listener: int | None) -> None:
        """Start the exporter, with a file ("" = none) and the descriptor of a listening socket (None = none).

        Raises:
            OSError: The process cannot be started.
        """
        self.metrics.start((str(self._run_dir), file, "" if listener is None else "listen"), self._env, self._out, listener)

    def end_metrics(self, patience: float) -> None:
        """Hang up, so that the exporter reads once more and ends; kill it after `patience` seconds."""
        if self.metrics.pid:
            self.metrics.hang_up()
            if not wait_for(self._metrics_ended, patience, 0.005):
                self.metrics.kill()
            self.metrics.pid = 0

    def _metrics_ended(self) -> bool:
        try:
            return os.waitpid(self.metrics.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def start_nvml(self) -> None:
        """Start the device watcher; call only on a machine with GPUs.

        Raises:
            OSError: The process cannot be started.
        """
        self.nvml.start((), self._env, self._out)

    def start_store(self, host: str, port: int, only: bool = False) -> None:
        """Order a store on `host` from the fork server, unless an order still waits here. Its address arrives as {"op": "store"}.

        `port`: where workers that have not connected yet look for it, 0 = any; `only`: accept no other port, else {"op": "store-failed"}
        arrives with an `error`.
        """
        if self.fork_server.waits_for("store"):
            return
        self._store_order += 1
        order = {"op": "store", "host": host, "port": port, "only": only, "order": self._store_order}
        self.fork_server.send(order, (self.store.connect().detach(),))

    def is_current(self, message: dict[str, Any]) -> bool:
        """Does this answer belong to the last order for a store? Ends the store of an earlier order."""
        if message["order"] == self._store_order:
            return True
        kill_group(message["pid"])
        return False

    def fork(self, cell: int, spec: dict[str, Any], out: int, err: int) -> None:
        """Order the fork of a worker; takes over the two descriptors."""
        self.fork_server.send({"op": "fork", "cell": cell, "spec": spec}, (out, err))

    def guard(self) -> None:
        """Send the fd store the pids to end, beside the workers, if we die."""
        pids = [pid for pid in (self.fork_server.pid, self.store.pid) if pid]
        self.fd_store.send({"op": "guard", "pids": pids})

    def retire_store(self) -> None:
        """End the store without a ServiceDied event, because a new one replaces it. Does nothing about a store still on order."""
        if self.store.pid:
            self.store.kill()
            self.store.ended()

    def attach(self, loop: EventLoop) -> None:
        """Let `loop` serve all helpers from now on."""
        for helper in self._all:
            helper.attach(loop)

    def living(self) -> list[Helper]:
        """Return the helpers that have a process now."""
        return [helper for helper in self._all if helper.pid]

    def pids(self) -> set[int]:
        return {helper.pid for helper in self.living()}

    def helper(self, name: str) -> Helper:
        """Return the helper of that name."""
        return next(helper for helper in self._all if helper.name == name)

    def which(self, pid: int) -> Helper | None:
        """Return the helper whose process is `pid`, None for another process."""
        return next((helper for helper in self.living() if helper.pid == pid), None)

    def end(self) -> None:
        """End all helpers."""
        self.fd_store.send({"op": "bye"})
        for helper in self.living():
            helper.kill()
