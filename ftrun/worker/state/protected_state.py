"""The state that protect() guards: parameters, buffers, optimizer state, and the Python state of everything given to it.

This module moves tensors into the arena and keeps them there, copies buffers aside at the start of a step, and puts them back.
"""

from __future__ import annotations

import ctypes
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any

import torch

from ftrun import native
from ftrun.core.errors import UsageError
from ftrun.worker.link.trees import content
from ftrun.worker.memory.arena import Arena, Entry, Manifest, place
from ftrun.worker.memory.gpu_memory import bytes_on_gpu, gpu_of
from ftrun.worker.state import shards
from ftrun.worker.state.holders import Holders
from ftrun.worker.state.loose_buffers import LooseBuffers
from ftrun.worker.state.optimizer_state import OptimizerState
from ftrun.worker.state.python_state import PythonState, params_of
from ftrun.worker.torch_compat.sharded_private import local_of, locals_of
from ftrun.worker.torch_compat.torch_private import write_count

_SAMPLE = 16384  # bytes
_PIECES = 64  # samples that a glance takes
_grad = attrgetter("grad")
_state = attrgetter("state")
LOOSE = "buffers that take another shape"


class WeightsAside:
    """A copy of the parameters; empty if a GPU lacks the room for it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors)
        gpus = {t.device for t in tensors if t.is_cuda}
        self._tensors = tensors if all(torch.cuda.mem_get_info(gpu)[0] > 3 * size for gpu in gpus) else []
        self._copies = [t.detach().clone() for t in self._tensors]

    def put_back(self) -> None:
        """Undo what an interrupted function wrote into the parameters."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            if not torch.equal(tensor.detach(), copy):
                tensor.detach().copy_(copy)


