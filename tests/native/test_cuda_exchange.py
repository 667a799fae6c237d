"""The reload from the host snapshot between GPUs: the exchange of test_transfer.py over the fake driver, in real processes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.native import fake

SETUP = """
import socket
from ftrun.native import transfer
from ftrun.native.transfer import BUFFERS, Facts, OnGpu, Terms, TransferError

MIB = 1 << 20
COUNT, TOTAL = 4, 10 * MIB + 4321
SLOW = "rate 20000000\\n"  # a chunk takes 50 ms
SLOWER = "rate 4000000\\n"  # 250 ms

def shared(size):
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    address = native.map_fd(fd, size)
    os.close(fd)
    return address

def control(text):
    open(os.environ["FAKE_CUDA_CONTROL"], "w").write(text)

def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.001)

class Exchange:
    "Of `state`: participant k is a process that uses device k and has its buffers and its target there."

    def __init__(self, generation=7):
        self.facts = Facts(COUNT, MIB, TOTAL, generation=generation, step=3, layout=99)
        self.ring, self.failed = shared(self.facts.control_bytes), shared(4096)
        self.facts.prepare(self.ring)
        self.hubs, self.pids, self.fds = [], [], []

    def start(self, sends_only=()):
        for me in range(COUNT):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.hubs.append(ours)
            pid = os.fork()
            if pid == 0:
                status = 99
                try: status = self.take_part(me, theirs, me in sends_only)
                except BaseException as error: sys.stderr.write(repr(error))
                finally: os._exit(status)
            self.pids.append(pid)
            self.fds += socket.recv_fds(ours, 1, 1)[1]
        return self

    def go(self, *who):
        for me in who or range(COUNT): socket.send_fds(self.hubs[me], [b"x"], self.fds)
        return self

    def take_part(self, me, hub, sends_only):
        base, fd = memory(BUFFERS * UNIT, me)
        socket.send_fds(hub, [b"x"], [fd])
        _, fds, _, _ = socket.recv_fds(hub, 1, COUNT)
        buffers = []
        for who, fd in enumerate(fds):
            at = base
            if who != me:
                at = cuda.reserve(me, BUFFERS * UNIT)
                cuda.attach(who, me, fd, at, BUFFERS * UNIT)
            buffers += [at, at + UNIT]
        target, _ = memory(6 * UNIT, me)
        offset, size = self.facts.share(me)
        to = [] if sends_only else [(target, TOTAL)]
        try:
            done = self.facts.run(self.ring, me, [(state + offset, size)], to, Terms(timeout=20, spans=100), OnGpu(me, buffers))
        except TransferError as error:
            native.store64(self.failed + 8 * me, error.failed + 1)
            return error.errno
        loads, sent, taken = ([s for s in done.spans if s.stage == k] for k in range(3))
        assert len(loads) == len(sent) == -(-size // MIB)
        assert all(load.end <= send.begin <= send.end for load, send in zip(loads, sent))
        if sends_only: return 0
        assert len(taken) == sum(-(-self.facts.share(who)[1] // MIB) for who in range(COUNT))
        own = [s for s in taken if s.source == me]
        assert all(send.end <= take.begin for send, take in zip(sent, own))
        return 0 if ctypes.string_at(target, TOTAL) == ctypes.string_at(state, TOTAL) else 77

    def progress(self, who):
        return transfer.look(self.ring, who)

    def codes(self):
        for hub in self.hubs: hub.close()
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def blamed(self):
        return [native.load64(self.failed + 8 * who) - 1 for who in range(COUNT)]

state = shared(TOTAL)
random.seed(5)
ctypes.memmove(state, random.randbytes(TOTAL), TOTAL)
"""


@pytest.fixture
def control(tmp_path: Path) -> fake.Control:
    return fake.Control(tmp_path / "cuda.txt")


def child(control: fake.Control, code: str) -> Any:
    return fake.child(control, SETUP + code)


def test_every_device_gets_the_whole(control: fake.Control) -> None:
    found = child(
        control,
        """
exchange = Exchange().start().go()
print(json.dumps([exchange.codes(), Facts.read(exchange.ring) == exchange.facts]))
""",
    )
    assert found == [[0, 0, 0, 0], True]


def test_a_killed_source_is_named_and_the_next_exchange_is_whole(control: fake.Control) -> None:
    codes, blamed, again = child(
        control,
        """
control(SLOW)
exchange = Exchange().start().go()
until(lambda: exchange.progress(2).produced >= 1)
os.kill(exchange.pids[2], signal.SIGKILL)
codes, blamed = exchange.codes(), exchange.blamed()
control("")
print(json.dumps([codes, blamed, Exchange(8).start().go().codes()]))
""",
    )
    assert codes == [errno.EPIPE, errno.EPIPE, -9, errno.EPIPE]
    assert [blamed[who] for who in (0, 1, 3)] == [2, 2, 2]
    assert again == [0, 0, 0, 0]


def test_a_receiver_that_is_killed_is_not_waited_for(control: fake.Control) -> None:
    """It has taken nothing yet, and the others' buffers are full."""
    codes = child(
        control,
        """
exchange = Exchange().start(sends_only=(0, 1, 3)).go()
control(SLOW)
until(lambda: exchange.progress(2).consumed >= 1)
os.kill(exchange.pids[2], signal.SIGKILL)
print(json.dumps(exchange.codes()))
""",
    )
    assert codes == [0, 0, -9, 0]


def test_a_chunk_is_announced_when_the_device_has_written_it(control: fake.Control) -> None:
    seen = child(
        control,
        """
control(SLOW)
exchange = Exchange().start(sends_only=range(COUNT))
buffers = native.map_fd(exchange.fds[1], BUFFERS * UNIT)
exchange.go(1)
whole = []
for chunk in range(2):  # nobody takes them, so that both stay
    until(lambda: exchange.progress(1).produced > chunk)
    offset, _ = exchange.facts.share(1)
    there = ctypes.string_at(buffers + chunk * UNIT, MIB)
    whole.append(there == ctypes.string_at(state + offset + chunk * MIB, MIB))
for pid in exchange.pids: os.kill(pid, signal.SIGKILL)
exchange.codes()
print(json.dumps(whole))
""",
    )
    assert seen == [True, True]


def test_what_arrives_is_what_is_hashed(control: fake.Control) -> None:
    """Somebody scribbles into a source's buffer between its broadcast and the reloads."""
    codes, blamed = child(
        control,
        """
exchange = Exchange().start(sends_only=(1,))
buffers = native.map_fd(exchange.fds[1], BUFFERS * UNIT)
exchange.go(1)
until(lambda: exchange.progress(1).produced == 2)
native.store64(buffers + MIB // 2, native.load64(buffers + MIB // 2) ^ 1)
exchange.go(0, 2, 3)
print(json.dumps([exchange.codes(), exchange.blamed()]))
""",
    )
    assert codes == [errno.EBADMSG, 0, errno.EBADMSG, errno.EBADMSG]
    assert [blamed[who] for who in (0, 2, 3)] == [1, 1, 1]


def test_a_lost_device_is_its_owners_error_and_a_dead_source_to_the_others(control: fake.Control) -> None:
    codes, blamed = child(
        control,
        """
control(SLOWER)
exchange = Exchange().start().go()
until(lambda: exchange.progress(2).produced >= 1)
control(SLOWER + "lost 2\\n")
print(json.dumps([exchange.codes(), exchange.blamed()]))
""",
    )
    assert codes == [errno.EPIPE, errno.EPIPE, errno.EIO, errno.EPIPE]
    assert blamed == [2, 2, -1, 2]
