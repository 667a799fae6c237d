"""Inject the faults that need a worker's own objects to strike: wrong numbers, and connections that drop.

ftrun.faults.trigger decides whether and when they strike. Each event of the loop is one of the phases of a plan.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftrun.core.paths import ENV_FAULT_PLAN, ENV_RANDOM_FAULTS
from ftrun.faults.dice import Dice
from ftrun.faults.plan import load_plan
from ftrun.faults.trigger import CannotStrike, Trigger, unfelt
from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.position import Where
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.step.finite_gradients import first_bad
from ftrun.worker.torch_compat.sharded_private import local_of

_IN_A_STEP = ("body_started", "forward_started", "backward_started", "gate_reached", "arrived", "update_started")

Prepared = tuple[str, Callable[[], None]]


class FaultEffects(StepObserver):
    """Lets the faults of this rank strike, by the plan and the chance with which a person started the run, if any."""

    def __init__(self, registry: Registry, state: ProtectedState) -> None:
        context = registry.context
        path = os.environ.get(ENV_FAULT_PLAN)
        chance = os.environ.get(ENV_RANDOM_FAULTS)
        dice = None
        if chance:
            rate, _, seed = chance.partition(":")
            dice = Dice(float(rate), int(seed), int(os.environ["WORLD_SIZE"]))
        self._nan = _Nan(state)
        own = {"nan": self._nan.prepare, "bitflip": _Bitflip(state).prepare, "comm": _Comm(registry).prepare}
        plan = load_plan(Path(path)) if path else None
        self._run_dir = context.run_dir
        self._position = context.position
        self._board, self._cell = context.board, context.cell
        self._trigger = Trigger(plan, context.rank, context.run_dir, context.board, own, dice)
        self._listens = False  # to the phases of a step; only a plan or a request needs them

    def _strike(self, phase: str, number: int) -> None:
        trigger = self._trigger
        if trigger.armed or self._board.requests() != trigger.seen:
            trigger.fire(phase, self._position.index_of(number), self._position.attempt, self._cell.epoch)

    def handed_out(self, number: int) -> None:
        wanted = self._trigger.armed or self._board.requests() != self._trigger.seen
        if wanted is not self._listens:
            self._listens = wanted
            change = self.told_by.listen if wanted else self.told_by.ignore
            for event in _IN_A_STEP:
                change(event, self)
        if wanted and self._position.where is Where.HANDED_OUT:
            self._strike("idle", number)

    def forward_started(self) -> None:
        self._strike("forward", self._position.number)

    def backward_started(self) -> None:
        self._strike("backward", self._position.number)

    def gate_reached(self, number: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        if not self._nan.in_output:
            return
        self._nan.in_output = False
        if optimizer is not None and first_bad([("", grad) for grad in grads if grad is not None]) is None:
            unfelt(self._run_dir, self._position.index_of(number), self._position.attempt)
            self._board.launcher_bell.ring()

    def body_started(self) -> None:
        self._nan.in_output = False

    def arrived(self, number: int) -> None:
        self._strike("gate", number)

    def update_started(self, number: int) -> None:
        self._strike("update", number)

    def stage(self, name: str, number: int) -> None:
        self._strike(name, number)


class _Nan:
    """Makes one value that this rank computes NaN: of the model's output (so of the loss), or of one gradient."""

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self.in_output = False  # a value of the output was made NaN in this body

    def prepare(self, phase: str, seed: int) -> Prepared:
        if phase == "forward":
            return "model output", self._in_output
        named = [(name, p) for name, p, _ in self._state.params if p.requires_grad and p.numel()]
        if not named:
            raise CannotStrike("no parameter has a gradient")
        name, param = random.Random(seed).choice(named)
        return f"gradient of {name.removeprefix('param.')}", lambda: self._in_gradient(param)

    def _in_output(self) -> None:
        module = self._state.modules[0]

        def poison(_module: Any, _inputs: Any, output: Any) -> None:
            hook.remove()
            for value in _tensors(output):
                value.data[(0,) * value.dim()] = math.nan  # past autograd, as a broken device would
                self.in_output = True
                return

        hook = module.register_forward_hook(poison)

    def _in_gradient(self, param: torch.nn.Parameter) -> None:
        def poison(grad: torch.Tensor) -> torch.Tensor:
            hook.remove()
            bad = grad.clone()
            bad[(0,) * bad.dim()] = math.nan
            return bad

        hook = param.register_hook(poison)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a model's output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


class _Bitflip:
    """Flips one bit of one parameter in the arena."""

    def __init__(self, state: ProtectedState) -> None:
        self._state = state

    def prepare(self, phase: str, seed: int) -> Prepared:
        state = self._state
        kept = [(n, local_of(p)) for n, p, private in state.params if not private]
        named = [(n, p) for n, p in kept if p.numel() and p.is_contiguous()]
        if not state.laid_out or not named:
            raise CannotStrike("no parameter lies in the arena yet")
        dice = random.Random(seed)
        name, param = dice.choice(named)
        data = param.detach().view(-1).view(torch.uint8)
        place, bit = dice.randrange(data.numel()), dice.randrange(8)
        element, byte = divmod(place, param.element_size())

        def flip() -> None:
            with torch.no_grad():
                data[place] ^= 1 << bit

        return f"bit {8 * byte + bit} of element {element} of {name.removeprefix('param.')}", flip


class _Comm:
    """Shuts down the connections of every group of this rank, as a failing link or switch does."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def prepare(self, phase: str, seed: int) -> Prepared:
        inner = [group.inner for group in self._registry.groups if group.inner is not None]
        if not inner:
            raise CannotStrike("this rank has no connections now")

        def drop() -> None:
            for group in inner:
                group.cut()

        return f"connections of {len(inner)} group{'' if len(inner) == 1 else 's'}", drop
