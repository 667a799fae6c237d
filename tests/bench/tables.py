"""Tables of measured figures: each benchmark writes its own in results/*.md, and docs/benchmarks.md shows the
same rows, the README three of them; both tell some of the figures in sentences (told.py).

    python -m tests.bench.tables     puts the tables of results/, and the sentences, into both

A file holds one table and what a reader needs to judge it: the command, commit, date, machine, load, versions, and in each
figure the median, the smallest and largest value, and n. A new run replaces the file; git has the older ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.bench import told

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
# "rows 1-3": only these, without the first column, and only their medians
SHOWN = re.compile(r"(<!-- table: ([\w-]+)(?: rows (\d+)-(\d+))? -->\n).*?(<!-- end of table -->)", re.S)
TOLD = re.compile(r"(<!-- told: (\w+) -->\n).*?(<!-- end of told -->)", re.S)  # sentences with figures
FACTS = ("command", "commit", "date", "machine", "software")  # each table's file names them


def arguments(words: str, *names: str) -> argparse.ArgumentParser:
    """A command line with what all benchmarks share. `names`: other names of --rounds."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument(
        *names,
        "--rounds",
        dest="rounds",
        type=int,
        metavar="N",
        help="how often each thing is measured; fewer for a quick look",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the table goes")
    return parser


def figure(values: Sequence[float], unit: str = "ms", digits: int | None = None) -> str:
    """Median, range and number of measured values, in words."""
    middle = statistics.median(values)
    if digits is None:
        digits = 0 if abs(middle) >= 100 else 1 if abs(middle) >= 5 else 2
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{middle:.{digits}f} {unit} ({low} to {high}, n={len(values)})"


def write(
    folder: Path | None, name: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: str
) -> None:
    """Write results `folder`/`name`.md, if there is a folder, and print it. `notes`: what was measured, from where to where."""
    table = [head, ["---"] * len(head), *rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    facts = [f"- {key}: {value}" for key, value in zip(FACTS, _facts(), strict=True)]
    text = "\n".join([f"# {title}", "", notes, "", *facts, "", *lines, ""])
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(text)
    print(text, flush=True)


def _facts() -> list[str]:
    """What `FACTS` names, of this command on this machine."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty= and changes that are not committed", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()
    words = [
        "..." if os.path.isabs(word) else shlex.quote(word) for word in sys.argv[1:]
    ]  # where things lay here helps nobody
    return [
        f"`python {' '.join([os.path.relpath(sys.argv[0], ROOT), *words])}`",
        described.stdout.strip() or "unknown",
        time.strftime("%Y-%m-%d"),
        f"{cores} cores ({models[0] if models else platform.machine()}), {memory:.0f} GiB, load at the end {load[0]:.1f}",
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {version('torch')}",
    ]


def rows(name: str, folder: Path = RESULTS) -> str:
    """The table alone of a results file."""
    lines = (folder / f"{name}.md").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|")) + "\n"


def caption(name: str, folder: Path = RESULTS) -> str:
    """One line on where a table comes from."""
    found = dict(re.findall(r"^- (\w+): (.*)$", (folder / f"{name}.md").read_text(), re.M))
    cores = found["machine"].partition(" (")[0] + "".join(re.findall(r", load at the end .*", found["machine"]))
    return (
        f"<sub>{found['command']}, {found['date']}, commit {found['commit'][:7]}, {cores}, {found['software']}</sub>\n"
    )


def some_rows(name: str, first: int, last: int) -> str:
    """Rows of a table, without its first column and without ranges."""
    lines = rows(name).splitlines()
    shown = [line.split("|", 2)[2] for line in [*lines[:2], *lines[first + 1 : last + 2]]]
    return "".join(f"|{re.sub(r' [(][^)]*, n=[0-9]+[)]', '', line)}\n" for line in shown)


def median(name: str, run: str, what: str, column: str, folder: Path = RESULTS) -> str:
    """The median of a figure, with its unit: in the line whose first cell begins with `run`, and whose second one is `what`.

    Where a table has no such second cell, `what` is empty.
    """
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows(name, folder).splitlines()]
    found = [line for line in lines if line[0].startswith(run) and what in ("", line[1])]
    if not found:
        raise LookupError(f"{name}.md has no line {run!r}, {what!r}")
    return found[0][head.index(column)].partition(" (")[0]


def with_tables(text: str) -> str:
    """A page with the tables of results/ in their places; one that is not there is said to be missing.

    Sentences with figures are told anew, from the same tables.
    """

    def table(found: re.Match[str]) -> str:
        name, first, last = found[2], found[3], found[4]
        if not (RESULTS / f"{name}.md").exists():
            return f"{found[1]}Not measured yet: `make bench` does.\n{found[5]}"
        if first:
            below = caption(name).replace("<sub>", "<sub>Medians; ranges are in the benchmarks. ")
            return f"{found[1]}{some_rows(name, int(first), int(last))}\n{below}{found[5]}"
        return f"{found[1]}{rows(name)}\n{caption(name)}{found[5]}"

    def sentence(found: re.Match[str]) -> str:
        return f"{found[1]}{told.SENTENCES[found[2]](median)}{found[3]}"

    return TOLD.sub(sentence, SHOWN.sub(table, text))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
