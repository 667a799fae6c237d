"""Parts of the launcher by themselves: fd store, run directory, output, detectors, incident account, fence."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftrun.core import paths, runs
from ftrun.core.account import Incident, Victim
from ftrun.core.errors import UsageError
from ftrun.core.shared import gate, wire
from ftrun.core.shared.board import Board, Busy, F, Flag, Phase, Source, collective_word, name_word
from ftrun.core.shared.handle import Handle, Kind
from ftrun.core.system import procfs
from ftrun.helpers.fd_store import FdStore
from ftrun.host.account import messages
from ftrun.host.account.incident import measured
from ftrun.host.base.loop import EventLoop
from ftrun.host.detect import disk_space, heartbeat
from ftrun.host.detect.hang import describe
from ftrun.host.detect.heartbeat import Beat, BeatWatch
from ftrun.host.output.nonblocking_writer import Outlet
from ftrun.host.rundir import rundir
from ftrun.host.services.services import Services
from ftrun.host.workers import fence, oom_kills
from tests.conftest import wait_for


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board.create(tmp_path / paths.BOARD, 8)


# ---- fd store ----------------------------------------------------------------------------------------------------------


class FdStoreScene:
    """An fd store in a thread of this process, and both ends that talk to it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / paths.FD_STORE_SOCKET
        self.launcher, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.launcher.settimeout(10)
        self.thread = threading.Thread(target=FdStore(run_dir, theirs).serve, daemon=True)
        self.thread.start()
        assert wire.receive(self.launcher) == ({"op": "ready"}, [])

    def ask(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> tuple[dict[str, object], list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(os.fspath(self.path))
            wire.send(sock, message, fds)
            answer = wire.receive(sock)
            assert answer is not None
            return answer

    def put(
        self, rank: int, name: str, cell: int, content: bytes, parts: int = 0, kind: Kind = Kind.HOST
    ) -> dict[str, object]:
        fd = os.memfd_create("test")
        os.write(fd, content)
        message: dict[str, object] = {"op": "put", "rank": rank, "name": name, "cell": cell, "parts": parts}
        answer, fds = self.ask({**message, "handle": Handle(kind, len(content)).pack().hex()}, (fd,))
        os.close(fd)
        assert answer["ok"] and not fds
        return answer

    def get(self, rank: int, name: str) -> tuple[object, bytes] | None:
        answer, fds = self.ask({"op": "get", "rank": rank, "name": name})
        if not answer["ok"]:
            assert not fds
            return None
        content = os.pread(fds[0], 100, 0)
        os.close(fds[0])
        return answer["cell"], content


@pytest.fixture
def fd_store(tmp_path: Path, board: Board) -> Iterator[FdStoreScene]:
    scene = FdStoreScene(tmp_path)
    yield scene
    wire.send(scene.launcher, {"op": "bye"})
    scene.thread.join(10)
    assert not scene.thread.is_alive()


def test_fd_store_gives_back_what_it_holds(fd_store: FdStoreScene) -> None:
    fd_store.put(1, "arena", 3, b"weights")
    fd_store.put(1, "slots", 3, b"streams")
    assert fd_store.get(1, "arena") == (3, b"weights")
    assert fd_store.get(1, "slots") == (3, b"streams")
    assert fd_store.get(0, "arena") is None
    fd_store.put(1, "arena", 5, b"newer")
    assert fd_store.get(1, "arena") == (5, b"newer")


def test_fd_store_forgets_all_when_told(fd_store: FdStoreScene) -> None:
    fd_store.put(0, "arena", 0, b"old world")
    before = len(os.listdir("/proc/self/fd"))
    wire.send(fd_store.launcher, {"op": "drop"})
    wait_for(lambda: fd_store.get(0, "arena") is None, "the arena to be forgotten")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_fd_store_drops_the_parts_that_a_segment_no_longer_has(fd_store: FdStoreScene) -> None:
    for part in range(3):
        fd_store.put(0, f"arena.{part}", 0, b"part")
    fd_store.put(1, "arena.2", 0, b"another rank's")
    fd_store.put(0, "arena", 0, b"whole", parts=1)
    assert [fd_store.get(0, f"arena.{part}") is not None for part in range(3)] == [True, False, False]
    assert fd_store.get(0, "arena") and fd_store.get(1, "arena.2")


def test_fd_store_says_why_device_memory_is_held_by_its_descriptor_only(fd_store: FdStoreScene) -> None:
    answer = fd_store.put(0, "arena.0", 0, b"no memory of a device", kind=Kind.CUDA)
    assert answer["why"]
    assert fd_store.get(0, "arena.0") == (0, b"no memory of a device")


def test_fd_store_keeps_no_descriptor_that_came_with_nonsense(fd_store: FdStoreScene) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("test")
    for handle in ("00", "ff" * 64, None):
        with pytest.raises((AssertionError, ConnectionError)):
            fd_store.ask({"op": "put", "rank": 0, "name": "arena", "cell": 1, "parts": 0, "handle": handle}, (fd,))
    os.close(fd)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "the descriptors to be closed")
    assert fd_store.get(0, "arena") is None


def test_fd_store_survives_nonsense(fd_store: FdStoreScene) -> None:
    for frame in (b"this is no JSON", b'{"op": "put", "rank": 0, "name": "arena", "cell": 1}'):  # no descriptor with it
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(os.fspath(fd_store.path))
            sock.send(frame)
            assert not sock.recv(100)
    fd_store.put(0, "arena", 1, b"fine")
    assert fd_store.get(0, "arena") == (1, b"fine")


# ---- run directory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "runs"
    monkeypatch.setenv(paths.ENV_RUNS_ROOT, str(root))
    return root


def test_claim_lists_and_removes(runs_root: Path) -> None:
    path = rundir.claim(None, {"argv": ["x.py"]})
    assert path.parent == runs_root and path.stat().st_mode & 0o777 == 0o700
    (run,) = runs.list_runs()
    assert (run.run_id, run.pid, run.raw["argv"]) == (path.name, os.getpid(), ["x.py"])
    with pytest.raises(UsageError, match="in use"):
        rundir.claim(path.name, {})
    rundir.remove(path)
    assert list(runs_root.iterdir()) == []


def test_directory_of_a_dead_launcher_is_taken_over(runs_root: Path) -> None:
    path = rundir.claim("again", {})
    raw = json.loads((path / paths.RUN_FILE).read_text())
    (path / paths.RUN_FILE).write_text(json.dumps({**raw, "start": raw["start"] - 1}))  # the pid was reused
    assert runs.list_runs() == []
    assert rundir.claim("again", {"fresh": True}) == path
    assert json.loads((path / paths.RUN_FILE).read_text())["fresh"] is True


# ---- output ----------------------------------------------------------------------------------------------------------


def test_output_never_blocks_on_a_reader_that_waits() -> None:
    loop = EventLoop()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    outlet = Outlet(writer, loop, lambda why: pytest.fail(why))
    text = b"".join(b"line %d\n" % i for i in range(100_000))
    began = time.monotonic()
    outlet.write(text)
    assert time.monotonic() - began < 5 and outlet.waiting > 0
    got = b""
    while len(got) < len(text):
        with contextlib.suppress(BlockingIOError):
            got += os.read(reader, 1 << 16)
        loop.run_once(1.0 if outlet.waiting else 0.0)
    assert got == text and outlet.waiting == 0
    for fd in (reader, writer):
        os.close(fd)


def test_a_terminal_that_is_not_read_blocks_nobody() -> None:
    loop = EventLoop()
    master, slave = os.openpty()  # as it comes: a newline takes two bytes there
    outlet = Outlet(slave, loop, lambda why: pytest.fail(why))
    text, seen = b"".join(b"%d %s\n" % (n, b"x" * (n % 90)) for n in range(9000)), b""
    begun = time.monotonic()
    outlet.write(text)
    for _ in range(3):
        loop.run_once(0.05)
    assert time.monotonic() - begun < 5 and outlet.waiting > 0
    assert os.get_blocking(slave), "those who share the descriptor keep its flags"
    os.set_blocking(master, False)

    def arrived() -> bool:
        nonlocal seen
        loop.run_once(0.01)
        while select.select([master], [], [], 0)[0]:
            seen += os.read(master, 65536)
        return outlet.waiting == 0 and len(seen) >= len(text) + 9000

    wait_for(arrived, "all of it")
    assert seen == text.replace(b"\n", b"\r\n")
    for fd in (master, slave, outlet._own):
        os.close(fd)


# ---- detectors that read the board -----------------------------------------------------------------------------------


def test_what_the_board_says_of_a_rank(board: Board) -> None:
    cell = board.cell(0)
    word = gate.GateWord(3, False, 6)
    cell[F.RANK], cell[F.STEP], cell[F.FLAGS] = 3, 108, Flag.ALIVE | Flag.LOOPING  # its index runs ahead of the gate
    cell[F.COLLECTIVE], cell[F.COLLECTIVE_NAME] = collective_word(0, 4), name_word("allreduce")
    cell[F.COLLECTIVE_SINCE], cell[F.PHASE] = 1, Phase.BACKWARD
    rank = describe(cell, word)
    assert (rank.rank, rank.step, rank.looping, rank.waiting, rank.at_gate) == (2, 107, True, True, False)
    assert (rank.group, rank.number, rank.name, rank.excuse) == (0, 4, "allreduce", "")
    cell[F.COLLECTIVE_SINCE], cell[F.ARRIVAL] = 0, gate.arrival(3, 7)
    rank = describe(cell, word)
    assert (rank.waiting, rank.at_gate) == (False, True)
    assert not describe(cell, word._replace(last=7)).at_gate, "that gate is open"
    assert not describe(cell, word._replace(generation=4)).at_gate, "it waited in a world that is over"
    cell[F.BUSY], cell[F.PHASE] = Busy.FIRST, Phase.BACKWARD
    assert describe(cell, word).excuse == "", "a rank that waits has nothing to begin with"
    cell[F.DEVICE] = 1
    assert describe(cell, word).excuse == "first", "but on a GPU: NCCL connects in the first collective"
    cell[F.DEVICE] = cell[F.ARRIVAL] = 0
    for busy, phase, excuse in (
        (Busy.FIRST, Phase.FORWARD, "first"),
        (Busy.FIRST | Busy.COMPILING, Phase.FORWARD, "compiling"),
        (Busy.CALL, Phase.IDLE, "call"),
        (Busy(0), Phase.DONE, "outside"),
        (Busy(0), Phase.UPDATE, ""),
    ):
        cell[F.BUSY], cell[F.PHASE] = busy, phase
        assert describe(cell, word).excuse == excuse


def test_a_stopped_process_is_condemned_and_a_silent_or_traced_one_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    beat = Beat(0, process.pid, time.monotonic_ns(), 10.0)
    watch: BeatWatch[int] = BeatWatch(0.05)

    def look() -> list[str]:
        time.sleep(watch.pause)
        return [evidence for _, evidence in watch.silent([beat], time.monotonic_ns())]

    try:
        assert [look() for _ in range(8)] == [[]] * 8, "the beat is overdue, and the process runs"
        process.send_signal(signal.SIGSTOP)
        found = wait_for(look, "a stopped process")
        assert "stopped by a signal and no debugger holds it" in found[0]
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: not heartbeat.why_still(process.pid), "the process runs again")
        assert look() == []
        beat = replace(beat, timeout=0.2, option="--heartbeat-timeout")
        assert "--heartbeat-timeout" in wait_for(look, "too long a silence")[0]
    finally:
        process.kill()
        process.wait()


