"""Runs that start and end again and again, in every way a run can end: nothing is left, not even a port."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run, leaked_memory, processes_of, wait_for

FEW, MANY = 5, 200  # each end once, one of them with gloo
GLOO_EVERY = 5
RANKS = 2

# "up" from every rank, then what the argument says; a child shows that whole groups are ended
SCRIPT = """
import os, subprocess, sys, time
end, gloo = sys.argv[1:3]
if gloo == "gloo":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t.tolist() == [float(dist.get_world_size())] * 3
child = subprocess.Popen(["sleep", "300"])
print("up", flush=True)
if end == "end":
    child.kill()
    child.wait()
elif end == "crash" and os.environ["RANK"] == "1":
    os.abort()
else:
    time.sleep(300)
"""


def by_signal(signum: int) -> Callable[[Run], None]:
    return lambda run: run.signal(signum)


# how a run ends: what is done once all ranks are up, and the launcher's exit code
ENDS: dict[str, tuple[Callable[[Run], None], int]] = {
    "end": (lambda run: None, 0),
    "Ctrl-C": (by_signal(signal.SIGINT), 128 + signal.SIGINT),
    "SIGTERM": (by_signal(signal.SIGTERM), 128 + signal.SIGTERM),
    "SIGKILL": (by_signal(signal.SIGKILL), -signal.SIGKILL),
    "crash": (lambda run: None, 1),
}


def listening() -> set[str]:
    """Sockets of this machine that listen: TCP as address and port, and the names of Unix sockets."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(f"{fields[1]} inode {fields[9]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000":  # it accepts connections
            found.add(fields[7] if len(fields) > 7 else fields[6])
    return found


def sockets_of(pids: set[int]) -> set[str]:
    """The inodes of all sockets of these processes."""
    found = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        found |= {link[8:-1] for link in links if link.startswith("socket:")}
    return found


def files(*folders: Path) -> set[str]:
    """All but torch's own cache folder, which `import torch._dynamo` makes; nothing may be in it."""
    return {str(p) for folder in folders for p in folder.rglob("*") if not p.name.startswith("torchinductor_")}


class Cycles:
    """Runs in one folder; what is there after each is compared with what was there before the first."""

    def __init__(self, ftrun: Ftrun) -> None:
        self.ftrun = ftrun
        self.script = ftrun.script(SCRIPT)
        self.home = ftrun.base / "home"
        self.temporary = ftrun.base / "tmp"
        for folder in (self.home, self.temporary):
            folder.mkdir()
        self.memory = set(os.listdir("/dev/shm"))
        self.count: Counter[str] = Counter()
        self.ours: set[str] = set()  # inodes of the sockets that listened for a run of ours

    def one(self, number: int, dice: random.Random) -> None:
        names = [*ENDS]
        name = names[(number + number // GLOO_EVERY + 1) % len(names)]  # so that each end comes with gloo in turn
        gloo = number % GLOO_EVERY == GLOO_EVERY - 1
        spares = dice.choice((0, 1))
        before = files(self.ftrun.runs_root, self.home, self.temporary)
        run = self.ftrun.start(
            f"--nproc-per-node={RANKS}", f"--spares={spares}", self.script, name, "gloo" if gloo else "-",
            TMPDIR=str(self.temporary), HOME=str(self.home), PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
        act, code = ENDS[name]
        what = f"cycle {number} ({name}, {spares} spares{', gloo' if gloo else ''})"
        if name not in ("end", "crash"):
            run.wait_output("up", RANKS)
            wait_for(lambda: len(run.pids("sleep")) == RANKS, "the workers' children")
            listened = self._listening_sockets()
            assert listened, f"{what}: no store listens"
            self.ours |= listened
            act(run)
        assert run.wait(30) == code, f"{what}\n{run.stdout}\n{run.stderr}"
        if name == "end":
            assert run.stdout.count("up") == RANKS
        wait_for(lambda: not processes_of(self.ftrun.runs_root), f"the end of every process after {what}", 10.0)
        assert files(self.ftrun.runs_root, self.home, self.temporary) == before, what
        self.count[name + (" with gloo" if gloo else "")] += 1

    def _listening_sockets(self) -> set[str]:
        mine = sockets_of({*processes_of(self.ftrun.runs_root)})
        return {entry for entry in listening() if " inode " in entry and entry.rpartition(" ")[2] in mine}

    def check_the_machine(self) -> None:
        """What all runs share with others: shared memory and ports."""
        left = leaked_memory(self.memory)
        assert not left, f"left in /dev/shm: {left}"
        assert not self.ours & listening(), "ports that still listen"
        assert not [entry for entry in listening() if str(self.ftrun.runs_root) in entry], "unix sockets"
        known = {"tmp", "home", "runs", "logs", "state", "train.py"}
        extra = {p.name for p in self.ftrun.base.iterdir()} - known
        assert not [name for name in extra if not name.startswith(("out-", "err-"))], "files beside the logs"


@pytest.fixture
def cycles(ftrun: Ftrun) -> Cycles:
    return Cycles(ftrun)


def repeat(cycles: Cycles, first: int, times: int) -> None:
    dice = random.Random(first)
    for number in range(first, first + times):
        cycles.one(number, dice)
    cycles.check_the_machine()
    print(
        f"{sum(cycles.count.values())} cycles: " + ", ".join(f"{n} {what}" for what, n in sorted(cycles.count.items()))
    )


@pytest.mark.slow
def test_start_and_stop(cycles: Cycles) -> None:
    repeat(cycles, 0, FEW)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, MANY, 20))
def test_start_and_stop_many_times(cycles: Cycles, first: int) -> None:
    repeat(cycles, first, 20)
