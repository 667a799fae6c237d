"""The pictures in the README, from a real run: `make images` writes docs/images/*.svg anew.

Trains the small GPT with four ranks and faults in three of its steps, looks at it with `ftrun status` in a terminal of its own
while it is healthy, recovering and short of a spare, and draws two incidents with `ftrun timeline` when it is over: one whose state
was adopted in place, and one in which it moved.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
FTRUN = str(Path(sys.executable).with_name("ftrun"))
RUN = "brave-otter"
COLUMNS, LINES = 100, 24
DEADLINE = 120.0
# the rank that hangs in `stop` keeps the second recovery going for --recover-timeout, which is long enough to look at; when every
# rank dies in its update, no whole copy of the state is left, and all ranks take it from the host snapshot
PLAN = """\
[[fault]]
kind = "kill"
rank = 2
step = 60
at = "backward"

[[fault]]
kind = "kill"
rank = 0
step = 150
at = "backward"

[[fault]]
kind = "hang"
rank = 1
step = 150
at = "stop"
""" + "".join(f'\n[[fault]]\nkind = "kill"\nrank = {rank}\nstep = 203\nat = "update"\n' for rank in range(4))


class Picture:
    """A real run, and what `ftrun` shows of it."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._folder, self._out = folder, out
        runs = folder / "runs"
        runs.mkdir(mode=0o700)
        self._env = {**os.environ, "FTRUN_RUNS_ROOT": str(runs), "OMP_NUM_THREADS": "1", "COLUMNS": str(COLUMNS)}
        self._env.pop("NO_COLOR", None)
        (folder / "plan.toml").write_text(PLAN)
        shutil.copy(HERE / "train_gpt.py", folder)  # the picture shows where it is
        options = [
            "--nproc-per-node",
            "4",
            "--spares",
            "1",
            "--fault-plan",
            "plan.toml",
            "--run-id",
            RUN,
            "--recover-timeout",
            "5",
            "--snapshot-every",
            "50",
            "--max-replacements",
            "9",
        ]
        self.run = subprocess.Popen(
            [FTRUN, *options, "train_gpt.py", "--steps", "260", "--print-every", "50"],
            cwd=folder, env=self._env,
        )  # fmt: skip

    def look(self) -> dict[str, object]:
        """`ftrun status --json`; {} when there is nothing to see."""
        done = subprocess.run([FTRUN, "status", RUN, "--json"], env=self._env, capture_output=True, text=True)
        return json.loads(done.stdout) if done.stdout.startswith("{") else {}

    def wait(self, what: str, condition: Callable[[dict[str, object]], bool]) -> None:
        """Errors: SystemExit when the run ends before `condition` holds."""
        deadline = time.monotonic() + DEADLINE
        while not condition(self.look()):
            if self.run.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"images: the run was never {what}")

    def screen(self, name: str) -> None:
        """What a terminal shows of `ftrun status`, as a picture."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(self._in_terminal("status", RUN, "--once").rstrip()))
        self._save(f"status-{name}", console.export_svg(title="ftrun status", unique_id=f"ftrun-{name}"))

    def _in_terminal(self, *args: str) -> str:
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(FTRUN, [FTRUN, *args], {**self._env, "TERM": "xterm-256color", "LINES": str(LINES)})
        shown = b""
        try:
            while select.select([terminal], [], [], 10.0)[0]:
                shown += os.read(terminal, 65536)
        except OSError:
            pass  # it has ended
        os.waitpid(pid, 0)
        os.close(terminal)
        return shown.decode().replace("\r\n", "\n").replace(f"{self._folder}/", "")

    def timeline(self, name: str, incident: int) -> None:
        """The drawing of an incident of the run, which must have ended."""
        command = [
            FTRUN,
            "timeline",
            str(self._folder / "ftrun-logs" / RUN),
            "--incident",
            str(incident),
            "--format",
            "svg",
        ]
        self._save(name, subprocess.run(command, env=self._env, capture_output=True, text=True, check=True).stdout)

    def _save(self, name: str, svg: str) -> None:
        (self._out / f"{name}.svg").write_text(svg.rstrip() + "\n")
        print(f"images: {self._out / name}.svg, {len(svg) / 1000:.0f} kB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the README's pictures from a real run.")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ftrun-images-"))
    picture = Picture(folder, out)
    try:
        picture.wait("healthy in its steps", lambda p: p.get("state") == "healthy" and bool(_step(p)))
        picture.screen("healthy")
        picture.wait("past its first incident", lambda p: _step(p) > 120)
        picture.wait("recovering", lambda p: p.get("state") == "recovering")
        picture.screen("recovering")
        picture.wait("healthy again", lambda p: p.get("state") == "healthy")
        picture.screen("recovered")
        if picture.run.wait(DEADLINE):
            sys.exit("images: the run failed")
        picture.timeline("timeline", 1)
        picture.timeline("transfer", 3)
    finally:
        if picture.run.poll() is None:
            picture.run.terminate()
            picture.run.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _step(picture: dict[str, object]) -> int:
    gate = picture.get("gate")
    return int(gate["last"]) + 1 if isinstance(gate, dict) else 0


if __name__ == "__main__":
    sys.exit(main())
