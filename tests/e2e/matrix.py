"""Every kind of fault in every phase: what must be found, who must be blamed, what must become of the run.

The table below is what is promised. tests/e2e/test_matrix.py does it with real runs of 4 ranks and leaves what happened in
matrix.json; run as a program, this file writes the table of docs/reference/faults.md from that.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from ftrun.core.faults import Fault
from ftrun.faults.kinds import KINDS, PHASES, REPAIR_PHASES, STEP_PHASES
from ftrun.host.rundir.rundir import remove_stale
from tests import injected
from tests.e2e import harness
from tests.e2e.harness import Outcome
from tests.faults.fake_nvml import FakeNvml

RESULTS = Path(__file__).with_name("matrix.json")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"
BEGIN, END = "<!-- matrix: tests/e2e/matrix.py -->", "<!-- end of matrix -->"
ON_DEVICE = harness.SCRIPTS / "on_device.py"
ARGUMENTS = ("--steps", "24")
SLOWER = ("--steps", "28", "--stretch", "0.03")  # devices are sampled every second
LONGER = ("--steps", "60", "--stretch", "0.004")  # statistics take their time

# what becomes of the run
REPLACED = "replaced"  # the struck rank gets a new worker
REDONE = "redone"  # all ranks do the step again, nobody is replaced
UNHARMED = "unharmed"  # nothing needs to be done
ENDED = "ended"  # the run is over

# how a cell of the page's table is written: the run's end by what became of it; found and left alone; nothing found
SIGNS = {REPLACED: "=", REDONE: "=", ENDED: "end"}
REPORTED, NOTHING = "report", "none"
SEED = 1  # of every plan, see harness.script_command


@dataclass(frozen=True)
class Row:
    """What is promised for a kind, in all its phases unless `otherwise` has the phase.

    `found`: what it must be called, None = nothing is to be found. `options`: of ftrun. `together`: may its phases share a run?
    """

    kind: str
    found: Fault | None
    then: str = REPLACED
    spelled: str = ""
    options: tuple[str, ...] = ()
    otherwise: dict[str, tuple[Fault | None, str]] = field(default_factory=dict)
    together: bool = True
    blames_others: bool = False  # its peers fail with it, so they may be named too
    arguments: tuple[str, ...] = ARGUMENTS  # of the script
    first: int = 4  # step of the first cell
    gpus: int = 0  # devices of a simulated driver, 0 = none

    @property
    def phases(self) -> tuple[str, ...]:
        return KINDS[self.kind].phases

    def expect(self, phase: str) -> tuple[Fault | None, str]:
        return self.otherwise.get(phase, (self.found, self.then))


_STILL = ("--hang-timeout", "1", "--stop-timeout", "2", "--recover-timeout", "3")
ROWS = (
    Row("kill", Fault.SIGNAL),
    Row("term", Fault.SIGNAL),
    Row("segv", Fault.SIGNAL),
    Row("abort", Fault.SIGNAL),
    Row("exit", Fault.EXIT, spelled="exit:3"),
    Row(
        "exception", Fault.EXCEPTION, REDONE, together=False,
        # after the update the rest of the body would never be done: the run ends, as under torchrun
        otherwise={**dict.fromkeys(("idle", *REPAIR_PHASES), (Fault.EXCEPTION, REPLACED)), "update": (Fault.EXCEPTION, ENDED)},
    ),
    Row("oom", Fault.OOM),
    Row("freeze", Fault.FROZEN),
    Row("hang", Fault.HANG, options=_STILL),
    # a repair has deadlines of its own, which do not ask what a rank that misses them is busy with
    Row("gil", Fault.GIL, options=_STILL, otherwise=dict.fromkeys(REPAIR_PHASES, (Fault.HANG, REPLACED))),
    Row(
        "slow", Fault.STRAGGLER, UNHARMED, spelled="slow:8", together=False, arguments=LONGER,
    ),
    Row("nan", Fault.NONFINITE, REDONE),
    Row("bitflip", Fault.CORRUPT, options=("--check-every", "1")),
    # a repair drops all connections itself before it makes new ones
    Row(
        "comm", Fault.LINK, REDONE, blames_others=True, otherwise=dict.fromkeys(("stop", "reset"), (None, UNHARMED))
    ),
    Row("xid", Fault.XID, spelled="xid:48", arguments=SLOWER, first=8, gpus=10),
    Row("gpu-lost", Fault.GPU_LOST, arguments=SLOWER, first=8, gpus=10),
    Row("ecc", Fault.ECC, arguments=SLOWER, first=8, gpus=10),
    Row("launcher-kill", None, ENDED, together=False),
    Row("node-kill", None, ENDED, together=False),
)  # fmt: skip
BY_KIND = {row.kind: row for row in ROWS}


@dataclass(frozen=True)
class Cell:
    """One kind in one phase: it strikes `rank` in `step`; in a phase of a repair, which `helper`'s death starts."""

    kind: str
    phase: str
    rank: int
    step: int
    helper: int | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Where it may strike: when the helper dies, a rank may not have begun the helper's step."""
        return (self.step,) if self.helper is None else (self.step - 1, self.step)

    def plan(self) -> str:
        row = BY_KIND[self.kind]
        entry = "".join(harness.fault(row.spelled or row.kind, self.rank, self.phase, step) for step in self.steps)
        return entry if self.helper is None else entry + harness.kill(self.helper, "backward", self.step)


