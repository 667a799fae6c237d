"""Checkpoints of a model of which each rank has a part: a folder, with one folder of `torch.distributed.checkpoint` for each save.

No rank waits for another one, which may be dead by now. Each writes, in `own-RANK.pt`, the values that are not spread over ranks, and
then its tensors with a description of them, as torch names it (`__RANK.metadata`). The rank that finds all descriptions merges them into
`.metadata`, by which another number of ranks, or torch without ftrun, can read the checkpoint. Until then the ranks keep the one before.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import math
import pickle
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)
from torch.distributed.checkpoint import TensorStorageMetadata as Described

from ftrun.core.errors import UsageError
from ftrun.core.text import ranks as named
from ftrun.worker.process import checkpoints
from ftrun.worker.state import shards
from ftrun.worker.torch_compat.sharded_private import local_of

_MOMENT = re.compile(r"step-(\d+)-of-(\d+)-[0-9a-f]+")
_OLD_PART = re.compile(r"step-\d+-rank-\d+-of-\d+-[0-9a-f]+\.pt")
_WHOLE = ".metadata"
Own = dict[tuple[Any, ...], Any]  # by place: ("step",), ("models", i, name), ("optimizers", i, "state", index, name), ...


class CheckpointPart(NamedTuple):
    """The part of a checkpoint that one rank writes."""

    tensors: dict[str, torch.Tensor]  # DTensors, by the name that they have in the checkpoint
    own: Own


class Checkpoint(NamedTuple):
    """A checkpoint of all ranks, or its parts so far."""

    step: int
    begun: int
    size: int  # of the world that wrote it
    folder: Path

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if not self.has(rank)]

    def has(self, rank: int) -> bool:
        return self._described(rank).exists()

    def write(self, rank: int, part: CheckpointPart) -> None:
        """Write a rank's part. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints.write(self._own(rank), part.own)
        planner, writer = DefaultSavePlanner(), FileSystemWriter(self.folder)
        planner.set_up_planner(part.tensors, is_coordinator=True)
        writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of other ranks' files
            plan = writer.prepare_local_plan(planner.create_local_plan())
        (plan,), described = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan([plan])[0])
        writer.finish(described, [writer.write_data(plan, planner).wait()])

    def complete(self) -> bool:
        """Is every rank's part there? If so, merge their descriptions into one.

        Raises:
            OSError: If it cannot be written.
        """
        if self.missing():
            return False
        try:
            if not (self.folder / _WHOLE).exists():
                found = pickle.dumps(_merged([_description(self._described(rank)) for rank in range(self.size)]))
                checkpoints.whole(self.folder / _WHOLE, lambda temporary: temporary.write_bytes(found))
        except FileNotFoundError:  # another rank is about to remove it
            return False
        return True

    def forget(self, until: float) -> None:
        """Remove descriptions from before this time, so that their parts do not count."""
        for file in self.folder.glob("*" + _WHOLE):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < until:
                    file.unlink()

    def remove(self, rank: int) -> None:
        """Remove a rank's part, its description first; the last rank removes the folder, too."""
        files = (self.folder.glob(pattern) for pattern in (f"__{rank}{_WHOLE}", _WHOLE + "*", f"__{rank}[._]*", f"own-{rank}.*"))
        for file in (file for found in files for file in list(found)):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def own(self, rank: int, size: int, device: torch.device) -> tuple[Own, list[tuple[Any, ...]]]:
        """Return a rank's own values in a world of this size, and the places where the ranks that wrote differ, which get none."""
        if size == self.size:
            return checkpoints.read(self._own(rank), device), []
        unlike: dict[tuple[Any, ...], None] = {}
        host = torch.device("cpu")  # compare the parts there, two at a time
        first = checkpoints.read(self._own(0), host)
        for one in range(1, self.size):
            part = checkpoints.read(self._own(one), host)
            unlike |= dict.fromkeys(place for place in (*first, *part) if not _same(first.get(place), part.get(place)))
        first = checkpoints.read(self._own(0), device)
        return {place: entry for place, entry in first.items() if place not in unlike}, list(unlike)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill DTensors; each rank fills its parts of them.

        Raises:
            UsageError: If one is missing, incomplete, or of another shape.
        """
        described = _description(self.folder / _WHOLE)
        for name, tensor in tensors.items():
            found = described.state_dict_metadata.get(name)
            if not isinstance(found, Described):
                raise UsageError(f"{self.folder} holds no {name}: lay the model out over the same ranks as it was")
            if found.size != tensor.shape:
                raise UsageError(f"{self.folder} holds {name} of shape {list(found.size)}, and this run's is {list(tensor.shape)}")
            if sum(math.prod(chunk.sizes) for chunk in found.chunks) != math.prod(found.size):
                raise UsageError(f"{self.folder} does not hold all of {name}")
        planner, reader = DefaultLoadPlanner(), FileSystemReader(self.folder)
        planner.set_up_planner(dict(tensors), described, True)
        reader.set_up_storage_reader(described, True)
        reader.read_data(planner.create_local_plan(), planner).wait()

    def _described(self, rank: int) -> Path:
        return self.folder / f"__{rank}{_WHOLE}"

    def _own(self, rank: int) -> Path:
        return self.folder / f"own-{rank}.pt"


class ShardedFolder:
    """The folder of a model's checkpoints. No rank waits for another one here."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._path = path
        self._rank = rank
        self._size = world_size

    def save(
        self,
        step: int,
        mark: str,
        since: float,
        modules: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        stateful: Mapping[str, Any],
    ) -> None:
        """Write this rank's part.

        `mark` is that of the call in which all ranks save: another run may save at the same step. Parts of the same mark from before
        `since` belong to another run, too: marks of torchrun's runs may be equal.

        Raises:
            OSError: If it cannot be written.
            UsageError: If a parameter does not tell how its state is spread.
        """
        self.write(step, mark, part_of(step, modules, optimizers, stateful), since)

    def load(
        self, modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], device: torch.device
    ) -> tuple[int, dict[str, Any]]:
        """Load the newest complete checkpoint; return its step, and the other state.

        Raises:
            UsageError: If there is none, or it does not fit.
        """
        moment = self.newest()
        own, unlike = moment.own(self._rank, self._size, device)
        lost = [place for place in unlike if place[0] == "stateful"]
        if len(unlike) > len(lost):
            names = [name_of(place) for place in unlike if place not in lost]
            raise UsageError(
                f"{moment.folder} was written by {moment.size} ranks, and this run has {self._size}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}, which torch does not lay out anew, differ between those "
                f"ranks; go on with {moment.size}"
            )
        if lost and self._rank == 0:
            print(
                f"ftrun: job.load: {', '.join(place[1] for place in lost)} stays as the script made it: each of the {moment.size} ranks "
                f"that wrote {moment.folder} had its own, and this run has {self._size}",
                file=sys.stderr,
                flush=True,
            )
        load_part(moment, own, modules, optimizers)
        return int(own["step",]), {place[1]: saved for place, saved in own.items() if place[0] == "stateful"}

    def write(self, step: int, mark: str, part: CheckpointPart, since: float = 0.0) -> None:
        """Write this rank's part of a checkpoint, once, and remove its parts of others that nobody needs.

        Raises:
            OSError: If it cannot be written.
        """
        here = Checkpoint(step, 0, self._size, self._path / f"step-{step}-of-{self._size}-{mark}")
        known = [moment for moment in self.found() if moment.folder != here.folder]
        earlier = [moment for moment in known if moment.step <= step]
        if earlier and earlier[-1].size == self._size and earlier[-1].has(self._rank) and (missing := earlier[-1].missing()):
            # a rank that saves again knows that all ranks have passed the last save
            print(
                f"ftrun: the checkpoint of step {earlier[-1].step} in {self._path} is not complete, {named(missing)} wrote nothing: each "
                "rank has only a part of this model, so call job.save on every rank (or they died while they wrote it)",
                file=sys.stderr,
                flush=True,
            )
        here.forget(since)
        if not here.has(self._rank):
            here.write(self._rank, part)
        here.complete()
        newest = next((i for i in reversed(range(len(earlier))) if earlier[i].complete()), 0)
        for moment in known:  # later ones belong to a run before, or to steps before a rollback
            for rank in range(self._rank, moment.size, self._size) if moment not in earlier[newest:] else ():
                moment.remove(rank)

    def newest(self) -> Checkpoint:
        """Return the newest complete checkpoint.

        Raises:
            UsageError: If there is none.
        """
        if self._path.is_file():
            raise UsageError(f"{self._path} is a file, as job.save writes it for a model that each rank has whole: lay it out as it was")
        moments = self.found()
        found = next((moment for moment in reversed(moments) if moment.complete()), None)
        if found is not None:
            return found
        if moments:
            raise UsageError(
                f"{self._path} holds no complete checkpoint: of step {moments[-1].step} {named(moments[-1].missing())} wrote nothing; call "
                "job.save on every rank"
            )
        old = next((file.name for file in self._path.iterdir() if _OLD_PART.fullmatch(file.name)), "")
        raise UsageError(
            f"{self._path} holds no checkpoint of a model of which each rank has a part"
            + f", only an older ftrun's ({old}), which this one does not read: load it with that one, or begin anew" * bool(old)
        )

    def found(self) -> list[Checkpoint]:
        """Return the checkpoints, complete or not, by step and then by time."""
        found = []
        for folder in self._path.iterdir() if self._path.exists() else ():
            name = _MOMENT.fullmatch(folder.name)
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                if name is not None:
                    begun = min((file.stat().st_mtime_ns for file in folder.glob("__*" + _WHOLE)), default=0)
                    found.append(Checkpoint(int(name[1]), begun, int(name[2]), folder))
        return sorted(found)


