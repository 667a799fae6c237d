"""Schedules of `torch.distributed.pipelining` forget an interrupted step, and a replacement's knows its neighbours.

ftrun keeps a schedule like any object with a state_dict(): whether its stages have met, and what they send one another, at the start
of each step. Putting that back drops what the first try left, and gives each stage fresh receive buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from ftrun.worker.state.shards import is_spread
from ftrun.worker.torch_compat import pipeline_private as private


class Pipeline:
    """One schedule with its stages on this rank."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self._stages = private.stages_of(schedule)
        self._metas: list[Any] = []  # those that `_plain` describes
        self._plain: list[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return whether the stages have met, and what they send one another; `stages` is None if no plain values describe it."""
        metas = [meta for stage in self._stages for meta in private.metas_of(stage)]
        if list(map(id, metas)) != list(map(id, self._metas)):
            plain = [private.plain_metas(stage) for stage in self._stages]
            self._metas, self._plain = metas, None if None in plain else plain
        return {"met": private.have_met(self.schedule), "stages": self._plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the start of a step. Stages that `state` does not describe meet again, on all ranks."""
        met, stages = state["met"], state["stages"]
        private.reset_schedule(self.schedule, met if stages is not None else [False, False])
        for stage, plain in zip(self._stages, stages or (), strict=False):
            private.lay_out(self.schedule, stage, plain, met)


def has_a_part(params: Iterable[Any]) -> bool:
    """Does this rank train a part of the model: shards, or stages of a pipeline? `params`: its parameters."""
    return any(map(is_spread, params)) or bool(found([]))


def found(known: Iterable[Any]) -> list[Pipeline]:
    """Return the schedules of this process that are not in `known`, in an order that is the same in a replacement."""
    if not private.is_loaded():
        return []
    seen = {id(one.schedule) for one in known if isinstance(one, Pipeline)}
    schedules = [thing for thing in gc.get_objects() if private.is_schedule(thing) and id(thing) not in seen]
    return [Pipeline(one) for one in sorted(schedules, key=_place)]


def _place(schedule: Any) -> tuple[Any, ...]:
    return type(schedule).__name__, [stage.stage_index for stage in private.stages_of(schedule)]
