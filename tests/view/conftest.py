"""A folder of runs that were recorded, and the command line to look at them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.view import boards
from tests.view.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]


class Looking:
    """Runs `ftrun ...` on the recorded runs below `root`, piped or in a terminal."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "runs"
        self.root.mkdir(mode=0o700)
        dropped = ("FTRUN_", "PET_", "COLUMNS", "NO_COLOR", "TERM")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.env = {**kept, "FTRUN_RUNS_ROOT": str(self.root), "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
        self.env["XDG_STATE_HOME"] = str(base / "state")

    def command(self, *args: object) -> list[str]:
        return [sys.executable, "-c", "from ftrun.cli.main import main; main()", *map(str, args)]

    def pipe(self, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args), cwd=self.base, env={**self.env, **env}, capture_output=True, text=True, timeout=60
        )

    def terminal(self, *args: object, columns: int = 100, rows: int = 30, **env: str) -> Terminal:
        return Terminal(self.command(*args), {**self.env, **env}, self.base, columns, rows)

    def finished(self, name: str = "lab") -> Path:
        """The log folder of a run that ended: the recorded journal."""
        import json

        folder = self.base / "ftrun-logs" / name
        folder.mkdir(parents=True)
        recorded = json.loads(boards.RECORDED.read_text())["journal"]
        (folder / "journal.jsonl").write_text(boards.journal_text(recorded))
        return folder


@pytest.fixture
def looking(tmp_path: Path) -> Looking:
    return Looking(tmp_path)
