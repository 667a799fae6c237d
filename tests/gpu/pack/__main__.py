"""Run the checks one after the other within a budget of seconds; see `make gpu`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu import machine
from tests.gpu.pack import here, one, processes, table

_STACKS = Path(__file__).resolve().parent / "stacks"
_PROBE = 90.0  # seconds for the first import of torch on a fresh machine
_LOOKING = 6.0  # seconds kept back for asking processes where they hang, and for ending them
_LAST = 60  # lines of a failed check's output


@dataclass
class Row:
    """A line of the table. `result`: ok, failed, timed out, not here, left out."""

    name: str
    result: str
    ms: float = 0.0
    seen: dict[str, object] = field(default_factory=dict)

    def cells(self) -> tuple[str, str, str, str]:
        told = "; ".join(str(v) if k == "why" else f"{k}: {v}" for k, v in self.seen.items())
        return self.name, self.result, f"{self.ms:.0f}" if self.ms else "", told.replace("|", "/")


class Report:
    """The rows in OUT, written anew after each, and what failed in full."""

    def __init__(self, out: Path, facts: dict[str, str]) -> None:
        self._out = out
        self._facts = facts
        self.rows: list[Row] = []
        out.mkdir(parents=True, exist_ok=True)
        (out / "failures.log").unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        name, result, ms, told = row.cells()
        print(f"{name:48} {result:9} {ms:>7} ms  {told}".rstrip(), flush=True)
        self.rows.append(row)
        lines = [f"- {key}: {value}" for key, value in self._facts.items()]
        cells = [("check", "result", "ms", "seen"), ("---",) * 4, *(row.cells() for row in self.rows)]
        text = "\n".join([*lines, "", *(f"| {' | '.join(row)} |" for row in cells)]) + "\n"
        self._write("gpu.md", text)
        self._write("gpu.json", json.dumps({"facts": self._facts, "rows": [asdict(r) for r in self.rows]}, indent=1))

    def failure(self, name: str, text: str) -> None:
        with (self._out / "failures.log").open("a") as file:
            file.write(f"==== {name}\n{text.rstrip()}\n\n")

    def _write(self, name: str, text: str) -> None:
        unfinished = self._out / f"{name}.new"
        unfinished.write_text(text)
        unfinished.rename(self._out / name)


class Runner:
    """Starts checks, holds each to its limit, and ends whatever it began."""

    def __init__(self, report: Report, work: Path, fake: bool, until: float, limit: float) -> None:
        self._report = report
        self._work = work
        self._fake = fake
        self._until = until
        self._limit = limit
        (work / "shared").mkdir()

    def run(self, check: table.Check) -> Row:
        """One check, whatever it does."""
        folder = self._work / check.function.replace(".", "-") / str(len(self._report.rows))
        folder.mkdir(parents=True)
        log = folder / "log"
        line = [sys.executable, "-m", "tests.gpu.pack.one", check.name, str(folder), str(self._work / "shared")]
        begin = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*line, *(["--fake"] if self._fake else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        hung = ""
        try:
            code = child.wait(max(1.0, min(check.limit, self._limit, self._until - _LOOKING - begin)))
        except subprocess.TimeoutExpired:
            code = -1
            hung = "\n".join([processes.where(processes.descendants(), folder), *_boards(folder)])
        ms = 1e3 * (time.monotonic() - begin)
        left = processes.end([child.pid])
        seen = here.notes(folder)
        if code == 0 and not left:
            result = "ok"
        elif code == one.NOT_HERE:
            result = "not here"
        else:
            result = "timed out" if hung else "failed"
            if hung:
                seen["why"] = f"hung in {_innermost(hung)}"
            elif "why" not in seen:
                seen["why"] = f"ended with {code}" if code else f"left processes behind: {left}"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST:])
            self._report.failure(check.name, "\n".join(filter(None, [tail, hung])))
        return Row(check.name, result, ms, seen)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(_STACKS), str(machine.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "GPU_PACK_STACKS": "1", "PYTHONUNBUFFERED": "1"}


def _innermost(hung: str) -> str:
    """Where the processes stand: of each main thread the innermost call of this project, those of runs first."""
    found: list[str] = []
    for stack in reversed(hung.split("Current thread ")[1:]):
        calls = [line for line in stack.partition("-- ")[0].splitlines() if f'File "{machine.ROOT}/' in line]
        if calls:
            file, _, rest = calls[0].partition(f'File "{machine.ROOT}/')[2].partition('", line ')
            number, _, name = rest.partition(" in ")
            found.append(f"{file}:{number} ({name})")
    return ", ".join(dict.fromkeys(found)) or "an unknown place: no process answered"


def _boards(folder: Path) -> list[str]:
    """How the runs of a check stand, by `ftrun status`, and the end of their journals."""
    found = []
    for board in sorted(folder.glob("**/runs/*/board")):
        env = {**os.environ, "FTRUN_RUNS_ROOT": str(board.parents[1]), "PYTHONPATH": str(machine.ROOT)}
        line = [sys.executable, "-m", "ftrun", "status", board.parent.name, "--once"]
        try:
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=5)
            text = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            text = "(ftrun status did not answer in 5 s)"
        journal = board.with_name("journal.jsonl")
        lines = journal.read_text().splitlines()[-12:] if journal.exists() else []
        found += [f"-- run {board.parent.name}", text, *lines]
    return found


def _probe() -> dict[str, object] | str:
    """Facts of this machine and what it lacks, or why nothing can be run."""
    env = {**os.environ, "PYTHONPATH": str(machine.ROOT)}
    try:
        line = [sys.executable, "-m", "tests.gpu.pack.one", "--probe"]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=_PROBE)
    except subprocess.TimeoutExpired:
        return f"the driver or torch did not answer in {_PROBE:.0f} s"
    if done.returncode:
        return f"asking for it failed: {(done.stderr or 'no word').strip().splitlines()[-1]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str]) -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=machine.ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="checks with this in their name")
    parser.add_argument("--from", dest="start", default="", metavar="WORD", help="the first check")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="of each check at most")
    parser.add_argument("--fake", action="store_true", help="take the tests' fake driver for a GPU")
    options = parser.parse_args(argv)
    try:
        checks = table.chosen([word for word in options.only if word], options.start)
    except ValueError as error:
        parser.error(str(error))
    probed = _probe()
    if isinstance(probed, str):
        print(f"no GPU answers: {probed}", flush=True)
        return 1
    if probed["missing"] and not (options.fake and "fake" in str(probed["missing"])):
        print(f"no GPU: {probed['missing']}", flush=True)
        return 0
    until = begin + options.budget
    lacks: dict[str, str] = probed["lacks"]  # type: ignore[assignment]
    report = Report(options.out, probed["facts"])  # type: ignore[arg-type]
    processes.adopt_orphans()
    work = Path(tempfile.mkdtemp(prefix="ftrun-gpu-"))
    runner = Runner(report, work, options.fake, until, options.limit)
    try:
        for check in checks:
            if check.needs.name in lacks:
                report.add(Row(check.name, "not here", seen={"why": lacks[check.needs.name]}))
            elif until - _LOOKING - time.monotonic() < check.expected:
                report.add(Row(check.name, "left out", seen={"why": "no time left in the budget"}))
            else:
                report.add(runner.run(check))
    finally:
        processes.end([])
        shutil.rmtree(work, ignore_errors=True)
    return _conclude(report, options.out, options.budget)


def _conclude(report: Report, out: Path, budget: float) -> int:
    """The last lines: what failed, what is left to do."""
    bad = [row.name for row in report.rows if row.result in ("failed", "timed out")]
    late = [row.name for row in report.rows if row.result == "left out"]
    print(f"{len(report.rows)} checks, {len(bad)} not as they should be; {out / 'gpu.md'}", flush=True)
    if bad:
        print(f"see {out / 'failures.log'}: {', '.join(bad)}", flush=True)
    if late:
        print(f"left out by BUDGET={budget:.0f}: {', '.join(late)}; go on with FROM='{late[0]}'", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
