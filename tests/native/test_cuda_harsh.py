"""Where drivers may differ, ftrun reckons with the worst: frees that wait, kernels that never end, processes that linger."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import fake
from tests.native.fake import child

STUCK = """
driver = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    assert getattr(driver, name)(*args) == 0, name
def current(device):
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent", context)
def stream():
    made = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(made), 1)
    return made
def release():
    open(os.environ["FAKE_CUDA_CONTROL"], "a").write("release 1\\n")
def log():
    path = next(l.split()[1] for l in open(os.environ["FAKE_CUDA_CONTROL"]) if l.startswith("log "))
    return [line.split()[2] for line in open(path)] if os.path.exists(path) else []
"""


@pytest.fixture
def control(tmp_path: Path) -> fake.Control:
    made = fake.Control(tmp_path / "cuda.txt")
    made.set(log=tmp_path / "calls.txt")
    return made


def test_a_free_waits_for_the_device(control: fake.Control) -> None:
    """The fake driver itself: without this the next test could not fail."""
    child(
        control,
        STUCK
        + """
import threading
current(0)
base, fd = memory(UNIT)
call("fake_endless", stream())
freeing = threading.Thread(target=cuda.unmap, args=(base, UNIT))
freeing.start()
freeing.join(0.3)
assert freeing.is_alive()
release()
freeing.join(20)
assert not freeing.is_alive()
print(1)
""",
    )


def test_a_repair_does_not_wait_for_a_kernel_of_another_stream(control: fake.Control) -> None:
    """One of NCCL's, say, that waits for a dead peer: whatever is computed beside it allocates nothing and frees nothing."""
    child(
        control,
        STUCK
        + """

from ftrun.native import transfer
from ftrun.native.transfer import CHECK_BACK, Terms
current(0)
base, fd = memory(8 * UNIT)
source, other = memory(8 * UNIT)
random.seed(1)
data = random.randbytes(8 * UNIT)
ctypes.memmove(source, data, len(data))
cuda.load_kernels(0)
call("fake_endless", stream())
calls = log()
own = stream().value
begin = time.monotonic()
for again in range(5):
    assert cuda.checksum(0, own, source, 5 * UNIT + 3, 7, 10) == native.checksum(source, 5 * UNIT + 3, 7)
    cuda.copy_now(0, own, base, source, UNIT, 10)
    transfer.copy([(base, 8 * UNIT)], [(source, 8 * UNIT)], Terms(check=CHECK_BACK, timeout=20), 0)
assert log() == calls, log()[len(calls):]
assert ctypes.string_at(base, 8 * UNIT) == data
release()
print(1)
""",
    )


def test_every_wait_on_the_device_has_its_deadline(control: fake.Control) -> None:
    """Copies of pageable memory too, for which a driver waits by itself; late results harm nobody."""
    child(
        control,
        STUCK
        + """
current(0)
base, fd = memory(UNIT)
ctypes.memset(base, 3, UNIT)
cuda.load_kernels(0)
want = native.checksum(base, UNIT)
held = ctypes.create_string_buffer(UNIT)
call("fake_endless", ctypes.c_void_p(0))
calls = log()
waits = [
    lambda: cuda.checksum(0, 0, base, UNIT - 8, 1, 0.2),
    lambda: cuda.copy_now(0, 0, ctypes.addressof(held), base, UNIT, 0.2),
]
for wait in waits:
    begin = time.monotonic()
    try: wait()
    except cuda.CudaError as error: assert error.errno == errno.ETIMEDOUT
    else: raise AssertionError
    assert time.monotonic() - begin < 5
assert not cuda.sync(0, 0, 0.2)
assert log() == calls
release()
assert cuda.sync(0, 0, 20)
for again in range(6):  # workspaces of the calls that gave up are not used again
    assert cuda.checksum(0, 0, base, UNIT, 0, 10) == want
cuda.copy_now(0, 0, ctypes.addressof(held), base, UNIT, 10)
assert held.raw == bytes([3]) * UNIT
print(1)
""",
    )