class ProtectedState:
    """Model(s), optimizer(s) and stateful objects of one rank, over its arena."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        stateful: dict[str, Any],
        declared: tuple[int, ...] = (),
    ) -> None:
        self.modules = modules
        self.optimizers = optimizers
        self.iterated: set[int] = set()  # ids of loaders and samplers whose epoch and iterator `job.batches` keeps
        self.shards = shards.Shards(modules)
        self.params = list(self._find_params())
        self.loose = LooseBuffers(self._find_buffers(), self._back_into_arena)
        self.buffers = self.loose.fixed()
        self.holders = Holders(modules, optimizers, self.params, declared)
        self.tensors = [p for _, p, _ in self.params]
        self.is_sharded = any(map(shards.is_spread, self.tensors))  # a parameter is spread over ranks
        self.few = self._first_and_last()
        self.looking = True  # this body is looked at as a whole, see ftrun.worker.state.looks
        self._counted: list[torch.Tensor] | None = (
            None  # the tensors that `write_counts` reads; None = there may be others by now
        )
        self.reassigned = True  # since `settle_buffers`, a module may have been given another tensor for a buffer
        buffers = {LOOSE: self.loose} if any(True for _ in self._find_buffers()) else {}
        self.python = PythonState(modules, optimizers, {**stateful, **buffers})
        self.manifest = Manifest()
        self._arena: Arena | None = None
        self._blocks: dict[int, torch.Tensor] = {}
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._buffer_views: list[tuple[torch.nn.Module, str, Entry, torch.Tensor]] = []
        self._on_gpu: tuple[list[torch.nn.Module], list[str]] = ([], [])  # module and name of each buffer on a GPU
        self._read_whole = 0, 0  # address and size of the committed zone in the host's memory
        self._made = OptimizerState(optimizers, self.params, self.python)
        self._shadow = 0
        self._gpu_shadow = 0

    # -- finding -----------------------------------------------------------------------------------------------------

    def _find_params(self) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
        seen: set[int] = set()
        for i, module in enumerate(self.modules):
            private = _ignored(module)
            for name, param in module.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield f"param.{i}.{name}", param, name in private
        for i, optimizer in enumerate(self.optimizers):
            for j, param in enumerate(params_of(optimizer)):
                if id(param) not in seen:
                    seen.add(id(param))
                    yield f"param.optimizer{i}.{j}", param, False

    def _find_buffers(self) -> Iterator[tuple[str, torch.nn.Module, str]]:
        seen: set[int] = set()
        for i, root in enumerate(self.modules):
            for prefix, module in root.named_modules():
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                    if id(buffer) not in seen:
                        seen.add(id(buffer))
                        yield f"buffer.{i}.{prefix}.{name}", module, name

    def _first_and_last(self) -> list[tuple[int, torch.nn.Parameter]]:
        """Return each optimizer's first and last parameter that learns, with their numbers among all parameters."""
        numbers = {id(param): i for i, param in enumerate(self.tensors)}
        learning = ([p for p in params_of(optimizer) if p.requires_grad] for optimizer in self.optimizers)
        ends = [params[k] for params in learning for k in (0, -1) if params]
        return list({id(p): (numbers[id(p)], p) for p in ends if id(p) in numbers}.values())

    @property
    def laid_out(self) -> bool:
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise UsageError("the state is not laid out yet")
        return self._arena

    def bytes_now(self) -> int:
        """Return the bytes of parameters and buffers."""
        tensors = [self.shards.memory(p) for _, p, _ in self.params] + [getattr(m, n) for _, m, n in self.buffers]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def gpu(self) -> int | None:
        """Ordinal of the GPU that the model is on, None = the host's memory."""
        return gpu_of(self.shards.memory(self.params[0][1]))

    def finish_device(self, stop: Callable[[], bool]) -> bool:
        """Wait until the GPU, if there is one, has finished its queue; return False if `stop` returns True first."""
        memory = self._arena.memory if self._arena is not None else None
        return memory is None or memory.finished(stop)

    # -- layout ------------------------------------------------------------------------------------------------------

    def move_in(self, arena: Arena) -> None:
        """Copy parameters, buffers and existing optimizer state into a fresh arena, and use it from now on."""
        self._arena = arena
        memory = [(name, self.shards.memory(param), private) for name, param, private in self.params]
        arena.expect("committed", bytes_on_gpu([tensor for _, tensor, _ in memory]))
        for (entry, view), (_, param, _) in zip(
            place(arena, "committed", memory, self._blocks), self.params, strict=True
        ):
            self.manifest.entries.append(entry)
            self._point(param, view)
        buffers = [(n, getattr(m, b), False) for n, m, b in self.buffers]
        arena.expect("volatile", 2 * bytes_on_gpu([t for _, t, _ in buffers]))
        for (entry, view), (_, module, name) in zip(
            place(arena, "volatile", buffers, self._blocks), self.buffers, strict=True
        ):
            self.manifest.entries.append(entry)
            self._point_buffer(module, name, entry, view)
        offset, size = arena.volatile
        self._shadow = arena.reserve("volatile", size) - offset if size else 0
        self.manifest.facts["shadow"] = self._shadow
        if arena.memory is not None:
            offset, size = arena.memory.extent("volatile")
            self._gpu_shadow = arena.reserve("volatile", size, on_gpu=True) - offset if size else 0
        self.manifest.facts["gpu_shadow"] = self._gpu_shadow
        spread = {name: said for name, param, _ in self.params if (said := shards.spread_of(param)) is not None}
        self.manifest.facts |= {"spread": spread, "composed": {}}
        self._made.check_groups(self.manifest)
        self.absorb()
        arena.write_manifest(self.manifest)

    def attach(self, arena: Arena, manifest: Manifest) -> None:
        """Use the arena of a dead rank (or a copy of a replica's): re-point everything, copy nothing."""
        self._arena, self.manifest, self._counted = arena, manifest, None
        entries = {e.name: e for e in manifest.entries}
        for name, param, _ in self.params:
            self._point(param, arena.tensor(entries[name], self._blocks))
        for name, module, attribute in self.buffers:
            entry = entries[name]
            self._point_buffer(module, attribute, entry, arena.tensor(entry, self._blocks))
        self._shadow = int(manifest.facts["shadow"])
        self._gpu_shadow = int(manifest.facts["gpu_shadow"])
        self._made.attach(arena, manifest, self._blocks)

    def reattach(self, arena: Arena, manifest: Manifest) -> None:
        """Attach as `attach` does, in a rank that has used its state and goes back to an earlier one."""
        self._views, self._buffer_views, self._blocks, self._on_gpu = [], [], {}, ([], [])
        self.attach(arena, manifest)

    def live_buffers(self) -> tuple[int, int]:
        """Return (offset, size) of the buffers in the arena, without their copy aside."""
        return self.arena.volatile[0], self._shadow

    def live_buffers_on_gpu(self) -> tuple[int, int]:
        """Return (offset, size) of the buffers in the arena's part on a GPU, without their copy aside."""
        return self.arena.gpu_part.extent("volatile")[0], self._gpu_shadow

    def _point(self, param: torch.nn.Parameter, view: torch.Tensor) -> None:
        self.shards.point(param, view)
        self._views.append((param, view))

    def _point_buffer(self, module: torch.nn.Module, name: str, entry: Entry, view: torch.Tensor) -> None:
        buffer = getattr(module, name)
        if buffer is None:
            raise UsageError(f"buffer {name} vanished")
        buffer.data = view
        self._buffer_views.append((module, name, entry, view))
        if entry.on_gpu:
            self._on_gpu[0].append(module)
            self._on_gpu[1].append(name)

    def absorb(self) -> bool:
        """Take optimizer state that the last update made (or replaced) into the arena. Return True if the layout changed.

        Call while the arena is OPEN.
        """
        if not self.looking and self._made.is_steady():
            return False
        self._counted = None
        changed = self._made.absorb(self.arena, self.manifest, self._blocks)
        if changed:
            self.arena.write_manifest(self.manifest)
        return changed

    def repoint(self) -> None:
        """Lay out optimizer state that was loaded anew (a checkpoint). Call while the arena is OPEN."""
        self._made.forget(self.manifest)
        if not self.absorb():
            self.arena.write_manifest(self.manifest)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def settle_buffers(self) -> None:
        """Bring buffers that the script re-assigned (instead of writing in place) back into the arena, if they still fit.

        Unless a module reported such an assignment, this looks only in the bodies that the checks look at.
        """
        if not self.looking and not self.reassigned:
            return
        self.reassigned = False
        for module, name, entry, view in self._buffer_views:
            current = getattr(module, name, None)
            if current is None or entry.name in self.loose or current.data_ptr() == view.data_ptr():
                continue
            if current.shape != view.shape or current.dtype != view.dtype:
                self.loose.take(entry.name)
                continue
            with torch.no_grad():
                view.copy_(current)
            current.data = view

    def save_buffers(self, step: int) -> None:
        """Copy the buffers aside as of the start of `step`."""
        self.settle_buffers()
        if not self._shadow and not self._gpu_shadow:
            return
        if self._gpu_shadow:
            self.arena.gpu_part.save_shadow(step, self._gpu_shadow)
        offset, size = self.arena.volatile
        if self._shadow:
            base = self.arena.segment.address + offset
            native.copy(base + self._shadow, base, min(self._shadow, size - self._shadow))

    def buffer_values(self) -> tuple[bytes, list[int]]:
        """Return the bytes of all buffers, to detect later which of them an update region wrote.

        For buffers on a GPU this takes torch's count of writes in place: a read of their bytes would wait for the update.
        """
        return self._buffer_bytes(), self._gpu_versions()

    def buffers_written(self, before: tuple[bytes, list[int]]) -> list[str]:
        """Return the names of the buffers that differ from an earlier result of `buffer_values`."""
        data, versions = before
        now, versions_now = self.buffer_values()
        if data == now and versions == versions_now:
            return []
        on_gpu = [e.name for _, _, e, _ in self._buffer_views if e.on_gpu]
        written = [n for n, old, new in zip(on_gpu, versions, versions_now, strict=True) if old != new]
        start = self.arena.volatile[0]
        for entry in (e for _, _, e, _ in self._buffer_views if not e.on_gpu):
            place = slice(entry.offset - start, entry.offset - start + entry.block)
            if data[place] != now[place]:
                written.append(entry.name)
        return written

    def stands_of(self, names: Collection[str]) -> dict[str, int]:
        """Return checksums of some buffers by name, without those on a GPU, for which one would have to wait."""
        of_host = [entry for _, _, entry, _ in self._buffer_views if entry.name in names and not entry.on_gpu]
        return {entry.name: self.arena.checksum(entry) for entry in of_host}

    def buffers_mark(self, turn: int) -> tuple[int, list[int]]:
        """Return a cheap fingerprint of the buffers: in the host's memory the hash of a small part, another one each turn."""
        if not self._shadow and not self._on_gpu[0]:
            return 0, []
        return self._hash_of_part(self.live_buffers(), turn), self._gpu_versions()

    def _buffer_bytes(self) -> bytes:
        if not self._shadow or self._arena is None:
            return b""
        return ctypes.string_at(self._arena.segment.address + self._arena.volatile[0], self._shadow)

    def _gpu_versions(self) -> list[int]:
        if not self._on_gpu[0]:
            return []
        return list(map(write_count, map(getattr, *self._on_gpu)))

    def copy_buffers(self, names: list[str], source: Arena) -> None:
        """Copy some buffers from a replica's arena."""
        for _, _, entry, _ in self._buffer_views:
            if entry.name in names:
                self.arena.copy_entry(entry, source)

    def shadow_is_whole(self, step: int) -> bool:
        """Did the device copy the buffers aside for `step`? If not, its forward did not begin either."""
        return not self._gpu_shadow or self.arena.gpu_part.shadow_step == step

    def rewind_buffers(self, gpu: bool = True) -> None:
        """Copy the buffers back from where `save_buffers` put them. `gpu`: also those on a GPU."""
        if self._gpu_shadow and gpu:
            self.arena.gpu_part.rewind_shadow(self._gpu_shadow)
        offset, size = self.arena.volatile
        base = self.arena.segment.address
        if self._shadow:
            native.copy(base + offset, base + offset + self._shadow, min(self._shadow, size - self._shadow))
        for module, name, entry, view in self._buffer_views:
            buffer = getattr(module, name, None)
            if buffer is not None and buffer.data_ptr() != view.data_ptr() and entry.name not in self.loose:
                buffer.data = view

    def _back_into_arena(self, name: str) -> None:
        for module, attribute, entry, view in self._buffer_views:
            if entry.name == name:
                getattr(module, attribute).data = view

    def why_not_resized(self, error: BaseException | None) -> str:
        """Tell for a failed `resize_` whose memory it was meant to enlarge, and what to do; "" for any other error."""
        if not isinstance(error, RuntimeError) or "not resizable" not in str(error):
            return ""
        parts = {id(part): part for root in self.modules for part in root.modules()}
        within = [parts.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = next((type(part).__name__ for part in reversed(within) if part is not None), "")
        names = sorted({n for m, n, e, _ in self._buffer_views if type(m).__name__ == found and e.name not in self.loose})
        whose = (found or "the model") + (f" ({', '.join(names)})" if names else "")
        return (
            f"a parameter or buffer of {whose} was resized in place, and the memory that"
            " outlives a worker does not grow: register a buffer that takes its shape later as torch.empty(0), or replace it "
            "(self.name = larger)"
        )

    # -- guard -------------------------------------------------------------------------------------------------------

    def check_places(self) -> None:
        """Raise UsageError if a parameter no longer lies in the arena: its updates would not outlive the worker."""
        for (name, _, _), (param, view) in zip(self.params, self._views, strict=True):
            memory = self.shards.memory(param)
            if memory.data_ptr() != view.data_ptr() or memory.shape != view.shape:
                raise UsageError(
                    f"parameter {name.split('.', 2)[-1]} was given other memory (param.data = ...), which ftrun does not keep; "
                    "write into it instead, in the body after optimizer.step(): param.data.copy_(...)",
                    explain="F309",
                )

    def checksum(self) -> int:
        """Return a hash of parameters and optimizer state, to detect writes that no hook reports."""
        offset, size = self.arena.committed
        value = native.checksum(self.arena.segment.address + offset, size) if size else 0
        if self.arena.memory is not None:
            offset, size = self.arena.memory.extent("committed")
            value = self.arena.memory.checksum(offset, size, value)
        return value

    def write_counts(self) -> tuple[list[int], list[int]]:
        """Return how often parameters and optimizer state, and their parts on this rank, were written in place; and the same of gradients.

        The counts also include a write that changed no value (a clamp that did not bite), but no write through `.data`.
        """
        if self._counted is None or self.looking:
            values = [one for one in self._made.values() if not one.is_inference()]
            of_all = [*self.tensors, *values]
            self._counted = [*of_all, *(map(local_of, of_all) if self.is_sharded else [])]
        grads: list[Any] = [grad for grad in map(_grad, self.tensors) if grad is not None]
        return list(map(write_count, self._counted)), list(
            map(write_count, locals_of(grads) if self.is_sharded else grads)
        )

    def writes_to_params(self) -> list[int]:
        """Return how often each parameter was written in place; empty for shards, since gathering writes them too."""
        return [] if self.is_sharded else list(map(write_count, self.tensors))

    def stand(self) -> tuple[Any, ...]:
        """Read all parameters and optimizer state into a fingerprint, to detect writes between two moments."""
        offset, size = self.arena.committed
        self._read_whole = self.arena.segment.address + offset, size
        return self.checksum(), self._made.stand()

    def glance(self, turn: int) -> tuple[Any, ...]:
        """Return a fingerprint that costs a few cache lines: it reveals a write to most of a tensor, or lost optimizer state."""
        return native.sample(*self._read_whole, _PIECES, turn), *map(len, map(_state, self.optimizers))

    def weights_aside(self) -> WeightsAside:
        """Copy the parameters, for a function that may replace them for a while, by averaged ones for example."""
        return WeightsAside([p for p in map(local_of, self.tensors) if p.numel()])

    def _hash_of_part(self, zone: tuple[int, int], turn: int) -> int:
        offset, size = zone
        at = turn % (-(-size // _SAMPLE) or 1) * _SAMPLE
        return native.checksum(self.arena.segment.address + offset + at, min(_SAMPLE, size - at)) if size else 0

    # -- replicas ----------------------------------------------------------------------------------------------------

    def sums_of(self, grads: list[torch.Tensor | None]) -> list[int]:
        """Return for each optimizer a checksum of all gradients that it would apply."""
        found = {id(param): grad for param, grad in zip(self.tensors, grads, strict=True)}
        each = ([content(found.get(id(param))) for param in params_of(optimizer)] for optimizer in self.optimizers)
        return [zlib.crc32(repr(sums).encode()) for sums in each]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def grads(self) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, or of this rank's part of it."""
        grads: list[Any] = list(map(_grad, self.tensors))
        return locals_of(grads) if self.is_sharded else grads

    def alive_now(self, before: list[bool]) -> list[bool]:
        """Return which gradients exist. `before`: the last result.

        A script zeroes all gradients of an optimizer or none: if a few exist as before, so do the others. If not, and in each body that the
        checks look at, this looks at all of them.
        """
        if before and not self.looking and all([(p.grad is not None) is before[i] for i, p in self.few]):
            return before
        return [grad is not None for grad in map(_grad, self.tensors)]

    def set_grads(self, alive: list[bool], values: list[torch.Tensor | None] | None) -> None:
        """Put gradients back: `values` where accumulation must go on; otherwise zeros where one existed, None where none did."""
        for i, (_, param, _) in enumerate(self.params):
            if not alive[i]:
                param.grad = None
            elif values is not None and values[i] is not None:
                value, grad = values[i], None if param.grad is None else local_of(param.grad)
                assert value is not None
                if grad is not None and grad.shape == value.shape and grad.layout is value.layout:
                    grad.copy_(value)
                else:
                    param.grad = shards.like(value, param)
            elif param.grad is None:
                param.grad = torch.zeros_like(param)


def _ignored(module: torch.nn.Module) -> set[str]:
    """Return the names (as in named_parameters) of parameters that DDP does not synchronize."""
    names = getattr(module, "parameters_to_ignore", None)
    if not names:
        return set()
    return {f"module.{name}" for name in names}
