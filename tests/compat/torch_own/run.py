"""torch's own distributed tests under torchrun with Gloo and under ftrun with its group: runs them, writes the table.

    python -m tests.compat.torch_own.run [--launches all|each|both] [--tools torchrun,ftrun] [--seconds S]

`all` is one launch for all tests, `each` a launch for each test. What was run is kept in build/torch-tests, so that a run
that was cut short (`--seconds`) goes on where it stopped; the table holds what is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.e2e import harness

DRIVER = Path(__file__).with_name("driver.py")
RESULTS = Path(__file__).resolve().parents[1] / "results"
RANKS = 4
FEW_SECONDS, MANY_SECONDS = 90.0, 400.0  # for a launch of one test, of all
COMMANDS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "ftrun": ["-m", "ftrun", "--spares", "0", "--hang-timeout", "40"],
}
BACKENDS = {"torchrun": "gloo", "ftrun": "ftrun"}
KNOWN = {
    "test_get_backend": 'the group\'s backend is called "ftrun"',
    "test_monitored_barrier_gloo": 'dist.monitored_barrier refuses a backend that is not called "gloo"; the group has the method',
    "test_monitored_barrier_gloo_subgroup": "as above",
}
"""Tests with another outcome under ftrun, and why."""

Found = dict[str, dict[str, Any]]  # test -> outcome and why


def launch(tool: str, folder: Path, tests: list[str], seconds: float) -> Found:
    """One launch. A test that some rank wrote nothing of counts as failed; without `tests` all that there are."""
    command = [sys.executable, *COMMANDS[tool], "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(DRIVER), "--backend", BACKENDS[tool], "--out", str(folder / "out"), *tests]
    running = harness.start(folder, command, {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _path()})
    try:
        ending = f"exit code {running.wait(seconds)}"
    except AssertionError:
        ending = f"still running after {seconds:.0f} s"
    said: list[Found] = []
    for rank in range(RANKS):
        report = folder / "out" / f"rank-{rank}.jsonl"
        lines = report.read_text().splitlines() if report.exists() else []
        said.append({row["test"]: row for row in map(json.loads, lines)})
    found: Found = {}
    for test in tests or sorted({test for rows in said for test in rows}):
        rows = [rows.get(test, {"outcome": "fail", "why": ending}) for rows in said]
        worst = min(rows, key=lambda row: ("fail", "pass", "skip").index(row["outcome"]))
        found[test] = {"outcome": worst["outcome"], "why": worst["why"]}
    return found


def _path() -> str:
    import os

    return os.pathsep.join([str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class State:
    """What was run so far with this torch."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{torch.__version__}.json"
        kept: dict[str, dict[str, Found]] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.found = {kind: {tool: kept.get(kind, {}).get(tool, {}) for tool in COMMANDS} for kind in ("all", "each")}

    def add(self, kind: str, tool: str, found: Found) -> None:
        self.found[kind][tool].update(found)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.found))

    def ran(self) -> list[str]:
        """Tests that some launch of all did not skip."""
        rows = [item for found in self.found["all"].values() for item in found.items()]
        return sorted({test for test, row in rows if row["outcome"] != "skip"})


def fill(state: State, kind: str, tool: str, until: float) -> None:
    """Run what is missing, until the time is over."""
    missing = [test for test in state.ran() if test not in state.found["each"][tool]] if kind == "each" else [""]
    if kind == "all" and state.found["all"][tool]:
        return
    for test in missing:
        if time.monotonic() > until:
            return
        folder = Path(tempfile.mkdtemp(prefix="torch-tests-"))
        try:
            tests, seconds = ([test], FEW_SECONDS) if test else ([], MANY_SECONDS)
            found = launch(tool, folder, tests, seconds)
            harness.check_no_strays(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        state.add(kind, tool, found)
        print(f"{tool:9} {kind:5} {test or len(found)}", file=sys.stderr, flush=True)


def table(state: State) -> str:
    """The committed page."""
    tests = state.ran()
    columns = [(kind, tool) for kind in ("all", "each") for tool in COMMANDS if state.found[kind][tool]]
    heads = [f"{tool}, {'one launch' if kind == 'all' else 'a launch each'}" for kind, tool in columns]
    lines = [
        f"# torch's own distributed tests, torch {torch.__version__}",
        "",
        f"{time.strftime('%Y-%m-%d')}, {RANKS} ranks, no GPU; `make torch-tests`. `DistributedTest._DistTestBase` of the installed torch:",
        'under torchrun on backend "gloo", under ftrun on backend "ftrun". Left out: tests that every launch skips.',
        "",
        "| " + " | ".join(["", *heads]) + " |",
        "|" + "---|" * (len(heads) + 1),
    ]
    for what in ("pass", "fail", "skip", "not run"):
        counts = [sum(_outcome(state, kind, tool, test) == what for test in tests) for kind, tool in columns]
        lines.append("| " + " | ".join([what, *map(str, counts)]) + " |")
    different = [t for t in tests if _differs(state, t)]
    lines += ["", f"Different under ftrun: {len(different)}.", ""]
    lines += [f"- `{test}`: {KNOWN.get(test, 'not explained: ' + _why(state, test))}" for test in different]
    lines += ["", "| " + " | ".join(["test", *heads]) + " |", "|" + "---|" * (len(heads) + 1)]
    for test in tests:
        cells = [_outcome(state, kind, tool, test) for kind, tool in columns]
        lines.append("| " + " | ".join([f"`{test}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _outcome(state: State, kind: str, tool: str, test: str) -> str:
    row = state.found[kind][tool].get(test)
    return str(row["outcome"]) if row else "not run"


def _differs(state: State, test: str) -> bool:
    pairs = [{_outcome(state, kind, tool, test) for tool in COMMANDS} for kind in ("all", "each")]
    return any(len(pair - {"not run"}) > 1 for pair in pairs)


def _why(state: State, test: str) -> str:
    rows = [found["ftrun"].get(test, {}) for found in state.found.values()]
    return next((row["why"] for row in rows if row.get("why")), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", choices=["all", "each", "both"], default="both")
    parser.add_argument("--tools", default="torchrun,ftrun")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no launch after so many")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    state = State(harness.ROOT / "build" / "torch-tests")
    for kind in ("all", "each") if arguments.launches == "both" else (arguments.launches,):
        for tool in arguments.tools.split(","):
            fill(state, kind, tool, until)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"torch-{torch.__version__.partition('+')[0]}.md"
    path.write_text(table(state))
    print(path)
    unexplained = [test for test in state.ran() if _differs(state, test) and test not in KNOWN]
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
