"""What `protect` refuses of sharded models: by name, with exit code 2 and no restart."""

from __future__ import annotations

from tests.conftest import Ftrun

BEGIN = """
import torch, torch.distributed as dist, ftrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapped(func(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {})))

dist.init_process_group("ftrun")
mesh = init_device_mesh("cpu", (2,))

def made(**how):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    fully_shard(model, mesh=mesh, **how)
    return model
"""
EACH = """
class AllGather:
    def allocate(self, *args, **kwargs): ...
    def __call__(self, *args, **kwargs): ...

class DeepSpeedEngine(torch.nn.Linear):
    __module__ = "deepspeed.runtime.engine"

def hooked():
    model = made()
    model.set_all_reduce_hook(lambda tensor: None)
    return model

def gathering():
    model = made()
    model.set_custom_all_gather(AllGather())
    return model

def odd():
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(Wrapped(torch.randn(4, 4)))
    return model

def elsewhere():
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=torch.distributed.device_mesh.DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu"))
    return model

for make in (lambda: FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")), lambda: DeepSpeedEngine(2, 2),
             lambda: made(offload_policy=CPUOffloadPolicy(pin_memory=False)), hooked, gathering, odd, elsewhere):
    model = make()
    try:
        ftrun.protect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ftrun.UsageError as error:
        if dist.get_rank() == 0:
            print("refused:", error, flush=True)
"""
UNCAUGHT = """
model = made(offload_policy=CPUOffloadPolicy(pin_memory=False))
ftrun.protect(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""
UNREDUCED = """
model = made()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model, optimizer)
for step in job.steps(4):
    with step:
        model.set_requires_gradient_sync(step.index % 2 == 1)
        model(torch.ones(2, 4)).sum().backward()
        if step.index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_what_cannot_be_put_back_is_refused_by_name(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, ftrun.script(BEGIN + EACH))
    assert run.wait() == 0, run.stderr
    refused = [line.partition("refused: ")[2] for line in run.stdout.splitlines() if "refused: " in line]
    wanted = (
        "FullyShardedDataParallel (FSDP1)",
        "DeepSpeed's DeepSpeedEngine",
        "offload_policy=CPUOffloadPolicy",
        "set_all_reduce_hook",
        "set_custom_all_gather",
        "parameter weight is a __main__.Wrapped",
        'spread over a "gloo" group',
    )
    assert len(refused) == len(wanted), run.stdout
    for line, part in zip(refused, wanted, strict=True):
        assert part in line and ("without protect()" in line or "init_process_group" in line), line


def test_a_refusal_ends_with_exit_code_2_and_no_restart(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--max-restarts", 1, ftrun.script(BEGIN + UNCAUGHT))
    assert run.wait() == 2, run.stderr
    assert "CPUOffloadPolicy" in run.stderr and "restarting" not in run.stderr, run.stderr


def test_gradients_that_only_fsdp_knows_of_may_not_live_from_body_to_body(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--max-restarts", 1, ftrun.script(BEGIN + UNREDUCED))
    assert run.wait() == 2, run.stderr
    assert "is not reduced yet" in run.stderr and "in one `with step:`" in run.stderr, run.stderr
