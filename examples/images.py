"""The pictures in README and docs, from real runs: `make images` writes docs/images/*.svg anew, and what is told beside them.

Runs `make demo`; its end is the README's first picture. Then trains the small GPT with four ranks and faults in three of its
steps, looks at it with `ftrun status` in a terminal of its own while it is healthy, recovering and short of a spare, and draws two
incidents with `ftrun timeline` when it is over: one whose state was adopted in place, and one in which it moved. The first one's
messages and figures go into the pages that show its picture.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
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
WIDE = 120  # of the demo's picture
# pages that tell the incident of the picture, between these marks
TOLD = (HERE.parent / "README.md", HERE.parent / "docs" / "concepts" / "repair.md")
MARKS = re.compile(r"(<!-- incident: examples/images\.py -->\n).*?(<!-- end of incident -->)", re.S)
INCIDENT = """\
```text
{lines}
```

![Four lanes of a training step: rank 2 fails in its backward pass, the others stop, clean and reset, a spare restores the rank]({picture})

1. **Detect, {detect:g} ms.** The kernel releases a worker's lock the moment it dies, however much memory it has.
2. **Stop, {stop:g} ms.** The launcher closes a gate before the optimizer. All ranks passed it or none did, so all agree on the next step.
3. **Clean and reset, {reset:g} ms.** The healthy ranks rewind random numbers and batch, and reconnect. Their processes live on.
4. **Restore, {restore:g} ms.** A warm spare maps the dead rank's weights: their memory outlives the worker.
5. **First step, {first_step:g} ms.** All ranks do step {step} again, together.
"""
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
        self._output = folder / "output.txt"
        with self._output.open("w") as output:
            self.run = subprocess.Popen(
                [FTRUN, *options, "train_gpt.py", "--steps", "260", "--print-every", "50"],
                cwd=folder, env=self._env, stdout=output, stderr=output,
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
        self._save(name, self._incident(incident, "--format", "svg"))

    def tell(self, incident: int) -> None:
        """Put messages and figures of an incident into the pages that show its picture."""
        said = self._output.read_text().splitlines()
        first = [number for number, line in enumerate(said) if " died in " in line][incident - 1]
        last = next(number for number in range(first, len(said)) if "recovered in" in said[number])
        lines = [line for line in said[first : last + 1] if line.startswith("ftrun: ")]
        parts = {
            name: float(ms)
            for name, ms in re.findall(r"(detect|stop|clean|reset|restore|first step) ([\d.]+)", lines[-1])
        }
        step = re.findall(r"step (\d+) again", "".join(lines))[0]
        for page in TOLD:
            picture = os.path.relpath(self._out / "timeline.svg", page.parent)
            told = INCIDENT.format(
                lines="\n".join(lines), picture=picture, step=step, reset=parts["clean"] + parts["reset"],
                **{name: parts[name.replace("_", " ")] for name in ("detect", "stop", "restore", "first_step")},
            )  # fmt: skip
            page.write_text(MARKS.sub(lambda found, told=told: f"{found[1]}{told}{found[2]}", page.read_text()))

    def _incident(self, number: int, *options: str) -> str:
        command = [FTRUN, "timeline", str(self._folder / "ftrun-logs" / RUN), "--incident", str(number), *options]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, check=True).stdout

    def _save(self, name: str, svg: str) -> None:
        save(self._out, name, svg)


def save(out: Path, name: str, svg: str) -> None:
    (out / f"{name}.svg").write_text(svg.rstrip() + "\n")
    print(f"images: {out / name}.svg, {len(svg) / 1000:.0f} kB", flush=True)


def demo(out: Path) -> None:
    """The end of `make demo`: the run with two kills, and the two digests. Errors: SystemExit when it fails."""
    done = subprocess.run(
        [sys.executable, str(HERE / "demo.py")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"images: the demo failed\n{done.stdout}")
    said = done.stdout[done.stdout.index("--- rank 2 killed") :].rstrip().splitlines()
    console = Console(record=True, width=WIDE, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print("$ make demo", style="bold")
    for line in said:
        if not line.startswith("$ "):
            style = "cyan" if line.startswith("ftrun: ") else "bold" if line.startswith(("---", "  ")) else ""
            console.print(Text(line, style=style, no_wrap=True))
    save(out, "demo", console.export_svg(title="make demo", unique_id="ftrun-demo"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures of README and docs from real runs.")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    parser.add_argument("--only", choices=("demo", "run"), help="one of the two runs")
    asked = parser.parse_args()
    out = asked.out
    out.mkdir(parents=True, exist_ok=True)
    if asked.only != "run":
        demo(out)
    if asked.only == "demo":
        return 0
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
        picture.tell(1)
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
