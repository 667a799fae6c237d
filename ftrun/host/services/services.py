"""Our own helper processes: fork server, store, fd store. Starts them, talks to them, notices that they died.

Requests wait here while a helper is away. Never decides whether one is started again: the machine does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftrun.core.shared import wire
from ftrun.core.system import shown_command
from ftrun.core.system.procfs import kill_group
from ftrun.host.base.loop import EventLoop
from ftrun.host.services import spawn

_NVML = "from ftrun.helpers import nvml_reader; nvml_reader.main()"
_FD_STORE = "from ftrun.helpers import fd_store; fd_store.main()"


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
        self.loop: EventLoop | None = None

    def start(
        self, args: tuple[str, ...], env: Mapping[str, str], out: int, stdin: int | None = None, room: int = 0
    ) -> None:
        """Errors: OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = spawn.start(self._code, args, env, theirs.fileno(), out, stdin, room)
        ours.setblocking(False)
        self._sock = ours
        if self.loop is not None:
            self.attach(self.loop)

    def attach(self, loop: EventLoop) -> None:
        """From now on `loop` serves this helper's socket."""
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
            if message["op"] == "ready":
                self.ready = True
            self._on_message(message)
            if message["op"] == "ready":
                self._flush()

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
        if self._sock is not None:
            if self.loop is not None:
                self.loop.forget(self._sock.fileno())
            self._sock.close()
            self._sock = None

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
        self.store_pid = 0
        self._store_order = 0  # number of the last order: answers to earlier ones are void
        # every store holds the read end: it ends when we do, however we end
        self._lifeline_r, self._lifeline_w = os.pipe()

    def log_to(self, path: Path) -> None:
        """What helpers print goes to this file; call before they are started. Errors: OSError."""
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

    def start_nvml(self) -> None:
        """Only where there are GPUs. Errors: OSError."""
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
        self.fork_server.send(order, (os.dup(self._lifeline_r),))

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
        pids = [pid for pid in (self.fork_server.pid, self.store_pid) if pid]
        self.fd_store.send({"op": "guard", "pids": pids})

    def retire_store(self) -> None:
        """End the store without mourning it: a new one takes its place."""
        kill_group(self.store_pid)
        self.store_pid = 0

    def pids(self) -> set[int]:
        return {pid for pid in (self.fork_server.pid, self.store_pid, self.fd_store.pid, self.nvml.pid) if pid}

    def helper(self, name: str) -> Helper:
        """The helper of that name: "fork server", "fd store" or "nvml"."""
        return next(h for h in (self.fork_server, self.fd_store, self.nvml) if h.name == name)

    def which(self, pid: int) -> str | None:
        """The service that `pid` is."""
        helpers = (self.fork_server, self.fd_store, self.nvml)
        found = next((h.name for h in helpers if pid and h.pid == pid), None)
        return found or ("store" if pid and pid == self.store_pid else None)

    def end(self) -> None:
        """End all of them."""
        self.fd_store.send({"op": "bye"})
        self.fork_server.kill()
        self.nvml.kill()
        self.retire_store()
        self.fd_store.kill()