def test_the_next_look_comes_when_the_newest_beat_would_be_overdue() -> None:
    """One look an interval while all beat, and more as soon as one is found stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        interval = 0.4
        watch: BeatWatch[int] = BeatWatch(interval)
        now = time.monotonic_ns()
        beats = [Beat(number, process.pid, now, 10.0) for number in range(2)]
        assert watch.silent(beats, now) == []
        assert interval < watch.pause <= 1.15 * interval, "nothing can be seen before the next beat"
        process.send_signal(signal.SIGSTOP)
        time.sleep(watch.pause)
        now = time.monotonic_ns()
        beats[1] = replace(beats[1], at=now)
        assert watch.silent(beats, now) == [], "a process that was found stopped once"
        assert watch.pause <= interval / 4
        time.sleep(watch.pause)
        assert [of for of, _ in watch.silent(beats, time.monotonic_ns())] == [0]
    finally:
        process.kill()
        process.wait()


def test_a_late_look_is_not_the_workers_silence() -> None:
    """Nor do the looks after it take it for one: whoever was stopped with the launcher has not beaten by then."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch: BeatWatch[int] = BeatWatch(0.08)
        beat = Beat(0, process.pid, time.monotonic_ns(), 0.3)
        time.sleep(0.8)  # as if the launcher, or the whole machine, had been stopped
        for _ in range(4):
            assert watch.silent([beat], time.monotonic_ns()) == []
            time.sleep(watch.pause)
        wait_for(lambda: time.sleep(watch.pause) or watch.silent([beat], time.monotonic_ns()), "its own silence", 10)
    finally:
        process.kill()
        process.wait()


