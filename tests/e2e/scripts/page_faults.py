"""Rank 1 dies once; who replaces it writes how many page faults it took from its rank to its first finished step.

page_faults.py OUT WAIT: with WAIT 1 it dies once a spare is parked and ready.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ftrun
from ftrun.core import paths
from ftrun.core.board import Board, F, Flag

DIES, STEPS = 10, 16
QUIET, DEADLINE = 1.0, 60.0  # seconds; a parked spare looks four times a second for what it can get ready


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def spare() -> int | None:
    """The pid of the parked one."""
    board = Board.open(Path(os.environ[paths.ENV_RUN_DIR]) / paths.BOARD)
    parked = [cell for cell in map(board.cell, range(8)) if cell.has(Flag.PARKED)]
    return parked[0][F.PID] if parked else None


def faults_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def wait_for_a_spare_that_is_ready() -> None:
    """Until it is parked, and takes no more page faults ahead."""
    begin = since = time.monotonic()
    last = None
    while last is None or time.monotonic() - since < QUIET:
        if time.monotonic() - begin > DEADLINE:
            raise TimeoutError("no spare was parked and ready")
        pid = spare()
        now = faults_of(pid) if pid is not None else None
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)


def main() -> None:
    out, wait = Path(sys.argv[1]), sys.argv[2] == "1"
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    before = faults()
    dist.init_process_group("ftrun")
    model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    mark = out / "died"
    replacement = mark.exists()
    job = ftrun.protect(model=ddp, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            ddp(torch.ones(4, 256)).square().mean().backward()
            if step.index == DIES and rank == 1 and not mark.exists():
                if wait:
                    wait_for_a_spare_that_is_ready()
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        if replacement and rank == 1 and step.committed and step.index == DIES:
            (out / "faults").write_text(str(faults() - before))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
