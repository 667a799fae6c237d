"""The loop of nanoGPT's train.py, with its variables: micro-batches, a batch fetched ahead, an evaluation and a checkpoint on one rank."""

import math
import os
import time
from contextlib import nullcontext

import torch
from common import finish, load, reach, save
from torch import nn
from torch.distributed import init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import ftrun

backend = "ftrun"
eval_interval, eval_iters, log_interval = 5, 3, 1
gradient_accumulation_steps, batch_size, block_size = 8, 4, 16
max_iters, learning_rate, min_lr, warmup_iters, grad_clip = int(os.environ["STEPS"]), 1e-2, 1e-3, 3, 1.0


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.drop, self.head = nn.Embedding(64, 32), nn.Dropout(0.1), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.drop(self.wte(x)))
        return logits, F.cross_entropy(logits.view(-1, 64), y.view(-1))


init_process_group(backend=backend)
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)
data = torch.randint(64, (4000,))
ctx = nullcontext()


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    part = data[:3600] if split == "train" else data[3600:]
    ix = torch.randint(len(part) - block_size, (batch_size,))
    return torch.stack([part[i : i + block_size] for i in ix]), torch.stack(
        [part[i + 1 : i + 1 + block_size] for i in ix]
    )


iter_num, best_val_loss = 0, torch.tensor(1e9)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
checkpoint = load()
if checkpoint is not None:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
torch.manual_seed(1337 + ddp_rank + iter_num)
model = DDP(model)


@torch.no_grad()
def estimate_loss() -> dict[str, torch.Tensor]:
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                _, loss = raw_model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * min(it, 30) / 30)) * (learning_rate - min_lr)


X, Y = get_batch("train")
t0, local_iter_num, running_mfu = time.time(), 0, -1.0
raw_model = model.module
job = ftrun.protect(model, optimizer, scaler, ignore=["t0", "running_mfu"])
for step in job.steps(max_iters + 1, start=iter_num):
    with step:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0 and master_process:
            losses = estimate_loss()
            best_val_loss = min(best_val_loss, losses["val"])
            state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            reach(f"before-{iter_num}")
            save({**state, "best_val_loss": best_val_loss})
            reach(f"saved-{iter_num}")
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            reach(f"step-{iter_num}")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        reach(f"updated-{iter_num}")
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        t1 = time.time()
        dt, t0 = t1 - t0, t1
        if iter_num % log_interval == 0 and master_process:
            running_mfu = 1 / dt if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 / dt
            print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
        iter_num += 1
        local_iter_num += 1
        if iter_num > max_iters:
            break
finish(raw_model, optimizer, best=float(best_val_loss))
