"""What a death in a sharded model or a pipeline came to, as the runs of test_sharded.py and test_pipeline.py left it.

With FTRUN_MATRIX set these tests write each run into layouts.json: every death with its place, where the replacement's state came
from, and whether the end was that of torchrun. `python -m tests.docs.generate` prints the table of docs/how-to/sharded.md from that.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.e2e import harness
from tests.e2e.harness import Outcome

RESULTS = Path(__file__).with_name("layouts.json")
KEEP = "FTRUN_MATRIX"  # as for `make matrix`
_OURS = ("pid", "history")  # which process it was is no part of the result
_TAKES_OVER = re.compile(r"takes over rank (\d+);.*?(?:; state (.*))?$", re.M)
# how the arguments of the scripts are called in the table; of others the reader sees themselves
LAYOUTS = {"fsdp": "FSDP2", "hsdp": "HSDP", "tp": "TP × DP", "fsdp-tp": "FSDP2 × TP"}
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
OPTIONS = {
    "--clip": "clipping",
    "--bf16": "bf16",
    "--accum inside": "accumulation in a body",
    "--accum across": "accumulation over bodies",
    "--checkpoint": "activation checkpointing",
    "--prefetch": "prefetch",
    "--compile": "torch.compile",
    "--fused": "fused",
    "--optim sgdm": "SGD",
    "--optim packed": "optimizer state in bytes",
    "--decay": "weights written after the update",
    "--replicas": "DP by hand",
    "--given": "",
}


# ---- what happened -----------------------------------------------------------------------------------------------------


def keep(
    script: str,
    arguments: Sequence[str],
    outcome: Outcome,
    wanted: Outcome | list[dict[str, Any]] | None,
    places: Mapping[int, str] | None = None,
) -> None:
    """Put the run of the current test beside those of the others, where that is asked for.

    `wanted`: the end of stock torch, None where the run is to end. `places`: of the deaths in a step, where the phase that the
    journal tells says too little.
    """
    if not os.environ.get(KEEP):
        return
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].rpartition("/")[2]
    run = {
        "test": test,
        "script": script,
        "arguments": _telling(arguments),
        "torch": version("torch"),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "equal": None if wanted is None else _equal(outcome, wanted),
        "deaths": [*_deaths(outcome, arguments, places or {})],
    }
    with FileLock(RESULTS.with_suffix(".lock")):
        kept = {one["test"]: one for one in (load() if RESULTS.exists() else [])} | {test: run}
        lines = [json.dumps(kept[name]) for name in sorted(kept)]
        RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def load() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def _telling(arguments: Sequence[str]) -> list[str]:
    """The options with their values, without those that say nothing of the layout."""
    found: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            found.append(word)
        else:
            found[-1] += f" {word}"
    return [option for option in found if option.partition(" ")[0] not in ("--steps", "--die", "--out", "--backend")]


def _equal(outcome: Outcome, wanted: Outcome | list[dict[str, Any]]) -> bool:
    """Did every rank write what it wrote under stock torch?"""
    theirs = wanted.need() if isinstance(wanted, Outcome) else wanted
    if outcome.code or None in outcome.ranks:
        return False
    ours = outcome.need()
    return [_compared(one) for one in ours] == [_compared(one) for one in theirs]


def _compared(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in _OURS}


def _deaths(outcome: Outcome, arguments: Sequence[str], places: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Each death: its place, and where the state of the rank came from, as ftrun's lines say it."""
    came: dict[int, list[str]] = {}
    for rank, source in _TAKES_OVER.findall(outcome.output):
        came.setdefault(int(rank), []).append(source)
    for rank, step, phase in _struck(outcome):
        sources = came.get(rank, [])
        source = sources.pop(0) if sources else f"exit code {outcome.code}" if outcome.code else "not replaced"
        place = places.get(step) or _place(outcome, arguments, rank, step) or phase
        yield {"rank": rank, "step": step, "place": place, "source": source}
    assert not any(came.values()), f"replaced without a death: {came}"


def _struck(outcome: Outcome) -> Iterator[tuple[int, int, str]]:
    """Rank, step and phase of each death, in order."""
    deaths = {id(event) for event in harness.deaths(outcome)}
    holder: dict[int, int] = {}  # cell -> rank
    for line in outcome.journal:
        event = line.get("event", {})
        if id(event) in deaths:
            yield holder[event["worker"]], event["step"], event["phase"]
        for action in line.get("actions", ()):
            if action["kind"] == "Publish":
                holder.update({cell: rank for rank, cell in enumerate(action["workers"])})


