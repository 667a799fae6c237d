"""What is started to measure a start: a small DDP model that is trained for three steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from start_noop import hold
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("ftrun" if "FTRUN_RUN_DIR" in os.environ else "gloo")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hold(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
