"""Makes plans that kill a rank in every phase of a step and of a recovery, spread over the steps of a run. It fires nothing."""

from __future__ import annotations

from dataclasses import dataclass

IN_A_STEP = ("idle", "forward", "backward", "gate", "update")
IN_A_RECOVERY = ("stop", "reset", "restore")
# half an update is repaired from another rank's memory, and a recovery begins with another rank's death
NEED_ANOTHER = ("update", *IN_A_RECOVERY)


@dataclass(frozen=True)
class Kill:
    """A kill of rank `rank` in phase `at` of step `step`."""

    at: str
    rank: int
    step: int


def plans(steps: list[int], ranks: int) -> list[list[Kill]]:
    """Return the kills of each run: one for each phase, spread from the first step to the last.

    A kill in a recovery comes with one in the same step's backward pass, which causes the recovery. With fewer steps than phases
    there are several runs, of one phase per step.
    """
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


def missed(kills: list[Kill], unfired: tuple[str, ...]) -> list[Kill]:
    """Return the kills of a plan to try again. `unfired`: the faults that the run reported as not fired.

    A rank may still finish the previous step while another one dies in this step's backward pass; its kill in the recovery
    is bound to this step and does not fire then.
    """
    again: list[Kill] = []
    for first, kill in zip([None, *kills], kills, strict=False):
        if any(f"on rank {kill.rank} in {kill.at} of step {kill.step}" in fault for fault in unfired):
            if kill.at in IN_A_RECOVERY and first is not None and first not in again:
                again.append(first)
            again.append(kill)
    return again


def as_toml(kills: list[Kill]) -> str:
    entries = (f'\n[[fault]]\nkind = "kill"\nrank = {k.rank}\nstep = {k.step}\nat = "{k.at}"\n' for k in kills)
    return "seed = 1\n" + "".join(entries)
