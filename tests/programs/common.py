"""What the programs share: data, a model, places at which a test may kill a rank, and an end that writes what each rank holds."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = Path(os.environ.get("PROGRAM_OUT", "."))
torch.set_num_threads(1)
torch.manual_seed(0)


def net() -> nn.Module:
    """A small classifier: 8 numbers in, 4 classes."""
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))


def samples(count: int, seed: int) -> TensorDataset:
    """`count` pairs of 8 numbers and a class."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """This rank's share of 160 samples to learn from, with a loader process, and of 64 to evaluate with."""
    train, test = samples(160, 1), samples(64, 2)
    learn = DataLoader(train, batch_size=4, sampler=DistributedSampler(train), num_workers=1)
    return learn, DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, for this rank."""
    x, y = samples(8, 1000 * step + dist.get_rank()).tensors
    return x, y


def save(state: dict[str, Any]) -> None:
    """Write the checkpoint, whole or not at all."""
    torch.save(state, OUT / "checkpoint.new")
    os.replace(OUT / "checkpoint.new", OUT / "checkpoint.pt")


def load() -> Any:
    """The checkpoint; None when there is none."""
    return torch.load(OUT / "checkpoint.pt") if (OUT / "checkpoint.pt").exists() else None


def reach(place: str) -> None:
    """A test may kill this rank here, once: PROGRAM_KILLS="PLACE@RANK ..."."""
    name = f"{place}@{dist.get_rank()}"
    mark = OUT / f"killed-{name}"
    if name in os.environ.get("PROGRAM_KILLS", "").split() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """Write digests of what this rank ends with."""
    moments = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    found = {
        "weights": [*model.parameters(), *model.buffers()],
        "optimizer": moments,
        "random numbers": [torch.get_rng_state()],
    }
    digests = {
        what: hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
        for what, tensors in found.items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    (OUT / f"rank-{dist.get_rank()}.json").write_text(json.dumps({**digests, **more, "rates": rates}))
    time.sleep(0.1)  # a Gloo thread of plain torch that gives up a tensor while the interpreter ends aborts the process
