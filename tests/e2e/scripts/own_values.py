"""A loop with values of its own. Words in argv: `nothing` has none; `feed` also an iterator and a large table, which cannot be kept;
`times` also the time of each step; `behind` also a sum that is changed behind the update. Each rank writes what it ends with to --out."""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("words", nargs="*")
parser.add_argument("--backend", default="ftrun")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--wait", type=int, default=-1, help="the step before which rank 0 waits for a file `go`")
parser.add_argument("--out", type=Path, default=Path("out"))
args = parser.parse_args()


def train() -> dict[str, object]:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dist.init_process_group(args.backend)
    ddp = DistributedDataParallel(model)
    job = ftrun.protect(ddp, optimizer)
    losses, best, names, times, behind = [], 1e9, set(), [], [0.0]
    feed, table = iter(range(1000)), torch.zeros(600_000)

    def backward(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
        loss = ddp(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        return loss

    for step in job.steps(args.steps) if "nothing" in args.words else ():
        with step:
            backward(step.index)
            optimizer.step()
            optimizer.zero_grad()
    for step in () if "nothing" in args.words else job.steps(args.steps):
        while step.index == args.wait and dist.get_rank() == 0 and not Path("go").exists():
            time.sleep(0.01)
        with step:
            loss = backward(step.index)
            losses.append(loss.item())
            best = min(best, loss.item())
            names.add(f"kind {step.index % 5}")
            if "times" in args.words:
                times.append(time.time())
            if "feed" in args.words:
                table[next(feed)] += 1
            optimizer.step()
            if "behind" in args.words:
                behind[0] += loss.item()
            optimizer.zero_grad()
    weights = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters())).hexdigest()
    return {"weights": weights, "losses": losses, "best": best, "names": sorted(names)}


ended = train()
args.out.mkdir(exist_ok=True)
(args.out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(ended))
dist.barrier()
