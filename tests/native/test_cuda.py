"""The CUDA part of the native library, against the fake driver, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import fake
from tests.native.fake import child

ROOT = fake.ROOT


@pytest.fixture
def control(tmp_path: Path) -> fake.Control:
    return fake.Control(tmp_path / "cuda.txt")


def test_without_a_driver_everything_says_so(tmp_path: Path) -> None:
    nowhere = fake.Control(tmp_path / "c")
    env = {**nowhere.env, "LD_LIBRARY_PATH": ""}
    code = (
        "from ftrun.native import cuda\ntry: cuda.room(0)\n"
        "except cuda.CudaError as e: print(cuda.present(), 'error' in cuda.report(), e.errno)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    if "True False" in done.stdout:
        pytest.skip("this machine has a real driver")
    assert done.stdout.split() == ["False", "True", "2"], done.stderr


def test_report(control: fake.Control) -> None:
    control.set(devices=2)
    report = child(control, "print(json.dumps(cuda.report()))")
    assert report["driver"] == "12.4" and [d["name"] for d in report["devices"]] == ["Fake GPU 0", "Fake GPU 1"]
    assert report["devices"][0]["usable"] and report["devices"][0]["uuid"].startswith("GPU-")
    control.set(vmm=0)
    assert not child(control, "print(json.dumps(cuda.report()))")["devices"][0]["usable"]
    control.set(devices=0)
    assert "CUDA_ERROR_NO_DEVICE" in child(control, "print(json.dumps(cuda.report()))")["error"]


def test_checksum_on_the_device_equals_the_hosts(control: fake.Control) -> None:
    """The kernels' source runs here on the host; that nvcc's PTX does the same needs a GPU (make gpu)."""
    assert child(
        control,
        """
        base, fd = memory(5 * UNIT)
        random.seed(1)
        ctypes.memmove(base, random.randbytes(5 * UNIT), 5 * UNIT)
        piece = 4 << 20
        sizes = [0, 1, 7, 8, 63, 64, 65, 4095, piece - 1, piece, piece + 1, 2 * piece + 77] + [
            random.randrange(5 * UNIT - 8) for _ in range(6)]
        for size in sizes:
            for offset in (0, 3, 8):
                size = min(size, 5 * UNIT - offset)
                for seed in (0, 2**63 + 5):
                    want = native.checksum(base + offset, size, seed)
                    assert cuda.checksum(0, 0, base + offset, size, seed, 10) == want, (size, offset, seed)
        print(len(sizes))
        """,
    )


def test_memory_outlives_its_maker_when_it_is_held(control: fake.Control) -> None:
    """Two processes: the maker is killed with SIGKILL in the middle of a copy; who imported has what was written."""
    control.set(rate=20_000_000)
    found = child(
        control,
        """
        import socket
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            base, fd = memory(4 * UNIT)
            source, _ = memory(4 * UNIT)
            ctypes.memset(source, 7, 4 * UNIT)
            cuda.copy(0, 0, base, source, 4 * UNIT)  # 0.4 s
            socket.send_fds(theirs, [b"x"], [fd])
            signal.pause()
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        handle = cuda.hold(0, fd)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        base = cuda.reserve(0, 64 * UNIT)
        cuda.attach(0, 0, fd, base, 4 * UNIT)
        os.close(fd)
        cuda.let_go(handle)
        seen = ctypes.string_at(base, 4 * UNIT)
        done = seen.count(7)
        assert seen == bytes([7]) * done + bytes(len(seen) - done)  # in order, and then nothing
        print(json.dumps(done / len(seen)))
        """,
    )
    assert 0 < found < 1


def test_stamps_come_in_stream_order(control: fake.Control) -> None:
    control.set(rate=20_000_000)
    child(
        control,
        """
        import mmap
        page = mmap.mmap(-1, 4096)
        word = ctypes.addressof(ctypes.c_char.from_buffer(page))
        seen = cuda.register(0, word, 4096)
        base, fd = memory(2 * UNIT)
        cuda.stamp(0, 0, seen, 1)
        cuda.copy(0, 0, base, base + UNIT, UNIT)
        cuda.stamp(0, 0, seen, 2)
        assert not cuda.sync(0, 0, 0.02)
        assert native.load64(word) == 1
        assert cuda.sync(0, 0, 10) and native.load64(word) == 2
        cuda.unregister(0, word)
        print(1)
        """,
    )


def test_errors_name_the_call(control: fake.Control) -> None:
    control.set(memory=8 << 20)
    found = child(
        control,
        """
        said = []
        def fails(call):
            try: call()
            except cuda.CudaError as error: said.append([error.errno, error.strerror]); return
            raise AssertionError("no error")
        base, fd = memory(2 * UNIT)
        fails(lambda: cuda.create(0, base + 4 * UNIT, 4 * UNIT))
        fails(lambda: cuda.create(0, base + 4 * UNIT, 1000))
        fails(lambda: cuda.attach(0, 0, 0, base + 4 * UNIT, UNIT))
        fails(lambda: cuda.device(9))
        print(json.dumps(said))
        """,
    )
    assert [errno for errno, _ in found] == [12, 22, 22, 19]
    assert "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY" in found[0][1]
    assert "there is no device 9" in found[3][1]


def test_a_lost_device_stays_lost(control: fake.Control) -> None:
    code = """
        base, fd = memory(UNIT)
        other, _ = memory(UNIT, 1)
        path = os.environ["FAKE_CUDA_CONTROL"]
        open(path, "a").write("lost 0\\n")
        for again in range(2):
            try: cuda.copy_now(0, 0, base, base, 8, 1)
            except cuda.CudaError as error: assert error.errno == cuda.BROKEN
            else: raise AssertionError
            cuda.copy_now(1, 0, other, other, 8, 1)
            open(path, "w").close()
        print(1)
        """
    child(control, code)


@pytest.mark.slow
def test_a_thousand_rounds_leak_nothing(control: fake.Control) -> None:
    """Random makers, mappers and kills; in the end this process has the descriptors and the shared memory it had before."""
    grown = child(
        control,
        """
        import socket
        def shared(): return int(next(l for l in open("/proc/meminfo") if l.startswith("Shmem:")).split()[1])
        def maps(): return sum("memfd:fake-cuda" in line for line in open("/proc/self/maps"))
        random.seed(3)
        cuda.device_count()
        before, fds, held = shared(), len(os.listdir("/proc/self/fd")), []
        base = cuda.reserve(0, 1024 * UNIT)
        for round in range(1000):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                size = random.choice([1, 2, 3]) * UNIT
                at = cuda.reserve(0, 64 * UNIT)
                fd = cuda.create(0, at, size)
                cuda.copy(0, 0, at, at + size // 2, size // 2)
                socket.send_fds(theirs, [size.to_bytes(8, "little")], [fd])
                if random.random() < 0.3: os.close(fd); cuda.unmap(at, size)
                signal.pause()
            theirs.close()
            data, (fd,), _, _ = socket.recv_fds(ours, 8, 1)
            ours.close()
            size, early = int.from_bytes(data, "little"), random.random() < 0.5
            if early: os.kill(pid, signal.SIGKILL)
            how = random.random()
            if how < 0.4: held.append(("hold", cuda.hold(0, fd), 0))
            elif how < 0.8:
                at = base + round * UNIT // 1 % (900 * UNIT)
                taken = [h for h in held if h[0] == "map" and abs(h[1] - at) < 4 * UNIT]
                for one in taken: cuda.unmap(one[1], one[2]); held.remove(one)
                cuda.attach(0, 0, fd, at, size); held.append(("map", at, size))
            os.close(fd)
            if not early: os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            while len(held) > 5:
                what, one, size = held.pop(random.randrange(len(held)))
                cuda.let_go(one) if what == "hold" else cuda.unmap(one, size)
        for what, one, size in held: cuda.let_go(one) if what == "hold" else cuda.unmap(one, size)
        cuda.free_range(base, 1024 * UNIT)
        assert maps() == 0, maps()
        left = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
        assert len(left) <= fds, left
        time.sleep(0.2)
        print(json.dumps(shared() - before))
        """,
        timeout=110,
    )
    assert grown < 64 << 10, "KiB of shared memory that nobody gave back; others on this machine use some too"


# -- what is written down by hand ---------------------------------------------------------------------------------------


def _cuda_include() -> Path:
    nvcc = shutil.which("nvcc")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *sorted(Path("/usr/local").glob("cuda-*"))]
    if nvcc:
        places.append(Path(nvcc).resolve().parents[1])
    for place in places:
        if (place / "include" / "cuda.h").exists():
            return place / "include"
    pytest.skip("no cuda.h here")


def test_prototypes_match_cuda_h(tmp_path: Path) -> None:
    include = _cuda_include()
    source = tmp_path / "drift.cpp"
    source.write_text(
        """
        #include <cuda.h>
        #include <cuda/abi.hpp>
        #include <type_traits>
        using namespace ftrun::cuda;
        template <typename... A, typename... B>
        constexpr bool fits(CUresult (*)(A...), Result (*)(B...)) {
            if constexpr (sizeof...(A) != sizeof...(B)) return false;
            else return ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> >= std::is_pointer_v<B>) && ...);
        }
        #define CHECK(name, arguments) static_assert(fits(&::name, static_cast<Result(*) arguments>(nullptr)), #name);
        // the stream calls have a second name for per-thread streams, and these two changed theirs
        FTRUN_CUDA_CALLS(CHECK)
        static_assert(sizeof(Properties) == sizeof(CUmemAllocationProp) && sizeof(Access) == sizeof(CUmemAccessDesc));
        static_assert(offsetof(Properties, location) == offsetof(CUmemAllocationProp, location));
        static_assert(offsetof(Access, flags) == offsetof(CUmemAccessDesc, flags));
        static_assert(sizeof(Uuid) == sizeof(CUuuid));
        static_assert(kVmm == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        static_assert(kExportsFd == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
        static_assert(kWrites64 == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
        static_assert(kMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR && kPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
        static_assert(kPosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && kOnDevice == CU_MEM_LOCATION_TYPE_DEVICE);
        static_assert(kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE && kDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
        static_assert(kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE && kUnifiedMemory == CU_MEMORYTYPE_UNIFIED);
        static_assert(kDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL && kHostMemory == CU_MEMORYTYPE_HOST);
        static_assert(kNotReady == CUDA_ERROR_NOT_READY && kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
        static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
        int main() {}
        """
    )
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    folders = ["-I", os.fspath(include), "-I", os.fspath(ROOT / "native/src")]
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", *folders, os.fspath(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_ptx_is_what_the_kernels_compile_to() -> None:
    nvcc = shutil.which("nvcc") or pytest.skip("no nvcc here")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" not in version:
        pytest.skip("the committed PTX was made by nvcc 13.0, and this is another")
    made = subprocess.run(
        [sys.executable, "native/kernels/make_ptx.py", "-"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert made == (ROOT / "native/kernels/ftrun.ptx").read_text(), "run: python native/kernels/make_ptx.py"


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "sm_100"])
def test_lowered_ptx_assembles(target: str, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas") or next(map(str, Path("/usr/local").glob("cuda-*/bin/ptxas")), None)
    if ptxas is None:
        pytest.skip("no ptxas here")
    subprocess.run([ptxas, f"-arch={target}", "native/kernels/ftrun.ptx", "-o", tmp_path / "out"], cwd=ROOT, check=True)


# -- the pipeline's seam ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lanes_and_marks(control: fake.Control, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    sources = [os.fspath(p) for p in (ROOT / "native/src/cuda").glob("*.cpp") if p.stem != "transfer"]
    others = ("memory/checksum", "transfer/host_device", "memory/memory", "process/thread")
    sources += [os.fspath(ROOT / f"native/src/{name}.cpp") for name in others]
    options = ["-std=c++17", "-O0", "-D_GNU_SOURCE", f'-DFTRUN_NATIVE="{ROOT / "native"}"', "-pthread", "-ldl"]
    folders = ["-I", os.fspath(ROOT / "native/include"), "-I", os.fspath(ROOT / "native/src")]
    program = tmp_path / "lane_test"
    test = os.fspath(ROOT / "tests/native/lane_test.cpp")
    subprocess.run([compiler, *options, *folders, test, *sources, "-o", os.fspath(program)], check=True)
    done = subprocess.run([program], env={**os.environ, **control.env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr


def test_doctor_tells_whether_weights_outlive_a_worker(control: fake.Control) -> None:
    code = "from ftrun.doctor import sharing\nprint(json.dumps([[f.state, f.text] for f in sharing.check()]))"
    control.set(devices=2)
    found = child(control, code)
    assert len(found) == 2 and all(state == "ok" and "outlive a worker" in text for state, text in found), found
    for lack in ({"vmm": 0}, {"vmm": None, "refuse": "cuMemGetAllocationGranularity"}):
        control.set(**lack)
        found = child(control, code)
        assert all(state == "warning" and "no virtual memory management" in text for state, text in found), found
    assert child(None, code) == [] or shutil.which("nvidia-smi")


def test_the_transfer_engine_copies_on_a_gpu(control: fake.Control) -> None:
    """Chunks are checked, the count on the board grows, a deadline holds, and a lost device is an error."""
    control.set(rate=100_000_000)
    child(
        control,
        """
        from ftrun.native import transfer
        from ftrun.native.transfer import CHECK_BACK, Terms, TransferError
        base, fd = memory(8 * UNIT)
        other, _ = memory(8 * UNIT)
        data = random.randbytes(8 * UNIT)
        ctypes.memmove(base, data, 8 * UNIT)
        count = ctypes.c_uint64()
        terms = Terms(check=CHECK_BACK, timeout=20, moved=ctypes.addressof(count))
        moved = transfer.copy([(other, 5 * UNIT), (other + 5 * UNIT, 3 * UNIT)], [(base, 8 * UNIT)], terms, gpu=0)
        assert moved.bytes == count.value == 8 * UNIT and ctypes.string_at(other, 8 * UNIT) == data
        for wanted, code in (("timeout", errno.ETIMEDOUT), ("lost", errno.EIO)):
            if wanted == "lost":
                open(os.environ["FAKE_CUDA_CONTROL"], "a").write("lost 0\\n")
            try: transfer.copy([(other, 8 * UNIT)], [(base, 8 * UNIT)], Terms(check=CHECK_BACK, timeout=0.02), gpu=0)
            except TransferError as error: print(repr(error))
            else: raise AssertionError(wanted)
        print(1)
        """,
    )
