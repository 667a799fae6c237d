"""The fd store: holds descriptors of the workers' memory, so that it outlives them; ends everybody if the launcher dies.

Standard library only, a process of its own. Never maps or reads what it keeps; device memory it imports, which is done in
threads beside the one that serves (see cuda_import.py).

Why a process of its own: memory lives as long as somebody holds a descriptor or a mapping, and the launcher must be free to be killed
without the weights going with it. For the same reason it is the one that ends the workers then: it sees the launcher's socket close,
and has nothing to do that could keep it from acting. Named files in shared memory would need no holder, and would stay behind when
everybody is killed; descriptors go with the last process. When it dies itself, workers go on: the launcher starts another one and
raises FD_STORE_EPOCH on the board, and they send their descriptors again. The memory of a rank that dies in between is lost.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ftrun import native
from ftrun.core import paths, shape
from ftrun.core.shared import wire
from ftrun.core.shared.board import Board, F, Head
from ftrun.core.shared.handle import Handle, Kind
from ftrun.core.system.procfs import kill_group
from ftrun.helpers.cuda_import import Imported

_INSIST = 2.0  # seconds for which the guardian looks for workers that had not written their pid yet
_CLIENTS = 128  # connections at once, each for one question: whoever has been silent longest makes room for the next
_KEY: dict[str, shape.Check] = {"rank": shape.whole, "name": shape.text}
_ASKED = {
    "put": shape.record({**_KEY, "cell": shape.whole, "parts": shape.whole, "handle": shape.text}),
    "get": shape.record(_KEY),
    "forget": shape.record(_KEY),
    "drop": shape.record({}),
}


def main() -> None:
    """Serve until the launcher says bye (or dies: then end everybody). argv: run directory. Descriptor 3: launcher."""
    launcher = socket.socket(fileno=3)
    os.set_inheritable(3, False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends when the launcher ends
    native.set_name("ftrun fd store")
    FdStore(Path(sys.argv[1]), launcher).serve()


class FdStore:
    """One per run. `serve` returns when the run is over."""

    def __init__(self, run_dir: Path, launcher: socket.socket) -> None:
        self._run_dir = run_dir
        self._launcher = launcher
        self._board = Board.open(run_dir / paths.BOARD)
        self._held: dict[tuple[int, str], tuple[int, int, str]] = {}  # (rank, name) -> (cell, fd, handle)
        self._imported: dict[tuple[int, str], Imported] = {}
        self._guarded: list[int] = []
        self._select = selectors.DefaultSelector()
        self._clients: dict[socket.socket, None] = {}  # who spoke last comes last

    def serve(self) -> None:
        path = self._run_dir / paths.FD_STORE_SOCKET
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # an fd store that died left it
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with wire.name_of(path) as name:
            listener.bind(name)
        listener.listen(128)
        self._select.register(listener, selectors.EVENT_READ)
        self._select.register(self._launcher, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # it died already: the loop hears that, and acts on it
            wire.send(self._launcher, {"op": "ready"})
        while True:
            for key, _ in self._select.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._launcher:
                    if not self._hear_launcher():
                        return
                elif sock is listener:
                    self._accept(listener)
                else:
                    self._answer(sock)

    def _hear_launcher(self) -> bool:
        try:
            frame = wire.receive(self._launcher)
        except ConnectionError:
            frame = None
        if frame is None:
            self._guard()
            return False
        message, _ = frame
        if message["op"] == "guard":
            self._guarded = [int(pid) for pid in message["pids"]]
        elif message["op"] == "drop":
            self._drop()
        elif message["op"] == "alive?":
            with contextlib.suppress(OSError):  # the launcher died: heard next
                wire.send(self._launcher, {"op": "alive"})
        return bool(message["op"] != "bye")

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # it went away again
        if wire.peer_uid(sock) != os.getuid():  # the socket's folder is private already; these are a run's weights
            sock.close()
            return
        sock.setblocking(False)  # one that does not read its answers keeps nobody else from theirs
        while len(self._clients) >= _CLIENTS:
            self._hang_up(next(iter(self._clients)))
        self._clients[sock] = None
        self._select.register(sock, selectors.EVENT_READ)

    def _hang_up(self, sock: socket.socket) -> None:
        del self._clients[sock]
        self._select.unregister(sock)
        sock.close()

    def _answer(self, sock: socket.socket) -> None:
        if sock not in self._clients:
            return  # it made room for another one just now
        try:
            frame = wire.receive(sock)
            if frame is not None:
                self._clients[sock] = self._clients.pop(sock)
                self._reply(sock, *frame)
                return
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # a full disk
                print(f"fd store: {error!r}", file=sys.stderr)
        self._hang_up(sock)

    def _reply(self, sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        """Raises ValueError for what is no question of ours, OSError. The descriptors that came are kept or closed."""
        try:
            op = str(message.get("op"))
            if op not in _ASKED or not _ASKED[op](message) or len(fds) != (op == "put"):
                raise ValueError(f"a question that nobody asks: {op[:40]!r} with {len(fds)} descriptors")
            answer: dict[str, Any] = {"ok": True}
            give: tuple[int, ...] = ()
            key = (message.get("rank", -1), message.get("name", ""))
            if op == "put":
                if self._put(sock, key, message, fds):
                    return  # a thread answers
            elif op == "forget":
                self._forget(key)
            elif op == "drop":
                self._drop()
            elif key in self._held:
                cell, fd, handle = self._held[key]
                answer, give = {"ok": True, "cell": cell, "handle": handle}, (fd,)
            else:
                answer = {"ok": False}
            wire.send(sock, answer, give)
        finally:
            for fd in fds:
                os.close(fd)

    def _put(self, sock: socket.socket, key: tuple[int, str], message: dict[str, Any], fds: list[int]) -> bool:
        """Hold a descriptor. True: device memory, which is imported first; the answer comes then."""
        handle = Handle.unpack(bytes.fromhex(message["handle"]))
        self._forget(key)  # the last word counts: a replacement that adopts sends the same memory again
        self._held[key] = (message["cell"], fds.pop(), message["handle"])
        rank, name = key
        for other in [k for k in self._held if k[0] == rank and k[1].startswith(f"{name}.")]:
            number = other[1].rpartition(".")[2]
            if number.isdecimal() and int(number) >= message["parts"]:
                self._forget(other)
        if handle.kind is not Kind.CUDA:
            return False
        # the client closes its end when it has the answer; until then a thread may write to ours
        fd, answer_to = os.dup(self._held[key][1]), sock.dup()

        def done(why: str) -> None:
            os.close(fd)
            with contextlib.suppress(OSError), answer_to:
                wire.send(answer_to, {"ok": True, "why": why})

        self._imported[key] = Imported()
        self._imported[key].begin(handle.device, fd, done)
        return True

    def _forget(self, key: tuple[int, str]) -> None:
        old = self._held.pop(key, None)
        if old is not None:
            os.close(old[1])
        imported = self._imported.pop(key, None)
        if imported is not None:
            imported.let_go()

    def _drop(self) -> None:
        for key in list(self._held):
            self._forget(key)

    def _guard(self) -> None:
        """The launcher is gone: end the fork server first, so that nothing new is forked, then every worker."""
        self._say_why()
        deadline = time.monotonic() + _INSIST
        while True:
            left = [pid for pid in self._guarded if kill_group(pid)]
            for index in range(self._board.cells):
                cell = self._board.cell(index)
                pid = cell[F.PID]
                if pid and not cell[F.EXITED] and kill_group(pid):
                    left.append(pid)
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self._clean_up()

    def _say_why(self) -> None:
        """Our stdout is services.log, which stays with the workers' logs."""
        cells = (self._board.cell(index) for index in range(self._board.cells))
        # as the launcher knew them: the fork server has seen its end as well, and may have been quicker with the first ones
        living = len({cell[F.PID] for cell in cells if cell[F.PID] and not cell[F.EXITED]})
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        launcher = self._board[Head.LAUNCHER_PID]
        workers = f"{living} worker{'' if living == 1 else 's'}"
        with contextlib.suppress(OSError):  # a full disk saves nobody's life
            print(f"fd store: {now}: the launcher ({launcher}) is gone; ending {workers}", flush=True)

    def _clean_up(self) -> None:
        from ftrun.core import runs
        from ftrun.host.rundir import rundir

        run = runs.read_run(self._run_dir)
        if run is not None and not run.alive():
            rundir.bury(run)
