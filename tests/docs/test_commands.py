"""What README and docs say is so: their commands are run, their options exist, their messages are the ones that appear."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import typer

from ftrun.cli import completion
from ftrun.cli.main import COMMANDS, app, load_commands
from ftrun.core.shared import gate
from ftrun.core.shared.board import Board
from tests.conftest import wait_for
from tests.docs.blocks import DOCS, README, ROOT, blocks, commands, pages, prose
from tests.e2e import harness

EXAMPLE = ROOT / "examples" / "four_lines.py"
TEXT = README.read_text()
ALL = commands()
# targets that a page tells people to call -> who runs them
MAKE = {
    "demo": "test_demo",
    "test": "this is it",
    "help": "test_make_targets_exist",
    "versions": "a person: an hour",
}
OTHERS = {"pip install .": "tests/docs/follow.py, in an environment of its own"}
# how a command begins -> why no test here runs it
NOT_RUN = {
    "ftrun --nnodes 2 --rdzv-backend file": "tests/host/nodes starts several nodes",
    "ftrun --nnodes 2 --rdzv-backend etcd": "tests/host/nodes does, with an etcd",
    "ftrun --nnodes 2 --rdzv-backend kubernetes": "tests/host/nodes does, with an API of its own",
    "ftrun --nnodes 2 --spare-nodes 1": "tests/e2e/test_lost_nodes.py starts spare nodes",
    "ftrun drain brave-otter --node": "tests/e2e/test_drain_nodes.py does, on several nodes",
    "ftrun verify ": "test_verify, a slow one",
    "ftrun --nproc-per-node 2 --metrics-file": "tests/view/test_metrics.py has such a run",
}
ON_A_LIVE_RUN = ("ftrun inject-fault ", "ftrun drain ", "ftrun status", "ftrun metrics ", "ftrun events", "ftrun runs")
ON_AN_ENDED_RUN = ("ftrun timeline ", "ftrun events brave-otter", "ftrun runs --all")
ENDED = [command for command in ALL if command.startswith(ON_AN_ENDED_RUN)]
LIVE = [
    command
    for command in ALL
    if command.startswith(ON_A_LIVE_RUN) and command not in ENDED and not command.startswith(tuple(NOT_RUN))
]
RUN = [
    command
    for command in ALL
    if command.startswith("ftrun ") and command not in LIVE + ENDED and not command.startswith(tuple(NOT_RUN))
]
# how a command begins -> what its output must hold
SAID = {"ftrun doctor": " 0 broken", "ftrun --standalone": "script    examples/four_lines.py"}
ASKS = ("inject-fault", "drain", "stop")
NAMES = ("first", "brave-otter")  # of runs, in the pages
STEPS, FEWER = 5000, 200


def block(language: str, page: str = "README.md") -> str:
    """The first block of a page in a language."""
    return next(block.text for block in blocks(language) if block.page == page)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like the checkout to the pages' commands; afterwards nothing of a run may be left."""
    examples = tmp_path / "examples"
    examples.mkdir()
    for script in (ROOT / "examples").glob("*.py"):
        (examples / script.name).write_text(shorter(script.read_text()) if script == EXAMPLE else script.read_text())
    yield tmp_path
    harness.check_no_strays(tmp_path)


def shorter(script: str) -> str:
    """The example with fewer steps."""
    assert script.count(f"job.steps({STEPS})") == 1
    return script.replace(f"job.steps({STEPS})", f"job.steps({FEWER})")


def run(folder: Path, command: str) -> str:
    """Run an `ftrun` command line of a page; its output."""
    program, *arguments = shlex.split(command)
    running = harness.start(folder, [harness.tool(program), *arguments])
    assert running.wait(90) == 0, running.output
    return running.output


def test_every_command_is_known() -> None:
    for command, page in ALL.items():
        program, first, *_ = shlex.split(command)
        known = program == "make" and first in MAKE
        assert known or command in OTHERS or program == "ftrun", f"{page}: no test knows: {command}"
    assert [*ALL][:2] == ["make demo", "make test"], "the first commands of the README"


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("ftrun ")])
def test_every_command_line_is_understood(command: str) -> None:
    """By the parser of the command itself, also where a test does not run it."""
    load_commands()
    _, *words = shlex.split(command)
    words = words if words[0] in COMMANDS else ["run", *words]
    parsed = typer.main.get_command(app).make_context("ftrun", [words[0]], resilient_parsing=True)
    typer.main.get_command(app).commands[words[0]].make_context(words[0], words[1:], parent=parsed)  # type: ignore[attr-defined]


def test_make_targets_exist() -> None:
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=30)
    targets = {line.split()[1] for line in listed.stdout.splitlines() if line.startswith("make ")}
    assert set(re.findall(r"`make ([\w-]+)`", TEXT)) | set(MAKE) <= targets


