"""Random faults from a seed: which fault strikes in which step is a function of (rate, seed, step, world size) alone.

So a run with the same seed meets the same faults, whatever its timing; a step that is done again meets none twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ftrun.faults.kinds import KINDS
from ftrun.faults.plan import InjectedFault

RANDOM = "random"  # Fault.source
# what a rank is replaced for, or does a step again for, without anything being lost
MIXTURE = ("kill", "segv", "abort", "exception", "freeze")


@dataclass(frozen=True)
class Dice:
    """`rate`: how likely a step has a fault, 0 to 1. `kind` "" = drawn from MIXTURE. `first`: the first step with any."""

    rate: float
    seed: int
    world_size: int
    kind: str = ""
    argument: float | None = None
    first: int = 0

    def draw(self, step: int) -> InjectedFault | None:
        """The fault of `step`, if it has one."""
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
    """Raises ValueError for a rate that is no probability, or a negative seed."""
    if not 0 <= rate <= 1:
        raise ValueError(f"RATE is how likely a step has a fault, 0 to 1 (0.02: one step in 50), not {rate:g}")
    if seed < 0:
        raise ValueError(f"the seed must not be negative, not {seed}")
