"""What a run tells of the script's own values: a line, the journal, `ftrun status`, `ftrun explain`, `ftrun verify`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.e2e import harness
from tests.e2e.harness import Outcome, kill

SCRIPT = harness.SCRIPTS / "own_values.py"
LINE = re.compile(r"^ftrun: kept with each step: (.*)$", re.M)
NAMES = {"losses", "best", "names"}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank ends with under torchrun."""
    command = [str(SCRIPT), "--backend", "gloo"]
    return harness.by_torch(tmp_path_factory.mktemp("plain"), command).need()


def run(folder: Path, *words: str, faults: tuple[str, ...] = ()) -> Outcome:
    options = ("--max-replacements", "9", "--run-id", "lab")
    return harness.finish(harness.start(folder, harness.script_command(folder, SCRIPT, words, faults, options=options)))


def tool(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [harness.tool("ftrun"), *args], cwd=folder, env=harness.environment(folder), capture_output=True, text=True, timeout=90
    )


def test_a_loop_that_changes_nothing_of_the_scripts_prints_nothing(folder: Path) -> None:
    done = run(folder, "nothing")
    assert done.code == 0 and "kept with each step" not in done.output and "not kept" not in done.output, done.tail()
    (note,) = done.notes("kept")[-1:]
    assert note["values"] == [] and note["not_kept"] == {}


def test_ranks_that_die_tell_it_once(folder: Path, plain: list[dict[str, Any]]) -> None:
    """The first rank tells; its replacement, and the others', tell no person again."""
    faults = (kill(0, "backward", 5), kill(2, "update", 7), kill(0, "update", 9))
    done = run(folder, faults=faults)
    assert done.need() == plain and len(harness.deaths(done)) == 3, done.tail()
    (line,) = LINE.findall(done.output)
    assert re.fullmatch(r"3 values of the script's own, the largest is \w+ \(\d+ B\)", line), line
    assert "result bit-identical to an uninterrupted run: yes" in done.output and "not kept" not in done.output
    first, *_, last = done.notes("kept")
    assert (first["step"], first["looked"], last["step"]) == (3, 3, 12)
    for note in (first, last):
        assert {name for value in note["values"] for name in value["names"]} == NAMES and note["not_kept"] == {}
    largest = max(last["values"], key=lambda value: value["bytes"])
    assert largest["names"] == ["losses"] and largest["bytes"] > 12 * 9
    head, *rows = tool(folder, "explain", "lab").stdout.splitlines()
    assert head == "kept with each step: 3 values of the script's own, as of step 12 on rank 0"
    assert {row.split()[0] for row in rows} == NAMES


def test_what_is_not_kept_is_named_once_with_the_reason(folder: Path, plain: list[dict[str, Any]]) -> None:
    done = run(folder, "feed", faults=(kill(2, "backward", 6),))
    assert done.need() == plain, done.tail()
    (line,) = LINE.findall(done.output)
    assert line.startswith("3 values of the script's own, ") and line.endswith("; not kept: 2")
    assert done.output.count("feed (is a range_iterator), table (larger than 1 MB)") == 1, done.tail()
    reasons = {"feed": "is a range_iterator", "table": "larger than 1 MB"}
    assert done.notes("kept")[-1]["not_kept"] == reasons
    page = tool(folder, "explain", "F406").stdout
    assert page.startswith("# F406: ") and "In run lab, the newest of this folder" in page
    assert page.endswith("changed by the loop, and not kept:\n  feed   is a range_iterator\n  table  larger than 1 MB\n")
    assert "lab" not in tool(folder, "explain", "F305").stdout
    ended = json.loads(tool(folder, "status", "lab", "--json").stdout)
    assert ended["not_kept"] == reasons and {name for value in ended["kept"]["values"] for name in value["names"]} == NAMES
    assert "changed by the loop, and not kept: feed (is a range_iterator), table" in tool(folder, "events", "lab").stdout


