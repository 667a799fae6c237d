"""Tries each private name of ftrun/worker/torch_compat in the running torch: is it there, and does it do what ftrun expects?

    python -m tests.worker.torch_compat.private_probes [--json]

A probe does with the name what ftrun does with it, in a process that is there for that. ftrun itself only looks whether a name is there.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import inspect
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ftrun.worker.process import facts
from ftrun.worker.torch_compat import frames_private, loader_private, pipeline_private, sharded_private
from ftrun.worker.torch_compat import torch_private as private

NAMES = facts.private_names()
THERE, MISSING, DIFFERS, BEFORE = "there", "missing", "behaves differently", "not in this torch yet"
AFTER = "not needed on this Python"


class Answer(NamedTuple):
    """What the system said of one entry."""

    entry: private.Private
    state: str
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.state in (THERE, BEFORE, AFTER)

    def as_json(self) -> dict[str, Any]:
        entry = self.entry
        since = ".".join(map(str, entry.since)) if entry.since else None
        return {
            "name": entry.name, "owner": entry.owner, "needs": entry.needs, "why": entry.why, "without": entry.without,
            "since": since, "state": self.state, "detail": self.detail,
        }  # fmt: skip


def ask(entry: private.Private) -> Answer:
    """Look for a name, and try it."""
    if entry.before_its_time():
        return Answer(entry, BEFORE)
    if entry.after_its_time():
        return Answer(entry, AFTER)
    lacking = entry.lacking()
    if lacking:
        return Answer(entry, MISSING, ", ".join(lacking))
    try:
        good = all(PROBES[name]() for name in entry.names if name in PROBES)
    except Exception as error:
        return Answer(entry, DIFFERS, f"{type(error).__name__}: {error}")
    return Answer(entry, THERE if good else DIFFERS)


def ask_all() -> list[Answer]:
    """Every entry, in the order of the modules."""
    return [ask(entry) for entry in NAMES]


# ---- process groups ----


def _use_gloo(group: Any) -> None:
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, private.gloo_options(timedelta(seconds=10), [device]))
    private.use_by_default(group, dist.ProcessGroup.BackendType.GLOO)
    private.use_backend(group, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def _gloo_of_one() -> bool:
    """A group as ftrun makes it, of one rank: it sums, and gives its backend."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    _use_gloo(group)
    tensor = torch.ones(2)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor.tolist() == [1.0, 1.0] and private.backend_of(group, torch.device("cpu")) is not None


# ---- DistributedDataParallel ----


@functools.cache
def _ddp() -> Any:
    """A DDP module over a world of one, after its first two backwards."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    return ddp


def _numbers_params() -> bool:
    params, sparse = private.params_of_reducer(_ddp())
    return [id(p) for p in params] == [id(p) for p in _ddp().parameters()] and sparse == [False, False]


def _resets() -> bool:
    """A backward that was cut off is forgotten: the next one ends, and its gradients are right."""
    ddp = _ddp()
    ddp(torch.ones(1, 2))  # and no backward
    private.reset_reducer(ddp)
    forgotten = not private.has_rebuilt(ddp)
    ddp.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
    return forgotten and ddp.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def _rebuilds() -> bool:
    """As a repair primes a reducer: gradients become ready in an order of ours, and it lays its buckets out."""
    ddp = _ddp()
    private.reset_reducer(ddp)
    ddp.zero_grad()
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for param in ddp.parameters():
        param.view_as(param).backward(torch.zeros_like(param))
    rebuilt = private.rebuild_buckets(ddp)
    ddp.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
    return rebuilt and private.has_rebuilt(ddp) and ddp.module.bias.grad.tolist() == [1.0, 1.0]


class _Interrupted:
    """Interrupts whoever looks at it, as a signal handler may."""

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def _interrupting_group() -> Any:
    """Of one rank, written in Python as ftrun's groups are. Made here, since a torch that is too old has no such classes."""

    class Interrupting(dist.Work):
        def get_future(self) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(_Interrupted())
            return future

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)
            _use_gloo(self)
            self._works: list[dist.Work] = []

        def allreduce(self, tensors: Any, options: Any) -> dist.Work:
            self._works.append(Interrupting())
            return self._works[-1]

        def getBackendName(self) -> str:
            return "gloo"

    return Group()


def _swallows() -> bool:
    """What comes up while DDP looks at a collective's result is given back as what it was."""
    group = _interrupting_group()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group, init_sync=False)
    try:
        with private.signals_in_backward():
            ddp(torch.ones(1, 2)).sum().backward()
    except KeyboardInterrupt:
        return True
    return False


def _knows_comm_hooks() -> bool:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=_ddp().process_group)
    before = private.comm_hooks(ddp)
    ddp.register_comm_hook(None, lambda state, bucket: bucket)
    return before == [] and len(private.comm_hooks(ddp)) == 1