@dataclass(frozen=True)
class Batch:
    """Cells of one kind that share a run."""

    kind: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}-{'-'.join(cell.phase for cell in self.cells)}"


def cells(kind: str) -> Iterator[Cell]:
    """Every possible cell of a kind, some steps apart, each rank's turn in order."""
    for number, phase in enumerate(BY_KIND[kind].phases):
        helper = (number + 1) % 4 if phase in REPAIR_PHASES else None
        offset = 3 * number if helper is None else 5 * REPAIR_PHASES.index(phase)
        yield Cell(kind, phase, number % 4, BY_KIND[kind].first + offset, helper)


def batches() -> list[Batch]:
    """Every cell that can be run, in as few runs as is sound: phases of a step in one, those of a repair in another."""
    found = []
    for row in ROWS:
        every = list(cells(row.kind))
        if not row.together:
            found += [Batch(row.kind, (cell,)) for cell in every]
            continue
        for phases in (STEP_PHASES, REPAIR_PHASES):
            chosen = tuple(cell for cell in every if cell.phase in phases)
            if chosen:
                found.append(Batch(row.kind, chosen))
    return found


def run(folder: Path, batch: Batch) -> Outcome:
    """One real run with the batch's faults."""
    options = ["--max-replacements", "50", "--nonfinite", "redo", *BY_KIND[batch.kind].options]
    plan = [cell.plan() for cell in batch.cells]
    row = BY_KIND[batch.kind]
    command = harness.ftrun_command(folder, row.arguments, plan, spares=1, options=options)
    env = None
    if row.gpus:
        env = {**FakeNvml(folder, row.gpus).env, **injected.env(without="simulation")}
        at = command.index(str(harness.REFERENCE))
        command[at:at] = [str(ON_DEVICE)]
    outcome = harness.finish(harness.start(folder, command, env), timeout=120)
    for left in (folder / "runs").glob("*/journal.jsonl"):
        # a node that lost its power leaves everything as it was, until the next run of this user comes
        outcome.journal = [json.loads(line) for line in left.read_text().splitlines()]
        _await(lambda: not harness.strays(folder))
        remove_stale(folder / "runs")
    if row.gpus:
        simulated = [note for note in outcome.notes("device-event") if note.get("simulated")]
        assert not simulated, f"the fault never reached the driver: {simulated}"
    return outcome


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


# ---- what happened -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What the journal says of one failure. `rank` None: of no rank."""

    fault: str
    rank: int | None
    t: float
    what: str
    evidence: str


