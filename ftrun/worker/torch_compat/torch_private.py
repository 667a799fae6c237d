"""Private names of torch, CPython or the kernel that ftrun relies on, each beside the functions that use it; *_private.py have more.

Nothing outside these files may use such a name; `make lint` checks it. Correctness needs nearly all of them; the few that only give
speed are the first to remove. `ftrun doctor` checks that each exists; tests/worker/torch_compat/private_probes.py tries each. Other
modules import this one while torch is still being imported, and in workers without torch, so it imports torch only inside functions.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import operator
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from ftrun.core.errors import UsageError
from ftrun.core.tried import TORCH_RANGE, version_of

# the uses of a name
START = "start"  # without it no worker runs, or no group of backend "ftrun" is made
PROTECT = "protect"  # without it protect() refuses
DDP = "protect of DDP"  # without it protect() refuses a model in DistributedDataParallel
COMPILE = "torch.compile"  # without it torch.compile beside protect() fails, or counts as a hang
ANSWER = "answer"  # torch asks about or through this name; a torch without it may not ask
MESSAGE = "message"  # without it a message says less
SPEED = "speed"  # without it something takes longer
TIDY = "tidy"  # without it something is left behind


class Private(NamedTuple):
    """Names of one class or module that ftrun needs together."""

    place: str  # MODULE or MODULE:CLASS
    names: tuple[str, ...]
    owner: str  # torch, CPython or Linux
    needs: str  # one of the uses above
    why: str
    without: str
    of_instance: bool = False  # the class has no such attribute; its methods set it in each instance
    since: tuple[int, ...] | None = None  # first release of torch; None: the oldest tested release has it
    until: tuple[int, ...] | None = None  # release of Python from which on ftrun does not use it

    @property
    def name(self) -> str:
        return f"{self.place.replace(':', '.')}{' ' if self.owner == 'Linux' else '.'}{', .'.join(self.names)}"

    def before_its_time(self) -> bool:
        """Is this torch older than the name?"""
        return self.since is not None and version_of(str(importlib.import_module("torch").__version__)) < self.since

    def after_its_time(self) -> bool:
        """Does this Python do without the name?"""
        return self.until is not None and sys.version_info >= self.until

    def lacking(self) -> list[str]:
        """Return the names that are needed here and missing. This is cheap: it looks names up, and calls nothing."""
        if self.owner == "Linux" or self.before_its_time() or self.after_its_time():
            return []  # names of Linux are no attributes: only a try tells
        module, _, attribute = self.place.partition(":")
        try:
            thing = importlib.import_module(module)
            for part in attribute.split(".") if attribute else []:
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            return list(self.names)
        if self.of_instance:
            codes = [m.__code__ for m in vars(thing).values() if hasattr(m, "__code__")]
            return [name for name in self.names if not any(name in code.co_names for code in codes)]
        return [name for name in self.names if not hasattr(thing, name)]


NAMES: list[Private] = []


def require(names: Iterable[Private], *needs: str, torch: str = TORCH_RANGE) -> None:
    """Raise UsageError that names the first missing entry with one of these uses.

    `torch`: the releases that have the names.
    """
    for entry in names:
        lacking = entry.lacking() if entry.needs in needs else []
        if lacking:
            version = (
                importlib.import_module("torch").__version__ if entry.owner == "torch" else platform.python_version()
            )
            use = torch if entry.owner == "torch" else "another Python"
            without = 'init_process_group("ftrun")' if entry.needs == START else "protect()"
            raise UsageError(
                f"{entry.owner} {version} lacks {entry.place.replace(':', '.')}.{lacking[0]}, which ftrun needs to {entry.why}; "
                f"use {use}, or run the script without {without} (all workers restart on a failure)"
            )


_C10D = "torch.distributed"
_DDP = "torch.nn.parallel:DistributedDataParallel"

# ---- process groups ----


def record_own_groups(distributed: Any) -> None:
    """Keep torch's flight recorder away from groups of backend "ftrun"; it records their inner groups anyway.

    Since torch 2.15 the recorder attaches itself to each new group and asks it for its name in C++, where a group that is
    written in Python has none: `init_process_group` would fail with "ProcessGroup name not set".

    Args:
        distributed: The module `torch.distributed`.
    """
    recording = getattr(distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add("ftrun")


def are_own_groups_recorded(distributed: Any) -> bool:
    """Does torch's flight recorder leave groups of backend "ftrun" alone?"""
    return "ftrun" in getattr(distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", ())


NAMES.append(
    Private(
        f"{_C10D}.distributed_c10d", ("_FR_SELF_RECORDING_BACKENDS",), "torch", ANSWER,
        "tell torch's flight recorder to leave our groups alone, which have no name in C++",
        'in torch 2.15 init_process_group("ftrun") ends in "ProcessGroup name not set"', since=(2, 15),
    )
)  # fmt: skip


def groups_of_others(distributed: Any) -> list[tuple[str, list[int]]]:
    """Return backend and ranks of each process group of this process that is not ftrun's.

    Args:
        distributed: The module `torch.distributed`.
    """
    groups = [(distributed.get_backend(group), group) for group in list(distributed.distributed_c10d._pg_map)]
    return [(str(name), distributed.get_process_group_ranks(group)) for name, group in groups if name != "ftrun"]


NAMES.append(
    Private(
        f"{_C10D}.distributed_c10d", ("_pg_map",), "torch", ANSWER,
        "find process groups of other backends, which no replacement can join, and refuse them by name",
        "a replacement waits in one until its repair is given up",
    )
)  # fmt: skip


def gloo_options(timeout: Any, devices: list[Any]) -> Any:
    """Make the options of a Gloo group over these devices."""
    options = importlib.import_module(_C10D).ProcessGroupGloo._Options()
    options._timeout, options._devices, options._threads = timeout, devices, 2 * len(devices)
    return options


def nccl(store: Any, rank: int, size: int, timeout: Any, group: Any) -> Any:
    """Make the backend that `init_process_group("nccl")` would make: this torch's class for it, or the user's choice.

    Since torch 2.15 the first request registers the creator of "nccl", and TORCH_DIST_USE_NCCL2=0 selects that of the older class.
    Before, there is one class. No public function makes a backend without making it one of the script's groups.

    Args:
        store: Where its ranks find one another; the backend uses it as long as it lives.
        rank: This rank.
        size: Number of ranks.
        timeout: Timeout of a collective.
        group: The ProcessGroup with which the backend will be registered.
    """
    c10d: Any = importlib.import_module(_C10D)
    if hasattr(c10d.Backend, "_ensure_backend_registered"):
        c10d.Backend._ensure_backend_registered("nccl")
    plugin = c10d.Backend._plugins.get("NCCL")
    if plugin is None:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    asked = c10d.distributed_c10d._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size, asked.timeout = store, rank, size, timeout
    asked.group_id = ""
    asked.global_ranks_in_group = []
    if hasattr(asked, "process_group"):
        asked.process_group = group
    return plugin.creator_fn(asked, None)


NAMES += [
    Private(
        f"{_C10D}:Backend", ("_ensure_backend_registered",), "torch", ANSWER,
        "have the creator of \"nccl\" registered, as init_process_group does",
        "the class ProcessGroupNCCL is made, which is not what torchrun's users run from 2.15 on", since=(2, 15),
    ),
    Private(
        f"{_C10D}:Backend", ("_plugins",), "torch", ANSWER,
        'make the class of group that "nccl" means in this torch, or that the user has chosen',
        "the class ProcessGroupNCCL is made, which is not what torchrun's users run from 2.15 on",
    ),
    Private(
        f"{_C10D}.distributed_c10d", ("_DistributedBackendOptions",), "torch", ANSWER,
        'make the class of group that "nccl" means in this torch, or that the user has chosen',
        "no group for CUDA tensors can be made in a torch that registers NCCL as a plugin",
    ),
]  # fmt: skip

NAMES += [
    Private(
        f"{_C10D}:ProcessGroupGloo", ("_Options",), "torch", START,
        "give Gloo devices whose listening ports are known, so that a stop finds the group's connections",
        "a collective that waits for a dead peer cannot be woken",
    ),
    Private(
        f"{_C10D}:ProcessGroupGloo._Options", ("_timeout", "_devices", "_threads"), "torch", START,
        "set the timeout, devices and threads of a Gloo group",
        "a collective that waits for a dead peer cannot be woken",
    ),
]  # fmt: skip


def use_by_default(group: Any, kind: Any) -> None:
    """Let the group use this kind of backend where no tensor decides; call it before `use_backend`."""
    group._set_default_backend(kind)


def use_backend(group: Any, device: Any, kind: Any, backend: Any) -> None:
    """Let the group send tensors of this kind of device through `backend`."""
    group._register_backend(device, kind, backend)


def backend_of(group: Any, device: Any) -> Any:
    """Return the backend that the group uses for tensors of this kind of device."""
    return group._get_backend(device)


NAMES.append(
    Private(
        f"{_C10D}:ProcessGroup", ("_register_backend", "_set_default_backend"), "torch", START,
        "put Gloo and NCCL into the inner group that a repair replaces", 'no group of backend "ftrun" can be made',
    )
)  # fmt: skip
# A SwapGroup overrides these. A test compares this table with ftrun's classes that inherit from torch's.
for _name, _why in {
    "_get_backend": "tell torch the backend behind a group",
    "_device_types": "tell torch which devices a group is for",
    "_set_group_name": "take the name that torch gives a group after it was made",
    "_set_group_desc": "take the description that torch gives a group after it was made",
    "_get_sequence_number_for_group": "tell torch's debugging how many collectives there were",
    "_start_coalescing": "refuse calls that torch would coalesce for one device",
    "_allgather_base": "do a collective that torch calls by this name",
    "_reduce_scatter_base": "do a collective that torch calls by this name",
}.items():
    NAMES.append(Private(f"{_C10D}:ProcessGroup", (_name,), "torch", ANSWER, _why, "nobody asks our groups by it"))


def source_of(work: Any) -> int:
    """Return the rank in the group whose message a receive from any source got."""
    return int(work._source_rank())


NAMES.append(
    Private(
        f"{_C10D}:Work", ("_source_rank",), "torch", ANSWER,
        "tell torch whom a receive from any source has heard", "nobody asks our works by it",
    )
)  # fmt: skip

# ---- DistributedDataParallel ----


def params_of_reducer(ddp: Any) -> tuple[list[Any], list[bool]]:
    """Return the parameters in the reducer's order, and whether each has sparse gradients."""
    params, sparse = ddp._build_params_for_reducer()
    return list(params), list(sparse)


def has_rebuilt(ddp: Any) -> bool:
    """Did DDP lay its buckets out by the order in which gradients became ready?"""
    return bool(ddp._has_rebuilt_buckets)


def reset_reducer(ddp: Any) -> None:
    """Forget a backward that was cut off; the buckets stay until DDP lays them out anew after the next backward."""
    ddp._has_rebuilt_buckets = False
    ddp.reducer._reset_state()


def rebuild_buckets(ddp: Any) -> bool:
    """Lay the buckets out now, by the order of the last backward. Return whether torch did."""
    done = bool(ddp.reducer._rebuild_buckets())
    ddp._has_rebuilt_buckets = True
    return done


def comm_hooks(ddp: Any) -> list[Any]:
    """Return the communication hooks that are registered with a DDP module."""
    return list(ddp._comm_hooks)


def is_joined(ddp: Any) -> bool:
    """Is it in a `torch.distributed.algorithms.Join`, which lets a rank end before the others?"""
    return bool(ddp._join_config.enable)


NAMES += [
    Private(
        "torch.distributed.algorithms:Joinable", ("_join_config",), "torch", MESSAGE,
        "refuse uneven inputs by their name", "such a run hangs until its timeout", of_instance=True,
    ),
    Private(
        _DDP, ("_build_params_for_reducer",), "torch", DDP,
        "number the parameters as DDP's reducer does, so that one rank's order of gradients means the same on another",
        "a repaired run ends on other bits",
    ),
    Private(
        _DDP, ("_has_rebuilt_buckets",), "torch", DDP,
        "keep DDP's bucket layout, which decides the order of summation, as an uninterrupted run has it",
        "a repaired run ends on other bits", of_instance=True,
    ),
    Private(
        f"{_C10D}:Reducer", ("_reset_state",), "torch", DDP,
        "make DDP's reducer forget the backward that a repair cuts off",
        "the redone step fails, or sums gradients of the aborted one",
    ),
    Private(
        f"{_C10D}:Reducer", ("_rebuild_buckets",), "torch", DDP,
        "lay DDP's buckets out as an uninterrupted run does", "a repaired run ends on other bits",
    ),
    Private(
        _DDP, ("_comm_hooks",), "torch", DDP,
        "find communication hooks, which keep state that cannot be rewound, to refuse them",
        "a run with such a hook ends on other bits without a word", of_instance=True,
    ),
]  # fmt: skip


# ---- tensors, scalers ----


write_count = operator.attrgetter("_version")
"""write_count(tensor) -> how often it was written in place; to be mapped over many, without a call of Python for each."""


def writes_to(tensor: Any) -> int:
    """Return how often a tensor was written in place."""
    return int(write_count(tensor))


def copy_each(targets: list[Any], sources: list[Any]) -> None:
    """Copy each source into its target, of the same shape, by one call for all."""
    importlib.import_module("torch")._foreach_copy_(targets, sources)


def step_hooks(optimizer: Any) -> list[Any]:
    """Return the hooks before and after an optimizer's step, its own and those of all optimizers."""
    every = importlib.import_module("torch.optim.optimizer")
    of_all = [*every._global_optimizer_pre_hooks.values(), *every._global_optimizer_post_hooks.values()]
    return [*of_all, *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def parts_of_sparse(tensor: Any) -> tuple[Any, Any]:
    """Return indices and values of a sparse tensor as they are, even if one index has several values."""
    return tensor._indices(), tensor._values()


def hooks_of(param: Any) -> list[dict[int, Any]]:
    """Return the non-empty dictionaries in which a tensor keeps its hooks."""
    return [hooks for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks) if hooks]


def forget_unscaled(thing: Any) -> None:
    """Make a GradScaler forget which optimizers it unscaled in the step that is done again; leave other objects as they are."""
    stages = getattr(thing, "_per_optimizer_states", None)
    if stages is not None:
        stages.clear()


NAMES += [
    Private(
        "torch", ("_foreach_copy_",), "torch", PROTECT,
        "seal the gradients of a rank without replica by one call for all of them",
        "a rank that dies in its update has left no gradients for its replacement",
    ),
    Private(
        "torch:Tensor", ("_version",), "torch", PROTECT,
        "see that a script wrote into its batch, its gradients or a buffer on a GPU",
        "a redone step may begin from a batch that the first try changed",
    ),
    Private(
        "torch.optim.optimizer", ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"), "torch", PROTECT,
        "leave an update alone that a hook of the script takes part in, when a replacement would make it in place of a dead rank",
        "a shard that nobody else has may end on other bits",
    ),
    Private(
        "torch.optim:Optimizer", ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"), "torch", PROTECT,
        "leave an update alone that a hook of the script takes part in, when a replacement would make it in place of a dead rank",
        "a shard that nobody else has may end on other bits", of_instance=True,
    ),
    Private(
        "torch:Tensor", ("_indices", "_values"), "torch", ANSWER,
        "record the sparse result of a collective before the first step as it was, and keep sparse gradients",
        "a script that reduces sparse tensors before its first step, or whose ranks have no replica, ends in an AttributeError",
    ),
    Private(
        "torch:Tensor", ("_backward_hooks", "_post_accumulate_grad_hooks"), "torch", PROTECT,
        "silence the script's tensor hooks while a reducer is primed with zeros",
        "the script's hooks run once more than in an uninterrupted run",
    ),
    Private(
        "torch.amp:GradScaler", ("_per_optimizer_states",), "torch", PROTECT,
        "let a step that is done again unscale its gradients again",
        'GradScaler raises "unscale_() has already been called" in the redone step', of_instance=True,
    ),
]  # fmt: skip

# ---- torch.compile ----


def skip_when_compiling(package: str) -> None:
    """Make torch.compile call the functions of a package as they are.

    Raises:
        ImportError: If this torch has no compiler.
        AttributeError: If its compiler lacks the function.
    """
    from torch._dynamo import trace_rules

    trace_rules.add(package)


def around_compiling(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Make torch call both around every compilation, even after `torch._dynamo.reset()`, which clears torch's callbacks.

    Raises:
        ImportError: If this torch has no compiler.
        AttributeError: If its compiler lacks the callbacks.
    """
    from torch._dynamo.callback import callback_handler as handler

    def register() -> None:
        handler.register_start_callback(lambda _: begins())
        handler.register_end_callback(lambda _: ends())

    def clear() -> None:
        try:
            forget()
        finally:
            register()

    forget = handler.clear
    register()
    handler.clear = clear


NAMES += [
    Private(
        "torch._dynamo.trace_rules", ("add",), "torch", COMPILE,
        "have torch.compile leave our hooks and groups in a compiled module alone",
        "torch.compile raises when it looks into a group of ours",
    ),
    Private(
        "torch._dynamo.callback:callback_handler", ("register_start_callback", "register_end_callback", "clear"),
        "torch", COMPILE, "tell the launcher to be patient while torch compiles",
        "a compilation in the middle of a run may count as a hang",
    ),
]  # fmt: skip

# ---- exceptions of signal handlers in a backward ----

_EXTRACTING = "Cannot extract tensors from value: "


def swallowed_in_backward(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt or SystemExit of a signal handler that torch turned into the RuntimeError `error`, else None.

    DDP waits for a collective in C++, and then lets Python look at the result: there Python runs the handler.
    """
    _, found, told = str(error).partition(_EXTRACTING) if isinstance(error, RuntimeError) else ("", "", "")
    kind, _, message = told.partition("\n")[0].partition(": ")
    if not found or kind not in ("KeyboardInterrupt", "SystemExit"):
        return None
    if kind == "KeyboardInterrupt":
        return KeyboardInterrupt()
    return SystemExit(int(message) if message.lstrip("-").isdigit() else None if message == "<EMPTY MESSAGE>" else message)


@contextlib.contextmanager
def signals_in_backward() -> Iterator[None]:
    """Raise the exception that a signal handler raised in a backward of ftrun's."""
    try:
        yield
    except RuntimeError as error:
        swallowed = swallowed_in_backward(error)
        if swallowed is None:
            raise
        raise swallowed.with_traceback(error.__traceback__) from None


NAMES += [
    Private(
        "torch._jit_internal", ("_extract_tensors",), "torch", MESSAGE,
        "give a script its KeyboardInterrupt, which torch turns into a RuntimeError while it looks at a collective's result",
        "Ctrl-C in a backward is a RuntimeError for the script, whose handlers of KeyboardInterrupt do not run",
    ),
]  # fmt: skip

# ---- CPython ----


def interrupt_thread(ident: int, kind: type[BaseException]) -> None:
    """Raise an exception in a Python thread at its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def capsule(address: int, name: bytes) -> Any:
    """Make a PyCapsule around a pointer; `name` must live as long as the capsule."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, name, None)


def frame_of(ident: int) -> FrameType | None:
    """Return the frame that a Python thread executes."""
    return sys._current_frames().get(ident)


def end_as_python_does() -> None:
    """Do what `os._exit` leaves out of the interpreter's end: wait for non-daemon threads, and call atexit's functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def use_temporary_folder(folder: str) -> None:
    """Make multiprocessing keep the sockets of this process and its forks in an existing folder.

    Without that it makes /tmp/pymp-*, and removes it at the end of the process, which a killed process does not reach.
    """
    from multiprocessing import process

    process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def watch_environment(kind: type) -> None:
    """Make `os.environ` an instance of a subclass of its class, or of its own class again."""
    os.environ.__class__ = kind


NAMES += [
    Private(
        "ctypes:pythonapi", ("PyThreadState_SetAsyncExc",), "CPython", PROTECT,
        "stop a rank that is busy in Python and calls nothing of ours",
        "such a rank is killed and replaced instead of stopped",
    ),
    Private(
        "ctypes:pythonapi", ("PyCapsule_New",), "CPython", PROTECT,
        "hand memory that torch did not allocate to torch's from_dlpack",
        "a model on a GPU cannot lie in memory that outlives its worker",
    ),
    Private(
        "sys", ("_current_frames",), "CPython", MESSAGE,
        "say on which line a rank hangs", "a hang is told without its line",
    ),
    Private(
        "threading", ("_shutdown",), "CPython", START,
        "end a script as Python does: wait for its threads, before os._exit", "threads of a script are cut off",
    ),
    Private(
        "atexit", ("_run_exitfuncs",), "CPython", START,
        "end a script as Python does: call its exit functions, before os._exit", "exit functions of a script do not run",
    ),
    Private(
        "multiprocessing.process:BaseProcess", ("_config",), "CPython", TIDY,
        "keep multiprocessing's sockets in the run directory, which is removed whatever becomes of a worker",
        "a killed worker leaves /tmp/pymp-*", of_instance=True,
    ),
    Private(
        "os:environ", ("__class__",), "CPython", START,
        "park a spare the moment its script asks for its rank", "spares cannot run ahead of their rank",
    ),
]  # fmt: skip

# ---- Linux: the launcher, which never imports this, asks the kernel (ftrun/host/workers/fence.py) ----

NAMES.append(
    Private(
        "/proc/PID/stat", ("PF_EXITING (0x4)",), "Linux", SPEED,
        "take a dead worker's memory over once each of its tasks is exiting, before anybody reaped it",
        "the launcher waits for the reap: some 100 ms at 1 GB",
    )
)  # fmt: skip