def test_out_of_memory_kills_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.oom_control"

    def kills(number: int) -> None:
        counter.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {number}\n")

    kills(3)
    monkeypatch.setattr(oom_kills, "group_files", lambda *_: iter([counter]))
    monkeypatch.setattr(oom_kills, "_open_kernel", lambda: None)
    watch = oom_kills.Kills()
    for pid in range(1, 6):
        watch.watch(pid)
    assert watch.evidence(1) == "", "kills before its time are no news"
    kills(4)
    assert "out-of-memory kill" in watch.evidence(2)
    assert watch.evidence(3) == "", "one kill explains one death"
    kills(5)
    watch.expire()
    watch.expire()
    assert watch.evidence(4) == "", "that kill had another victim, long ago"
    kills(6)
    watch.expire()
    assert watch.evidence(5), "a death just before the second look still counts"


def test_a_full_file_system_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"blocks": 10}

    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1000, left["blocks"], left["blocks"], 100, 50, 50, 0, 255))

    monkeypatch.setattr(disk_space, "_LEAST", 20 * 4096)
    monkeypatch.setattr(disk_space.os, "statvfs", statvfs)
    monkeypatch.setattr(disk_space, "_EVERY", 0.01)
    monkeypatch.setattr(disk_space, "mount", lambda path: "tmpfs" if path == tmp_path / "b" else "ext4")
    watch = disk_space.RoomWatch({"a file": tmp_path / "a", "the board": tmp_path / "b"})
    try:
        found = wait_for(watch.news, "the full disk")
        assert [fault for fault, _ in found] == ["disk-full", "memory-full"]
        assert f"the disk under {tmp_path}/a is full" in found[0][1]
        assert watch.news() == []
        left["blocks"] = 900
        wait_for(lambda: not watch._full, "room again")
        assert watch.news() == []
        left["blocks"] = 0
        assert wait_for(watch.news, "full once more")
    finally:
        watch.close()


