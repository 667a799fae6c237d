"""Private names of `torch.distributed.pipelining`, beside the functions that use them; see torch_private.py for the rules.

A schedule remembers whether its stages have met: in its first step they tell one another the shapes that they send, and run their
modules once for that. A replacement's schedule has not met the others. They would not answer, and must not run their modules
again, which would change buffers. So ftrun keeps the shapes, and each rank makes its receive buffers from them, without messages.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from ftrun.worker.torch_compat.torch_private import Private

PIPELINE = "protect of pipelines"  # without it protect() refuses a schedule of torch.distributed.pipelining

_PIPELINING = "torch.distributed.pipelining"
_OF_A_STEP = (
    "backward_counter", "bwd_recv_ops", "fwd_recv_ops", "unshard_ops", "unsharded_stages", "_deferred_stages", "_finalized_stages",
)  # fmt: skip
_FIELDS = ("inputs", "outputs", "input_grads", "output_grads")


def is_loaded() -> bool:
    """Is the module imported? Without it there is no schedule."""
    return f"{_PIPELINING}.schedules" in sys.modules


def is_schedule(thing: Any) -> bool:
    """Is it a schedule of torch's? This imports nothing."""
    module: Any = sys.modules.get(f"{_PIPELINING}.schedules")
    return module is not None and isinstance(thing, (module.PipelineScheduleSingle, module.PipelineScheduleMulti))


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages that this rank runs."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def have_met(schedule: Any) -> list[bool]:
    """Return whether its stages know the shapes that they receive: forward, backward."""
    return [bool(getattr(schedule, name)) for name in _flags(schedule)]


def _flags(schedule: Any) -> tuple[str, str]:
    if hasattr(schedule, "_stages"):
        return "_stages_forward_initialized", "_stages_backward_initialized"
    return "_stage_forward_initialized", "_stage_backward_initialized"


def reset_schedule(schedule: Any, met: list[bool]) -> None:
    """Forget a step that was cut off. `met`: the result of `have_met` before that step."""
    schedule._internal_losses.clear()
    for name in _OF_A_STEP:
        getattr(schedule, name, {}).clear()  # only schedules with several stages on a rank have it
    if hasattr(schedule, "_p2p_initialized"):  # torch 2.15: stages that have met are connected, too
        schedule._p2p_initialized = met[0]
    for stage in stages_of(schedule):
        stage.clear_runtime_states()
        stage.bwd_cache.clear()
        stage.backward_state.clear()
        stage.dw_runner.clear()
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for info in received:
                if hasattr(info, "take_buffer"):  # from torch 2.15 on a buffer belongs to the step that was cut off
                    info.buffer = None
    for name, value in zip(_flags(schedule), met, strict=True):
        setattr(schedule, name, value)


def metas_of(stage: Any) -> tuple[Any, ...]:
    """Return torch's descriptions of the tensors that a stage receives and sends: a tuple (or None) for each of `_FIELDS`."""
    return tuple(getattr(stage._stage_meta, field) for field in _FIELDS)


def plain_metas(stage: Any) -> list[Any] | None:
    """Return the same as plain values; None if that is impossible: for a traced stage, or tensors that are spread over ranks."""
    kind: Any = importlib.import_module(f"{_PIPELINING}._utils")._TensorMeta
    metas = metas_of(stage)
    known = all(type(meta) in (kind, type(None)) for field in metas for meta in field or ())
    if not known or not isinstance(stage, importlib.import_module(_PIPELINING).PipelineStage):
        return None
    return [None if field is None else [_plain(meta) for meta in field] for field in metas]


def _plain(meta: Any) -> list[Any] | None:
    if meta is None:
        return None
    return [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch."), meta.requires_grad]


def lay_out(schedule: Any, stage: Any, plain: list[Any], met: list[bool]) -> None:
    """Set a stage up as if it had met the others. `plain`: the result of `plain_metas`; `met`: that of `have_met`."""
    kind: Any = importlib.import_module(f"{_PIPELINING}._utils")._TensorMeta
    for field, metas in zip(_FIELDS, plain, strict=True):
        setattr(stage._stage_meta, field, None if metas is None else tuple(_meta(kind, meta) for meta in metas))
    microbatches, forward, backward = schedule._n_microbatches, *met
    stage.grad_send_info = None
    if forward:
        stage._setup_forward_recv_info(microbatches, backward)
        stage._setup_forward_send_info()
    if backward:
        stage._setup_backward_recv_info(microbatches)


def _meta(kind: Any, plain: list[Any] | None) -> Any:
    if plain is None:
        return None
    shape, stride, dtype, requires_grad = plain
    return kind(torch.Size(shape), tuple(stride), getattr(torch, dtype), requires_grad)


NAMES = [
    Private(
        f"{_PIPELINING}.schedules:PipelineScheduleSingle",
        ("_stage", "_stage_forward_initialized", "_stage_backward_initialized"), "torch", PIPELINE,
        "make a schedule forget a step that was cut off", "a pipeline ends at its first repair", of_instance=True,
    ),
    Private(
        f"{_PIPELINING}.schedules:PipelineScheduleMulti",
        ("_stages", "_stages_forward_initialized", "_stages_backward_initialized"), "torch", PIPELINE,
        "the same where a rank runs several stages", "such a pipeline ends at its first repair", of_instance=True,
    ),
    Private(
        f"{_PIPELINING}.schedules:_PipelineSchedule", ("_internal_losses", "_n_microbatches"), "torch", PIPELINE,
        "drop the losses of a step that was cut off", "losses of the first try are counted again", of_instance=True,
    ),
    Private(
        f"{_PIPELINING}.schedules:_PipelineSchedule", ("_p2p_initialized",), "torch", PIPELINE,
        "keep a replacement's stages from connecting once more, without the others", "a pipeline hangs after its first repair",
        of_instance=True, since=(2, 15),
    ),
    Private(
        f"{_PIPELINING}.schedules:_PipelineScheduleRuntime", ("_deferred_stages", "_finalized_stages"), "torch", PIPELINE,
        "forget which stages of a step that was cut off had reduced their gradients", "a redone step leaves a reduction out",
        of_instance=True, since=(2, 15),
    ),
    Private(
        f"{_PIPELINING}.stage:PipelineStage",
        ("_setup_forward_recv_info", "_setup_forward_send_info", "_setup_backward_recv_info"), "torch", PIPELINE,
        "make the receive buffers of a replacement's stage without asking its neighbours", "a pipeline ends at its first repair",
    ),
    Private(
        f"{_PIPELINING}.stage:_PipelineStageBase", ("_stage_meta",), "torch", PIPELINE,
        "keep the shapes that stages send one another", "a pipeline ends at its first repair", of_instance=True,
    ),
    Private(
        f"{_PIPELINING}._utils", ("_TensorMeta",), "torch", PIPELINE,
        "tell the stage of a replacement what its neighbours send", "a pipeline ends at its first repair",
    ),
]  # fmt: skip
