"""The command line starts without the slow imports: a real interpreter imports it and says what came along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "pynvml", "rich", "pydantic", "numpy", "asyncio")


@pytest.mark.parametrize("what", ["import ftrun", "from ftrun.cli.main import load_commands; load_commands()"])
def test_no_slow_import(what: str) -> None:
    program = f"import sys; {what}\nprint(*[name for name in {SLOW!r} if name in sys.modules])"
    # -S would hide site-packages, so a .pth file that imports something is part of what is tested.
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_command_is_found_without_importing_all() -> None:
    program = (
        "import typer; from ftrun.cli import main; main.load_commands();"
        "print(set(typer.main.get_command(main.app).commands) == set(main.COMMANDS))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True"], done.stderr