# ---- incident account ------------------------------------------------------------------------------------------------


def test_parts_sum_to_the_whole_and_old_generations_do_not_count(board: Board) -> None:
    base, ms = 10**12, 10**6
    times = {F.STOPPED: (5, 9), F.CLEANED: (6, 10), F.RESET: (30, 28), F.RESTORED: (31, 34), F.RESUMED: (35, 36)}
    for index, cell in enumerate((board.cell(0), board.cell(4))):
        for said, pair in times.items():
            cell[said] = 7
            cell[said + 1] = base + pair[index] * ms
    board.cell(0)[F.FIRST_DONE] = 6  # an answer to an older generation
    board.cell(0)[F.FIRST_DONE_NS] = base + 900 * ms
    board.cell(4)[F.FIRST_DONE] = 7
    board.cell(4)[F.FIRST_DONE_NS] = base + 200 * ms
    board.cell(4)[F.SOURCE] = Source.ADOPT
    incident = Incident(base, base + 2 * ms, (Victim(1, 1, 60, "backward", "SIGKILL", 2.0),), 7, 60, 1)
    facts = measured(incident, board, {0: 0, 1: 4})
    assert facts["ms"] == {
        "detect": 2, "stop": 7, "clean": 1, "reset": 20, "restore": 4, "resume": 2, "first_step": 164
    }  # fmt: skip
    assert sum(facts["ms"].values()) == facts["total_ms"] == 200
    assert facts["sources"] == {"1": {"name": "adopt", "bytes": 0, "cell": 4}}
    assert messages.recovered(facts) == (
        "recovered in 200 ms: detect 2, stop 7, clean 1.0, reset 20, restore 4, first step 166; 0 committed steps lost"
    )
    assert messages.failed(incident.victims[0], 3, True) == (
        "rank 1 died in backward of step 60 (SIGKILL, seen after 2 ms); stopping 3 healthy workers"
    )
    assert messages.replaced(1, 4, True, "step 60", True, facts["sources"]["1"]) == (
        "spare 4 takes over rank 1; step 60 again; state adopted in place, 0 B moved"
    )


