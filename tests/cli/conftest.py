"""Dry runs inside this process: what a command line means, without starting anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftrun.cli.main import execute

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: empty but for train.py; no variable of torchrun's or ours is set."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PET_", "FTRUN_", "TORCHELASTIC_", "TORCH_ELASTIC_")):
            monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.fixture
def plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """plan(*args): the JSON of `ftrun --dry-run --json *args`; train.py is the script when `script` is left out."""

    def run(*args: object, script: tuple[str, ...] = ("train.py",)) -> dict[str, Any]:
        code = execute(["--dry-run", "--json", *map(str, args), *script])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return dict(json.loads(printed.out))

    return run


@pytest.fixture
def mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """mistake(*args, code=2): the error of a command line that must not be accepted, one line."""

    def run(*args: object, code: int = 2) -> str:
        assert execute(["--dry-run", *map(str, args)]) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("ftrun: error: ") and printed.err.count("\n") == 1
        return printed.err

    return run