@pytest.mark.slow
def test_a_live_run_shows_how_many_and_names_them(folder: Path, plain: list[dict[str, Any]]) -> None:
    command = harness.script_command(folder, SCRIPT, ["feed", "--wait", "8"], (kill(1, "update", 5),), options=("--run-id", "lab"))
    running = harness.start(folder, command)
    try:
        picture = wait_for(lambda: _picture(folder), "the values that are kept")
        assert {name for value in picture["kept"]["values"] for name in value["names"]} == NAMES
        assert picture["not_kept"] == {"feed": "is a range_iterator", "table": "larger than 1 MB"}
        assert "kept 3 values, 2 not" in tool(folder, "status", "lab", "--once").stdout
        shown = tool(folder, "explain", "lab").stdout
        assert shown.startswith("kept with each step: 3 values of the script's own, as of step 3 on rank 0\n"), shown
        assert shown.endswith("  feed   is a range_iterator\n  table  larger than 1 MB\n")
    finally:
        (folder / "go").touch()
    assert harness.finish(running).need() == plain


def _picture(folder: Path) -> dict[str, Any]:
    """`ftrun status --json`, once a rank has told; else {}."""
    done = tool(folder, "status", "lab", "--json")
    picture: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return picture if picture.get("kept") and picture["step"] > 7 else {}


def test_a_run_that_is_not_there_is_not_explained(folder: Path) -> None:
    done = tool(folder, "explain", "no-such-run")
    assert done.returncode == 4 and "no run named no-such-run" in done.stderr and not done.stdout
    assert tool(folder, "explain", "F406").stdout.count("kept with each step") == 0


# -- ftrun verify --------------------------------------------------------------------------------------------------------


def verify(folder: Path, *words: str, at: str = "update") -> tuple[int, list[str], dict[str, Any]]:
    """Its exit code, what it says, and the same as JSON without another run: they are of two calls."""
    (folder / "plan.toml").write_text(kill(2, at, 7))
    done = tool(folder, "verify", "--faults", "plan.toml", "--nproc-per-node", "4", "--json", str(SCRIPT), "--out", "${verify}", *words)
    assert done.stdout.startswith("{"), done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, [run["name"] for run in result["runs"]], result


@pytest.mark.slow
def test_values_that_are_kept_are_compared(folder: Path, plain: list[dict[str, Any]]) -> None:
    """A set of strings too, which lie there in another order in each run."""
    code, runs, result = verify(folder)
    assert (code, runs, result["verdict"]) == (0, ["clean", "faults"], "equal"), result
    assert result["values"] == {"equal": sorted(NAMES), "different": {}, "not_compared": {}}
    own = [[json.loads((folder / name / f"rank-{rank}.json").read_text()) for rank in range(4)] for name in runs]
    assert own == [plain, plain]


@pytest.mark.slow
def test_a_time_is_neither_equal_nor_different(folder: Path) -> None:
    code, runs, result = verify(folder, "times", at="backward")
    assert (code, runs, result["verdict"]) == (0, ["clean", "faults", "again"], "equal"), result
    assert result["values"]["not_compared"] == {"times": "differs between two runs without faults, too"}
    assert result["values"]["equal"] == sorted(NAMES) and not result["passing_differences"]


def test_a_value_that_a_death_loses_is_different(folder: Path) -> None:
    code, runs, result = verify(folder, "behind")
    assert (code, runs, result["verdict"], result["cause"]) == (1, ["clean", "faults", "again"], "different", "not-kept"), result
    assert result["values"]["different"] == {"behind": {"loop": 1, "ranks": [2]}} and result["difference"]["differ_at_end"] == 0
    assert result["values"]["equal"] == sorted(NAMES)


@pytest.mark.slow
def test_what_is_not_kept_is_not_compared(folder: Path) -> None:
    """What it says to a person, too."""
    (folder / "plan.toml").write_text(kill(2, "forward", 7))
    done = tool(folder, "verify", "--faults", "plan.toml", "--nproc-per-node", "4", str(SCRIPT), "--out", "${verify}", "feed")
    first, *others = done.stdout.splitlines()
    assert done.returncode == 0 and "; 3 values of the script's own are equal at the end of each loop" in first, done.stdout
    assert "not compared: feed (is a range_iterator), table (larger than 1 MB)" in others
