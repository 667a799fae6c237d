"""FSDP2 over Gloo: a step is cut off at every n-th Python call inside torch's FSDP, put back, and done again; gradients are compared.

All ranks are cut off at the same call, so that no collective is left alone. Rank 0 prints `COUNT cut off, WRONG different`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ftrun.worker.torch_compat import sharded_private
from tests.injected import inside

EVERY, BY_TORCH_ALONE, SHAPE = int(sys.argv[1]), sys.argv[2] == "alone", sys.argv[3]


class CutOff(BaseException):
    pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(3)])
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(checkpoint(layer, x, use_reentrant=False) if SHAPE == "hsdp" else layer(x))
        return x * self.scale


class Counter:
    """Counts calls of functions of FSDP, and raises at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "_fully_shard" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.at:
                sys.setprofile(None)
                raise CutOff


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Net()
    size = dist.get_world_size()
    shape, names = ((2, size // 2), ("replicate", "shard")) if SHAPE == "hsdp" else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if SHAPE == "hsdp" else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    states = sharded_private.fsdp_states(model)
    sharded_private.begin_fsdp(states)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(4, 16) for _ in range(2)]

    def step(at: int) -> int:
        model.zero_grad()
        counter = Counter(at)
        sys.setprofile(counter)
        try:
            for number, x in enumerate(batches):  # the first gradients wait for the second backward
                model.set_requires_gradient_sync(number == 1)
                model(x).float().square().sum().backward()
        finally:
            sys.setprofile(None)
        return counter.count

    def gradients() -> list[list[float]]:
        return [sharded_private.local_of(p.grad).flatten().tolist() for p in model.parameters()]

    step(-1)
    calls = step(-1)
    wanted, done, wrong = gradients(), 0, 0
    for at in range(1, calls, EVERY):
        try:
            step(at)
        except CutOff:
            done += 1
        (inside.by_torch_alone if BY_TORCH_ALONE else sharded_private.reset_fsdp)(states)
        dist.barrier()
        try:
            step(-1)
            wrong += gradients() != wanted
        except (RuntimeError, AssertionError):
            wrong += 1
            if BY_TORCH_ALONE:
                break
            raise
    if dist.get_rank() == 0:
        print(f"{done} cut off, {wrong} different", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
