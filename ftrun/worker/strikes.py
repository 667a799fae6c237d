"""Injected faults that need more than a process to strike: wrong numbers, and connections that drop.

Only what a worker knows of itself stands here; when and whether they strike is decided by ftrun.faults.trigger.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftrun.core.paths import ENV_FAULT_PLAN, ENV_RANDOM_FAULTS
from ftrun.faults.dice import Dice
from ftrun.faults.plan import load_plan
from ftrun.faults.trigger import CannotStrike, Trigger

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine

Prepared = tuple[str, Callable[[], None]]


def trigger_of(engine: Engine) -> Trigger:
    """The trigger of this worker's rank, with the plan and the chance that its run was started with, if any."""
    context = engine.context
    path = os.environ.get(ENV_FAULT_PLAN)
    chance = os.environ.get(ENV_RANDOM_FAULTS)
    dice = None
    if chance:
        rate, _, seed = chance.partition(":")
        dice = Dice(float(rate), int(seed), int(os.environ["WORLD_SIZE"]))
    own = {"nan": _Nan(engine).prepare, "bitflip": _Bitflip(engine).prepare, "comm": _Comm(engine).prepare}
    plan = load_plan(Path(path)) if path else None
    return Trigger(plan, context.rank, context.run_dir, context.board, own, dice)


class _Nan:
    """One value of what this rank computes is NaN: of the model's output (so of the loss), or of one gradient."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, phase: str, seed: int) -> Prepared:
        if phase == "forward":
            return "model output", self._in_output
        named = [(name, p) for name, p, _ in self._engine.state.params if p.requires_grad and p.numel()]
        if not named:
            raise CannotStrike("no parameter has a gradient")
        name, param = random.Random(seed).choice(named)
        return f"gradient of {name.removeprefix('param.')}", lambda: self._in_gradient(param)

    def _in_output(self) -> None:
        module = self._engine.state.modules[0]

        def poison(_module: Any, _inputs: Any, output: Any) -> None:
            hook.remove()
            for value in _tensors(output):
                value.data[(0,) * value.dim()] = math.nan  # past autograd, as a broken device would
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
    """Floating-point tensors in a model's output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


class _Bitflip:
    """One bit of one parameter, where it lies in the arena."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, phase: str, seed: int) -> Prepared:
        state = self._engine.state
        named = [(n, p) for n, p, private in state.params if p.numel() and p.is_contiguous() and not private]
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
    """The connections of every group of this rank are shut down, as by a link or a switch that fails."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, phase: str, seed: int) -> Prepared:
        inner = [group.inner for group in self._engine.registry.groups if group.inner is not None]
        if not inner:
            raise CannotStrike("this rank has no connections now")

        def drop() -> None:
            for group in inner:
                group.abort()

        return f"connections of {len(inner)} group{'' if len(inner) == 1 else 's'}", drop
