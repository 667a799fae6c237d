"""The fd store: holds descriptors of the workers' memory, so that it outlives them, and ends the workers if the launcher dies.

Theory of operation. It is a process of its own and uses the standard library only. One thread serves the launcher's socket and a listening
socket. A worker puts the descriptor of each segment under (rank, name); a replacement gets it. Of several nodes, further threads read
memory for replacements on other nodes (memory_server.py). The fd store never maps host memory; it imports device memory, in
threads beside the one that serves (see cuda_import.py). When the launcher's socket closes without a `bye`, it kills
the fork server and every worker, tells a node that watches this one, and removes the run directory. When the lease of this node is over
(ftrun.core.shared.lease), it kills the workers that have ranks. One more thread copies host snapshots of another node (snapshot_copies.py).

Why a process of its own: memory lives as long as a process holds a descriptor or a mapping, and the weights must survive the launcher's
death. The fd store ends the workers then, since it sees the launcher's socket close and does nothing that could delay it. Named files in
shared memory would need no holder, but would stay behind when all processes are killed; descriptors vanish with the last process. If the
fd store dies itself, the launcher starts another one and raises FD_STORE_EPOCH on the board, and the workers send their descriptors again.
The memory of a rank that dies in between is lost.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import native
from ftrun.core import paths, shape
from ftrun.core.shared import health, lease, wire
from ftrun.core.shared.board import Board, Cell, F, Head
from ftrun.core.shared.handle import Handle, Kind
from ftrun.core.shared.snapshot_layout import NAME as SNAPSHOT
from ftrun.core.system.procfs import kill_group, process_start
from ftrun.helpers.cuda_import import Imported
from ftrun.host.workers import fence

if TYPE_CHECKING:
    from ftrun.helpers.gpu_reads import GpuReads
    from ftrun.helpers.memory_server import Borrowed, MemoryServer
    from ftrun.helpers.snapshot_copies import Copies

_LEASE_SLEEP = 1.0  # the most seconds between two looks at a lease: the wait's clock stands still while the machine sleeps
_LEASE_LOOK = 0.05  # seconds between two looks at a lease that is over
_INSIST = 2.0  # seconds for which `_guard` waits for the ends
_CLIENTS = 128  # the most connections at once: a further one closes the one that has been silent longest
_KEY: dict[str, shape.Check] = {"rank": shape.whole, "name": shape.text}
_ASKED = {
    "put": shape.record({**_KEY, "cell": shape.whole, "parts": shape.whole, "handle": shape.text}),
    "reads": shape.record({"rank": shape.whole, "cell": shape.whole, "size": shape.whole}),
    "get": shape.record(_KEY),
    "forget": shape.record(_KEY),
    "drop": shape.record({}),
}


def main() -> None:
    """Serve until the launcher sends `bye`, or dies: then end all workers. argv: run directory. Descriptor 3: launcher."""
    launcher = socket.socket(fileno=3)
    os.set_inheritable(3, False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends when the launcher ends
    native.set_name("ftrun fd store")
    FdStore(Path(sys.argv[1]), launcher).serve()


class FdStore:
    """The server of one run. `serve` returns when the run is over."""

    def __init__(self, run_dir: Path, launcher: socket.socket) -> None:
        self._run_dir = run_dir
        self._launcher = launcher
        self._board = Board.open(run_dir / paths.BOARD)
        self._held: dict[tuple[int, str], tuple[int, int, str]] = {}  # (rank, name) -> (cell, fd, handle)
        self._lock = threading.Lock()  # around what changes `_held`, and around what another thread takes from it
        self._memory: MemoryServer | None = None  # of several nodes
        self._reads: dict[int, tuple[int, GpuReads]] = {}  # rank -> (cell, its worker, which reads its memory on a GPU)
        self._copies: Copies | None = None
        self._serving = threading.Lock()  # around the start of another one
        self._imported: dict[tuple[int, str], Imported] = {}
        self._guarded: list[int] = []
        self._killed: dict[int, int] = {}  # processes that we ended, with when they had started
        self._select = selectors.DefaultSelector()
        self._clients: dict[socket.socket, None] = {}  # sorted by their last message, the latest last

    def serve(self) -> None:
        path = self._run_dir / paths.FD_STORE_SOCKET
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # an earlier fd store left it when it died
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with wire.name_of(path) as name:
            listener.bind(name)
        listener.listen(128)
        self._select.register(listener, selectors.EVENT_READ)
        self._select.register(self._launcher, selectors.EVENT_READ)
        self._board[Head.COPIES] = self._board[Head.COPIES + 1] = self._board[Head.COPIES_AT] = 0  # an earlier fd store had them
        self._tell({"op": "ready"})
        while True:
            for key, _ in self._select.select(self._keep_lease()):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._launcher:
                    if not self._hear_launcher():
                        return
                elif sock is listener:
                    self._accept(listener)
                else:
                    self._answer(sock)

    def _keep_lease(self) -> float | None:
        """End the ranks if the lease of this node is over. Return the seconds until the next look, None = it has no lease."""
        left = lease.left(self._board)
        if left is None or left > 0:
            return None if left is None else min(_LEASE_SLEEP, left)
        ended = [cell for cell in self._workers() if cell[F.RANK] and self._cut_off(cell)]
        if ended:
            self._board[Head.FENCED] = self._board[Head.FENCED] + 1
            self._print(f"no beat of this node reached the others for {-left:.1f} s too long; ending its {len(ended)} ranks")
        return _LEASE_LOOK

    def _workers(self) -> list[Cell]:
        """Return the cells of the workers that had not ended by the launcher's last knowledge."""
        return [self._board.cell(at) for at in health.living(self._board, health.used_cells(self._board))]

    def _cut_off(self, cell: Cell) -> bool:
        """Kill a rank, and let the launcher know why, which finds it dead. Return False if its process is gone."""
        if not fence.quiet(cell[F.PID]):
            cell[F.CUT_OFF] = 1
        return self._kill(cell[F.PID])

    def _kill(self, pid: int) -> bool:
        """Kill a process and its group. Return False if it had ended before; its number may be that of a stranger by now."""
        start = process_start(pid)
        return start is not None and self._killed.setdefault(pid, start) == start and kill_group(pid)

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
        elif message["op"] == "serve":
            told = str(message["address"]), str(message["secret"])
            threading.Thread(target=self._serve_nodes, args=told, daemon=True).start()  # a host's name may take long to look up
        elif message["op"] == "copy":
            self._copy(message)
        elif message["op"] == "alive?":
            self._tell({"op": "alive"})
        return bool(message["op"] != "bye")

    def _serve_nodes(self, address: str, secret: str) -> None:
        """Serve the memory to other nodes, from now on to those that know `secret`; tell the launcher the port, 0 = it cannot be served."""
        from ftrun.helpers.memory_server import MemoryServer  # one node never needs it

        with self._serving:
            if self._memory is not None:
                self._memory.close()
            try:
                self._memory = MemoryServer(self._borrow, address, secret)
                self._memory.start()
            except OSError as error:
                self._memory = None
                print(f"fd store: cannot serve memory on {address}: {error}", file=sys.stderr)
            self._tell({"op": "serving", "port": self._memory.port if self._memory is not None else 0})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher died: the next receive notices it, and the loop acts
            wire.send(self._launcher, message)

    def _copy(self, message: dict[str, Any]) -> None:
        """Copy the host snapshots of the ranks of another node from now on."""
        from ftrun.helpers.snapshot_copies import Copies, NodeBefore, Shelf

        if self._copies is None:
            shelf = Shelf(self._snapshots, self._keep_snapshots)
            self._copies = Copies(self._board, shelf, lambda why: self._tell({"op": "uncopied", "why": why}))
        ranks = range(int(message["first"]), int(message["end"]))
        secret = str(message["secret"])
        self._copies.follow(NodeBefore(int(message["node"]), str(message["address"]), int(message["port"]), secret, ranks))

    def _snapshots(self, rank: int) -> int | None:
        with self._lock:
            held = self._held.get((rank, SNAPSHOT))
            return None if held is None else os.dup(held[1])

    def _keep_snapshots(self, rank: int, fd: int) -> None:
        self._forget((rank, SNAPSHOT))
        with self._lock:
            self._held[rank, SNAPSHOT] = (0, fd, Handle(Kind.HOST, os.fstat(fd).st_size).pack().hex())

    def _borrow(self, rank: int, name: str) -> Borrowed | None:
        from ftrun.helpers.memory_server import HostMemory

        with self._lock:
            if name == "device":
                cell, reads = self._reads.get(rank, (0, None))
                return None if reads is None or reads.over() or self._board.cell(cell)[F.CORRUPT] else reads
            held = self._held.get((rank, name))
            if held is None or Handle.unpack(bytes.fromhex(held[2])).kind is not Kind.HOST:
                return None
            if name == "arena" and self._board.cell(held[0])[F.CORRUPT]:  # what it mirrors of other nodes is sound
                return None
            return HostMemory(os.dup(held[1]))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # the client went away again
        if wire.peer_uid(sock) != os.getuid():  # a second guard of the weights: the socket's folder is private already
            sock.close()
            return
        sock.setblocking(False)  # a client that does not read its answers must not block the other clients
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
            return  # `_accept` closed it just now to make room
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
        """Answer a request, and keep or close its descriptors; raise ValueError for an invalid request, OSError if the answer fails."""
        try:
            op = str(message.get("op"))
            if op not in _ASKED or not _ASKED[op](message) or len(fds) != (op in ("put", "reads")):
                raise ValueError(f"a question that nobody asks: {op[:40]!r} with {len(fds)} descriptors")
            answer: dict[str, Any] = {"ok": True}
            give: tuple[int, ...] = ()
            key = (message.get("rank", -1), message.get("name", ""))
            if op == "put":
                if self._put(sock, key, message, fds):
                    return  # a thread will answer
            elif op == "reads":
                wire.send(sock, answer)  # before anybody may ask on this connection
                self._hear_reads(sock, message, fds)
                return
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
        """Hold a descriptor. Return True for device memory: a thread answers after its import."""
        handle = Handle.unpack(bytes.fromhex(message["handle"]))
        self._forget(key)  # the last put counts: a replacement that adopts sends the same memory again
        with self._lock:
            self._held[key] = (message["cell"], fds.pop(), message["handle"])
            rank, name = key
            parts = [k for k in self._held if k[0] == rank and k[1].startswith(f"{name}.")]
        for other in parts:
            number = other[1].rpartition(".")[2]
            if number.isdecimal() and int(number) >= message["parts"]:
                self._forget(other)
        if handle.kind is not Kind.CUDA:
            return False
        # the client closes its end after the answer; until then a thread may write to this end
        fd, answer_to = os.dup(self._held[key][1]), sock.dup()

        def done(why: str) -> None:
            os.close(fd)
            with contextlib.suppress(OSError), answer_to:
                wire.send(answer_to, {"ok": True, "why": why})

        self._imported[key] = Imported()
        self._imported[key].begin(handle.device, fd, done)
        return True

    def _hear_reads(self, sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        """Keep the connection of a worker that reads its memory on a GPU for other nodes from now on."""
        from ftrun.helpers.gpu_reads import GpuReads

        self._select.unregister(sock)
        del self._clients[sock]
        with self._lock:
            earlier = self._reads.get(message["rank"])
            self._reads[message["rank"]] = message["cell"], GpuReads(sock, fds.pop(), message["size"])
        if earlier is not None:
            earlier[1].end()

    def _forget(self, key: tuple[int, str]) -> None:
        with self._lock:
            old = self._held.pop(key, None)
            if old is not None:
                os.close(old[1])
        imported = self._imported.pop(key, None)
        if imported is not None:
            imported.let_go()

    def _drop(self) -> None:
        for key in list(self._held):
            self._forget(key)
        with self._lock:
            reads = [*self._reads.values()]
            self._reads.clear()
        for _, one in reads:
            one.end()
        if self._copies is not None:
            self._copies.dropped()

    def _guard(self) -> None:
        """End the processes of a dead launcher: first the fork server, so that it forks no more, then every worker."""
        self._say_why()
        deadline = time.monotonic() + _INSIST
        while True:
            pids = {*self._guarded, *(cell[F.PID] for cell in self._workers())}
            for pid in pids:
                self._kill(pid)
            ended = all(map(fence.quiet, pids))
            if ended or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if self._memory is not None and ended:
            self._memory.tell_ended()
        self._clean_up()

    def _say_why(self) -> None:
        """Print why the workers end; stdout is services.log, which stays with the workers' logs."""
        living = len(self._workers())  # the fork server may already have killed some
        launcher = self._board[Head.LAUNCHER_PID]
        self._print(f"the launcher ({launcher}) is gone; ending {living} worker{'' if living == 1 else 's'}")

    def _print(self, what: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the workers alive
            print(f"fd store: {time.strftime('%Y-%m-%d %H:%M:%S')}: {what}", flush=True)

    def _clean_up(self) -> None:
        from ftrun.core import runs
        from ftrun.host.rundir import rundir

        run = runs.read_run(self._run_dir)
        if run is not None and not run.alive():
            rundir.bury(run)
