"""What protect() guards: parameters, buffers, optimizer state, and the Python state of everything given to it.

Moves tensors into the arena and keeps them there, copies buffers aside at the start of a step, and puts things back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ftrun import native
from ftrun.core.errors import UsageError
from ftrun.worker import codec
from ftrun.worker.arena import Arena, Entry, Manifest, place
from ftrun.worker.device import bytes_on_gpu, gpu_of
from ftrun.worker.packing import Groups, has_flags, packed_flags
from ftrun.worker.segment import is_ample
from ftrun.worker.torch_private import forget_unscaled, writes_to

_WHOLE_ZONE = 4 << 20  # bytes of buffers up to which they are copied aside in one piece
_SAMPLES = 64


class Protected:
    """Model(s), optimizer(s) and stateful objects of one rank, over its arena."""

    def __init__(
        self, modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], stateful: dict[str, Any]
    ) -> None:
        self.modules = modules
        self.optimizers = optimizers
        self.stateful = stateful
        self.params = list(self._find_params())
        self.buffers = list(self._find_buffers())
        self.tensors = [p for _, p, _ in self.params]
        self.manifest = Manifest()
        self._arena: Arena | None = None
        self._blocks: dict[int, torch.Tensor] = {}
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._buffer_views: list[tuple[torch.nn.Module, str, Entry, torch.Tensor]] = []
        self._slots: list[tuple[dict[Any, Any], Any, torch.Tensor]] = []  # optimizer state dict, key, tensor in arena
        self._known: dict[int, int] = {}  # id of a per-parameter state dict -> number of its keys when laid out
        self._held: dict[int, set[Any]] = {}  # the same -> its keys that lie in the arena
        self._groups = [Groups(f"optimizer.{i}") for i in range(len(optimizers))]
        self._ddp = [(f"ddp.{i}", m) for i, m in enumerate(modules) if has_flags(m)]
        self._settled: list[Any] = []  # every value of the optimizers' states when it was last laid out
        self._loose = False  # some optimizer state is no tensor
        self._shadow = 0
        self._gpu_shadow = 0
        self._versions: dict[str, tuple[int, int]] = {}

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
            for j, param in enumerate(_params_of(optimizer)):
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

    @property
    def laid_out(self) -> bool:
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise UsageError("the state is not laid out yet")
        return self._arena

    def bytes_now(self) -> int:
        """Bytes of parameters and buffers."""
        tensors = [p for _, p, _ in self.params] + [getattr(m, n) for _, m, n in self.buffers]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def gpu(self) -> int | None:
        """Ordinal of the GPU that the model is on, None = the host's memory."""
        return gpu_of(self.params[0][1])

    def finish_device(self, stop: Callable[[], bool]) -> bool:
        """Wait until the GPU has done what it was told, if there is one; False when `stop` says so first."""
        memory = self._arena.memory if self._arena is not None else None
        return memory is None or memory.finished(stop)

    # -- layout ------------------------------------------------------------------------------------------------------

    def move_in(self, arena: Arena) -> None:
        """First layout: copy parameters, buffers and optimizer state there is into a fresh arena and use it from now on."""
        self._arena = arena
        arena.expect("committed", bytes_on_gpu([p for _, p, _ in self.params]))
        for (entry, view), (_, param, _) in zip(
            place(arena, "committed", self.params, self._blocks), self.params, strict=True
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
        self.absorb()
        arena.write_manifest(self.manifest)

    def attach(self, arena: Arena, manifest: Manifest) -> None:
        """Use what a dead rank left (or a replica's copy of it): re-point everything, copy nothing."""
        self._arena, self.manifest = arena, manifest
        entries = {e.name: e for e in manifest.entries}
        for name, param, _ in self.params:
            self._point(param, arena.tensor(entries[name], self._blocks))
        for name, module, attribute in self.buffers:
            entry = entries[name]
            self._point_buffer(module, attribute, entry, arena.tensor(entry, self._blocks))
        self._shadow = int(manifest.facts["shadow"])
        self._gpu_shadow = int(manifest.facts["gpu_shadow"])
        for i, optimizer in enumerate(self.optimizers):
            params = list(_params_of(optimizer))
            optimizer.state.clear()
            for entry in manifest.entries:
                kind, _, rest = entry.name.partition(".")
                if kind == "optim" and rest.split(".", 1)[0] == str(i):
                    _, index, key = rest.split(".", 2)
                    view = arena.tensor(entry, self._blocks)
                    state = optimizer.state[params[int(index)]]
                    state[key] = view
                    self._slots.append((state, key, view))
                    self._held.setdefault(id(state), set()).add(key)
            for state in optimizer.state.values():
                self._known[id(state)] = len(state)

    def reattach(self, arena: Arena, manifest: Manifest) -> None:
        """As `attach`, for a rank that has used its state and goes back to an earlier one."""
        self._views, self._buffer_views, self._slots = [], [], []
        self._known, self._held, self._versions = {}, {}, {}
        self._blocks, self._settled = {}, []
        self.attach(arena, manifest)

    def live_buffers(self) -> tuple[int, int]:
        """(offset, size) of the buffers in the arena, without the copy of them that is kept aside."""
        return self.arena.volatile[0], self._shadow

    def live_buffers_on_gpu(self) -> tuple[int, int]:
        """The same of the arena's part on a GPU."""
        return self.arena.gpu_part.extent("volatile")[0], self._gpu_shadow

    def _point(self, param: torch.nn.Parameter, view: torch.Tensor) -> None:
        param.data = view
        self._views.append((param, view))

    def _point_buffer(self, module: torch.nn.Module, name: str, entry: Entry, view: torch.Tensor) -> None:
        buffer = getattr(module, name)
        if buffer is None:
            raise UsageError(f"buffer {name} vanished")
        buffer.data = view
        self._buffer_views.append((module, name, entry, view))

    def absorb(self) -> bool:
        """Take optimizer state that the last update made (or replaced) into the arena. True when the layout grew.

        Call while the arena is OPEN.
        """
        now = self._optimizer_values()
        if len(now) == len(self._settled) and all(map(operator.is_, now, self._settled)):
            return False
        for state, key, view in [slot for slot in self._slots if slot[0].get(slot[1]) is not slot[2]]:
            current = state.get(key)
            if isinstance(current, torch.Tensor):
                with torch.no_grad():
                    view.copy_(current)
                state[key] = view
        del now  # what was moved is given back at once, so that the state is never there twice
        states = list(self._grown_states())
        on_host, on_gpu = self._loose_bytes([state for _, state, _ in states])
        self.arena.expect("committed", on_gpu)
        roomy = is_ample(on_host)
        grown = any([self._absorb_one(*found, roomy) for found in states])
        if grown:
            self.arena.write_manifest(self.manifest)
        self._settled = self._optimizer_values()
        return grown

    def _optimizer_values(self) -> list[Any]:
        values: list[Any] = []
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                values += state.values()
        return values

    def _grown_states(self) -> Iterator[tuple[str, dict[Any, Any], bool]]:
        """Optimizer state of each parameter that has keys which are not in the arena: its name, itself, is it private."""
        private = {id(p) for _, p, alone in self.params if alone}
        for i, optimizer in enumerate(self.optimizers):
            for index, param in enumerate(_params_of(optimizer)):
                state = optimizer.state.get(param)
                if state is not None and self._known.get(id(state)) != len(state):
                    yield f"optim.{i}.{index}", state, id(param) in private

    def _fresh(self, state: dict[Any, Any]) -> dict[Any, torch.Tensor]:
        """Its tensors that do not lie in the arena yet."""
        held = self._held.get(id(state), ())
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and k not in held}

    def _loose_bytes(self, states: list[dict[Any, Any]]) -> tuple[int, int]:
        """Bytes of those tensors, in the host's memory and on the GPU."""
        tensors = [tensor for state in states for tensor in self._fresh(state).values()]
        if self.arena.memory is None:
            return sum(t.untyped_storage().nbytes() for t in tensors), 0
        return sum(t.untyped_storage().nbytes() for t in tensors if gpu_of(t) is None), bytes_on_gpu(tensors)

    def _absorb_one(self, owner: str, state: dict[Any, Any], private: bool, roomy: bool) -> bool:
        self._loose = self._loose or any(not isinstance(v, torch.Tensor) for v in state.values())
        fresh = self._fresh(state)
        named = [(f"{owner}.{key}", value, private) for key, value in fresh.items()]
        placed = place(self.arena, "committed", named, self._blocks, roomy)
        for key, (entry, view) in zip(fresh, placed, strict=True):
            self.manifest.entries.append(entry)
            state[key] = view
            self._slots.append((state, key, view))
        self._held.setdefault(id(state), set()).update(fresh)
        self._known[id(state)] = len(state)
        return bool(fresh)

    def repoint(self) -> None:
        """Optimizer state was loaded anew (a checkpoint): lay it out afresh. Call while the arena is OPEN."""
        self._slots, self._known, self._held, self._settled = [], {}, {}, []
        self.manifest.entries = [e for e in self.manifest.entries if not e.name.startswith("optim.")]
        self.absorb()
        self.arena.write_manifest(self.manifest)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def settle_buffers(self) -> None:
        """Bring buffers that the script re-assigned (not written in place) back into the arena."""
        for module, name, _, view in self._buffer_views:
            current = getattr(module, name, None)
            if current is None or current.data_ptr() == view.data_ptr():
                continue
            if current.shape != view.shape or current.dtype != view.dtype:
                raise UsageError(f"buffer {name} changed its shape or type while training; ftrun cannot keep it")
            with torch.no_grad():
                view.copy_(current)
            current.data = view

    def save_buffers(self, step: int) -> None:
        """Copy the buffers aside as of the start of `step` (large ones only when they changed)."""
        self.settle_buffers()
        if self._gpu_shadow:
            self.arena.gpu_part.save_shadow(step, self._gpu_shadow)
        offset, size = self.arena.volatile
        if not self._shadow:
            return
        base = self.arena.segment.address
        half = self._shadow
        if half <= _WHOLE_ZONE:
            native.copy(base + offset + half, base + offset, min(half, size - half))
            return
        for module, name, entry, _ in self._buffer_views:
            if entry.on_gpu:
                continue
            address = base + entry.offset
            if entry.block > _WHOLE_ZONE // 4:
                buffer = getattr(module, name)
                mark = (
                    writes_to(buffer) if buffer is not None else 0,
                    native.sample_checksum(address, entry.block, _SAMPLES, 0),
                )
                if self._versions.get(entry.name) == mark:
                    continue
                self._versions[entry.name] = mark
            native.copy(address + half, address, entry.block)

    def buffers_mark(self) -> int:
        """A hash of all buffers (sampled when they are large), to see that an update region writes them.

        Of those on a GPU torch's count of writes in place is taken: a look at their bytes would wait for the update.
        """
        if not self._buffer_views:
            return 0
        offset, size = self.arena.volatile
        half = min(self._shadow, size)
        address = self.arena.segment.address + offset
        versions = hash(tuple(_version(m, n) for m, n, e, _ in self._buffer_views if e.on_gpu))
        if half <= _WHOLE_ZONE:
            return native.checksum(address, half) ^ versions
        return native.sample_checksum(address, half, _SAMPLES, 0) ^ versions

    def buffer_marks(self) -> dict[str, int]:
        """The same for each buffer."""
        base = self.arena.segment.address
        return {
            e.name: _version(m, n) if e.on_gpu else native.checksum(base + e.offset, e.block)
            for m, n, e, _ in self._buffer_views
        }

    def copy_buffers(self, names: list[str], source: Arena) -> None:
        """Take some buffers from a replica's arena."""
        for _, _, entry, _ in self._buffer_views:
            if entry.name in names:
                self.arena.copy_entry(entry, source)

    def shadow_is_whole(self, step: int) -> bool:
        """Did the device get as far as copying the buffers aside for `step`? Else its forward did not begin either."""
        return not self._gpu_shadow or self.arena.gpu_part.shadow_step == step

    def rewind_buffers(self, gpu: bool = True) -> None:
        """Copy the buffers back from where `save_buffers` put them; `gpu`: those on a GPU too."""
        if self._gpu_shadow and gpu:
            self.arena.gpu_part.rewind_shadow(self._gpu_shadow)
        offset, size = self.arena.volatile
        base = self.arena.segment.address
        if self._shadow:
            native.copy(base + offset, base + offset + self._shadow, min(self._shadow, size - self._shadow))
        for module, name, _, view in self._buffer_views:
            buffer = getattr(module, name, None)
            if buffer is not None and buffer.data_ptr() != view.data_ptr():
                buffer.data = view

    # -- guard -------------------------------------------------------------------------------------------------------

    def sample(self) -> int:
        """A sampled hash of the parameters, to see writes that no hook sees."""
        value = 0
        for param, view in self._views:
            if param.data_ptr() != view.data_ptr():
                return -1
        if self.arena.memory is not None:
            return self.arena.memory.sample([view for _, view in self._views])
        for _, view in self._views:
            value = native.sample_checksum(view.data_ptr(), view.untyped_storage().nbytes(), 4, value)
        return value

    # -- replicas ----------------------------------------------------------------------------------------------------

    def replicas(self, world_size: int) -> set[int]:
        """Ranks that hold the same as this one: those with which each DDP module exchanges its gradients."""
        groups = [m.process_group.ranks for m in self.modules if isinstance(m, DistributedDataParallel)]
        return set(range(world_size)).intersection(*groups)

    def replicated(self, manifest: Manifest) -> Iterator[Entry]:
        """Where parameters of the whole world's DDP modules and their optimizer state lie: equal everywhere, bit for bit."""
        wrapped = [(i, m) for i, m in enumerate(self.modules) if isinstance(m, DistributedDataParallel)]
        shared = {f"param.{i}." for i, m in wrapped if m.process_group.mark == 0}
        names = {id(p): n for n, p, private in self.params if not private and n.startswith(tuple(shared) or ("-",))}
        wanted = set(names.values())
        for i, optimizer in enumerate(self.optimizers):
            indices = (index for index, p in enumerate(_params_of(optimizer)) if id(p) in names)
            wanted.update(f"optim.{i}.{index}" for index in indices)
        for entry in manifest.entries:
            kind, _, rest = entry.name.partition(".")
            name = f"{kind}.{'.'.join(rest.split('.')[:2])}" if kind == "optim" else entry.name
            if entry.zone == "committed" and not entry.private and name in wanted:
                yield entry

    # -- Python state ------------------------------------------------------------------------------------------------

    def python_state(self) -> dict[str, bytes]:
        """Hyperparameters and non-tensor optimizer state, and state_dict() of every further object, each packed."""
        state: dict[str, bytes] = {}
        for i, optimizer in enumerate(self.optimizers):
            loose = self._loose_state(optimizer)
            state[self._groups[i].name] = self._groups[i].packed(optimizer.param_groups, loose)
        for name, module in self._ddp:
            state[name] = packed_flags(module)
        for name, thing in self.stateful.items():
            state[name] = codec.pack(_get_state(thing), f"{name}.state_dict()")
        return state

    def _loose_state(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        loose: dict[int, dict[str, Any]] = {}
        if not self._loose:
            return loose
        for index, param in enumerate(_params_of(optimizer)):
            values = {k: v for k, v in optimizer.state.get(param, {}).items() if not isinstance(v, torch.Tensor)}
            if values:
                loose[index] = values
        return loose

    def apply_python_state(self, packed: dict[str, bytes]) -> None:
        """Put back what `python_state` gave."""
        state = {name: codec.decode(data) for name, data in packed.items()}
        for i, optimizer in enumerate(self.optimizers):
            groups, loose = state[f"optimizer.{i}"]
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for key in [k for k in group if k != "params" and k not in saved]:
                    del group[key]
                for key, value in saved.items():
                    current = group.get(key)
                    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                        current.copy_(value)
                    else:
                        group[key] = value
            params = list(_params_of(optimizer))
            for index, values in loose.items():
                self._loose = True
                optimizer.state[params[index]].update(values)
                self._known[id(optimizer.state[params[index]])] = len(optimizer.state[params[index]])
        for i, module in enumerate(self.modules):
            for name, value in state.get(f"ddp.{i}", {}).items():
                setattr(module, name, value)
        for name, thing in self.stateful.items():
            _set_state(thing, state[name])

    # -- gradients ---------------------------------------------------------------------------------------------------

    def grads(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self.tensors]

    def grads_alive(self) -> list[bool]:
        return [p.grad is not None for p in self.tensors]

    def set_grads(self, alive: list[bool], values: list[torch.Tensor | None] | None) -> None:
        """Put gradients back: `values` where accumulation must go on, else None, or zeros where one was alive."""
        for i, (_, param, _) in enumerate(self.params):
            if not alive[i]:
                param.grad = None
            elif values is not None and values[i] is not None:
                value = values[i]
                if param.grad is not None and value is not None and param.grad.shape == value.shape:
                    param.grad.copy_(value)
                else:
                    param.grad = value
            elif param.grad is None:
                param.grad = torch.zeros_like(param)


def _version(module: torch.nn.Module, name: str) -> int:
    buffer = getattr(module, name)
    return writes_to(buffer) if buffer is not None else -1


def _ignored(module: torch.nn.Module) -> set[str]:
    """Names (as in named_parameters) that DDP does not synchronize."""
    names = getattr(module, "parameters_to_ignore", None)
    if not names:
        return set()
    return {f"module.{name}" for name in names}


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _get_state(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    return thing.state_dict()


def _set_state(thing: Any, state: Any) -> None:
    if isinstance(thing, torch.Generator):
        thing.set_state(state)
        return
    thing.load_state_dict(state)
    forget_unscaled(thing)
