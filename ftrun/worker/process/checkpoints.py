"""Checkpoints of a job: one file where a rank has the whole model, else a folder in which each rank has a file of its own part.

Read without running code (`weights_only`). A folder holds files of one or two moments: those of a moment count once every rank has
written its own, and until then the files of the moment before are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.core.text import ranks as named
from ftrun.worker.state import shards
from ftrun.worker.torch_compat.sharded_private import local_of

_PART = re.compile(r"step-(\d+)-rank-(\d+)-of-(\d+)-([0-9a-f]+)\.pt")
State = dict[str, Any]
Moment = tuple[int, str]  # a step, and the mark of the call in which all ranks saved: another run may save at the same step


def mark_of(*words: object) -> str:
    """Short, and the same on every rank that says the same."""
    return f"{zlib.crc32(repr(words).encode()):08x}"


def write(path: Path, state: State) -> None:
    """Whole or not at all.

    Raises:
        OSError
    """
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

    def write(self, step: int, mark: str, state: State) -> None:
        """Keep this rank's part, and remove its parts that nobody needs.

        Raises:
            OSError
        """
        self._path.mkdir(parents=True, exist_ok=True)
        written = {moment: by for moment, by in self._moments().items() if moment[0] <= step and moment != (step, mark)}
        last = next(reversed(written), None)
        if last is not None and self._rank in written[last] and (missing := self._missing(written[last])):
            # whoever saves again knows that all have come past the last time
            print(
                f"ftrun: the checkpoint of step {last[0]} in {self._path} is not complete, {named(missing)} wrote nothing: each rank has "
                "only a part of this model, so call job.save on every rank (or they died while they wrote it)",
                file=sys.stderr,
                flush=True,
            )
        write(self._file((step, mark)), state)
        order = list(written)
        newest = next((i for i in reversed(range(len(order))) if not self._missing(written[order[i]])), 0)
        kept = {self._file(moment).name for moment in [*order[newest:], (step, mark)]}
        for name in self._names():  # later ones are of a run before, or of steps that were taken back
            part = _PART.fullmatch(name)
            if part is not None and (int(part[2]), int(part[3])) == (self._rank, self._size) and name not in kept:
                (self._path / name).unlink(missing_ok=True)

    def read(self, device: torch.device) -> State:
        """This rank's part of the newest moment of which every part is there.

        Raises:
            UsageError
        """
        written = self._moments()
        moment = next((known for known in reversed(written) if not self._missing(written[known])), None)
        if moment is not None:
            return read(self._file(moment), device)
        sizes = sorted({int(found[3]) for name in self._names() if (found := _PART.fullmatch(name))})
        if sizes and self._size not in sizes:
            raise UsageError(
                f"{self._path} was written by {sizes[-1]} ranks, each its part of the model, and this run has {self._size}: go on with "
                f"{sizes[-1]}, or write checkpoints by torch.distributed.checkpoint, in job.call(fn)"
            )
        last = next(reversed(written), None)
        if last is None:
            raise UsageError(f"{self._path} holds no checkpoint of a model of which each rank has a part")
        raise UsageError(
            f"{self._path} holds no complete checkpoint: of step {last[0]} {named(self._missing(written[last]))} wrote nothing; call "
            "job.save on every rank"
        )

    def _file(self, moment: Moment) -> Path:
        return self._path / f"step-{moment[0]}-rank-{self._rank}-of-{self._size}-{moment[1]}.pt"

    def _names(self) -> list[str]:
        return [file.name for file in self._path.iterdir()]

    def _moments(self) -> dict[Moment, set[int]]:
        """Ranks whose parts are there, of a world of this size; by step, of the same step as they were written."""
        found: dict[Moment, set[int]] = {}
        begun: dict[Moment, int] = {}
        for file in self._path.iterdir():
            part = _PART.fullmatch(file.name)
            if part is not None and int(part[3]) == self._size:
                moment = int(part[1]), part[4]
                found.setdefault(moment, set()).add(int(part[2]))
                with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                    at = file.stat().st_mtime_ns
                    begun[moment] = min(at, begun.get(moment, at))
        return {moment: found[moment] for moment in sorted(found, key=lambda m: (m[0], begun.get(m, 0), m[1]))}

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
    """Raises UsageError when this rank's part is another one now."""
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
    """The same of an optimizer.

    Raises:
        UsageError: For state that is spread otherwise than its parameter can tell.
    """
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
