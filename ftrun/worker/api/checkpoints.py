"""Checkpoints of a job: one file where a rank has the whole model, else a folder in which each rank has a file of its own part.

Read without running code (`weights_only`). A folder holds files of one or two steps: those of a step count once every rank has written
its own, and until then the files of the step before are kept.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.core.text import ranks as named
from ftrun.worker.runtime.sharded_private import local_of
from ftrun.worker.state import shards

_PART = re.compile(r"step-(\d+)-rank-(\d+)-of-(\d+)\.pt")
State = dict[str, Any]


def write(path: Path, state: State) -> None:
    """Whole or not at all. Errors: OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, device: torch.device) -> State:
    state: State = torch.load(path, map_location=device, weights_only=True)
    return state


class PartsFolder:
    """The checkpoints of a model of which each rank has a part. No rank waits for another one here."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._path = path
        self._rank = rank
        self._size = world_size

    def write(self, step: int, state: State) -> None:
        """Keep this rank's part, and remove its parts that nobody needs. Errors: OSError."""
        self._path.mkdir(parents=True, exist_ok=True)
        written = self._steps()
        last = max((known for known in written if known < step), default=None)
        if last is not None and self._rank in written[last] and (missing := self._missing(written[last])):
            # whoever saves again knows that all have come past the last time
            print(
                f"ftrun: the checkpoint of step {last} in {self._path} is not complete, {named(missing)} wrote nothing: each rank has "
                "only a part of this model, so call job.save on every rank (or they died while they wrote it)",
                file=sys.stderr,
                flush=True,
            )
        write(self._file(step), state)
        newest = max((known for known, by in written.items() if known < step and not self._missing(by)), default=step)
        for known in written:
            if known < newest or known > step:  # later ones are of a run before, or of steps that were taken back
                self._file(known).unlink(missing_ok=True)

    def read(self, device: torch.device) -> State:
        """This rank's part of the newest step of which every part is there. Errors: UsageError."""
        written = self._steps()
        step = max((known for known, by in written.items() if not self._missing(by)), default=None)
        if step is not None:
            return read(self._file(step), device)
        sizes = sorted({int(found[3]) for name in self._names() if (found := _PART.fullmatch(name))})
        if sizes and self._size not in sizes:
            raise UsageError(
                f"{self._path} was written by {sizes[-1]} ranks, each its part of the model, and this run has {self._size}: go on with "
                f"{sizes[-1]}, or write checkpoints by torch.distributed.checkpoint, in job.call(fn)"
            )
        last = max(written, default=None)
        if last is None:
            raise UsageError(f"{self._path} holds no checkpoint of a model of which each rank has a part")
        raise UsageError(
            f"{self._path} holds no complete checkpoint: of step {last} {named(self._missing(written[last]))} wrote nothing; call "
            "job.save on every rank"
        )

    def _file(self, step: int) -> Path:
        return self._path / f"step-{step}-rank-{self._rank}-of-{self._size}.pt"

    def _names(self) -> list[str]:
        return [file.name for file in self._path.iterdir()]

    def _steps(self) -> dict[int, set[int]]:
        """Step -> ranks whose parts are there, of a world of this size."""
        found: dict[int, set[int]] = {}
        for name in self._names():
            part = _PART.fullmatch(name)
            if part is not None and int(part[3]) == self._size:
                found.setdefault(int(part[1]), set()).add(int(part[2]))
        return found

    def _missing(self, written: set[int]) -> list[int]:
        return [rank for rank in range(self._size) if rank not in written]


# ---- parts of tensors ----


def model_part(module: torch.nn.Module) -> State:
    """Its state dict, of a DTensor this rank's part, and how each of these is spread."""
    state = module.state_dict()
    return {
        "values": {name: local_of(one) if isinstance(one, torch.Tensor) else one for name, one in state.items()},
        "spread": {name: said for name, one in state.items() if (said := shards.spread_of(one)) is not None},
    }


def load_model_part(module: torch.nn.Module, saved: State) -> None:
    """Errors: UsageError when this rank's part is another one now."""
    here = module.state_dict()
    values = dict(saved["values"])
    for name, one in here.items():
        said = shards.spread_of(one)
        if said != saved["spread"].get(name) or (said is not None and local_of(one).shape != values[name].shape):
            raise UsageError(
                f"the checkpoint's {name} is spread over ranks in another way than the model's: {saved['spread'].get(name)} and {said} "
                "(placements, shape, mesh); lay the model out as it was, or write checkpoints by torch.distributed.checkpoint"
            )
        if said is not None:
            values[name] = shards.like(values[name], one)
    module.load_state_dict(values)


def optimizer_part(optimizer: torch.optim.Optimizer) -> State:
    """The same of an optimizer. Errors: UsageError for state that is spread otherwise than its parameter can tell."""
    whole = optimizer.state_dict()
    params = _params(optimizer)
    state: State = {}
    spread: State = {}
    for index, values in whole["state"].items():
        state[index] = {key: local_of(one) if isinstance(one, torch.Tensor) else one for key, one in values.items()}
        said = {key: shards.spread_of_state(one, params[index], f"optimizer state {key}") for key, one in values.items()}
        spread[index] = {key: one for key, one in said.items() if one is not None}
    return {"state": state, "param_groups": whole["param_groups"], "spread": spread}


def load_optimizer_part(optimizer: torch.optim.Optimizer, saved: State) -> None:
    params = _params(optimizer)
    state = {
        index: {key: _spread(one, saved["spread"][index].get(key), params[index]) for key, one in values.items()}
        for index, values in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def _spread(value: Any, said: Any, param: torch.Tensor) -> Any:
    return shards.spread(value, said, param) if isinstance(value, torch.Tensor) else value


def _params(optimizer: torch.optim.Optimizer) -> Mapping[int, torch.Tensor]:
    return dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
