"""How the command begins and how its output ends: a Ctrl-C during the imports, a reader that has seen enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INSTALLED = [str(Path(sys.executable).with_name("ftrun"))]
AS_MODULE = [sys.executable, "-m", "ftrun"]


@pytest.mark.parametrize("command", [INSTALLED, AS_MODULE], ids=["ftrun", "python -m ftrun"])
def test_ctrl_c_during_the_imports(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        ended = subprocess.run([*command, "runs"], env=env, capture_output=True, text=True, timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("words", [["--help"], ["runs", "--help"], ["completions", "bash"]])
def test_a_reader_that_has_seen_enough(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run([*AS_MODULE, *words], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
