"""What only a real GPU can answer, the riskiest first: does it start, NCCL, spares, equal bits, nothing that waits in a stall.

Skipped without a GPU; `make gpu-test PART=1` runs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftrun import native
from ftrun.native import cuda
from tests.conftest import wait_for
from tests.e2e.harness import kill
from tests.gpu import conftest, machine, real

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ROUNDS = 10
BACKENDS = ["nccl", "nccl-legacy"]


@pytest.fixture(autouse=True, scope="module")
def _gpu() -> None:
    why = machine.missing()
    if why:
        pytest.skip(why)


@pytest.fixture
def two_gpus() -> None:
    if cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")


@pytest.fixture(scope="module")
def cleans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, conftest.Outcome]:
    """The uninterrupted run on each device."""
    folder = tmp_path_factory.mktemp("clean")
    return {
        device: conftest.finish(real.start(folder / device[:4], "--device", device), 200.0)
        for device in ("cuda:0", "cpu")
    }


# -- 1. start --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("mode", ["forkserver", "exec"])
def test_1_starts_and_is_repaired(
    cleans: dict[str, conftest.Outcome], tmp_path: Path, mode: str, device: str, record_property: real.Note
) -> None:
    """In each start mode; what forks the workers has not opened the GPU."""
    begin = time.monotonic()
    running = real.start(
        tmp_path / "run",
        *("--device", device, "--pause", "0.2"),
        faults=(kill(2, "backward", 6),),
        options=("--worker-start", mode),
    )
    wait_for(lambda: conftest.at_step(tmp_path / "run", 2) >= 0, "the first step", 150)
    record_property("first step after", f"{time.monotonic() - begin:.1f} s")
    for server in conftest.named(tmp_path / "run", "ftrun forksrv"):
        assert not real.open_devices(server), "CUDA is open in the process that forks workers"
    outcome = conftest.finish(running, 200.0)
    conftest.same(cleans[device], outcome)
    assert "state adopted" in outcome.output
    record_property("repair", real.total_ms(outcome))


def test_1_lowered_ptx_loads_and_computes_the_hosts_checksum() -> None:
    cuda.load_kernels(0)
    random.seed(1)
    size = 9 << 20
    data = random.randbytes(size)
    base = cuda.reserve(0, 64 << 20)
    os.close(cuda.create(0, base, 10 << 20))
    held = ctypes.create_string_buffer(data, size)
    address = ctypes.addressof(held)
    cuda.copy_now(0, 0, base, address, size, 30)
    for length in (0, 1, 63, 64, 4 << 20, (4 << 20) + 9, size - 8):
        for offset in (0, 3):
            want = native.checksum(address + offset, length, 5)
            assert cuda.checksum(0, 0, base + offset, length, 5, 30) == want, (length, offset)


# -- 2. NCCL ---------------------------------------------------------------------------------------------------------------


def _known(backend: str) -> None:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    # from torch 2.15 on "nccl" is a new class, and the old one has a name of its own
    if backend != "nccl" and not hasattr(dist.distributed_c10d, "ProcessGroupNCCL2"):
        pytest.skip(f"torch has no {backend}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_2_a_world_of_one_is_aborted_and_made_again(tmp_path: Path, backend: str, record_property: real.Note) -> None:
    _known(backend)
    line = [os.fspath(real.SCRIPTS / "nccl.py"), os.fspath(tmp_path), "0", "1", backend, str(ROUNDS)]
    for name, value in real.program(line, 200.0, real.NCCL).items():
        record_property(name, value)
        assert len(value) == ROUNDS


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("backend", BACKENDS)
def test_2_two_ranks_are_aborted_in_a_collective_and_made_again(
    tmp_path: Path, backend: str, record_property: real.Note
) -> None:
    """Rank 0 waits in a collective that rank 1 never joins, as for a dead peer: only the abort ends it."""
    _known(backend)
    script, env = os.fspath(real.SCRIPTS / "nccl.py"), {**os.environ, **real.SETTINGS, **real.NCCL}
    lines = [[sys.executable, script, os.fspath(tmp_path), str(r), "2", backend, str(ROUNDS)] for r in range(2)]
    both = [
        subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for line in lines
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    for process, text in zip(both, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    record_property("rank 0", json.loads(said[0].splitlines()[-1]))


@pytest.mark.usefixtures("two_gpus")
def test_2_two_ranks_on_nccl_are_repaired(tmp_path: Path, record_property: real.Note) -> None:
    clean = conftest.finish(real.start(tmp_path / "clean", "--device", "own", ranks=2), 200.0)
    faults = (kill(1, "backward", 3), kill(0, "update", 5))
    outcome = conftest.finish(real.start(tmp_path / "run", "--device", "own", faults=faults, ranks=2), 250.0)
    real.equal(clean, outcome, 2)
    record_property("repair", real.total_ms(outcome))


# -- 3. what a spare has ready ---------------------------------------------------------------------------------------------


def test_3_a_spare_has_the_shared_device_open(tmp_path: Path, cleans: dict[str, conftest.Outcome]) -> None:
    folder = tmp_path / "run"
    running = real.start(folder, "--pause", "1.0", faults=(kill(2, "backward", 7),))
    wait_for(lambda: conftest.at_step(folder, 2) >= 1, "two steps", 150)
    spares = conftest.named(folder, "ftrun spare")
    assert spares
    wait_for(lambda: all(real.open_devices(pid) for pid in spares), "the spare to open the device", 30)
    conftest.same(cleans["cuda:0"], conftest.finish(running, 200.0))


def test_3_what_a_first_use_costs(record_property: real.Note) -> None:
    """A spare that knows its device has the first two behind it; with a device of its own for each rank, none."""
    for name, ms in real.program([os.fspath(real.SCRIPTS / "cold.py")], 200.0, real.NCCL).items():
        record_property(name, f"{ms} ms")


# -- 4. what bits depend on ------------------------------------------------------------------------------------------------


def test_4_the_same_bits_twice(tmp_path: Path, cleans: dict[str, conftest.Outcome]) -> None:
    outcome = conftest.finish(real.start(tmp_path / "run", "--device", "cuda:0"), 200.0)
    conftest.same(cleans["cuda:0"], outcome)
    assert "for the same bits set" not in outcome.output, "everything is set"


def test_4_without_the_workspace_setting_it_is_told(
    tmp_path: Path, cleans: dict[str, conftest.Outcome], record_property: real.Note
) -> None:
    """Whether the bits are others then is reported, not required; torch itself may refuse such a run."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ""}
    outcome = conftest.finish(real.start(tmp_path / "run", "--device", "cuda:0", env=env), 200.0)
    assert "for the same bits set CUBLAS_WORKSPACE_CONFIG=:4096:8" in outcome.output
    if outcome.code != 0:
        record_property("without CUBLAS_WORKSPACE_CONFIG", "torch refuses: it is asked for determinism")
        return
    same = [r["weights"] for r in outcome.ranks] == [r["weights"] for r in cleans["cuda:0"].ranks]
    record_property("without CUBLAS_WORKSPACE_CONFIG", "the same bits" if same else "other bits")


# -- 5. nothing in a stall waits for a kernel that waits for a dead peer -----------------------------------------------------


def test_5_work_on_another_stream_does_not_wait(record_property: real.Note) -> None:
    import torch

    from ftrun.native import transfer

    size = 64 << 20
    base = cuda.reserve(0, 2 * size)
    for at in (base, base + size):
        os.close(cuda.create(0, at, size))
    cuda.load_kernels(0)
    other, own = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    calls = {
        "checksum": lambda: cuda.checksum(0, own.cuda_stream, base, size, 0, 30),
        "copy": lambda: cuda.copy_now(0, own.cuda_stream, base + size, base, size, 30),
        "checked copy": lambda: transfer.copy(
            [(base + size, size)], [(base, size)], transfer.Terms(check=transfer.CHECK_BACK, timeout=30), 0
        ),
    }
    for call in calls.values():
        call()
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(6e9))  # three seconds or more
    slow = {}
    for name, call in calls.items():
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        record_property(name, f"{1e3 * took:.1f} ms")
        if took > 0.5:
            slow[name] = took
    assert not other.query(), "the kernel ended too early to show anything"
    torch.cuda.synchronize()
    assert not slow
