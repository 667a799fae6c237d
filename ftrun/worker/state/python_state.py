"""The state that protect() guards beside tensors: hyperparameters, modes of modules, and the state_dict() of further objects."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from ftrun.worker.memory import serialization
from ftrun.worker.torch_compat.torch_private import forget_unscaled
from ftrun.worker.variables.plain_values import GlobalVariables
from ftrun.worker.variables.variables import PREFIX

# flags of DDP's last forward: after one under no_sync() the next does not broadcast buffers
_DDP_FLAGS = ("require_forward_param_sync", "require_backward_grad_sync")
_ddp_flags = attrgetter(*_DDP_FLAGS)
_FIXED = {int, float, bool, str, bytes, type(None)}
_training, _learns = attrgetter("training"), attrgetter("requires_grad")


class PythonState:
    """The Python state of one rank; `stateful` gets more entries when the script calls `job.state`."""

    def __init__(
        self, modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], stateful: dict[str, Any]
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._stateful = stateful
        self._ask = {name: _asked(thing) for name, thing in stateful.items()}
        self.loose = False  # some optimizer state is no tensor
        self._packed: dict[str, tuple[Any, bytes]] = {}  # the value that `capture` packed last, and its bytes
        self._parts = [list(module.modules()) for module in modules]
        self._params_of_module = [list(module.parameters()) for module in modules]
        self._learning = [bytes(map(_learns, params)) for params in self._params_of_module]
        self._is_ddp = [all(hasattr(module, flag) for flag in _DDP_FLAGS) for module in modules]
        default = torch.nn.Module.get_extra_state
        self._with_extra = [
            [(n, part) for n, part in enumerate(parts) if type(part).get_extra_state is not default]
            for parts in self._parts
        ]

    @property
    def variables(self) -> frozenset[str]:
        """The names of the script's global variables that are kept."""
        return frozenset[str]().union(*(t.names for t in self._stateful.values() if isinstance(t, GlobalVariables)))

    @property
    def objects(self) -> list[Any]:
        """The further objects that are guarded."""
        return list(self._stateful.values())

    def keep(self, name: str, thing: Any) -> None:
        """Guard a further object.

        Raises:
            UsageError: If its state cannot be kept.
        """
        serialization.pack(_get_state(thing), f"{name}.state_dict()")
        self._stateful[name] = thing
        self._ask[name] = _asked(thing)

    def capture(self) -> dict[str, bytes]:
        """Pack hyperparameters, non-tensor optimizer state, modes of modules, and the state_dict() of every further object.

        In most steps most of it is unchanged: one comparison each detects that, and the last bytes are returned again.
        """
        state: dict[str, bytes] = {}
        for i, optimizer in enumerate(self._optimizers):
            name, groups = f"optimizer.{i}", optimizer.param_groups
            last = self._packed.get(name)
            if self.loose or last is None or groups != last[0]:
                last = self._of_optimizer(i)
            state[name] = last[1]
        for i, parts in enumerate(self._parts):
            name, seen = f"module.{i}", (bytes(map(_training, parts)), self._learning[i])
            last = self._packed.get(name)
            if last is None or seen != last[0] or self._with_extra[i]:
                last = self._packed[name] = seen, serialization.pack([*seen, self._extra(i)], f"model {i}")
            state[name] = last[1]
            if self._is_ddp[i]:
                name, flags = f"ddp.{i}", _ddp_flags(self._modules[i])
                last = self._packed.get(name)
                if last is None or flags != last[0]:
                    packed = serialization.pack(dict(zip(_DDP_FLAGS, flags, strict=True)), "DDP")
                    last = self._packed[name] = flags, packed
                state[name] = last[1]
        for name, ask in self._ask.items():
            value = ask()
            try:
                plain = marshal.dumps(value, 2)
            except ValueError:  # it holds tensors, arrays or objects
                state[name] = serialization.pack(value, f"{name}.state_dict()")
                continue
            last = self._packed.get(name)
            if last is None or last[0] != plain:
                last = self._packed[name] = plain, serialization.pack(value, f"{name}.state_dict()")
            state[name] = last[1]
        return state

    def _of_optimizer(self, i: int) -> tuple[Any, bytes]:
        """Return an optimizer's groups, for comparison in later steps, and their bytes; None for groups that can change unnoticed."""
        optimizer, name = self._optimizers[i], f"optimizer.{i}"
        packed = serialization.pack([_groups(optimizer), self._loose_state(optimizer)], f"optimizer {i}")
        fixed = all(_is_fixed(v) for group in optimizer.param_groups for k, v in group.items() if k != "params")
        self._packed[name] = [dict(group) for group in optimizer.param_groups] if fixed else None, packed
        return self._packed[name]

    def look_again(self) -> None:
        """Look again which parameters learn, which `capture` does not."""
        self._learning = [bytes(map(_learns, params)) for params in self._params_of_module]

    def is_alike(self, key: str) -> bool:
        """Does an update change this piece of `capture`'s result in the same way on every replica, whatever the script is?"""
        kind, _, number = key.partition(".")
        if kind in ("optimizer", "ddp") and number:
            return True
        if kind == "module" and number:
            return not self._with_extra[int(number)]
        thing = self._stateful.get(key)  # a replacement's script may give it later, by job.state
        by_metric = isinstance(thing, torch.optim.lr_scheduler.ReduceLROnPlateau)  # its metric may differ by rank
        return isinstance(thing, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler) and not by_metric

    def hyperparameters(self) -> Iterator[bytes]:
        """Yield each optimizer's hyperparameters, packed; they are equal on replicas."""
        for i, optimizer in enumerate(self._optimizers):
            yield serialization.pack(_groups(optimizer), f"optimizer {i}")

    def apply(self, packed: dict[str, bytes], in_call: bool = False) -> None:
        """Put back a result of `capture`. `in_call`: do not touch an object that holds its state already.

        The script may be about to use it, as in `found.values.append(job.call(evaluate))`: Python looked the list up before the call.
        """
        state = {name: serialization.decode(data) for name, data in packed.items() if not name.startswith(PREFIX)}
        for i, optimizer in enumerate(self._optimizers):
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
            params = list(params_of(optimizer))
            for index, values in loose.items():
                self.loose = True
                optimizer.state[params[index]].update(values)
        for i, module in enumerate(self._modules):
            self._set_module_state(i, state[f"module.{i}"])
            for name, value in state.get(f"ddp.{i}", {}).items():
                setattr(module, name, value)
        for name, thing in self._stateful.items():
            if not (in_call and serialization.pack(_get_state(thing), name) == packed[name]):
                _set_state(thing, state[name])

    def _extra(self, i: int) -> dict[str, Any]:
        """Return the extra state of modules that define `get_extra_state`."""
        return {str(n): part.get_extra_state() for n, part in self._with_extra[i]} if self._with_extra[i] else {}

    def _set_module_state(self, i: int, saved: list[Any]) -> None:
        modes, learning, extra = saved
        for module, training in zip(self._parts[i], modes, strict=True):
            module.training = bool(training)
        for param, learns in zip(self._params_of_module[i], learning, strict=True):
            param.requires_grad_(bool(learns))
        self._learning[i] = learning
        for n, part in self._with_extra[i]:
            part.set_extra_state(extra[str(n)])

    def _loose_state(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        loose: dict[int, dict[str, Any]] = {}
        if not self.loose:
            return loose
        for index, param in enumerate(params_of(optimizer)):
            values = {k: v for k, v in optimizer.state.get(param, {}).items() if not isinstance(v, torch.Tensor)}
            if values:
                loose[index] = values
        return loose


def _is_fixed(value: Any) -> bool:
    """Is it immutable, so that an equal value has the same content?"""
    kinds = {type(one) for one in value} if type(value) is tuple else {type(value)}
    return kinds <= _FIXED


def params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield an optimizer's parameters, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _asked(thing: Any) -> Callable[[], Any]:
    """Return the function that returns an object's state."""
    ask: Callable[[], Any] = thing.get_state if isinstance(thing, torch.Generator) else thing.state_dict
    return ask


def _get_state(thing: Any) -> Any:
    return _asked(thing)()


def _set_state(thing: Any, state: Any) -> None:
    if isinstance(thing, torch.Generator):
        thing.set_state(state)
        return
    thing.load_state_dict(state)
    forget_unscaled(thing)