# ---- descriptions ----

_DESCRIBES = "torch.distributed.checkpoint."
_LAYOUT = copyreg.dispatch_table[torch.layout](torch.strided)[0]  # how torch pickles one


class _Descriptions(pickle.Unpickler):
    """Reads plain descriptions of tensors, and runs no code but that of their classes."""

    def find_class(self, module: str, name: str) -> Any:
        known = module in ("torch", "torch.serialization", "pathlib", "pathlib._local") or module.startswith(_DESCRIBES)
        found = super().find_class(module, name) if known and "." not in name else None
        if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, PurePath, torch.Size))):
            return found
        if isinstance(found, torch.dtype) or (found is not None and found is _LAYOUT):
            return found
        raise UsageError(f"a checkpoint's description of its tensors names {module}.{name}, which has no place there")


def _description(path: Path) -> Metadata:
    """Read a description. Raises UsageError if this torch cannot, since a newer one wrote it, say."""
    try:
        with path.open("rb") as file:
            found = _Descriptions(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"it holds {type(found).__name__}")
    except (ValueError, TypeError, AttributeError, ImportError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"torch {torch.__version__} cannot read {path} ({error}): use the torch that wrote it, or a newer one") from error
    return found


def _merged(parts: list[Metadata]) -> Metadata:
    """Merge all ranks' descriptions into one."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, one in part.state_dict_metadata.items():
            tensors.setdefault(name, dataclasses.replace(one, chunks=[])).chunks.extend(one.chunks)
    where, names = ({key: one for part in parts for key, one in getattr(part, of).items()} for of in ("storage_data", "planner_data"))
    return dataclasses.replace(parts[0], state_dict_metadata=tensors, storage_data=where, planner_data=names, storage_meta=None)


def _same(one: Any, other: Any) -> bool:
    """Are two values equal, tensors bit for bit? Tensors made of several count as different."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = type(one) is torch.Tensor and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))  # NaN