def findings(outcome: Outcome) -> list[Found]:
    """Every failure that was detected, in order, with the rank that was blamed for it."""
    holder: dict[int, int] = {}  # cell -> rank
    expired: set[int] = set()  # cells that were condemned by a deadline: their death follows
    found = []
    event: dict[str, Any] = {}
    for line in outcome.journal:
        event = line.get("event", event)  # the line after it says what was ordered
        kind = event.get("kind")
        if "event" in line and kind in ("Died", "Raised", "Unconnected", "Noticed", "Stuck", "DeviceFault"):
            rank = holder.get(event.get("worker", -1))
            if kind == "DeviceFault":
                found += [
                    Found(_named(event), holder[cell], event["t"], kind, "")
                    for cell in event["workers"]
                    if cell in holder
                ]
            elif (rank is not None or kind == "Stuck") and event.get("worker") not in expired:
                found.append(Found(_named(event), rank, event["t"], kind, event.get("evidence", "")))
        for action in line.get("actions", ()):
            if kind in ("Expired", "Stalled") and action["kind"] == "Say" and action["what"] == "died":
                # the deadline of a stage of the repair: what has not got there in time hangs
                found.append(Found(Fault.HANG.value, action["rank"], event["t"], "Died", action["detail"]))
                expired.add(action["worker"])
            if action["kind"] == "Publish":
                holder.update({cell: rank for rank, cell in enumerate(action["workers"])})
            elif action["kind"] == "End":
                return found  # who dies from here on is ended by us
    return found


def _named(event: dict[str, Any]) -> str:
    """The name of the fault, as the event says it."""
    return str(event.get("fault", ""))


@dataclass
class Result:
    """What came of a cell. `wrong`: why it is not as promised, "" when it is."""

    kind: str
    phase: str
    found: str = ""
    then: str = ""
    exact: bool | None = None
    wrong: str = ""
    commit: str = field(default_factory=lambda: _commit())
    seed: int = SEED


