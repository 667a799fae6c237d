"""The fork server: imports torch once, so that it forks a worker in milliseconds.

Theory of operation. It is a process of its own with one socket to the launcher. Before it forks it only imports: it starts no thread,
runs no backward and calls no CUDA function. If an import of the user's environment does so, the fork server executes itself anew without
imports and starts each worker as a fresh interpreter. Then it forks workers and stores on the launcher's orders and reports each
child's end. When the launcher's socket closes it kills all children. The store runs in a child, because a process that serves a store
cannot be forked: the store's thread is missing in the child.

Why does the fork server run no backward and no optimizer step, so that workers skip first-call costs? In a process that sees a GPU, a
backward starts autograd's device threads, and then every child's backward raises; AdamW's step opens CUDA, which no child can use. So
each spare makes its own first calls (`ftrun.worker.process.warmup`). Importing torch takes 0.9 s on an idle machine and 2 to 4 s on a
busy one; a fork of a process that has all imports takes some 15 ms.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ftrun.core.shared import fresh, wire
from ftrun.core.system import shown_command
from ftrun.core.system.procfs import kill_group, reaped
from ftrun.helpers import forkable, store
from ftrun.host.services import spawn

# every training script imports these modules sooner or later; the first optimizer alone imports torch._dynamo (0.8 s)
_PRELOAD = (
    "torch",  # first, so that preloaded can separate torch's own imports from later ones
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.utils.data",
    "ftrun.worker.process.backend",
    "ftrun.worker.process.protect",
)
_IMPORTS = {"preload": _PRELOAD, "light": ("multiprocessing.process",), "exec": ()}
_UNFIT = "unfit="  # prefix of the argument that tells the re-executed fork server why it must not import
_LAUNCHER = 3  # the descriptor of the socket to the launcher
_WORKER = "from ftrun.worker.process import main; main.main_of_program(started)"


def main(started: list[str]) -> None:
    """Serve the launcher at descriptor 3 until it is gone; then end every child. `started`: modules that were imported at the start."""
    launcher = socket.socket(fileno=_LAUNCHER)
    os.set_inheritable(_LAUNCHER, False)
    words = sys.argv[1:]
    if "stdin" in words:
        os.set_inheritable(spawn.ALSO, False)
    unfit = next((word.removeprefix(_UNFIT) for word in words if word.startswith(_UNFIT)), "")
    ForkServer(launcher, words[0], spawn.ALSO if "stdin" in words else None, unfit, started).serve()


class ForkServer:
    """The server's loop. `stdin`: the descriptor that ranks read as stdin, None = /dev/null.

    `mode`: "preload" forks workers with torch; "light" forks them without it, for programs that do not need it; "exec"
    starts each as a fresh interpreter. `unfit`: the reason why an earlier fork server in this process gave up its imports.
    """

    def __init__(
        self, launcher: socket.socket, mode: str, stdin: int | None = None, unfit: str = "", started: Sequence[str] = ()
    ) -> None:
        self._started = started
        self._launcher = launcher
        self._mode = mode
        self._stdin = stdin
        self._unfit = unfit
        self._children: set[int] = set()
        self._ended_r, self._ended_w = os.pipe()
        os.set_blocking(self._ended_r, False)
        os.set_blocking(self._ended_w, False)

    def serve(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from ftrun import native

        native.set_name("ftrun forksrv")
        gc.disable()  # a fifth of torch's import time goes into collections that free nothing
        self._import()
        gc.freeze()  # a collection in a child would copy every page that it visits
        gc.enable()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a handler is written to the wakeup descriptor
        signal.set_wakeup_fd(self._ended_w, warn_on_full_buffer=False)
        wire.send(self._launcher, {"op": "ready", "unfit": self._unfit})
        poller = select.poll()
        poller.register(self._launcher, select.POLLIN)
        poller.register(self._ended_r, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._ended_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._ended_r, 4096)
                    self._reap()
                elif not self._obey():
                    self._end_all()

    def _import(self) -> None:
        variables = dict(os.environ)
        if self._mode != "exec":
            self._check("starting Python (a sitecustomize, or a .pth file of an installed package)", variables)
            self._import_all(variables)
        for name in set(os.environ) - set(variables):
            del os.environ[name]  # torch sets some for its own children; a script must not see them before it imports torch

    def _import_all(self, variables: dict[str, str]) -> None:
        from ftrun.worker.process import main, preloaded  # noqa: F401 every worker needs these, also a fresh one

        preloaded.begin(self._started)
        for name in _IMPORTS[self._mode]:
            try:
                importlib.import_module(name)
            except ImportError:
                if name.startswith("ftrun"):
                    raise
                # the script reports a missing module itself, if it imports it at all
            if name == "torch":
                preloaded.imported_torch()
            self._check(f"importing {name}", variables)
        preloaded.end()

    def _check(self, what: str, variables: dict[str, str]) -> None:
        """If this process can no longer be forked, execute it anew without imports. `what`: the last action, as the likely cause."""
        found = forkable.obstacle()
        if not found:
            return
        os.set_inheritable(_LAUNCHER, True)
        words = ["exec", f"{_UNFIT}{what} {found}"]
        if self._stdin is not None:
            os.set_inheritable(self._stdin, True)
            words.append("stdin")
        argv = spawn.command(spawn.FORK_SERVER, *words)
        os.execve(argv[0], argv, variables)

    def _obey(self) -> bool:
        try:
            frame = wire.receive(self._launcher)
        except ConnectionError:
            frame = None
        if frame is None:
            return False
        message, fds = frame
        if message["op"] == "fork":
            why = self._why_fresh(message["spec"])
            pid = self._fork_worker(message["spec"], fds, why is not None)
            self._report({"op": "forked", "cell": message["cell"], "pid": pid, "fresh": why or ""})
        elif message["op"] == "store":
            pid = os.fork()
            if pid == 0:
                if self._stdin is not None:
                    os.close(self._stdin)
                store.serve(self._launcher, fds[0], message)
            self._children.add(pid)
            self._report({"op": "store-forked", "pid": pid, "order": message["order"]})
        elif message["op"] == "alive?":
            self._report({"op": "alive"})
        for fd in fds:
            os.close(fd)
        return True

    def _why_fresh(self, spec: dict[str, Any]) -> str | None:
        """Return None if this worker can be a fork; else the reason to report, "" if it was reported before."""
        if self._mode == "exec":
            return ""
        from ftrun.worker.process import preloaded

        why = preloaded.why_not_forked(spec)
        return "" if why == preloaded.AGAIN else why or None

    def _fork_worker(self, spec: dict[str, Any], fds: list[int], begin_fresh: bool) -> int:
        shown = shown_command.command(spec["kind"], spec["argv"])
        spec["interpreter"] = spawn.command(_WORKER, room=shown_command.room_for(shown))
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return pid
        try:
            _become_worker(spec, fds[0], fds[1], self._stdin)
            if begin_fresh:
                try:
                    fresh.become(spec, os.environ)
                except OSError as error:
                    print(f"ftrun: no interpreter can be started for this worker: {error.strerror}", file=sys.stderr)
                    os._exit(1)
            from ftrun.worker.process import main

            main.main(spec)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the loop of the server that it was forked from

    def _reap(self) -> None:
        for pid, code in reaped():
            self._children.discard(pid)
            self._report({"op": "exit", "pid": pid, "status": code})

    def _report(self, message: dict[str, Any]) -> None:
        try:
            wire.send(self._launcher, message)
        except OSError:
            self._end_all()

    def _end_all(self) -> NoReturn:
        for pid in self._children:
            kill_group(pid)
        os._exit(0)


def _become_worker(spec: dict[str, Any], out: int, err: int, stdin: int | None) -> None:
    forkable.leave()
    # move the sources above 2 first, so that no dup2 overwrites the next one's source
    import fcntl

    out, err = (fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in (out, err))
    null = os.open(os.devnull, os.O_RDONLY)
    rank = spec["rank"]
    mine = rank is not None and spec.get("debug_rank") in (None, rank)
    for source, target in ((stdin if mine and stdin is not None else null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    first = 3
    if stdin is not None and rank is None:
        # a spare keeps it for the time when it has a rank: two processes that read one stdin would each get half
        os.dup2(stdin, first)
        spec["stdin"] = first
        first += 1
    # close the sockets and pipes of other processes: as long as this worker holds a copy, their readers never see the end
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
