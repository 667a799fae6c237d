"""Our own helper processes: fork server, store, fd store, watcher of the devices, exporter. Starts them and talks to them.

Requests wait here while a helper is away. Whether one lives is asked with "alive?", which each answers from the loop in which
it does its work. Never decides whether one is started again: the machine does.
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
    """One helper process and its socket; `pid` is 0 while there is none."""

    def __init__(self, name: str, code: str, on_message: Callable[[dict[str, Any]], None]) -> None:
        self.name = name
        self.pid = 0
        self.ready = False
        self._code = code
        self._on_message = on_message
        self._sock: socket.socket | None = None
        self._waiting: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._heard = time.monotonic_ns()
        self._asked = 0  # ns; 0 = it has answered
        self.loop: EventLoop | None = None

    def start(
        self, args: tuple[str, ...], env: Mapping[str, str], out: int, also: int | None = None, room: int = 0
    ) -> None:
        """`also` becomes its descriptor spawn.ALSO; `room`: see `spawn.command`.

        Raises:
            OSError
        """
        with self.connect() as theirs:
            self.pid = spawn.start(self._code, args, env, theirs.fileno(), out, also, room)

    def connect(self) -> socket.socket:
        """Make a new socket and give the helper's end of it. The helper ends when it reads there that we are gone."""
        self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._sock = ours
        self._heard, self._asked = time.monotonic_ns(), 0
        if self.loop is not None:
            self.attach(self.loop)
        return theirs

    def attach(self, loop: EventLoop) -> None:
        """Have `loop` serve this helper's socket from now on."""
        self.loop = loop
        if self._sock is not None:
            loop.watch(self._sock.fileno(), self._receive, urgent=True)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send now, or once the helper is ready. Descriptors sent are closed here."""
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
                return  # it died: kept for its successor
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
        """If it has said nothing for `silent` seconds: is it alive? While it begins, it is asked as soon as it listens."""
        if self.ready and not self._asked and time.monotonic_ns() - self._heard > silent * 1e9:
            self._asked = time.monotonic_ns()
            self.send({"op": _ALIVE})

    def began(self, pid: int) -> None:
        """Somebody else started it: it is `pid`, and its time begins now."""
        self.pid = pid
        self._heard = time.monotonic_ns()

    def shows_work(self) -> None:
        """Note a sign of work from the helper, which is not ready yet."""
        self._heard = time.monotonic_ns()

    @property
    def silent_since(self) -> int:
        """Since when it owes a word, ns: an answer, or that it is ready. Now, when it owes none."""
        return self._asked or (time.monotonic_ns() if self.ready else self._heard)

    def waiting_forks(self) -> set[int]:
        """Cells whose fork order has not been sent yet."""
        return {message["cell"] for message, _ in self._waiting if message["op"] == "fork"}

    def waits_for(self, op: str) -> bool:
        """Is such a request still to be sent?"""
        return any(message["op"] == op for message, _ in self._waiting)

    def ended(self) -> None:
        """The process was reaped: read its last words, then forget it."""
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
        """Close our end: the helper takes us for gone, and ends."""
        self._close()

    def kill(self) -> None:
        kill_group(self.pid)


class Services:
    """The helpers of a run. `on_message(service, message)` takes what they say; `stdin` is for the workers.

    `shown`: the command that workers show. `mode`: how the fork server starts workers, see fork_server.ForkServer.
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
        self._store_order = 0  # number of the last order: answers to earlier ones are void
        self.metrics = Helper("metrics", _METRICS, lambda m: None)
        self._all = (self.fork_server, self.store, self.fd_store, self.nvml, self.metrics)

    def log_to(self, path: Path) -> None:
        """Send what helpers print to this file; call before they are started.

        Raises:
            OSError
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.close(self._out)
        self._out = fd

    def start_fork_server(self) -> None:
        self.fork_server.start(self._mode, self._env, self._out, self._stdin, self._room)

    def stop_preloading(self) -> None:
        """The fork server found that it cannot be forked after its imports: it works as "exec" now, and so does its successor."""
        self._mode = ("exec", *self._mode[1:])

    def start_fd_store(self) -> None:
        self.fd_store.start((str(self._run_dir),), self._env, self._out)

    def start_metrics(self, file: str, listener: int | None) -> None:
        """The exporter of the figures, to a file ("" = none) and on a listening socket.

        Raises:
            OSError
        """
        self.metrics.start((str(self._run_dir), file, "" if listener is None else "listen"), self._env, self._out, listener)

    def end_metrics(self, patience: float) -> None:
        """Let the exporter have its last look, then make sure that it is gone."""
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
        """Start the reader of NVML; call it only where there are GPUs.

        Raises:
            OSError
        """
        self.nvml.start((), self._env, self._out)

    def start_store(self, host: str, port: int, only: bool = False) -> None:
        """The fork server forks it; its address comes as a message {"op":"store"}. Nothing when that is ordered already.

        `host`: the address to listen on. `port`: where workers that have not connected yet will look for it, 0 = anywhere;
        `only` there: if that cannot be, the message is {"op":"store-failed"} with an `error`.
        """
        if self.fork_server.waits_for("store"):
            return
        self._store_order += 1
        order = {"op": "store", "host": host, "port": port, "only": only, "order": self._store_order}
        self.fork_server.send(order, (self.store.connect().detach(),))

    def is_current(self, message: dict[str, Any]) -> bool:
        """Does this answer belong to the last order for a store? A store that came too late is ended here."""
        if message["order"] == self._store_order:
            return True
        kill_group(message["pid"])
        return False

    def fork(self, cell: int, spec: dict[str, Any], out: int, err: int) -> None:
        """Have a worker forked; takes over the two descriptors."""
        self.fork_server.send({"op": "fork", "cell": cell, "spec": spec}, (out, err))

    def guard(self) -> None:
        """Tell the fd store whom to end, beside the workers, if we die."""
        pids = [pid for pid in (self.fork_server.pid, self.store.pid) if pid]
        self.fd_store.send({"op": "guard", "pids": pids})

    def retire_store(self) -> None:
        """End the store without mourning it: a new one takes its place. One that is only ordered yet is that one."""
        if self.store.pid:
            self.store.kill()
            self.store.ended()

    def attach(self, loop: EventLoop) -> None:
        """Have `loop` serve them from now on."""
        for helper in self._all:
            helper.attach(loop)

    def living(self) -> list[Helper]:
        """The helpers that have a process now."""
        return [helper for helper in self._all if helper.pid]

    def pids(self) -> set[int]:
        return {helper.pid for helper in self.living()}

    def helper(self, name: str) -> Helper:
        """The helper of that name."""
        return next(helper for helper in self._all if helper.name == name)

    def which(self, pid: int) -> Helper | None:
        """The helper whose process is `pid`."""
        return next((helper for helper in self.living() if helper.pid == pid), None)

    def end(self) -> None:
        """End all of them."""
        self.fd_store.send({"op": "bye"})
        for helper in self.living():
            helper.kill()
