"""What is started to measure a start: `noop` does nothing, `ddp` trains a small model for three steps.

With OUT/hold in place every rank writes OUT/here-RANK when it is done and waits until OUT/hold is gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def train() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("ftrun" if "FTRUN_RUN_DIR" in os.environ else "gloo")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    if kind == "ddp":
        train()
    hold = out / "hold"
    if hold.exists():
        (out / f"here-{os.environ['RANK']}").touch()
        deadline = time.monotonic() + 60
        while hold.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
