"""Make the backend of a new process group, when torch asks for one in `init_process_group("ftrun")` or `new_group`."""

from __future__ import annotations

import atexit
import datetime as dt
import functools
from typing import Any

import torch.distributed as dist

from ftrun.core.errors import WorkerError
from ftrun.core.shared.board import Flag
from ftrun.worker.comm.backend import make_group
from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link import compiling
from ftrun.worker.link.run_link import Context
from ftrun.worker.repair.replacement import report_no_source
from ftrun.worker.repair.sources import read_log
from ftrun.worker.torch_compat import torch_private

_PATIENCE = dt.timedelta(days=30)  # timeout of ranks that wait for one in the debugger

_registry: Registry | None = None


def registry() -> Registry | None:
    """Return this worker's groups; None if ftrun did not start it, or if it made no "ftrun" group."""
    return _registry


def create(options: Any, _backend_options: Any) -> Any:
    """Make the backend of a new process group from torch's options."""
    global _registry
    torch_private.require(torch_private.NAMES, torch_private.START)
    context = Context.current
    if context is None or not context.is_main_process():
        return _as_torch_does(options)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if _registry is None:
        context.position.trains_here()
        _registry = Registry(context)
        compiling.stay_out()
        if context.restoring:
            _replay(context, _registry)
    timeout = max(options.timeout, _PATIENCE) if context.patient else options.timeout
    group = _registry.create(options.group_rank, ranks, timeout)
    context.milestone(Flag.GROUP)
    return group


def _as_torch_does(options: Any) -> Any:
    """Make the group that "nccl" or "gloo" would give, in a process that ftrun did not start."""
    # a group that lives until the interpreter's end aborts the process there, while its threads run
    atexit.unregister(_destroy)
    atexit.register(_destroy)
    return make_group(options.store, options.group_rank, options.group_size, options.timeout).group


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _replay(context: Context, groups: Registry) -> None:
    groups.unrestorable = functools.partial(report_no_source, context)
    try:
        groups.recorder.load(read_log(context))
    except WorkerError as error:
        report_no_source(context, error)
    groups.recorder.replaying = True
