"""Options from a TOML file, and its mistakes: file, line, key, nearest name, exit code 78."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Plan

GOOD = """
nproc-per-node = 4
spares = 2                       # a comment
hang_timeout = "auto"
heartbeat-timeout = 2
stop-timeout = 2.5
standalone = true
redirects = 3
tee = "0:1"
local-ranks-filter = [0, 2]
duplicate-stdout-filters = ["loss, step", "acc"]
forward-signals = ["USR1", "SIGUSR2"]
rdzv-conf = { timeout = 9, join = "x" }
"""


def test_every_kind_of_value(folder: Path, plan: Plan) -> None:
    (folder / "run.toml").write_text(GOOD)
    shown = plan("--config", "run.toml")
    settings = shown["settings"]
    assert (settings["nproc"], settings["spares"], settings["stop_timeout"]) == (4, 2, 2.5)
    assert settings["hang_timeout"] is None and settings["nodes"]["standalone"] is True
    assert settings["nodes"]["conf"] == {"timeout": "9", "join": "x"}
    output = settings["output"]
    assert output["redirects"]["default"] == 3 and output["tee"]["by_rank"] == {"0": 1}
    assert output["filter"] == [0, 2] and output["stdout_filters"] == ["loss, step", "acc"]
    assert settings["forward"] == [10, 12]
    assert shown["options"]["spares"] == {"value": "2", "from": "run.toml", "effect": True}


def test_pyproject(folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert plan()["settings"]["spares"] == 1
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.ftrun]\nspares = 0\n')
    assert plan()["settings"]["spares"] == 0
    assert plan("--config=pyproject.toml")["settings"]["spares"] == 0
    (folder / "mine.toml").write_text("spares = 7\n")
    monkeypatch.setenv("FTRUN_CONFIG", "mine.toml")
    assert plan()["settings"]["spares"] == 7


def test_what_an_inexact_repair_does_by_file_variable_and_command_line(
    folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan()["settings"]["inexact"] == "go-on"
    (folder / "run.toml").write_text('inexact = "stop"\n')
    assert plan("--config=run.toml")["settings"]["inexact"] == "stop"
    monkeypatch.setenv("FTRUN_INEXACT", "go-on")
    assert plan("--config=run.toml")["settings"]["inexact"] == "go-on"
    assert plan("--config=run.toml", "--inexact=stop")["settings"]["inexact"] == "stop"


def test_a_flag_of_the_file_is_turned_off_by_its_variable(
    folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "run.toml").write_text("standalone = true\n")
    monkeypatch.setenv("PET_STANDALONE", "0")
    assert plan("--config=run.toml")["settings"]["nodes"]["standalone"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nspare = 1\n", "run.toml:2: there is no option 'spare'; did you mean spares?"),
        ("x = 1\n", "run.toml:1: there is no option 'x'; there are spares, "),
        ("spares = 1\nmax_restarts = '3'\n", "run.toml:2: max_restarts must be a whole number, not '3'"),
        ("spares = true\n", "run.toml:1: spares must be a whole number, not True"),
        ("standalone = 1\n", "run.toml:1: standalone must be true or false, not 1"),
        ("\n\nspares = -1\n", "run.toml:3: --spares must not be negative"),
        ("nnodes = '3:1'\n", "run.toml:1: --nnodes must be at least 1"),
        ("dry-run = true\n", "run.toml:1: dry-run belongs on the command line"),
        ("spares = 1\nspares = 2\n", "run.toml:2: not valid TOML"),
        ("max-restarts = 1\nmax_restarts = 1\n", "max-restarts is there twice"),
        ("[tool.ftrun]\nspares = 2\n", "there is no option 'tool'"),
        ("local-ranks-filter = [true]\n", "local-ranks-filter must hold strings and numbers, not True"),
    ],
)
def test_mistake(folder: Path, mistake: Callable[..., str], text: str, message: str) -> None:
    (folder / "run.toml").write_text(text)
    assert message in mistake("--config=run.toml", "train.py", code=78)


def test_mistakes_in_pyproject(folder: Path, mistake: Callable[..., str]) -> None:
    text = "[project]\nspares = 1\n\n[tool.ftrun]\nname = 'x'\nspares = -1\n"
    (folder / "pyproject.toml").write_text(text)
    assert "pyproject.toml:5: there is no option 'name'" in mistake("train.py", code=78)
    (folder / "pyproject.toml").write_text(text.replace("name = 'x'\n", ""))
    assert "pyproject.toml:5: --spares must not be negative" in mistake("train.py", code=78)
    (folder / "pyproject.toml").write_text("tool.ftrun = 3\n")
    assert "tool.ftrun must be a table" in mistake("train.py", code=78)


def test_missing_file(mistake: Callable[..., str]) -> None:
    assert "none.toml: cannot read the configuration: No such file" in mistake("--config=none.toml", "x.py", code=78)