def _place(outcome: Outcome, arguments: Sequence[str], rank: int, step: int) -> str:
    """Which collective or call of the step it was, "" where the script did not choose one."""
    counted = outcome.folder / "out" / f"collectives-{rank}"
    most = int(counted.read_text()) if counted.exists() else 0
    if 1 <= step <= 2 * most:
        return f"{'before' if step % 2 else 'after'} collective {(step + 1) // 2} of {most}"
    for word in arguments:
        found = re.fullmatch(rf"{rank}:{step}:(\d+):(before|after)", word)
        if found:
            return f"{found[2]} call {found[1]}"
    return ""


@functools.cache
def _commit() -> str:
    """The commit of this checkout; one with changes, other than of what is recorded here, has a "+"."""
    command = ["git", "describe", "--always", "--exclude=*"]
    name = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True).stdout.strip()
    changed = ["git", "status", "--porcelain", "--", ".", ":!*/layouts.json"]
    return name + ("+" if subprocess.run(changed, cwd=harness.ROOT, capture_output=True, text=True).stdout else "")


# ---- the table ---------------------------------------------------------------------------------------------------------

_HEAD = ("layout", "a rank dies", "deaths", "its state", "moved", "equal", "run")


def rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One for each place and source of a run."""
    found: list[tuple[str, ...]] = []
    for run in sorted(runs, key=_order):
        places = {death["place"] for death in run["deaths"]}
        kinds: dict[tuple[str, str], list[str]] = {}
        for death in run["deaths"]:
            words, moved = _said(death["source"])
            kinds.setdefault((_kind(death["place"], places), words), []).append(moved)
        equal = {True: "yes", False: "**no**", None: "–"}[run["equal"]]
        ran = f"torch {run['torch']}, {run['commit']}, {run['date']}"
        for (place, words), sizes in sorted(kinds.items(), key=lambda item: _ranked(item[0][0])):
            found.append((named(run), place, str(len(sizes)), words, _range(sizes), equal, ran))
    return found


def named(run: dict[str, Any]) -> str:
    """The layout in words, with what was switched on."""
    options = dict(option.partition(" ")[::2] for option in run["arguments"])
    layout = LAYOUTS[options.pop("--layout", "fsdp")]
    if run["script"] == "pipelined.py":
        layout = "PP × DP"
        if options.pop("--dp", "2") == "1":
            layout = "PP"
            options.pop("--replicas", None)
        layout += f", {SCHEDULES[options.pop('--schedule', 'gpipe')]}"
    words = [
        OPTIONS.get(f"{name} {value}".strip(), OPTIONS.get(name, f"`{name} {value}`"))
        for name, value in options.items()
    ]
    return ", ".join([layout, *filter(None, words)])


_UNITS = ("B", "kB", "MB", "GB", "TB")
AFTER = "after its update"  # all is written; the body's end was not told
_PLACES = ("forward", "backward", "gate", "update", AFTER)  # the order in the table; collectives come first


def _kind(place: str, places: set[str]) -> str:
    """A place in words; those at collectives, or at calls, are one. `places`: all of the run."""
    at = re.fullmatch(r"(?:before|after) (collective|call) \d+(?: of (\d+))?", place)
    if not at:
        return {"gate": "at its gate", "update": "in its update", AFTER: AFTER}.get(place, f"in {place}")
    sides = [{p.split()[2] for p in places if p.startswith(f"{side} {at[1]}")} for side in ("before", "after")]
    both, struck = sides[0] == sides[1], len(sides[0] | sides[1])
    many = f"{struck} of {at[2]}" if at[2] and struck < int(at[2]) else f"each of {at[2]}" if at[2] else str(struck)
    return f"before {'and after' if both else 'or after'} {many} {at[1]}s"


def _ranked(words: str) -> int:
    last = words if words == AFTER else words.split()[-1]
    return _PLACES.index(last) if last in _PLACES else -1


def _said(source: str) -> tuple[str, str]:
    """A source in words, and what was moved."""
    moved = re.search(r", ([\d.]+ [A-Za-z]+)(?: moved)?", source)
    if not moved:
        return source, ""
    return source.replace(moved[0], ""), moved[1]


def _range(moved: Sequence[str]) -> str:
    known = sorted(set(moved) - {""}, key=lambda text: (_UNITS.index(text.split()[1]), float(text.split()[0])))
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}" if known else ""


def _order(run: dict[str, Any]) -> tuple[Any, ...]:
    names = [*LAYOUTS.values(), "PP × DP", "PP"]
    return run["script"] != "sharded.py", names.index(named(run).partition(",")[0]), len(run["arguments"]), run["test"]


def table() -> str:
    """Markdown, for the page between its marks."""
    lines = [_HEAD, ("---",) * len(_HEAD), *rows(load())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
