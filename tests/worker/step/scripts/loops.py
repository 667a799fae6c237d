"""Three loops, calls, subgroups and collectives before the first step; KILL=place@rank kills that rank there, once."""

import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun


def die(where: str) -> None:
    name, _, victim = os.environ.get("KILL", "").partition("@")
    if name == where and dist.get_rank() == int(victim):
        try:
            os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
dist.init_process_group("ftrun")
rank, size = dist.get_rank(), dist.get_world_size()
config = [{"lr": 0.05, "name": "x" * 50} if rank == 0 else None]
dist.broadcast_object_list(config, src=0)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.barrier()
gathered = [None] * size
dist.all_gather_object(gathered, {"rank": rank})
assert [g["rank"] for g in gathered] == list(range(size)), gathered
assert total.item() == size * (size + 1) / 2
groups = [dist.new_group([r, (r + 1) % size]) for r in range(size)] if size > 2 else [dist.new_group()]
optimizer = torch.optim.AdamW(model.parameters(), lr=config[0]["lr"])
torch.manual_seed(100 + rank)
ddp = DistributedDataParallel(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
job = ftrun.protect(model=ddp, optimizer=optimizer, scheduler=scheduler)


def evaluate(where: str) -> float:
    die(where)
    with torch.no_grad():
        value = model(torch.ones(2, 8)).sum()
    dist.all_reduce(value)
    die(where + " late")
    return value.item()


for epoch in range(3):
    die(f"before loop {epoch}")
    torch.rand(epoch)  # belongs to the first step of the loop
    for step in job.steps(4 * (epoch + 1), start=4 * epoch):
        if step.index % 4 == 1:
            value = job.call(evaluate, f"call {step.index}")
        die(f"handed out {step.index}")
        with step:
            x = torch.randn(6, 8)
            loss = ddp(x).square().mean()
            extra = torch.ones(1) * (rank + 1)
            for g in groups:
                if g != dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(g) >= 0:
                    dist.all_reduce(extra, group=g)
            die(f"subgroups {step.index}")
            (loss * (1 + extra.item() / 100)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        die(f"left {step.index}")
    die(f"after loop {epoch}")
die("tail")
noise = torch.rand(1)
h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
    for _, value in sorted(optimizer.state[p].items()):
        h.update(value.numpy().tobytes())
h.update(noise.numpy().tobytes())
h.update(torch.get_rng_state().numpy().tobytes())
h.update(str(scheduler.state_dict()).encode())
print("digest", h.hexdigest(), flush=True)
die("very end")
