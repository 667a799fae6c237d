"""What the README says is so: its commands are run, its options exist, its messages are the ones that appear."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ftrun.core.shared import gate
from ftrun.core.shared.board import Board
from tests.e2e import harness

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "four_lines.py"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
# targets that the README tells people to call -> who runs them
MAKE = {
    "demo": "test_demo",
    "test": "this is it",
    "help": "test_make_targets_exist",
    "bench": "a person: minutes",
    "matrix": "a person: minutes",
}


def block(language: str, number: int = 0) -> str:
    return [text for kind, text in BLOCKS if kind == language][number]


def commands() -> list[str]:
    """Every command line in shell blocks, and those in comments of plans."""
    shell = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    return [line.partition("  #")[0].strip() for line in shell if line.strip()]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like the checkout to the README's commands; afterwards nothing of a run may be left."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield tmp_path
    harness.check_no_strays(tmp_path)


def run(folder: Path, command: str) -> str:
    """Run an `ftrun` command line of the README; its output."""
    program, *arguments = shlex.split(command)
    running = harness.start(folder, [harness.tool(program), *arguments])
    assert running.wait(90) == 0, running.output
    return running.output


def test_every_command_is_known() -> None:
    for command in commands():
        program, first, *_ = shlex.split(command)
        assert (program == "make" and first in MAKE) or command in FTRUN + LIVE, f"no test runs: {command}"
    assert {"make demo", "make test"} <= set(commands())


def test_make_targets_exist() -> None:
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=30)
    targets = {line.split()[1] for line in listed.stdout.splitlines() if line.startswith("make ")}
    assert set(re.findall(r"`make ([\w-]+)`", README)) | set(MAKE) <= targets


ON_A_LIVE_RUN = ("ftrun inject-fault ", "ftrun drain ")
LIVE = [command for command in commands() if command.startswith(ON_A_LIVE_RUN)]
FTRUN = [command for command in commands() if command.startswith("ftrun ") and command not in LIVE]


VERIFY = "ftrun verify "
STEPS, FEWER = 1000, 200
# how a command begins -> what its output must hold
SAID = {VERIFY: f"equal: 2 ranks, {STEPS} steps", "ftrun doctor": " 0 broken"}


def shorter(script: str) -> str:
    """The example with fewer steps."""
    assert script.count(f"job.steps({STEPS})") == 1
    return script.replace(f"job.steps({STEPS})", f"job.steps({FEWER})")


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if c.startswith(VERIFY) else ()) for c in FTRUN]
)
def test_command(folder: Path, command: str) -> None:
    said = next((said for start, said in SAID.items() if command.startswith(start)), "every weight is 1")
    assert said in run(folder, command)


def test_commands_on_a_live_run(folder: Path) -> None:
    arguments = ["--steps", "2000", "--stretch", "0.02"]
    running = harness.start(folder, harness.ftrun_command(folder, arguments, options=["--max-replacements", "99"]))
    board = Board.open(running.run_dir() / "board")
    deadline = time.monotonic() + 60
    while gate.unpack(board.gate()).last < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for command in [*LIVE, "ftrun stop"]:
        program, *words = shlex.split(command)
        done = subprocess.run(
            [harness.tool(program), *words, "--yes"],  # no terminal here, and nobody to be asked
            cwd=folder, env=harness.environment(folder), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=80,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}\n{running.output}"
    assert len(LIVE) == 4 and running.wait(60) == 143


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
    """The plan's command, with the README's own script, shortened: the incident is told in the README's words."""
    plan = block("toml")
    (folder / "plan.toml").write_text(plan)
    (folder / "train.py").write_text(shorter(block("python")))
    command = re.search(r"^# plan\.toml, for: (ftrun .*)$", plan, re.M)
    assert command
    output = run(folder, command[1])
    said = _without_figures(output).splitlines()
    for line in _without_figures(block("")).splitlines():
        assert line in said, f"not said: {line}\n{output}"


def _without_figures(text: str) -> str:
    """The text with every measured duration replaced by #."""
    return re.sub(r"(after|recovered in|detect|stop|clean|reset|restore|first step) [\d.]+", r"\1 #", text)


def test_options_exist_with_these_defaults() -> None:
    command = [harness.tool("ftrun"), "run", "--help"]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split())
    table = re.findall(r"^\| `(--[\w-]+) \w+` \|([^|]*)\|", README, re.M)
    assert len(table) >= 6
    for option, default in table:
        found = re.search(rf" {option}(?:, --\w+)? (.*?)(?= --|$)", shown)
        assert found, f"{option} is not an option"
        if default.strip().isdigit():
            assert f"[default: {default.strip()}]" in found[1], found[1]


def test_pictures() -> None:
    """They are there, drawn, and of the runs that `make images` makes."""
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert shown
    for name in shown:
        text = ET.parse(ROOT / name).getroot()
        assert text.tag == "{http://www.w3.org/2000/svg}svg"
        words = " ".join("".join(text.itertext()).split())
        assert "brave-otter" in words and "/tmp" not in words
    script = (ROOT / "examples" / "images.py").read_text()
    assert all(Path(name).stem.partition("-")[0] in script for name in shown)