# ---- fence -----------------------------------------------------------------------------------------------------------


def test_fence_sees_the_end_and_its_reason_before_anybody_reaped(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert not fence.quiet(process.pid)
    procfs.kill_group(process.pid)
    wait_for(lambda: fence.quiet(process.pid), "the end of its threads", 5)
    assert fence.peek_exit(process.pid) == 128 + signal.SIGKILL
    process.wait()
    assert fence.quiet(process.pid)
    assert fence.peek_exit(process.pid) is None


def test_an_exit_code_that_is_set_can_be_read() -> None:
    for _ in range(20):
        with subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) as process:
            assert not fence.code_is_set(process.pid) and process.stdin is not None
            process.stdin.close()
            wait_for(lambda: fence.code_is_set(process.pid), "its exit code", 10)
            assert fence.peek_exit(process.pid) == 3
        assert not fence.code_is_set(process.pid), "it was reaped: who did that knows"


# ---- services --------------------------------------------------------------------------------------------------------


def test_a_store_of_an_earlier_order_is_ended_and_not_used(tmp_path: Path) -> None:
    """Two orders cross (the store dies, then the world is restarted): workers may only hear of the second store."""
    services = Services(tmp_path, os.environ, False, lambda service, message: None)
    ours, fork_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, fork_server:
        services.fork_server._sock = ours
        services.fork_server.ready = True
        orders = []
        for _ in range(2):
            services.start_store("127.0.0.1", 0)
            frame = wire.receive(fork_server)
            assert frame is not None
            orders.append(frame[0]["order"])
            for fd in frame[1]:
                os.close(fd)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as late:
            assert not services.is_current({"op": "store-forked", "pid": late.pid, "order": orders[0]})
            assert late.wait(10) == -signal.SIGKILL
        assert services.is_current({"op": "store", "pid": os.getpid(), "order": orders[1]})


def test_a_worker_with_a_gpu_is_over_when_its_last_child_is() -> None:
    """A forked child keeps the device's descriptors open, so the device may still run what its parent queued."""
    code = "import os, signal\nif os.fork(): print(flush=True)\nsignal.pause()"
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None and leader.stdout.readline()
    assert not fence.ended(leader.pid)
    leader.kill()
    leader.wait()
    assert fence.quiet(leader.pid) and not fence.ended(leader.pid)
    os.killpg(leader.pid, signal.SIGKILL)
    wait_for(lambda: fence.ended(leader.pid), "the child's end")
    leader.stdout.close()
