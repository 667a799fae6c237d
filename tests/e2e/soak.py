"""Signals at random moments on four programs, a long run whose repairs may cost nothing for good, and Ctrl-C at random moments.

    python tests/e2e/soak.py [--signals 300] [--repairs 100] [--interrupts 20] [--seed S] [--programs ddp,fsdp2,pipeline,epochs]
                             [--without REGEX] [--json FILE]

Each run takes thirty signals, and must end where the uninterrupted run of plain torch ends. A run that does not end, ends elsewhere,
says "yes" to an end that differs, or leaves a process, a file or shared memory is a failure: it is shown with its seed, and its
folder is kept. `--programs ddp --seed S --signals 30` does the run of a seed again. `--without "server freeze"` leaves out kinds of
strikes (tests/e2e/strikes.py, KINDS). Exit code 0 when nothing failed and every phase of a step was struck.

tests/e2e/soak_seeds.json lists the seeds that tests/e2e/test_soak.py runs: `--table PROGRAM:SEED:SIGNALS...` prints it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e import growth, interrupts, strikes
from tests.e2e.soaked import PROGRAMS

SEEDS = Path(__file__).with_name("soak_seeds.json")


class Soak:
    """Everything that was done and found."""

    def __init__(self, root: Path, seed: int, programs: list[str], without: str) -> None:
        self.root = root
        self.seed = seed
        self.programs = programs
        self.without = without
        self.struck: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in programs}
        self.phases: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in programs}
        self.runs: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.growth: dict[int, growth.Counts] = {}
        self.ends: list[dict[str, Any]] = []  # of interrupted runs
        self.failures: list[dict[str, Any]] = []

    def signals(self, number: int) -> None:
        """Run the programs in turns until so many signals were sent."""
        references = {name: PROGRAMS[name].plain(self.root / f"plain-{name}") for name in self.programs}
        most = 3 * (number // strikes.PER_RUN + 1)
        for turn, name in zip(range(most), itertools.cycle(self.programs), strict=False):
            left = number - self.sent()
            if left <= 0:
                return
            seed = self.seed + turn // len(self.programs)
            planned = strikes.plan(seed, min(left, strikes.PER_RUN), self.without)
            folder = self.root / f"{name}-{seed}"
            begun = time.monotonic()
            striker, found = strikes.run(folder, PROGRAMS[name], planned, references[name])
            self.seconds[name] += time.monotonic() - begun
            self.runs[name] += 1
            self.struck[name] += striker.struck
            self.phases[name] += striker.phases
            self.note(f"{name}, seed {seed}", folder, found, striker.struck.total())
        if self.sent() < number:
            self.note("signals", self.root, [f"{self.sent()} instead of {number}"])

    def sent(self) -> int:
        return sum(counter.total() for counter in self.struck.values())

    def repairs(self, number: int) -> None:
        folder = self.root / f"growth-{self.seed}"
        self.growth, found = growth.run(folder, number, self.seed, lambda text: print(f"growth: {text}", flush=True))
        self.note(f"growth, seed {self.seed}", folder, found, number)

    def interrupts(self, number: int) -> None:
        start_up = interrupts.start_up(self.root / "start-up")
        for turn, interrupt in enumerate(interrupts.plan(self.seed, number)):
            folder = self.root / f"interrupt-{turn}"
            one = interrupts.Interrupted(folder, interrupt, start_up)
            found = one.run()
            self.ends.append({"moment": interrupt.moment, "seconds": round(one.seconds, 2), "good": not found})
            self.note(f"Ctrl-C {turn} in {interrupt.moment}, seed {self.seed}", folder, found, 1)

    def note(self, what: str, folder: Path, found: list[str], signals: int = 0) -> None:
        """Show how something ended; keep its folder if it failed."""
        print(f"{what}: {signals} signals: {'FAILED, see ' + str(folder) if found else 'good'}", flush=True)
        print("".join(f"    {line}\n" for line in found[:10]), end="", flush=True)
        if found:
            self.failures.append({"what": what, "folder": str(folder), "found": found})
        else:
            shutil.rmtree(folder)

    def unmet(self) -> list[str]:
        """Phases of a step in which no rank was struck; few signals need not meet all."""
        met = sum(self.phases.values(), collections.Counter())
        return [p.name.lower() for p in strikes.PHASES if not met[p.name.lower()]] if self.sent() >= 100 else []

    def table(self) -> list[str]:
        lines = [f"{'program':12s}{'runs':>6s}{'signals':>9s}{'failed':>8s}{'seconds':>9s}  signals by kind"]
        for name in self.programs:
            failed = sum(f["what"].startswith(f"{name},") for f in self.failures)
            kinds = ", ".join(f"{kind} {n}" for kind, n in self.struck[name].most_common())
            numbers = f"{self.runs[name]:6d}{self.struck[name].total():9d}{failed:8d}{self.seconds[name]:9.0f}"
            lines.append(f"{name:12s}{numbers}  {kinds}")
        met = sum(self.phases.values(), collections.Counter())
        lines.append("phases of struck ranks: " + ", ".join(f"{name} {n}" for name, n in met.most_common()))
        for moment in interrupts.MOMENTS if self.ends else ():
            ends = [end for end in self.ends if end["moment"] == moment]
            slowest = max((end["seconds"] for end in ends), default=0.0)
            failed = sum(not end["good"] for end in ends)
            lines.append(
                f"Ctrl-C in {moment:16s}{len(ends):4d} runs, {failed} failed, the slowest end in {slowest:.1f} s"
            )
        return lines + (growth.table(self.growth) if self.growth else [])

    def written(self) -> dict[str, Any]:
        programs = {
            name: {
                "runs": self.runs[name],
                "seconds": round(self.seconds[name], 1),
                "signals": dict(self.struck[name]),
                "phases": dict(self.phases[name]),
            }
            for name in self.programs
        }
        done = {"seed": self.seed, "without": self.without, "programs": programs}
        return {**done, "growth": self.growth, "interrupts": self.ends, "failures": self.failures}


def rows(told: list[str]) -> list[dict[str, Any]]:
    """PROGRAM:SEED:SIGNALS words as rows of the table of seeds: how often who is struck by what."""
    found = []
    for word in told:
        name, seed, signals = word.split(":")
        counted = collections.Counter(strike.kind for strike in strikes.plan(int(seed), int(signals)))
        kinds = {kind: counted[kind] for kind in strikes.KINDS}
        found.append({"program": name, "seed": int(seed), "signals": int(signals), **kinds})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Signals at random moments; every run must end as if there had been none."
    )
    parser.add_argument("--signals", type=int, default=300)
    parser.add_argument("--repairs", type=int, default=100, help="of the run that looks for growth; 0: no such run")
    parser.add_argument("--interrupts", type=int, default=20, help="runs that are ended by Ctrl-C")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--without", default="", metavar="REGEX", help="kinds of strikes that are left out")
    parser.add_argument("--json", type=Path, help="write what was done and found there, too")
    parser.add_argument(
        "--table", nargs="+", metavar="PROGRAM:SEED:SIGNALS", help="print the rows of seeds, and run nothing"
    )
    args = parser.parse_args()
    if args.table:
        print("[\n" + ",\n".join(map(json.dumps, rows(args.table))) + "\n]")
        return 0
    begun = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="ftrun-soak-"))
    print(f"soak: seed {args.seed}, folder {root}", flush=True)
    soak = Soak(root, args.seed, args.programs.split(","), args.without)
    if args.signals:
        soak.signals(args.signals)
    if args.repairs:
        soak.repairs(args.repairs)
    if args.interrupts:
        soak.interrupts(args.interrupts)
    print("\n" + "\n".join(soak.table()))
    if args.json:
        args.json.write_text(json.dumps(soak.written(), indent=1))
    for failure in soak.failures:
        print(f"FAILED: {failure['what']}: {failure['found'][0]}; see {failure['folder']}")
    if unmet := soak.unmet():
        print(f"no rank was struck in: {', '.join(unmet)}")
    print(f"{soak.sent()} signals, {len(soak.failures)} failures, {time.monotonic() - begun:.0f} s")
    if not soak.failures:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
    return 1 if soak.failures or unmet else 0


if __name__ == "__main__":
    sys.exit(main())
