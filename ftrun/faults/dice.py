"""Draws random faults from a seed: the fault of a step is a function of the fields of `Dice` and the step alone.

So a run with the same seed gets the same faults, whatever its timing. No fault strikes a redone step a second time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ftrun.faults.kinds import KINDS
from ftrun.faults.plan import InjectedFault

RANDOM = "random"  # InjectedFault.source, before its seed
# kinds after which ftrun replaces the rank or redoes the step, and nothing is lost
MIXTURE = ("kill", "segv", "abort", "exception", "freeze")


@dataclass(frozen=True)
class Dice:
    """A source of random faults. `rate`: probability of a fault per step; `kind` "" = drawn from MIXTURE; `first`: no fault before it."""

    rate: float
    seed: int
    world_size: int
    kind: str = ""
    argument: float | None = None
    first: int = 0

    def draw(self, step: int) -> InjectedFault | None:
        """Return the fault of `step`, None if it has none."""
        if step < self.first:
            return None
        dice = random.Random(f"ftrun {self.seed} {step}")
        if dice.random() >= self.rate:
            return None
        rank = dice.randrange(self.world_size)
        kind = KINDS[self.kind or dice.choice(MIXTURE)]
        at = dice.choice(kind.anywhere)
        return InjectedFault(
            index=step,
            kind=kind.name,
            argument=self.argument,
            rank=rank,
            step=step,
            at=at,
            times=1,
            line=0,
            source=f"{RANDOM}-{self.seed}",
        )


def check(rate: float, seed: int) -> None:
    """Raise ValueError for a rate that is no probability, or a negative seed."""
    if not 0 <= rate <= 1:
        raise ValueError(f"RATE is how likely a step has a fault, 0 to 1 (0.02: one step in 50), not {rate:g}")
    if seed < 0:
        raise ValueError(f"the seed must not be negative, not {seed}")
