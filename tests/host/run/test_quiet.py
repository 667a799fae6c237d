"""A run in which nothing fails: launcher and helpers sleep. Counted are wake-ups, which a busy machine does not change, and no seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tests.conftest import Ftrun, Run, processes_of, wait_for

RANKS = 2
WATCHED = 3.0  # seconds
# wake-ups a second, with half as many to spare: of the launcher one look at the ranks for each beat (0.2 s); of each helper a question
# every two seconds; of a spare its beats, and a look of each of its two threads every second
MOST = {"ftrun": 10.0, "ftrun forksrv": 1.0, "ftrun fd store": 1.0, "ftrun store": 3.0, "ftrun spare": 11.0}

SCRIPT = """
import time, torch, torch.distributed as dist, ftrun
model = torch.nn.Linear(8, 8)
dist.init_process_group("ftrun")
ddp = torch.nn.parallel.DistributedDataParallel(model)
opt = torch.optim.SGD(ddp.parameters(), lr=0.01)
job = ftrun.protect(model=ddp, optimizer=opt)
for step in job.steps(100_000):
    with step:
        time.sleep(0.01)
        ddp(torch.ones(2, 8)).sum().backward()
        opt.step(); opt.zero_grad()
    if step.index == 20 and job.rank == 0:
        print("on its way", flush=True)
"""


def wakes(pids: Iterable[int]) -> int:
    """How often threads of these processes, as many as there are, gave a core up until something woke them."""
    found = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def ours(run: Run) -> dict[str, list[int]]:
    """The processes beside the ranks, by what they are."""
    found: dict[str, list[int]] = {}
    for pid, name in {**processes_of(run.runs_root), run.process.pid: "ftrun"}.items():
        kind = next((kind for kind in sorted(MOST, reverse=True) if name.startswith(kind[:15])), "")
        if not name.startswith("ftrun rank"):
            found.setdefault(kind, []).append(pid)
    return found


def test_launcher_and_helpers_sleep_while_nothing_happens(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", RANKS, ftrun.script(SCRIPT))
    run.wait_output("on its way")
    wait_for(lambda: list(run.dir.glob("notes/parked-*")), "a parked spare")
    here = ours(run)
    assert here.keys() == MOST.keys() and all(len(pids) == 1 for pids in here.values()), here
    time.sleep(1.0)  # what follows the start, once
    ranks = run.pids("ftrun rank")
    before, trained, begun = {kind: wakes(pids) for kind, pids in here.items()}, wakes(ranks), time.monotonic()
    time.sleep(WATCHED)
    found = {kind: wakes(pids) - before[kind] for kind, pids in here.items()}
    trained, seconds = wakes(ranks) - trained, time.monotonic() - begun
    run.signal(signal.SIGINT)
    run.wait()
    assert trained > 10 * RANKS * WATCHED, "the ranks stood still, and there was nothing to be quiet about"
    allowed = {kind: round(most * seconds) for kind, most in MOST.items()}
    assert all(found[kind] <= allowed[kind] for kind in MOST), f"woke {found} times in {seconds:.1f} s, {allowed} are allowed"
