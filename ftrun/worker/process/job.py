"""`ftrun.Job`, the object through which a training script uses ftrun."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ftrun.core.errors import UsageError
from ftrun.core.shared import gate
from ftrun.worker.link.callers import caller, outside
from ftrun.worker.link.position import Where
from ftrun.worker.process import checkpoints
from ftrun.worker.process import progress as bars
from ftrun.worker.process.handed import Handed
from ftrun.worker.repair import pipelines
from ftrun.worker.state.loader_position import LoaderPosition
from ftrun.worker.state.logged_values import LoggedValues
from ftrun.worker.step.body import Step
from ftrun.worker.step.loop import Loop
from ftrun.worker.variables.plain_values import GlobalVariables, PlainValues

if TYPE_CHECKING:
    from ftrun.worker.process.sharded_checkpoints import ShardedFolder  # imports torch.distributed.checkpoint

T = TypeVar("T")


class Job:
    """A training run of this rank, which `protect` makes; outside ftrun it only counts steps."""

    def __init__(
        self, loop: Loop | None, modules: list[torch.nn.Module], optimizers: list[Any], stateful: dict[str, Any]
    ) -> None:
        self._loop = loop
        self._modules = modules
        self._optimizers = optimizers
        self._stateful = stateful
        self._loaded = 0
        self._saved: Counter[str] = Counter()  # how often `save` wrote a part to a folder
        self._counted_from: tuple[Any, ...] = ()
        self._made = time.time()
        self._epoch: int | None = None  # the last one of `epochs`
        self._looked_at: set[str] = set()  # checked lines of the script where loops begin
        self._numbered = 0  # steps that were handed out outside ftrun
        self._logged = loop.kit.logged if loop else LoggedValues()

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        for module in self._modules:
            for param in module.parameters():
                return param.device
        return torch.device("cpu")

    @property
    def generation(self) -> int:
        """Number of the world that runs now; it grows by one with each incident. 0 outside ftrun."""
        return self._loop.kit.context.generation if self._loop else 0

    @property
    def start_step(self) -> int:
        """Step at which the loop starts, on a replacement too: 0, or the loaded checkpoint's; the same on every rank."""
        return self._loaded

    # -- loops -------------------------------------------------------------------------------------------------------

    def steps(self, total: int, start: int | None = None, progress: bool = False) -> Iterator[Step]:
        """Hand out steps `start` (default: 0, or the loaded checkpoint's step) up to `total`, each until it is committed.

        `progress`: rank 0 draws a bar, by tqdm.

        Raises:
            UsageError: Without tqdm.
        """
        first = self._loaded if start is None else start
        if progress:
            bars.require()
        steps = self._handed("job.steps", self._steps(first, total))
        return bars.shown(steps, total, self._epoch) if progress and self.rank == 0 else steps

    def _steps(self, first: int, total: int) -> Iterator[Step]:
        return self._bare(first, total) if self._loop is None else self._loop.steps(first, max(total - first, 0))

    def _handed(self, call: str, inner: Iterator[T]) -> Iterator[T]:
        return inner if self._loop is None else Handed(inner, call, caller, self._looked_at)

    def _bare(self, first: int, total: int) -> Iterator[Step]:
        for index in range(first, total):
            step = Step(index, self._numbered)
            self._numbered += 1
            step.alone = self._logged
            yield step
            if not step.entered:
                raise UsageError(f"step {index} was taken from the loop, but its `with step:` was skipped", explain="F317")

    def epochs(self, total: int, start: int = 0) -> Iterator[int]:
        """Hand out epochs `start` up to `total`, each with a loop. A replacement begins in the epoch that runs, not in a past one."""
        return self._handed("job.epochs", self._epochs(start, total))

    def _epochs(self, start: int, total: int) -> Iterator[int]:
        try:
            for epoch in range(start, total) if self._loop is None else self._loop.epochs(start, total):
                self._epoch = epoch
                yield epoch
        finally:
            self._epoch = None

    def batches(self, loader: Iterable[Any], epochs: int = 1, progress: bool = False) -> Iterator[tuple[Step, Any]]:
        """Hand out (step, batch) over `epochs` passes of a loader; a step that is done again gets the same batch.

        `progress`: as in `steps`.
        """
        return self._handed("job.batches", self._batches(loader, epochs, progress))

    def _batches(self, loader: Iterable[Any], epochs: int, progress: bool) -> Iterator[tuple[Step, Any]]:
        position = LoaderPosition(loader)
        for step in self._steps_over(position, epochs * position.length, progress=progress):
            if self._loop is None:  # else the hand-out has fetched it
                position.ensure(step.index)
            yield step, position.batch

    def late_batches(
        self, loader: Iterable[Any], total: int, start: int | None = None
    ) -> Iterator[tuple[Step, Callable[[], Any]]]:
        """Hand out (step, fetch) for steps `start` up to `total`, over as many passes of a loader as they take.

        Use it if a loop does something between two steps, such as an evaluation in `job.call`, before it fetches its batch:
        call `fetch()` once before `with step` to get the batch. To go on behind n batches, ftrun calls the loader's `iterate_from(n)`;
        without that, it makes torch's DataLoader skip them, and reads them from any other loader.
        """
        return self._handed("job.late_batches", self._late_batches(loader, total, start))

    def _late_batches(
        self, loader: Iterable[Any], total: int, start: int | None
    ) -> Iterator[tuple[Step, Callable[[], Any]]]:
        position = LoaderPosition(loader, late=True)

        def fetch() -> Any:
            position.ensure(step.index)
            return position.batch

        for step in self._steps_over(position, total, start):
            yield step, fetch

    def _steps_over(
        self, position: LoaderPosition, total: int, start: int | None = None, progress: bool = False
    ) -> Iterator[Step]:
        if progress:
            bars.require()
        ledger = self._loop.kit.ledger if self._loop else None
        if self._loop is not None and ledger is not None:
            ledger.loader = position
            self._loop.kit.state.iterated |= {id(thing) for thing in position.kept()}
        try:
            steps = self._steps(self._loaded if start is None else start, total)
            yield from bars.shown(steps, total, self._epoch) if progress and self.rank == 0 else steps
            position.finish()
        finally:
            if ledger is not None:
                ledger.loader = ledger.loader_state = None

    def call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function that communicates, such as an evaluation, and return its result; after a fault all ranks run it again.

        Call it between two loops, or between the hand-out of a step and `with step`.

        Raises:
            UsageError: Elsewhere.
        """
        return self._loop.call(lambda: fn(*args, **kwargs)) if self._loop else fn(*args, **kwargs)

    def log(self, **values: Any) -> None:
        """Log numbers of this step, as means over all ranks; every rank calls it in the body, before `optimizer.step()`.

        ftrun computes the mean once for each committed step. After the `with`, `step.logged` has it, on every rank; rank 0 adds it to
        `metrics.jsonl` in the folder of the run's logs. ftrun copies tensors as they are now, and waits for nothing before the gate.

        Raises:
            UsageError: Outside a body, after the update, or for a value that is no number.
        """
        position = self._loop.kit.position if self._loop else None
        if position is not None and position.where is Where.PASSED:
            raise UsageError(
                f"job.log after optimizer.step(), at {caller()}: a rank that dies in its update would take its value along; call it "
                "before optimizer.step()"
            )
        if position is not None and not position.in_body:
            raise UsageError(f"job.log outside `with step:`, at {caller()}: call it in the body, before optimizer.step()")
        self._logged.add(values)

    # -- values of the script ----------------------------------------------------------------------------------------

    def state(self, *names: str, **values: Any) -> PlainValues:
        """Keep plain values with the step: numbers, strings, tensors, arrays, and lists and dicts of them.

        ftrun restores them when a step is done again, a replacement has them as of its step, and `job.save` writes them. Call it
        before the first step.

        Args:
            *names: Global variables of the calling script, which goes on using them as they are: `job.state("best", "x", "y")`.
            **values: Initial values of the returned object: `kept = job.state(best=0.0)`, then read and write `kept.best`.

        Raises:
            UsageError: If the script has no such global variable, or after the first step.
        """
        frame = outside()
        space = frame.f_globals if frame is not None else {}
        missing = [name for name in names if name not in space]
        if missing:
            raise UsageError(
                f"job.state: {', '.join(missing)}: no global variable of this script; keep a function's own variable by "
                f"kept = job.state({missing[0]}=...), and use kept.{missing[0]}",
                explain="F320",
            )
        if names:
            self._keep("variables", GlobalVariables(space, names))
        kept = PlainValues(values)
        if values:
            self._keep("state", kept)
        return kept

    def _keep(self, name: str, thing: Any) -> None:
        if name in self._stateful:
            name = f"{name} {len(self._stateful)}"
        if self._loop is not None:
            self._loop.keep(name, thing)
        self._stateful[name] = thing

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _folder(self, path: str | os.PathLike[str]) -> ShardedFolder | None:
        """Return the folder for the ranks' parts of the model; None if this rank has all of it."""
        if not pipelines.has_a_part(param for module in self._modules for param in module.parameters()):
            return None
        from ftrun.worker.process.sharded_checkpoints import ShardedFolder

        return ShardedFolder(Path(path), self.rank, self.world_size)

    def save(self, path: str | os.PathLike[str], step: int = 0) -> None:
        """Write a checkpoint (torch.save of state dicts and the next step) whole or not at all; call it on one rank.

        Each rank has only a part of a sharded model or a pipeline: call it on every rank. Then `path` is a folder, with one
        checkpoint of torch.distributed.checkpoint for each save.
        """
        stateful = {k: v.state_dict() for k, v in self._stateful.items() if hasattr(v, "state_dict")}
        folder = self._folder(path)
        if folder is not None:
            mark, since = self._mark(os.fspath(path))
            folder.save(step, mark, since, self._modules, self._optimizers, stateful)
            return
        models, optimizers = [m.state_dict() for m in self._modules], [o.state_dict() for o in self._optimizers]
        checkpoints.write(Path(path), {"step": step, "models": models, "optimizers": optimizers, "stateful": stateful})

    def _mark(self, path: str) -> tuple[str, float]:
        """Return a mark that every rank gives to this call of `save`, and the time before which the same mark belongs to another run.

        A replacement does not know how often its predecessor has saved, nor how far it came. So the ranks count calls from the last open
        gate, since the next one opens only when every rank has arrived, and from an incident, after which all ranks repeat the same
        calls. The world's stamp tells runs of one id apart, and the steps before a rollback from those after it. torchrun has no such
        stamp, but no replacements either.
        """
        kit = self._loop.kit if self._loop else None
        if kit is not None and kit.context.world is not None:
            words: tuple[Any, ...] = kit.context.world.stamp, gate.unpack(kit.context.board.gate()).last
            since = 0.0
        else:
            words = *map(os.environ.get, ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")),
            since = self._made
        if self._counted_from != (*words, self.generation):
            self._counted_from = (*words, self.generation)
            self._saved.clear()
        self._saved[path] += 1
        return checkpoints.mark_of(*words, self._saved[path]), since

    def load(self, path: str | os.PathLike[str]) -> int:
        """Read a checkpoint of `save` on every rank, before the loop; return the step after it, at which the loop starts.

        Raises:
            UsageError: After the first step, or if the checkpoint lacks parts or does not fit.
        """
        kit = self._loop.kit if self._loop else None
        if kit is not None and kit.position.number >= 0:
            raise UsageError("job.load after the first step; load before the loop")
        if kit is not None and kit.pending.resume >= 0:
            # a replacement has newer state already, and the file may have been overwritten since
            self._loaded = int(kit.state.manifest.facts.get("loaded", 0))
            return self._loaded
        folder = self._folder(path)
        if folder is not None:
            step, stateful = folder.load(self._modules, self._optimizers, self.device)
        else:
            state = checkpoints.read(Path(path), self.device)
            step, stateful = state["step"], state["stateful"]
            for module, saved in zip(self._modules, state["models"], strict=True):
                module.load_state_dict(saved)
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        for name, saved in stateful.items():
            if name not in self._stateful:
                raise UsageError(
                    f"{os.fspath(path)} holds {name}, which neither protect() nor job.state was given; call job.load after both"
                )
            self._stateful[name].load_state_dict(saved)
        self._loaded = int(step)
        if kit is not None:
            arena = kit.state.arena
            arena.open()
            kit.state.manifest.facts["loaded"] = self._loaded
            kit.state.repoint()
            kit.ledger.end(0, accumulating=False)
            arena.sealed(0)
        return self._loaded
