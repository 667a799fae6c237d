"""The progress bar: drawn on terminals only, and gone at the end; elsewhere one line for each part of the work."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
from ftrun.verify.progress import ProgressBar
with ProgressBar("verify") as progress:
    progress.begin("clean")
    progress.show(3, 12)
    progress.done("clean: exit code 0")
"""


def test_lines_without_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("", "ftrun: verify: clean: exit code 0\n")


def test_a_bar_in_a_terminal() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="80")
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:
        pass  # it has ended
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert b"verify: clean" in shown and b"3/12" in shown
    assert b"ftrun: verify: clean: exit code 0\r\n" in shown