@functools.cache
def _commit() -> str:
    """The commit of this checkout; one with changes has a "+"."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def struck_twice(batch: Batch, outcome: Outcome) -> bool:
    """Did a fault that was planned for one of two steps strike in both?"""
    firings = [(f["rank"], f["phase"], f["step"]) for f in (note["fired"] for note in outcome.notes("fault"))]
    return any(all((cell.rank, cell.phase, step) in firings for step in cell.steps) for cell in batch.cells if len(cell.steps) > 1)


def judge(batch: Batch, outcome: Outcome, clean: Outcome | None) -> list[Result]:
    """Compare what happened with what is promised; `clean` is the uninterrupted run (None: the run is to end)."""
    row = BY_KIND[batch.kind]
    firings = [note["fired"] for note in outcome.notes("fault")]
    seen = findings(outcome)
    exact = None
    trouble = ""
    if clean is not None:
        try:
            different = harness.differences(clean, outcome)
            exact = not different
            trouble = different[0] if different else ""
        except AssertionError as error:
            trouble = str(error).splitlines()[0]
    results = []
    for cell in batch.cells:
        wanted, then = row.expect(cell.phase)
        result = Result(cell.kind, cell.phase, exact=exact)
        results.append(result)
        fired = [
            f for f in firings
            if (f["kind"], f["rank"], f["phase"]) == (cell.kind, cell.rank, cell.phase) and f["step"] in cell.steps
        ]  # fmt: skip
        if not fired:
            result.wrong = "did not fire"
            continue
        later = [f["t"] for f in firings if f["step"] > cell.step]  # of the next cells
        mine = [f for f in seen if fired[0]["t"] <= f.t < min(later, default=float("inf"))]
        named = [f for f in mine if f.rank == cell.rank or (row.blames_others and f.what != "Died")]
        result.found = (named or [f for f in mine if f.rank is None] or [Found("", None, 0.0, "", "")])[0].fault
        result.then = _became(outcome, mine, named)
        result.wrong = _wrong(outcome, result, wanted, then, trouble)
    strangers = _innocent(batch, firings, seen)
    if strangers and not row.blames_others:
        results[-1].wrong = results[-1].wrong or f"blamed without a fault: {strangers}"
    return results


def _became(outcome: Outcome, mine: list[Found], named: list[Found]) -> str:
    if outcome.code:
        return ENDED
    if any(f.what in ("Died", "DeviceFault") for f in named):
        return REPLACED
    redone = any(f.what in ("Raised", "Unconnected") for f in named) or any(f.what == "Stuck" for f in mine)
    return REDONE if redone else UNHARMED


def _wrong(outcome: Outcome, result: Result, wanted: Fault | None, then: str, trouble: str) -> str:
    if result.then != then:
        return f"{result.then}, not {then} (exit code {outcome.code})"
    if result.found != (wanted.value if wanted else ""):
        return f"found as {result.found or 'nothing'}, not {wanted.value if wanted else 'nothing'}"
    return "" if then == ENDED else trouble


def _innocent(batch: Batch, firings: list[dict[str, Any]], seen: list[Found]) -> list[str]:
    """Ranks that were blamed for more failures than they had."""
    struck: dict[int, int] = {}
    for firing in firings:
        struck[firing["rank"]] = struck.get(firing["rank"], 0) + 1
    blamed: dict[int, int] = {}
    for found in seen:
        if found.rank is not None and found.what not in ("Noticed", "DeviceFault"):
            blamed[found.rank] = blamed.get(found.rank, 0) + 1
    return [f"rank {rank}, {n} times" for rank, n in sorted(blamed.items()) if n > struck.get(rank, 0)]


# ---- the table ---------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, one row a kind, from what the runs left."""
    by_cell = {(r["kind"], r["phase"]): r for r in results}
    lines = [f"| fault | found as | {' | '.join(PHASES)} |", "|---|---|" + "---|" * len(PHASES)]
    for row in ROWS:
        marks = [_mark(row, phase, by_cell.get((row.kind, phase))) for phase in PHASES]
        simulated = " (simulated driver)" if row.gpus else ""
        names = sorted({by_cell[row.kind, p]["found"] for p in PHASES if (row.kind, p) in by_cell} - {""})
        lines.append(f"| `{row.spelled or row.kind}`{simulated} | {', '.join(names) or '–'} | {' | '.join(marks)} |")
    commits = sorted({r["commit"] for r in results})
    seeds = sorted({r["seed"] for r in results})
    lines += ["", f"<sub>{len(results)} cells, commit {', '.join(commits)}, seed {', '.join(map(str, seeds))}</sub>"]
    return "\n".join(lines)


def _mark(row: Row, phase: str, result: dict[str, Any] | None) -> str:
    if phase not in row.phases:
        return ""
    if result is None:
        return "not run"
    if result["wrong"]:
        return "**no**"
    if result["then"] == UNHARMED:
        return REPORTED if result["found"] else NOTHING
    return SIGNS[result["then"]]


def load() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def save(results: list[Result]) -> None:
    """Put these results beside those of cells that were not run now, in the table's order."""
    with FileLock(RESULTS.with_suffix(".lock")):
        kept = {(r["kind"], r["phase"]): r for r in (load() if RESULTS.exists() else [])}
        kept |= {(r.kind, r.phase): vars(r) for r in results}
        order = [(row.kind, phase) for row in ROWS for phase in row.phases]
        lines = [json.dumps(kept[key]) for key in order if key in kept]
        RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def with_table(text: str) -> str:
    """The page with the table of the results that are there."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(load())}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    bad = [r for r in load() if r["wrong"]]
    for result in bad:
        print(f"{result['kind']} in {result['phase']}: {result['wrong']}", file=sys.stderr)
    print(f"{len(load())} cells, {len(bad)} not as promised; the table in {PAGE.name} is up to date")
