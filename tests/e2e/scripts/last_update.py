"""Values that change behind `optimizer.step()`, alike on all ranks; rank 2 dies there in the last step: the others are at the loop's end.

`--backend NAME --out FOLDER [--dies]`
"""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("--backend")
parser.add_argument("--out", type=Path)
parser.add_argument("--dies", action="store_true")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group(args.backend)
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
count, seen = 0, []
job = ftrun.protect(ddp, optimizer)
for step in job.steps(6):
    with step:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step.index + rank))
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        killed = args.out / "killed"
        if args.dies and rank == 2 and step.index == 5 and not killed.exists():
            killed.touch()
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        seen.append(step.index)
weights = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
(args.out / f"rank-{rank}.txt").write_text(f"{hashlib.sha256(weights).hexdigest()} {count} {seen}")