@pytest.mark.parametrize("command", RUN)
def test_command(folder: Path, command: str) -> None:
    said = next((said for start, said in SAID.items() if command.startswith(start)), "every weight is 1")
    assert said in run(folder, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("ftrun verify ")])
def test_verify(folder: Path, command: str) -> None:
    assert "equal: 2 ranks, " in run(folder, command)


def test_commands_on_a_live_run(folder: Path) -> None:
    """One run, called as all these commands call it, and every command that needs a live one."""
    arguments = ["--steps", "4000", "--stretch", "0.02"]
    options = ["--max-replacements", "99", "--run-id", "brave-otter"]
    running = harness.start(folder, harness.ftrun_command(folder, arguments, options=options))
    try:
        board = Board.open(running.run_dir() / "board")
        wait_for(lambda: gate.unpack(board.gate()).last >= 2, "the first steps")
        for command in [*LIVE, "ftrun stop"]:
            program, *words = shlex.split(command)
            words = ["brave-otter" if word in NAMES else word for word in words]
            done = subprocess.run(
                # no terminal here, and nobody to be asked
                [harness.tool(program), *words, *(["--yes"] if words[0] in ASKS and "--yes" not in words else [])],
                cwd=folder,
                env=harness.environment(folder), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=80,
            )  # fmt: skip
            healing = words[0] == "status" and done.returncode == 1
            assert done.returncode == 0 or healing, f"{command}\n{done.stderr}\n{running.output}"
    except BaseException:
        running.process.terminate()  # it would train on for minutes
        raise
    assert len(LIVE) >= 8 and running.wait(60) == 143


def test_demo(folder: Path) -> None:
    recipe = subprocess.run(
        ["make", "-C", str(ROOT), "-n", "demo"], capture_output=True, text=True, timeout=30
    ).stdout.splitlines()
    assert any(line.endswith("python examples/demo.py") for line in recipe), recipe
    running = harness.start(folder, [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", "20"])
    assert running.wait(110) == 0, running.output
    assert running.output.rstrip().endswith("equal")
    assert running.output.count("recovered in ") == 2


def test_plan_and_messages(folder: Path) -> None:
    """The plan's command, with the README's own script, shortened: the incident is told in the README's words.

    Afterwards every command that looks at a run that has ended.
    """
    plan = block("toml", "docs/how-to/inject-faults.md")
    (folder / "plan.toml").write_text(plan)
    (folder / "train.py").write_text(shorter(block("python")))
    command = re.search(r"^# plan\.toml, for: (ftrun .*)$", plan, re.M)
    assert command
    said = _without_figures(run(folder, command[1].replace("ftrun ", "ftrun --run-id brave-otter "))).splitlines()
    for page in ("README.md", "docs/concepts/repair.md"):
        for line in _without_figures(block("text", page)).splitlines():
            assert line in said, f"{page}: not said: {line}\n{said}"
    shown = "".join(run(folder, look) for look in ENDED)
    assert len(ENDED) >= 5 and shown.count("brave-otter") >= 3 and "rank 2" in shown
    assert ET.parse(folder / "incident.svg").getroot().tag.endswith("svg") and (folder / "run.json").exists()


def _without_figures(text: str) -> str:
    """The text with every measured duration replaced by #."""
    return re.sub(r"(after|recovered in|detect|stop|clean|reset|restore|first step) [\d.]+", r"\1 #", text)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_a_page_names_exist(page: Path) -> None:
    known = {
        name.lstrip("-") for command in completion.commands() for option in command.options for name in option.names
    }
    named = {
        name.replace("_", "-")
        for code in re.findall(r"`(ftrun [^`]*|--[^`]*)`", prose(page.read_text()))
        for name in re.findall(r"--([a-z][\w-]+)", code.partition("train.py")[0])
    }
    assert named <= known


def test_pictures() -> None:
    """They are there, drawn, and of the runs that `make images` makes; what is told beside a picture is of its run."""
    script = (ROOT / "examples" / "images.py").read_text()
    for page in pages():
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", page.read_text()):
            text = ET.parse(page.parent / name).getroot()
            assert text.tag == "{http://www.w3.org/2000/svg}svg"
            words = " ".join("".join(text.itertext()).replace("\xa0", " ").split())
            assert "/tmp" not in words and Path(name).stem.partition("-")[0] in script
    drawn = " ".join("".join(ET.parse(DOCS / "images" / "timeline.svg").getroot().itertext()).split())
    for page in (README, DOCS / "concepts" / "repair.md"):
        total, *parts = re.findall(
            r"(?:recovered in|detect|stop|clean|reset|restore|first step) ([\d.]+)", page.read_text()
        )[:7]
        assert f"repaired in {total} ms" in drawn
        told = [float(ms) for ms in re.findall(r"^\d\. \*\*.*?, ([\d.]+) ms\.\*\*", page.read_text(), re.M)]
        detect, stop, clean, reset, restore, first = map(float, parts)
        assert told == pytest.approx([detect, stop, clean + reset, restore, first])
