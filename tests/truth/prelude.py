"""What every script of tests/truth begins with: 4 ranks, a small model, and digests of everything at the end.

The same under ftrun and torchrun. `end(name=thing)` writes what a rank holds, for the comparison.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import ftrun

__all__ = [
    "DDP",
    "STEPS",
    "DataLoader",
    "Dataset",
    "DistributedSampler",
    "TensorDataset",
    "copy",
    "data",
    "dist",
    "end",
    "ftrun",
    "loss_of",
    "net",
    "nn",
    "np",
    "random",
    "rank",
    "torch",
    "world",
]  # fmt: skip

STEPS = 12
torch.set_num_threads(1)
dist.init_process_group("ftrun")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


def data(index: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator)


def net(middle: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), middle or nn.ReLU(), nn.Linear(8, 2))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def digest(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    if isinstance(value, dict):
        return {str(key): digest(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [digest(inner) for inner in value]
    return digest(value.state_dict()) if hasattr(value, "state_dict") else repr(value)


def end(**state: Any) -> None:
    """Leave digests of what this rank holds."""
    path = Path(os.environ["TRUTH_OUT"]) / f"{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: digest(value) for name, value in state.items()}))