# ---- state of models and optimizers ----


def part_of(
    step: int, modules: Iterable[torch.nn.Module], optimizers: list[torch.optim.Optimizer], stateful: Mapping[str, Any]
) -> CheckpointPart:
    """Collect this rank's part. Raises UsageError for state whose parameter does not tell how it is spread."""
    part = CheckpointPart({}, {("step",): step, **{("stateful", name): saved for name, saved in stateful.items()}})
    for place, value, param in _values(modules, optimizers):
        said = shards.spread_of_state(value, param, name_of(place))
        local = local_of(value)
        if said is None:
            part.own[place] = ["plain", _alone(value)]
        elif type(local) is not torch.Tensor:  # made of several tensors, which torch does not lay out anew
            part.own[place] = ["local", local, said, shards.spread_of(value)]
        else:
            part.own[place] = ["spread", said, value.dtype]
            if min(shards.holders(value), default=-1) == torch.distributed.get_rank():
                part.tensors[_name_among(place, value)] = value
    for i, optimizer in enumerate(optimizers):
        part.own["optimizers", i, "param_groups"] = optimizer.state_dict()["param_groups"]
    return part


def _values(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[tuple[Any, ...], Any, torch.Tensor | None]]:
    """Yield (place, value, the parameter that it is spread as)."""
    for i, module in enumerate(modules):
        for name, value in module.state_dict().items():
            yield ("models", i, name), value, value
    for i, optimizer in enumerate(optimizers):
        params = _params(optimizer)
        for index, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                yield ("optimizers", i, "state", index, name), value, params[index]


