"""Every command, whoever wrote it: help with an example, JSON where it reads, its exit codes; in a terminal and piped.

The commands are taken from the app, so a new one is tested without a word here. Real processes throughout.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftrun.cli import catalog, completion
from ftrun.cli.completion import RUN, Command
from ftrun.cli.options import BY_NAME
from tests.e2e import harness

COMMANDS = {command.name: command for command in completion.commands()}
ACTING = {"run", "stop", "drain", "inject-fault", "completions", "explain"}  # they change something, or print what is no data
# what these need beside the run's name to be understood
NEEDS = {"inject-fault": ["kill", "--yes"], "drain": ["--rank", "0", "--yes"]}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Answer:
    code: int
    out: str
    err: str


def environment(folder: Path) -> dict[str, str]:
    return {**harness.environment(folder), "TERM": "xterm", "COLUMNS": "110", "LINES": "40"}


def piped(folder: Path, *args: str) -> Answer:
    done = subprocess.run(
        [harness.tool("ftrun"), *args],
        cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout, done.stderr)


def in_terminal(folder: Path, *args: str) -> Answer:
    """All three streams are a terminal; what is shown comes back as `out`, without colours."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(harness.tool("ftrun"), ["ftrun", *args], environment(folder))
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                data = os.read(terminal, 65536)
                if not data:
                    break
                shown += data
    except OSError:
        pass  # the other end was closed
    else:
        os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return Answer(os.waitstatus_to_exitcode(status), ESCAPE.sub("", shown.decode()).replace("\r\n", "\n"), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "bad.toml").write_text("[[fault]]\nkind = 'nonsense'\nrank = 0\n")
    (tmp_path / "wide.toml").write_text("[[fault]]\nkind = 'kill'\nrank = 7\n")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(folder: Path, name: str) -> None:
    answer = piped(folder, name, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"Usage: ftrun {name}") and "\x1b" not in answer.out
    last = " ".join(answer.out.strip().rpartition("\n\n")[2].split())
    assert re.search(rf"Examples?: .*ftrun {name}\b", last), f"no example at the end: {last}"
    assert in_terminal(folder, name, "--help").out.strip() == answer.out.strip()


def test_every_reading_command_has_json() -> None:
    without = {name for name, command in COMMANDS.items() if not any(o.shown == "--json" for o in command.options)}
    assert without <= ACTING


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_a_usage_error(folder: Path, name: str) -> None:
    answer = piped(folder, name, "--no-such-option")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("ftrun: error: ") and answer.err.count("\n") == 1, answer.err
    shown = in_terminal(folder, name, "--no-such-option")
    assert (shown.code, shown.out) == (2, answer.err)


@pytest.mark.parametrize("name", [n for n, command in COMMANDS.items() if RUN in command.arguments])
def test_no_such_run(folder: Path, name: str) -> None:
    answer = piped(folder, name, "no-such-run", *NEEDS.get(name, []))
    assert (answer.code, answer.out) == (4, ""), answer.err
    assert answer.err.startswith("ftrun: error: ") and "no-such-run" in answer.err
    if not NEEDS.get(name) and name != "explain":  # which lists all codes then
        assert piped(folder, name).code == 4  # nor a newest one
    shown = in_terminal(folder, name, "no-such-run", *NEEDS.get(name, []))
    assert shown.code == 4 and "no-such-run" in shown.out and "Traceback" not in shown.out


CODES: list[tuple[int, str]] = [
    (2, ""),
    (0, "--help"),
    (0, "--version"),
    (0, "runs"),
    (0, "runs --json"),
    (0, "--dry-run train.py"),
    (0, "--dry-run --json train.py"),
    (2, "missing.py"),
    (2, "run missing.py"),
    (2, "statsu"),
    (2, "--spares many train.py"),
    (78, "--fault-plan bad.toml train.py"),
    (78, "--fault-plan wide.toml train.py"),
    (78, "--fault-plan missing.toml train.py"),
    (78, "--config missing.toml train.py"),
    (2, "verify train.py"),
    (2, "verify --faults bad.toml --kill-every-phase train.py"),
    (2, "verify --kill-every-phase missing.py"),
    (2, "verify --kill-every-phase --nnodes 2 --node-rank 0 train.py"),
    (2, "verify --kill-every-phase --no-python true"),
    (2, "verify --kill-every-phase --fault-plan bad.toml train.py"),
    (78, "verify --faults bad.toml train.py"),
    (78, "verify --faults wide.toml --nproc-per-node 4 train.py"),
    (2, "doctor --rdzv-endpoint host:99999999"),
    (2, "completions tcsh"),
    (0, "completions bash"),
]


@pytest.mark.parametrize(("code", "line"), CODES)
def test_exit_codes(folder: Path, code: int, line: str) -> None:
    answer = piped(folder, *line.split())
    assert answer.code == code, answer
    if code and line:
        assert answer.out == "" and answer.err.startswith("ftrun: error: ") and answer.err.count("\n") == 1, answer
    elif "--json" in line:
        json.loads(answer.out)
    assert "Traceback" not in answer.err
    shown = in_terminal(folder, *line.split())
    assert shown.code == code
    if code and line:
        assert shown.out == answer.err  # the same sentence, whoever reads it
    assert not any((folder / "runs").iterdir())


def test_json_where_there_is_nothing_to_read(folder: Path) -> None:
    """A program that asks for JSON gets JSON or nothing on stdout, never a sentence."""
    for name, command in COMMANDS.items():
        if RUN in command.arguments and name not in ACTING:
            answer = piped(folder, name, "--json")
            assert answer.code == 4, (name, answer)
            if answer.out:
                json.loads(answer.out)


def test_the_table_sees_every_command(folder: Path) -> None:
    assert set(catalog.COMMANDS) == set(COMMANDS) and isinstance(COMMANDS["run"], Command)


def test_the_front_page(folder: Path) -> None:
    """It fits a terminal of 80 columns and 40 lines, and nothing on it is cut; --help-all has every option."""
    for answer in (piped(folder, "--help"), in_terminal(folder, "-h")):
        lines = answer.out.rstrip("\n").split("\n")
        assert len(lines) <= 40 and all(len(line) <= 80 for line in lines), answer.out
        for name, listed in catalog.COMMANDS.items():
            assert [line for line in lines if f" {name} " in line and line.endswith(listed.summary)], name
        for option, text in catalog.COMMON:
            assert [line for line in lines if line.split()[:1] == [option.split()[0]] and line.endswith(text)], option
    assert {option.split()[0][2:] for option, _ in catalog.COMMON} <= set(BY_NAME)
    everything = piped(folder, "--help-all").out
    assert all(f"--{name}" in everything for name in BY_NAME) and "..." not in everything.replace("[ARGS]...", "")
    assert all(listed.summary in everything for listed in catalog.COMMANDS.values())


@pytest.mark.parametrize("command", [["doctor"], ["completions", "bash"], ["--help"], ["--version"]])
def test_a_full_disk_behind_stdout_is_said(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [harness.tool("ftrun"), *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr == "ftrun: error: cannot write to stdout: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    command = f"{harness.tool('ftrun')} timeline ./nowhere {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert ("no run named ./nowhere" in done.stderr) is ("2>&-" not in closed)
