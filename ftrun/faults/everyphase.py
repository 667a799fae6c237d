"""Plans that kill a rank in every phase of a step, spread over a run whose steps are known. Makes text, fires nothing."""

from __future__ import annotations

from dataclasses import dataclass

IN_A_STEP = ("idle", "forward", "backward", "gate", "update")
IN_A_RECOVERY = ("stop", "reset", "restore")
# half an update is made good from another rank's memory, and a recovery begins with another rank's death
NEED_ANOTHER = ("update", *IN_A_RECOVERY)


@dataclass(frozen=True)
class Kill:
    """Rank `rank` is killed in phase `at` of step `step`."""

    at: str
    rank: int
    step: int


def plans(steps: list[int], ranks: int) -> list[list[Kill]]:
    """Kills for each run: one a step and phase, from the first step to the last; several runs when there are few steps."""
    phases = [phase for phase in IN_A_STEP + IN_A_RECOVERY if ranks > 1 or phase not in NEED_ANOTHER]
    runs = []
    for begin in range(0, len(phases), len(steps)):
        part = phases[begin : begin + len(steps)]
        kills: list[Kill] = []
        for i, at in enumerate(part):
            step = steps[i * (len(steps) - 1) // max(len(part) - 1, 1)]
            rank = (begin + i) % ranks
            if at in IN_A_RECOVERY:
                kills.append(Kill("backward", (rank + 1) % ranks, step))
            kills.append(Kill(at, rank, step))
        runs.append(kills)
    return runs


def as_toml(kills: list[Kill]) -> str:
    entries = (f'\n[[fault]]\nkind = "kill"\nrank = {k.rank}\nstep = {k.step}\nat = "{k.at}"\n' for k in kills)
    return "seed = 1\n" + "".join(entries)