# ---- tensors, scalers ----


def _counts_writes() -> bool:
    tensor = torch.zeros(1)
    before = private.writes_to(tensor)
    tensor.add_(1)
    return private.writes_to(tensor) == before + 1


def _finds_hooks() -> bool:
    tensor = torch.zeros(1, requires_grad=True)
    tensor.register_hook(lambda grad: None)
    tensor.register_post_accumulate_grad_hook(lambda _: None)
    return [len(hooks) for hooks in private.hooks_of(tensor)] == [1, 1]


def _unscales_again() -> bool:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        private.forget_unscaled(scaler)
    return weight.grad is not None and weight.grad.tolist() == [1.0]


def _makes_processes_anew() -> bool:
    loader = torch.utils.data.DataLoader(range(2), num_workers=1, persistent_workers=True)
    before = loader_private.has_processes(loader)
    first = iter(loader)
    made = loader_private.has_processes(loader)
    loader_private.drop_processes(loader)
    return not before and made and iter(loader) is not first


# ---- torch.compile ----


def _calls_around() -> bool:
    seen: list[str] = []
    private.around_compiling(lambda: seen.append("begins"), lambda: seen.append("ends"))
    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    return seen == ["begins", "ends"]


# ---- CPython, Linux ----


def _interrupts() -> bool:
    caught, begun = threading.Event(), threading.Event()

    def spin() -> None:
        try:
            while not caught.wait(0.001):
                begun.set()
        except TimeoutError:
            caught.set()

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    begun.wait(5.0)
    private.interrupt_thread(thread.ident or 0, TimeoutError)
    return caught.wait(5.0)


def _binds_locals() -> bool:
    def holder() -> Iterator[int]:
        value = 1
        while True:
            yield value

    begun = holder()
    next(begun)
    frame = getattr(begun, "gi_frame", None)
    if frame is None:
        return False
    frames_private.bind_local(frame, "value", 2)
    return next(begun) == 2


def _leaves_locals() -> bool:
    def holder(first: int) -> bool:
        taken = locals()
        frame = inspect.currentframe()
        seen = dict(frames_private.locals_of(frame)) if frame is not None else {}
        return taken == {"first": 1} and seen.keys() == {"first", "taken", "frame"}

    return holder(1)


def _makes_capsules() -> bool:
    from ftrun.worker.memory import dlpack

    memory = (ctypes.c_uint8 * 3)(1, 2, 3)
    tensor = dlpack.tensor(ctypes.addressof(memory), 3, None)
    memory[1] = 7
    return tensor.tolist() == [1, 7, 3]


def _watches() -> bool:
    plain = type(os.environ)
    read: list[str] = []

    def getitem(environ: Any, key: str) -> str:
        read.append(key)
        return str(plain.__getitem__(environ, key))

    private.watch_environment(type("Watching", (plain,), {"__getitem__": getitem}))
    os.environ.get("RANK")
    private.watch_environment(plain)
    return read == ["RANK"] and type(os.environ) is plain


def _dying_is_seen() -> bool:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with open(f"/proc/{child}/stat") as file:
        flags = int(file.read().rpartition(")")[2].split()[6])
    os.waitpid(child, 0)
    return bool(flags & 0x4)


# ---- sharded models ----


