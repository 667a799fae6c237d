"""Rank 1 gives a gradient that is not finite where a sample does not see it, and comes late to the gate the first time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import ftrun

BAD_STEP, BAD_ELEMENT, LATE = 3, 6000, 2.5


def main() -> None:
    dist.init_process_group("ftrun")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layer = torch.nn.Linear(400, 400, bias=False)
    current: list[ftrun.Step] = []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        if rank == 1 and current[0].index == BAD_STEP:
            gradient = gradient.clone()
            gradient.view(-1)[BAD_ELEMENT] = float("nan")
        return gradient

    layer.weight.register_hook(poison)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in ftrun.protect(model=model, optimizer=optimizer).steps(6):
        with step:
            current[:] = [step]
            optimizer.zero_grad()
            model(torch.randn(4, 400)).square().mean().backward()
            if rank == 1 and step.index == BAD_STEP and step.attempt == 0:
                time.sleep(LATE)
            optimizer.step()


if __name__ == "__main__":
    main()