def load_part(moment: Checkpoint, own: Own, modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Load a checkpoint into models and optimizers. Raises UsageError if it cannot be laid out like them."""
    tensors: dict[str, torch.Tensor] = {}
    here = [module.state_dict() for module in modules]
    params = [_params(optimizer) for optimizer in optimizers]
    models: list[dict[str, Any]] = [{} for _ in modules]
    states: list[dict[int, dict[str, Any]]] = [{} for _ in optimizers]
    for place, entry in own.items():
        if place[0] == "models":
            like = here[place[1]].get(place[2])
            models[place[1]][place[2]] = _laid_out(place, entry, like, like, tensors)
        elif place[2:3] == ("state",):
            values = states[place[1]].setdefault(place[3], {})
            values[place[4]] = _laid_out(place, entry, params[place[1]][place[3]], None, tensors)
    moment.read(tensors)
    for module, saved in zip(modules, models, strict=True):
        module.load_state_dict(saved)
    for i, optimizer in enumerate(optimizers):
        optimizer.load_state_dict({"state": states[i], "param_groups": own["optimizers", i, "param_groups"]})


def _laid_out(place: tuple[Any, ...], entry: list[Any], param: Any, into: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a place's value on this rank, or the DTensor that torch will fill, which `tensors` then holds, too."""
    kind, *words = entry
    if kind == "plain":
        if into is not None and shards.is_spread(into):
            raise UsageError(f"the checkpoint's {name_of(place)} is not spread over ranks, and the model's is: lay it out as it was")
        return words[0]
    if not shards.is_spread(param):
        raise UsageError(f"the checkpoint's {name_of(place)} is spread over ranks, and the model's is not: lay it out as it was")
    if kind == "local":
        local, said, spread = words
        value = shards.spread(local, said, param)
        if shards.spread_of(value) != spread:
            raise UsageError(
                f"the checkpoint's {name_of(place)} is spread over ranks in another way than the model's: {spread} and "
                f"{shards.spread_of(value)} (placements, shape, mesh); it is made of several tensors, so lay the model out as it was"
            )
        return value
    said, dtype = words
    value = shards.empty(said, param, dtype) if into is None else into
    tensors[_name_among(place, value)] = value
    return value


def name_of(place: tuple[Any, ...]) -> str:
    """Name a place in messages and checkpoints: `models.0.layer.weight`, `optimizers.0.state.3.exp_avg`."""
    return ".".join(map(str, place))


def _name_among(place: tuple[Any, ...], tensor: Any) -> str:
    """Name a place, with the tensor's ranks unless these are all: two stages of a pipeline may use the same names."""
    ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())
    alone = len(ranks) < torch.distributed.get_world_size()
    return (f"ranks-{'-'.join(map(str, ranks))}." if alone else "") + name_of(place)


def _alone(value: Any) -> Any:
    """Clone a tensor out of a larger storage, all of which torch.save would write."""
    small = type(value) is torch.Tensor and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if small else value


def _params(optimizer: torch.optim.Optimizer) -> Mapping[int, torch.Tensor]:
    return dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
