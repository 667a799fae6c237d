"""Optimizer state: after the update that creates it, ftrun lays it into the arena, where a replacement takes it over.

The manifest names an entry `optim.<optimizer>.<parameter>.<key>`, and a part of a composed tensor
`optim.<optimizer>.<parameter>.<key>/<part>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.worker.link.trees import checksum
from ftrun.worker.memory import composed
from ftrun.worker.memory.arena import Arena, Manifest, place
from ftrun.worker.memory.gpu_memory import bytes_on_gpu, gpu_of
from ftrun.worker.memory.segment import is_ample
from ftrun.worker.state import shards
from ftrun.worker.state.python_state import PythonState, params_of
from ftrun.worker.torch_compat.sharded_private import local_of
from ftrun.worker.torch_compat.torch_private import writes_to

_Owner = tuple[int, int]  # number of the optimizer, number of the parameter in it
_Blocks = dict[int, torch.Tensor]
Params = list[tuple[str, torch.nn.Parameter, bool]]  # name, parameter, left out of DDP's synchronization


class OptimizerState:
    """The optimizer state of one rank. `params`: all protected parameters; `python`: keeps the values that are no tensors."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], params: Params, python: PythonState) -> None:
        self.optimizers = optimizers
        self._params = params
        self._python = python
        self._replaced = False  # an update replaced a tensor
        self._steady: list[tuple[Any, int, list[int], list[tuple[Any, dict[Any, Any], list[int]]]]] = []  # see `is_steady`
        self._held: dict[_Owner, dict[Any, torch.Tensor]] = {}  # key -> its tensor in the arena
        # of composed tensors: part -> its tensor in the arena, and the recipe
        self._inner: dict[tuple[_Owner, Any], tuple[dict[str, torch.Tensor], Any]] = {}

    def is_steady(self) -> bool:
        """Is all optimizer state where it was after the last update, as far as a few looks tell?

        An optimizer makes its state at once, or replaces it in each update, which the first updates reveal; `absorb` then looks at all of
        it after each. State that is loaded anew is another dict, and an added group makes the optimizer larger.
        """
        for optimizer, (state, size, sizes, few) in zip(self.optimizers, self._steady, strict=False):
            groups = optimizer.param_groups
            if optimizer.state is not state or len(state) != size or [len(group["params"]) for group in groups] != sizes:
                return False
            for param, found, values in few:
                if state.get(param) is not found or list(map(id, found.values())) != values:
                    return False
        return len(self._steady) == len(self.optimizers)

    def _settle(self, changed: bool) -> None:
        """Remember the state after a look at all of it, for `is_steady`."""
        self._steady = []
        if changed or self._python.loose or self._inner:
            return
        for optimizer in self.optimizers:
            state = optimizer.state
            ends = next(iter(state), None), next(reversed(state), None)
            few = [(param, found) for param in ends if (found := state.get(param))]
            if any(not isinstance(one, dict) for _, one in few):
                return
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            self._steady.append((state, len(state), sizes, [(param, one, list(map(id, one.values()))) for param, one in few]))

    def attach(self, arena: Arena, manifest: Manifest, blocks: _Blocks) -> None:
        """Use the state that a dead rank left: the groups that its script added, and the state of each parameter."""
        self._held, self._inner, self._steady = {}, {}, []
        entries = [entry for entry in manifest.entries if entry.name.startswith("optim.")]
        for i, optimizer in enumerate(self.optimizers):
            self._follow_groups(optimizer, manifest.facts["groups"][i])
            params = list(params_of(optimizer))
            optimizer.state.clear()
            found: dict[str, dict[str, torch.Tensor]] = {}
            for entry in entries:
                name, part = _owner_of(entry.name, manifest)
                if name.split(".", 2)[1] == str(i):
                    found.setdefault(name, {})[part] = arena.tensor(entry, blocks)
            for name, parts in found.items():
                index, key = int(name.split(".", 3)[2]), name.split(".", 3)[3]
                param = params[index]
                local = composed.made(parts, manifest.facts["composed"].get(name))
                value = shards.spread(local, manifest.facts["spread"].get(name), param)
                optimizer.state[param][key] = value
                self._hold((i, index), key, value)

    def forget(self, manifest: Manifest) -> None:
        """Drop all entries: the state was loaded anew (a checkpoint), so nothing of it is in the arena."""
        self._steady = []
        gone = [(owner, key) for owner, held in self._held.items() for key in held]
        self._drop(gone, manifest)

    def absorb(self, arena: Arena, manifest: Manifest, blocks: _Blocks) -> bool:
        """Take the state that the last update made (or replaced) into the arena. Return True if the manifest must be written.

        Call while the arena is OPEN.

        Raises:
            UsageError: If ftrun cannot keep a value.
        """
        self._steady, self._replaced = [], False
        changed = self._take_in(arena, manifest, blocks)
        self._settle(changed or self._replaced)
        return changed

    def _take_in(self, arena: Arena, manifest: Manifest, blocks: _Blocks) -> bool:
        changed, grown = False, []
        if self._groups_changed(manifest) or self._vanished(manifest):
            self.check_groups(manifest)
            changed = True
        for owner, param, state in self._states():
            held, fresh = self._held.get(owner, {}), []
            for key, value in state.items():
                view = held.get(key)
                if value is not None and value is view and (not self._inner or self._is_over_its_parts(owner, key, value)):
                    continue
                if not isinstance(value, torch.Tensor):
                    self._python.loose = True
                elif view is None:
                    composed.recipe_of(local_of(value), _what(key))  # raises if it cannot be kept
                    fresh.append(key)
                elif (owner, key) in self._inner:
                    state[key] = self._made_again(owner, key, value, param, manifest)
                    changed = True
                else:
                    with torch.no_grad():
                        local_of(view).copy_(local_of(value))
                    state[key] = view
                    self._replaced = True
            if fresh:
                grown.append((owner, param, state, fresh))
        if not grown:
            return changed
        # this list has no name, so that the memory of each moved tensor is freed before the next is moved
        on_host, on_gpu = _bytes(
            [p for _, _, state, fresh in grown for key in fresh for p in _parts(state[key]).values()], arena
        )
        arena.expect("committed", on_gpu)
        roomy = is_ample(on_host)
        private = {id(p) for _, p, left_out in self._params if left_out}
        for owner, param, state, fresh in grown:
            names = {key: f"optim.{owner[0]}.{owner[1]}.{key}" for key in fresh}
            alone, views = id(param) in private, {}
            named = [(_named(names[key], part), one, alone) for key in fresh for part, one in _parts(state[key]).items()]
            for entry, view in place(arena, "committed", named, blocks, roomy):
                manifest.entries.append(entry)
                views[entry.name] = view
            for key, name in names.items():
                state[key] = _made(manifest, name, state[key], param, views)
                self._hold(owner, key, state[key])
        return True

    def _hold(self, owner: _Owner, key: Any, value: torch.Tensor) -> None:
        self._held.setdefault(owner, {})[key] = value
        if not composed.is_plain(local_of(value)):
            self._inner[owner, key] = _parts(value), composed.recipe_of(local_of(value), _what(key))

    def _is_over_its_parts(self, owner: _Owner, key: Any, value: torch.Tensor) -> bool:
        """Is a composed tensor still composed of its parts in the arena, in the same way?"""
        if (owner, key) not in self._inner:
            return True
        inner, recipe = self._inner[owner, key]
        same = composed.recipe_of(local_of(value), _what(key)) == recipe
        return same and all(part is inner.get(name) for name, part in _parts(value).items())

    def _made_again(self, owner: _Owner, key: Any, value: Any, param: Any, manifest: Manifest) -> torch.Tensor:
        """Copy a composed tensor, which the optimizer replaced or gave other parts, to its place in the arena.

        Raises:
            UsageError: If its kind or shape changed.
        """
        (inner, _), name = self._inner[owner, key], f"optim.{owner[0]}.{owner[1]}.{key}"
        new = _parts(value)
        if [(n, p.shape, p.dtype) for n, p in new.items()] != [(n, p.shape, p.dtype) for n, p in inner.items()]:
            raise UsageError(f"{_what(key)} changed its kind or shape while training; ftrun cannot keep it")
        with torch.no_grad():
            for part, one in new.items():
                if one is not inner[part]:
                    inner[part].copy_(one)
        made = _made(manifest, name, value, param, {_named(name, part): view for part, view in inner.items()})
        self._hold(owner, key, made)
        return made

    def values(self) -> Iterator[torch.Tensor]:
        """Yield its tensors."""
        for _, _, state in self._states():
            yield from (one for one in state.values() if isinstance(one, torch.Tensor))

    def stand(self) -> tuple[Any, ...]:
        """Return a fingerprint of the values outside the arena, and of which values lie in it."""
        return tuple(
            (owner, key, id(one), None if self._lies(owner, key, one) else _content(one))
            for owner, _, state in self._states()
            for key, one in state.items()
        )

    def _lies(self, owner: _Owner, key: Any, value: Any) -> bool:
        """Does it lie in the arena?"""
        return self._held.get(owner, {}).get(key) is value and (not self._inner or self._is_over_its_parts(owner, key, value))

    def check_groups(self, manifest: Manifest) -> None:
        """Raise UsageError if an optimizer updates a parameter that is not protected."""
        for i, groups in enumerate(self._groups()):
            if any(name == "" for names in groups for name in names):
                raise UsageError(
                    f"optimizer {i} was given a parameter that no protected model had when protect() was called, so it would be "
                    "lost with its worker: build the whole model before protect(), and freeze what comes later"
                )
        manifest.facts["groups"] = self._groups()

    def _groups(self) -> list[list[list[str]]]:
        """Return the names of the parameters in each group of each optimizer."""
        names = {id(p): name for name, p, _ in self._params}
        return [[[names.get(id(p), "") for p in g["params"]] for g in o.param_groups] for o in self.optimizers]

    def _follow_groups(self, optimizer: torch.optim.Optimizer, wanted: list[list[str]]) -> None:
        """Make the groups that the predecessor's script has added since; their settings come with the Python state."""
        params = {name: p for name, p, _ in self._params}
        for names in wanted[len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": [params[name] for name in names]})

    def _groups_changed(self, manifest: Manifest) -> bool:
        sizes = [[len(g["params"]) for g in o.param_groups] for o in self.optimizers]
        return sizes != [[len(names) for names in groups] for groups in manifest.facts["groups"]]

    def _vanished(self, manifest: Manifest) -> bool:
        """Drop state that the script has dropped (by state.clear(), say). Return whether there was any."""
        alive = {owner: state for owner, _, state in self._states()}
        gone = [(owner, key) for owner, held in self._held.items() for key in held if key not in alive.get(owner, ())]
        if gone:
            self._drop(gone, manifest)
        return bool(gone)

    def _drop(self, gone: list[tuple[_Owner, Any]], manifest: Manifest) -> None:
        names = {f"optim.{i}.{index}.{key}" for (i, index), key in gone}
        manifest.entries = [e for e in manifest.entries if _owner_of(e.name, manifest)[0] not in names]
        for fact in ("composed", "spread"):
            manifest.facts[fact] = {name: said for name, said in manifest.facts[fact].items() if name not in names}
        for owner, key in gone:
            del self._held[owner][key]
            self._inner.pop((owner, key), None)

    def _states(self) -> Iterator[tuple[_Owner, torch.nn.Parameter, dict[Any, Any]]]:
        for i, optimizer in enumerate(self.optimizers):
            for index, param in enumerate(params_of(optimizer)):
                state = optimizer.state.get(param)
                if state:
                    yield (i, index), param, state


def _made(manifest: Manifest, name: str, value: Any, param: Any, views: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compose `value` again, over the views that its parts were copied to."""
    what = _what(name.split(".", 3)[3])
    recipe, spread = composed.recipe_of(local_of(value), what), shards.spread_of_state(value, param, what)
    if recipe is not None:
        manifest.facts["composed"][name] = recipe
    if spread is not None:
        manifest.facts["spread"][name] = spread
    parts = {part: views[_named(name, part)] for part in _parts(value)}
    return shards.spread(composed.made(parts, recipe), spread, param)


def _what(key: Any) -> str:
    return f"optimizer state {key}"


def _owner_of(name: str, manifest: Manifest) -> tuple[str, str]:
    """Return the name of the tensor that an entry belongs to, and which part of it the entry is."""
    whole, _, part = name.rpartition("/")
    return (whole, part) if whole in manifest.facts["composed"] else (name, "")


def _named(name: str, part: str) -> str:
    return f"{name}/{part}" if part else name


def _parts(value: Any) -> dict[str, torch.Tensor]:
    return composed.parts_of(local_of(value))


def _bytes(tensors: list[torch.Tensor], arena: Arena) -> tuple[int, int]:
    """Return the bytes of the tensors' storages, in the host's memory and on the GPU."""
    if arena.memory is None:
        return sum(t.untyped_storage().nbytes() for t in tensors), 0
    return sum(t.untyped_storage().nbytes() for t in tensors if gpu_of(t) is None), bytes_on_gpu(tensors)


def _content(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    read = [writes_to(part) if (one := checksum(part)) is None else one for part in _parts(value).values()]
    return read if composed.is_plain(local_of(value)) else [*read, composed.recipe_of(local_of(value), "optimizer state")]
