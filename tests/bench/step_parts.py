"""Where the time of a step goes in ftrun's code: `python tests/bench/cost.py --parts`.

A profile of one rank that trains a few and many tiny tensors (scripts/parts.py says how it is made). A module's time is its own,
with what it calls outside ftrun; a function's is with all that it calls.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.bench import runs, tables
from tests.e2e import harness

TENSORS = (8, 200)
STEPS = 300  # without the profile, and again with it
WARM = 1000
SHOWN = 0.02  # a function with less than this share of the whole is left out


@dataclass
class Parts:
    """Microseconds a step: of modules, and of functions. `calls`: a step, of both. `step`: a whole one, without the profile."""

    step: float
    modules: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    functions: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[str | tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    @property
    def all(self) -> float:
        return sum(self.modules.values())


def read(rows: Sequence[tuple[str, str, float, float, int]], steps: int, step: float) -> Parts:
    """What a profile of `steps` steps wrote."""
    parts = Parts(step)
    for module, function, own, whole, calls in rows:
        parts.modules[module] += own / steps / 1e3
        parts.functions[module, function] = whole / steps / 1e3
        parts.calls[module] += calls / steps
        parts.calls[module, function] = calls / steps
    return parts


def one(tensors: int, folder: Path) -> Parts:
    """A run of its own."""
    (folder / "out").mkdir(parents=True)
    words = ["--system", "ftrun", "--tensors", str(tensors), "--steps", str(WARM + 2 * STEPS), "--profile", str(STEPS)]
    command = runs.command("ftrun", folder, "many_tensors.py", words, 1, 0)
    outcome = harness.finish(harness.start(folder, command), ranks=0, timeout=300)
    assert outcome.code == 0, outcome.tail()
    plain = [done for done in runs.read_times(folder, 0) if WARM <= done.step < WARM + STEPS]
    step = statistics.median((b.ns - a.ns) / 1e3 for a, b in pairwise(plain))
    return read(json.loads((folder / "out" / "parts.json").read_text()), STEPS, step)


def table(found: Mapping[int, Sequence[Parts]]) -> list[list[str]]:
    """Modules by what they cost with many tensors, each followed by its dear functions; medians of runs."""
    few, many = found.values()
    whole = statistics.median(parts.all for parts in many)

    def of(runs_of: Sequence[Parts], key: str | tuple[str, str]) -> tuple[float, float]:
        kinds = [parts.modules if isinstance(key, str) else parts.functions for parts in runs_of]
        return (
            statistics.median(kind.get(key, 0.0) for kind in kinds),  # type: ignore[call-overload]
            statistics.median(parts.calls.get(key, 0.0) for parts in runs_of),
        )

    def line(name: str, key: str | tuple[str, str]) -> list[str]:
        less, more = of(few, key), of(many, key)
        return [name, *(f"{value:.1f}" for value in (*less, *more)), each(less[0], more[0])]

    def each(less: float, more: float) -> str:
        return f"{(more - less) / (TENSORS[1] - TENSORS[0]):.2f}"

    lines = []
    for module in sorted(many[0].modules, key=lambda module: -of(many, module)[0]):
        if of(many, module)[0] >= SHOWN / 4 * whole:
            lines.append(line(f"**`{module}`**", module))
        names = [key for key in many[0].functions if key[0] == module and of(many, key)[0] >= SHOWN * whole]
        for key in sorted(names, key=lambda key: -of(many, key)[0]):
            lines.append(line(f"`{key[1]}`", key))
    for name, values in (
        ("all of ftrun's code", [[parts.all for parts in runs_of] for runs_of in (few, many)]),
        ("a whole step, without the profile", [[parts.step for parts in runs_of] for runs_of in (few, many)]),
    ):
        cells = [tables.figure(values[0], "µs"), "", tables.figure(values[1], "µs"), ""]
        lines.append([name, *cells, each(*map(statistics.median, values))])
    return lines


def measure(rounds: int, root: Path, results: Path | None) -> None:
    """Print the table, and write it where `results` is given."""
    found: dict[int, list[Parts]] = {tensors: [] for tensors in TENSORS}
    for number in range(rounds):
        for tensors, parts in found.items():
            parts.append(one(tensors, root / f"parts-{tensors}-{number}"))
            print(f"  {tensors} tensors, round {number}: {parts[-1].all:.0f} µs of {parts[-1].step:.0f} µs", flush=True)
    head = ["part", *(words for tensors in TENSORS for words in (f"{tensors} tensors, µs", "calls")), "a tensor, µs"]
    notes = (
        f"One rank under ftrun, {STEPS} steps with a profile after as many without, and {WARM} warm ones; each step's share, medians of "
        f"{rounds} runs. Bold: a module's own time, with what it calls outside ftrun (a collective and its wait among them), so "
        f"these add up. Below it, functions of the module with all that they call, from {SHOWN:.0%} of the whole on."
    )
    tables.write(results, "step_parts", "Where a step's time goes in ftrun", head, table(found), notes)