@functools.cache
def _fsdp() -> Any:
    """A model in FSDP2 over a world of one, as `protect` finds it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    sharded_private.begin_fsdp(sharded_private.fsdp_states(model))
    return model


def _knows_shards() -> bool:
    """A shard is moved into other memory, and FSDP2 computes with what is there."""
    model = _fsdp()
    records = dict(sharded_private.fsdp_params(sharded_private.fsdp_states(model)))
    if set(records) != set(model.parameters()):
        return False
    for record in records.values():
        sharded_private.point_shard(record, torch.ones_like(sharded_private.padded_memory(record)))
    local = sharded_private.local_of(model[0].weight)
    return local.tolist() == [[1.0, 1.0], [1.0, 1.0]] and model(torch.ones(1, 2)).tolist() == [[7.0, 7.0]]


def _resets_fsdp() -> bool:
    """Two steps that were cut off, in the forward and in the backward, leave nothing in the next one."""
    model = _fsdp()
    states = sharded_private.fsdp_states(model)
    _knows_shards()

    def cut_off(*_: Any) -> None:
        raise InterruptedError

    def in_backward(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(cut_off)

    for hook in (model[1].register_forward_pre_hook(cut_off), model[0].register_forward_hook(in_backward)):
        try:
            model(torch.ones(1, 2)).sum().backward()
        except InterruptedError:
            hook.remove()
            sharded_private.reset_fsdp(states)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    right = sharded_private.local_of(model[0].weight.grad).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    return (
        right
        and sharded_private.unreduced(states) == ""
        and not any(map(list, map(sharded_private.fsdp_extras, states)))
    )


# ---- pipelines ----


def _redoes_a_pipeline() -> bool:
    """A schedule that was cut off, and one that knows the shapes only, give the gradients of an uninterrupted one."""
    from torch.distributed import pipelining

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, tries = torch.nn.Linear(2, 2), []

    def made() -> Any:
        stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
        return pipelining.ScheduleGPipe(stage, 2, loss_fn=torch.nn.MSELoss())

    def gradient(schedule: Any) -> list[Any]:
        model.zero_grad()
        schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2))
        assert model.weight.grad is not None
        return [*model.weight.grad.tolist(), *pipeline_private.have_met(schedule)]

    def cut_off(*_: Any) -> None:
        tries.append(0)
        if len(tries) == 2:
            raise InterruptedError

    schedule, other = made(), made()
    wanted = gradient(schedule)
    stage = pipeline_private.stages_of(schedule)[0]
    plain, met = pipeline_private.plain_metas(stage), pipeline_private.have_met(schedule)
    hook = model.register_forward_pre_hook(cut_off)
    try:
        gradient(schedule)
    except RuntimeError:
        hook.remove()
    for one in (schedule, other):
        pipeline_private.reset_schedule(one, met)
        pipeline_private.lay_out(one, pipeline_private.stages_of(one)[0], plain or [], met)
    return len(tries) == 2 and gradient(schedule) == wanted and gradient(other) == wanted


# By one of an entry's names. The other entries are only looked for: torch asks for them, or trying would end the process.
def _finds_groups() -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return private.groups_of_others(dist) == [("gloo", [0])]
    finally:
        dist.destroy_process_group()


def _takes_a_folder() -> bool:
    from multiprocessing import util

    before = util.get_temp_dir()  # a loader's processes may need it: those of a fork server do, which Python 3.14 has by default
    private.use_temporary_folder("/nowhere")
    try:
        return str(util.get_temp_dir()) == "/nowhere"
    finally:
        private.use_temporary_folder(before)


def _copies_each() -> bool:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    private.copy_each(targets, [torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
    return all(bool((one == 1).all()) for one in targets)


PROBES: dict[str, Callable[[], bool]] = {
    "_local_tensor": _knows_shards,
    "_reset_iter_state": _resets_fsdp,
    "_stage": _redoes_a_pipeline,
    "_config": _takes_a_folder,
    "_FR_SELF_RECORDING_BACKENDS": lambda: private.are_own_groups_recorded(dist),
    "_pg_map": _finds_groups,
    "_Options": _gloo_of_one,
    "_register_backend": _gloo_of_one,
    "_get_backend": _gloo_of_one,
    "_build_params_for_reducer": _numbers_params,
    "_has_rebuilt_buckets": _rebuilds,
    "_reset_state": _resets,
    "_extract_tensors": _swallows,
    "_rebuild_buckets": _rebuilds,
    "_comm_hooks": _knows_comm_hooks,
    "_foreach_copy_": _copies_each,
    "_version": _counts_writes,
    "_backward_hooks": _finds_hooks,
    "_iterator": _makes_processes_anew,
    "_per_optimizer_states": _unscales_again,
    "register_start_callback": _calls_around,
    "PyThreadState_SetAsyncExc": _interrupts,
    "PyCapsule_New": _makes_capsules,
    "PyFrame_LocalsToFast": _binds_locals,
    "f_locals": _leaves_locals,
    "_current_frames": lambda: private.frame_of(threading.get_ident()) is not None,
    "__class__": _watches,
    "PF_EXITING (0x4)": _dying_is_seen,
}


# ---- printing ----


def main() -> int:
    """Print the list with the answers. Exit code 1 when something is missing or differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.worker.torch_compat.private_probes", description=private.__doc__)
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    as_json = parser.parse_args().json
    answers = ask_all()
    if as_json:
        facts = {"torch": str(torch.__version__), "python": platform.python_version()}
        print(json.dumps({**facts, "names": [answer.as_json() for answer in answers]}, indent=2))
    else:
        print("\n".join(table(answers)))
    return 0 if all(answer.good for answer in answers) else 1


def table(answers: list[Answer]) -> list[str]:
    """Aligned text: state, need and name, and below each what it is for."""
    lines = [f"torch {torch.__version__}, Python {platform.python_version()}"]
    for state, needs, entry, detail in ((a.state, a.entry.needs, a.entry, a.detail) for a in answers):
        lines.append(f"{state:<25} {needs:<13} {entry.name}{f' ({detail})' if detail else ''}")
        lines.append(f"{'':<39} to {entry.why}; without: {entry.without}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
