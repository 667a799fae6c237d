"""Devices that a process does not see, or sees in another order: memory is found by its device's UUID, or refused in words."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.native.fake import Control, child

ATTACH = """
import os, sys
from ftrun.core.errors import DeviceError
from ftrun.native import cuda
from ftrun.worker.memory.gpu_memory import DeviceMemory
from ftrun.worker.memory.segment import Segment
control, chunk, own, write = (int(word) for word in sys.argv[1:])
try:
    memory = DeviceMemory.attach(Segment.attach(control), own, lambda k: os.dup(chunk), bool(write))
except (DeviceError, cuda.CudaError) as error:
    print(error)
else:
    print(memory.home, memory.read(0, 3))
"""
MAKE = """
import subprocess
from ftrun.worker.memory.gpu_memory import DeviceMemory
from ftrun.worker.memory.segment import Segment
control = Segment.create("words", 1 << 30)
memory = DeviceMemory.create(control, 0, 1 << 30)
memory.reserve("committed", 100, 64)
memory.write(0, b"abc")
fds = [control.fd, memory.chunks[0].fd]
def attach(visible, own, write=False):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    line = [sys.executable, "-c", os.environ["ATTACH"], *map(str, fds), str(own), str(int(write))]
    done = subprocess.run(line, env=env, pass_fds=fds, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
"""


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(tmp_path / "cuda.txt")


@pytest.mark.parametrize(
    ("variable", "seen"),
    [("", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("0,0", []), ("GPU-32,GPU-30", [2, 0]), ("MIG-0,1", [])],
)
def test_what_is_seen_is_known_by_its_uuid(
    control: Control, monkeypatch: pytest.MonkeyPatch, variable: str, seen: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    report = child(control, "print(json.dumps(cuda.report()))")
    assert [device["name"] for device in report.get("devices", [])] == [f"Fake GPU {number}" for number in seen]
    assert ("CUDA_ERROR_NO_DEVICE" in report.get("error", "")) == (not seen)


@pytest.mark.slow
def test_memory_is_found_on_the_device_that_has_it(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by a process for which the machine's third device is the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("ATTACH", ATTACH)
    found = child(
        control,
        MAKE
        + textwrap.dedent("""
        uuid = cuda.device(0).uuid_text
        print(json.dumps([
            attach("0,1,2", 2, True), attach("0,1,2", 0), attach(uuid, 0, True), attach(uuid[:8] + ",1", 1),
            attach("0,1", 0), attach("0,1,2", 0, True), attach("", 0),
        ]))
        """),
    )
    assert found[:4] == ["2 b'abc'", "2 b'abc'", "0 b'abc'", "0 b'abc'"]
    assert found[4] == "the memory is on a GPU that this worker does not see"
    assert found[5] == "the memory is on device 2, and this worker uses device 0"
    assert "CUDA_ERROR_NO_DEVICE" in found[6]


def test_an_fd_store_that_sees_no_device_says_so(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then has the memory by its descriptor only, which the run tells."""
    program = """
        import threading
        from ftrun.helpers.cuda_import import Imported
        said, heard = [], threading.Event()
        Imported().begin(bytes(16), os.memfd_create("x"), lambda why: (said.append(why), heard.set()))
        assert heard.wait(20)
        print(json.dumps(said))
        """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (why,) = child(control, program)
    assert "CUDA_ERROR_NO_DEVICE" in why