def test_memory_that_may_not_be_accessed_is_given_back(control: fake.Control) -> None:
    """cuMemSetAccess fails after memory was made or imported, and mapped."""
    control.set(refuse="cuMemSetAccess#2")
    child(
        control,
        STUCK
        + """
base, fd = memory(UNIT)
used = cuda.room(0), len(os.listdir("/proc/self/fd"))
path = os.environ["FAKE_CUDA_CONTROL"]
said = open(path).read()
def fails(call):
    try: call()
    except cuda.CudaError as error: assert "cuMemSetAccess: CUDA_ERROR_NOT_PERMITTED" in error.strerror; return
    raise AssertionError
fails(lambda: cuda.create(0, base + 4 * UNIT, UNIT))
assert (cuda.room(0), len(os.listdir("/proc/self/fd"))) == used
open(path, "w").write(said.replace("#2", ""))
fails(lambda: cuda.attach(0, 0, fd, base + 4 * UNIT, UNIT))
fails(lambda: cuda.attach(1, 0, fd, base + 4 * UNIT, UNIT))  # of another device: neither way of reaching it
assert (cuda.room(0), len(os.listdir("/proc/self/fd"))) == used
open(path, "w").write(said.replace("refuse cuMemSetAccess#2", ""))
cuda.attach(0, 0, fd, base + 4 * UNIT, UNIT)
ctypes.memset(base, 9, UNIT)
assert ctypes.string_at(base + 4 * UNIT, UNIT) == bytes([9]) * UNIT
print(1)
""",
    )


@pytest.mark.parametrize("demanded", [False, True], ids=["any thread may import", "with a context only"])
def test_a_context_is_made_for_an_import_only_if_the_driver_wants_one(control: fake.Control, demanded: bool) -> None:
    """It takes hundreds of megabytes of a device."""
    maker = """
        base, fd = memory(UNIT)
        ctypes.memset(base, 5, UNIT)
        import subprocess
        code = '''if True:
            import os, sys
            from ftrun.native import cuda
            fd = int(sys.argv[1])
            facts = cuda.device(0)
            handle = cuda.hold(0, fd)
            path = next(l.split()[1] for l in open(os.environ["FAKE_CUDA_CONTROL"]) if l.startswith("log "))
            own = [l.split()[2] for l in open(path) if int(l.split()[0]) == os.getpid()]
            print("cuDevicePrimaryCtxRetain" in own)
            cuda.let_go(handle)
        '''
        done = subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(json.dumps(done.stdout.strip() == "True"))
        """
    control.set(**{"import": "context"} if demanded else {})
    assert child(control, maker) == demanded


def test_the_dead_are_not_over_before_their_kernels_are(control: fake.Control) -> None:
    """A kernel goes on writing shared memory after its process was killed; when `fence.ended` says so, nothing changes any more."""
    early, late = child(
        control,
        STUCK
        + """
import socket
from ftrun.core.system import procfs
from ftrun.host.workers import fence
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    current(0)
    base, fd = memory(UNIT)
    call("fake_writes", ctypes.c_uint64(base), ctypes.c_size_t(UNIT), ctypes.c_double(1.0), stream())
    socket.send_fds(theirs, [b"x"], [fd])
    signal.pause()
_, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
base = cuda.reserve(0, 64 * UNIT)
cuda.attach(0, 0, fd, base, UNIT)
def changes(seconds):
    before = ctypes.string_at(base, UNIT)
    time.sleep(seconds)
    return ctypes.string_at(base, UNIT) != before
deadline = time.monotonic() + 20
while not any(ctypes.string_at(base, 4)): assert time.monotonic() < deadline
procfs.kill_group(pid)
time.sleep(0.05)
early = changes(0.1), fence.ended(pid), fence.quiet(pid)
while not fence.ended(pid):
    assert time.monotonic() < deadline
    procfs.kill_group(pid)
    time.sleep(0.002)
late = changes(0.3)
os.waitpid(pid, 0)
print(json.dumps([early, late]))
""",
    )
    assert early == [True, False, False], "it was still writing, and neither way of asking took it for over"
    assert not late
