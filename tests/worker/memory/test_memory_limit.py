"""A memory limit that the weights do not fit in: said with the amounts, before the kernel kills anything."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ftrun.core.system import cgroup
from ftrun.worker.memory import segment
from ftrun.worker.memory.arena import Arena
from ftrun.worker.state.protected_state import ProtectedState
from tests import cgroups
from tests.conftest import ROOT, Ftrun

ROOM = 700 << 20  # for the models of two ranks, beside what the imports take, which differs from torch to torch
MODEL = 600  # MiB: fits for one of two ranks, not for both

# parameters that were never written take no memory, so that only what protect() takes can be too much
SCRIPT = f"""
import torch, torch.distributed as dist, ftrun
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.empty({MODEL} << 18))
dist.init_process_group("ftrun")
ftrun.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
print("protected", flush=True)
"""


IMPORTS = """
import ftrun.worker.process.protect, torch._dynamo, torch.utils.data
fields = dict(line.split(":") for line in open("/proc/self/status"))
print(int(fields["VmRSS"].split()[0]) << 10)
"""


def _imported() -> int:
    """Bytes that a process takes which has torch and ftrun imported, as the fork server has."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup (v1) with a limit; needs the right to make one."""
    group = cgroups.make("memory")
    try:
        (group / "memory.limit_in_bytes").write_text(str(_imported() + ROOM))
        yield group
    finally:
        cgroups.remove(group)


def test_limit_too_small_for_the_weights(ftrun: Ftrun, limited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ftrun.command
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(limited / "cgroup.procs")]
    monkeypatch.setattr(ftrun, "command", lambda *args: enter + plain(*args))
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, ftrun.script(SCRIPT))
    assert run.wait() == 1, run.stderr
    message = re.search(
        r"rank [01]: DeviceError: moving parameters and optimizer state into memory that outlives the worker needs (\d+) MiB of "
        r"shared memory on each of 2 ranks, and the memory limit \(cgroup\) leaves (\d+) MiB; raise the limit by at least (\d+) MiB",
        run.stderr,
    )
    assert message, run.stderr
    needed, left, more = map(int, message.groups())
    assert needed == MODEL and left < needed and abs(needed - left - more) <= 1
    assert re.search(r"ftrun: rank [01] failed: DeviceError at .*train.py:\d+", run.stderr)
    assert run.stdout.count("protected") <= 1
    killed = dict(line.split() for line in (limited / "memory.oom_control").read_text().splitlines())
    assert killed.get("oom_kill", "0") == "0", "the kernel killed a process"


KEPT = 280  # MiB: fits twice, but not with a snapshot of it beside
SNAPSHOTS = f"""
import torch, torch.distributed as dist, ftrun
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.empty({KEPT} << 18))
dist.init_process_group("ftrun")
job = ftrun.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in job.steps(3):
    with step:
        pass
print("trained", flush=True)
"""


def test_no_room_for_a_snapshot_is_said_and_lived_with(
    ftrun: Ftrun, limited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ftrun.command
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(limited / "cgroup.procs")]
    monkeypatch.setattr(ftrun, "command", lambda *args: enter + plain(*args))
    script = ftrun.script(SNAPSHOTS)
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--snapshot-every", 1, script)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("trained") == 2
    assert re.search(r"rank [01]: no more host snapshots: a host snapshot needs \d+ MiB", run.stdout + run.stderr)
    killed = dict(line.split() for line in (limited / "memory.oom_control").read_text().splitlines())
    assert killed.get("oom_kill", "0") == "0", "the kernel killed a process"


def test_file_cache_counts_as_free_and_every_level_limits(tmp_path: Path) -> None:
    """v1 and v2 files: the tightest level decides, and the cache of files is given back when memory is asked for."""
    for level, limit, used in (("", "max", 90), ("a", "100", 80), ("a/b", "1000", 70)):
        folder = tmp_path / level
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 30\nactive_file 10\n")
    assert cgroup._left_under(tmp_path, "/a/b", "memory.max", "memory.current", "") == [970, 60]
    assert cgroup._left_under(tmp_path, "/", "memory.max", "memory.current", "") == []
    assert cgroup._left_under(tmp_path, "/gone/x", "memory.max", "memory.current", "") == []


@pytest.mark.parametrize(("spare", "looks"), [(0, 1), (-1, 21)])
def test_the_limit_is_looked_at_for_each_parameter_only_where_it_is_tight(
    monkeypatch: pytest.MonkeyPatch, spare: int, looks: int
) -> None:
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(20)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    state = ProtectedState([torch.nn.ParameterList(params)], [optimizer], {})
    state.move_in(Arena.create(0, state.bytes_now()))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    originals = [weakref.ref(optimizer.state[param]["momentum_buffer"]) for param in params]
    seen: list[int] = []  # how many of them were still there at each look

    def memory_left() -> int:
        seen.append(sum(original() is not None for original in originals))
        return 4 * 20 * 64 * 4 + spare

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(segment, "memory_left", memory_left)
    assert state.absorb()
    assert seen == [20, *range(20, 0, -1)][:looks], "what was moved is to be given back before the next is"
    momentum = [optimizer.state[param]["momentum_buffer"] for param in params]
    assert all(torch.equal(m, torch.ones(64)) for m in momentum)
    assert not state.absorb(), "everything lies in the arena"
