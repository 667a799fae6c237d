"""Follows the README literally, as somebody who has nothing but a clone: `make follow`.

A fresh clone in a temporary folder, an empty HOME, an environment with nothing of this one but PATH and how pip finds packages. Every
command of every shell block is run in its order, as written; where the README says "from a second terminal", from a second
process once the first one trains. What each must print is compared. `make test` (which CI runs in a fresh clone) is left out
unless --all is given. Exit code 0 when everything was as the README says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.blocks import ROOT, blocks

# command -> patterns that its output must hold
WANTED: dict[str, tuple[str, ...]] = {
    "make demo": (r"rank 2 died in backward", r"rank 0 died in update", r"bit-identical to an uninterrupted run: yes", r"  equal\s*$"),
    "make test": (r"\d+ passed",),
    "pip install .": (r"Successfully installed .*ftrun-",),
    "ftrun --nproc-per-node": (
        r"rank 1 died in ", r"spare 2 takes over rank 1", r"recovered in", r"every weight is 1", r"uninterrupted run: yes",
    ),
    "ftrun inject-fault": (r"kill struck rank 1",),
    "ftrun verify": (r"equal: 2 ranks, 60 steps",),
}  # fmt: skip
LONG = "make test"
SECOND = "ftrun inject-fault"  # typed in a second terminal, while the command before it trains
# of this environment: where programs are, and how pip finds packages
KEPT = ("PATH", "LANG", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE")
PIPS = "PIP_"
DEADLINE = 3600.0


@dataclass
class Terminal:
    """A command in a terminal of its own, as a person has one."""

    command: str
    folder: Path
    env: dict[str, str]
    output: str = ""
    code: int | None = None
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        print(f"$ {self.command}", flush=True)
        ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self.command],
            cwd=self.folder, env=self.env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,))
        self._reader.start()

    def _read(self, ours: int) -> None:
        deadline = time.monotonic() + DEADLINE
        with contextlib.suppress(OSError):  # it has ended
            while time.monotonic() < deadline:
                if select.select([ours], [], [], 1.0)[0]:
                    self.output += os.read(ours, 65536).decode(errors="replace")
        if self._process.poll() is None:
            self._process.terminate()
        self.code = self._process.wait()
        os.close(ours)

    def wait(self) -> None:
        self._reader.join()

    def text(self) -> str:
        """What was printed, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output).replace("\r\n", "\n")


def check(terminal: Terminal) -> bool:
    terminal.wait()
    wanted = next(patterns for start, patterns in WANTED.items() if terminal.command.startswith(start))
    missing = [pattern for pattern in wanted if not re.search(pattern, terminal.text(), re.M)]
    print("".join(f"    {line}\n" for line in terminal.text().splitlines()[-12:]), end="", flush=True)
    print(
        f"  -> exit code {terminal.code}{f', not in the output: {missing}' if missing else ', as the README says'}",
        flush=True,
    )
    return terminal.code == 0 and not missing


def training(terminal: Terminal, env: dict[str, str]) -> None:
    """Wait until the run does steps: as a person would, by looking at `ftrun status`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and terminal.code is None:
        look = ["ftrun", "status", "--json"]
        done = subprocess.run(look, cwd=terminal.folder, env=env, capture_output=True, text=True)
        with contextlib.suppress(ValueError):
            if (picture := json.loads(done.stdout))["state"] == "healthy" and picture["step"]:
                return
        time.sleep(0.2)


def clone(folder: Path) -> Path:
    """What is committed, and nothing else: as `git clone` gives it."""
    there = folder / "ftrun"
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(there)], check=True)
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    subprocess.run(["git", "-C", str(there), "checkout", "--quiet", "--detach", head.strip()], check=True)
    return there


def main() -> int:
    parser = argparse.ArgumentParser(description="Follow the README in a fresh clone.")
    parser.add_argument("--all", action="store_true", help="`make test` too")
    everything = parser.parse_args().all
    commands = [
        line.partition("  #")[0].strip()
        for block in blocks("sh") if block.page == "README.md"
        for line in block.text.splitlines()
    ]  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="ftrun-follow-"))
    good = True
    try:
        here = clone(folder)
        (folder / "home").mkdir()
        (folder / "session").mkdir(mode=0o700)
        env = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(PIPS)}
        env |= {"HOME": str(folder / "home"), "TERM": "xterm-256color", "XDG_RUNTIME_DIR": str(folder / "session")}
        env["PIP_CONSTRAINT"] = str(here / "constraints.txt")  # a bare torch would be gigabytes
        # "into an environment of yours"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "yours")], check=True)
        env["PATH"] = f"{folder / 'yours' / 'bin'}:{env['PATH']}"
        before: Terminal | None = None
        for number, command in enumerate(commands):
            if command == LONG and not everything:
                print(f"$ {command}\n  -> left out (--all runs it)", flush=True)
                continue
            followed = number + 1 < len(commands) and commands[number + 1].startswith(SECOND)
            terminal = Terminal(command, here, env)
            if followed:
                before = terminal
                training(terminal, env)
                continue
            good &= check(terminal)
            if before is not None:
                good &= check(before)
                before = None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("the README is right" if good else "the README is WRONG", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
