"""The fork server: it has torch imported, so that a worker starts in milliseconds.

Runs in a process of its own with one socket to the launcher. It imports and does nothing else before it forks: no thread,
no backward, no CUDA call. If an import of the user's environment breaks that, the fork server begins anew without imports
and starts each worker as a fresh interpreter. It decides nothing else: it forks what it is told to and reports who ended.
The store runs in a child, because a process that serves a store cannot be forked from: its thread is missing in the child.

Why not a backward or an optimizer's step here, so that workers skip their first-call costs? In a process that sees a GPU a backward
starts autograd's device threads, and every child's backward raises then; AdamW's step opens CUDA, which no child can use. So
the fork server imports, and first calls are made by each spare in itself (`ftrun.worker.process.warmup`). Importing torch takes 0.9 s on
an idle machine and 2 to 4 s on a busy one, a fork with all of it some 15 ms.
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

# what every training script imports sooner or later; the first optimizer alone imports torch._dynamo (0.8 s)
_PRELOAD = (
    "torch",  # the first: what it brings is told from what comes later
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.utils.data",
    "ftrun.worker.process.backend",
    "ftrun.worker.process.protect",
)
_IMPORTS = {"preload": _PRELOAD, "light": ("multiprocessing.process",), "exec": ()}
_UNFIT = "unfit="  # the argument by which a fork server tells its successor why it does not fork workers from imports
_LAUNCHER = 3  # the descriptor of the socket to the launcher
_WORKER = "from ftrun.worker.process import main; main.main_of_program(started)"


def main(started: list[str]) -> None:
    """Serve the launcher at descriptor 3 until it goes away; then end every child. `started`: the first modules of all."""
    launcher = socket.socket(fileno=_LAUNCHER)
    os.set_inheritable(_LAUNCHER, False)
    words = sys.argv[1:]
    if "stdin" in words:
        os.set_inheritable(spawn.ALSO, False)
    unfit = next((word.removeprefix(_UNFIT) for word in words if word.startswith(_UNFIT)), "")
    ForkServer(launcher, words[0], spawn.ALSO if "stdin" in words else None, unfit, started).serve()


class ForkServer:
    """`stdin`: what ranks read from.

    `mode`: "preload" forks workers that have torch; "light" forks them without, for programs that need none; "exec"
    starts each as a fresh interpreter. `unfit`: why a fork server before this one, in the same process, gave "preload" up.
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
        gc.disable()  # a fifth of the time of importing torch goes into looking for garbage that is not there
        self._import()
        gc.freeze()  # a collection in a child would copy every page it looks at
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
            del os.environ[name]  # torch sets some for its own children; a script that imports it later sees none

    def _import_all(self, variables: dict[str, str]) -> None:
        from ftrun.worker.process import main, preloaded  # noqa: F401 what every worker needs, also a fresh one

        preloaded.begin(self._started)
        for name in _IMPORTS[self._mode]:
            try:
                importlib.import_module(name)
            except ImportError:
                if name.startswith("ftrun"):
                    raise
                # the script says it better, if it imports that at all
            if name == "torch":
                preloaded.imported_torch()
            self._check(f"importing {name}", variables)
        preloaded.end()

    def _check(self, what: str, variables: dict[str, str]) -> None:
        """If this process can no longer be forked, begin anew as one that imports nothing. `what` came last."""
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
        """What is to be told when this worker must be a fresh interpreter, "" when it was told; None when it can be a fork."""
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
    # first above 2, so that no dup2 overwrites a source of the next one
    import fcntl

    out, err = (fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in (out, err))
    null = os.open(os.devnull, os.O_RDONLY)
    rank = spec["rank"]
    mine = rank is not None and spec.get("debug_rank") in (None, rank)
    for source, target in ((stdin if mine and stdin is not None else null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    first = 3
    if stdin is not None and rank is None:
        # for when it has a rank: two processes that read one stdin would each get half
        os.dup2(stdin, first)
        spec["stdin"] = first
        first += 1
    # the sockets and pipes of the others: whoever waits for their end would never see it while this worker held a copy
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
