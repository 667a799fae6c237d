"""Train a small GPT on real text that every machine has: the source files of Python's standard library.

    ftrun --nproc-per-node 4 --spares 1 examples/train_gpt.py --steps 200

The same file runs under torchrun and under plain `python`. A fault in any rank costs at most the step in flight, and
the final weights are those of a run without a fault: `--hash FILE` makes rank r write their digest to FILE.r.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ftrun

# layers, width, heads, context length in bytes
SIZES = {"small": (2, 64, 4, 64), "10m": (6, 384, 6, 64)}
VOCABULARY = 256  # one token a byte


class Text:
    """The bytes of the standard library's top-level modules; the last tenth is kept for validation."""

    def __init__(self, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        everything = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        cut = len(everything) * 9 // 10
        self.parts = {"train": everything[:cut], "val": everything[cut:]}
        self.seed = seed

    def batch(self, part: str, step: int, rank: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, [size, context] each: a function of (seed, step, rank), so any step can be done again."""
        chosen = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_009 + rank)
        data = self.parts[part]
        starts = torch.randint(len(data) - context - 1, (size,), generator=chosen)
        rows = torch.stack([data[s : s + context + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


class Block(nn.Module):
    """Attention over the past, then a two-layer network; both read a normalized input and add to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Next-byte model; the output layer shares the embedding's weights. `forward` returns the mean loss in nats."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.context = context
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """sha256 of everything the next step would depend on: parameters, buffers, optimizer state, random streams."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    state = optimizer.state_dict()["state"]
    for index in sorted(state):
        for key in sorted(state[index]):
            sha.update(f"{index}.{key}".encode() + state[index][key].cpu().numpy().tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():
        sha.update(torch.cuda.get_rng_state().numpy().tobytes())
    sha.update(repr(random.getstate()).encode())
    sha.update(repr([p.tolist() if isinstance(p, np.ndarray) else p for p in np.random.get_state()]).encode())
    return sha.hexdigest()


def build(args: argparse.Namespace, device: torch.device) -> tuple[GPT, torch.optim.Optimizer]:
    """The model and its optimizer: they depend on no rank, so a spare has them ready."""
    torch.manual_seed(args.seed)
    model = GPT(*SIZES[args.size]).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def validate(model: GPT, text: Text, batch: int, device: torch.device) -> float:
    """Mean loss over four fixed validation batches."""
    model.eval()
    batches = [text.batch("val", i, 0, batch, model.context) for i in range(4)]
    losses = [model(x.to(device), y.to(device)).item() for x, y in batches]
    model.train()
    return sum(losses) / len(losses)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--hash", metavar="FILE", help="rank r writes the digest of its final state to FILE.r")
    parser.add_argument(
        "--order",
        choices=["early", "late"],
        default="early",
        help="build the model before the process group, or after reading LOCAL_RANK as torchrun's tutorial does",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.order == "early" and args.device == "cpu":
        device = torch.device("cpu")
        model, optimizer = build(args, device)
        text = Text(args.seed)
        dist.init_process_group("ftrun")
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", local_rank)
        dist.init_process_group("ftrun")
        model, optimizer = build(args, device)
        text = Text(args.seed)
    rank = dist.get_rank()
    torch.manual_seed(args.seed * 1_000 + rank)  # each rank drops its own units
    random.seed(args.seed * 1_000 + rank)
    np.random.seed(args.seed * 1_000 + rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1 if args.size == "small" else 25)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(args.steps, 1))

    job = ftrun.protect(model=ddp, optimizer=optimizer, scheduler=scheduler)
    for step in job.steps(args.steps):
        with step:
            inputs, targets = text.batch("train", step.index, rank, args.batch, model.context)
            loss = ddp(inputs.to(device), targets.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        last = step.index + 1 == args.steps
        if rank == 0 and step.committed and step.index == 0:
            millions = sum(p.numel() for p in model.parameters()) / 1e6
            print(f"{millions:.1f} M parameters, {len(text.parts['train']) / 1e6:.1f} MB of text", flush=True)
        if rank == 0 and step.committed and (step.index % args.print_every == 0 or last):
            print(f"step {step.index:4d}  loss {loss.item():.3f}", flush=True)
    if rank == 0:
        print(f"validation loss {validate(model, text, args.batch, device):.3f}", flush=True)
    if args.hash:
        Path(f"{args.hash}.{rank}").write_text(digest(ddp, optimizer) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
