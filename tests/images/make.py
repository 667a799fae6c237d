"""Makes docs/images/status/*.png and docs/images/timeline/*.png from real runs, in a terminal and in a browser."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.images import shots

ROOT = Path(__file__).resolve().parents[2]
FTRUN = str(Path(sys.executable).with_name("ftrun"))
SIZES = {"200x60": 0, "80x24": 1650}  # and where such a terminal is on the display, px from the left
DEADLINE = 180.0
# rank 2 hangs; later a rank that hangs in `stop` keeps the recovery from another's death going
STATES = """
[[fault]]
kind = "kill"
rank = 1
step = 20
at = "update"

[[fault]]
kind = "hang"
rank = 2
step = 300
at = "backward"

[[fault]]
kind = "kill"
rank = 0
step = 330
at = "backward"

[[fault]]
kind = "hang"
rank = 1
step = 330
at = "stop"
"""
INCIDENTS = {
    "backward": '[[fault]]\nkind = "kill"\nrank = 2\nstep = 20\nat = "backward"\n',
    "freeze": '[[fault]]\nkind = "freeze"\nrank = 1\nstep = 40\nat = "forward"\n',
    "update": '[[fault]]\nkind = "kill"\nrank = 3\nstep = 60\nat = "update"\n',
    "all-lost": "".join(f'[[fault]]\nkind = "kill"\nrank = {rank}\nstep = 83\nat = "update"\n' for rank in range(4)),
}


class Runs:
    """Runs in a folder of their own, which goes with them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ftrun-images-"))
        (self.folder / "runs").mkdir(mode=0o700)
        dropped = ("FTRUN_", "PET_", "NO_COLOR", "COLUMNS", "LINES")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        self.env = {**kept, "FTRUN_RUNS_ROOT": str(self.folder / "runs"), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
        self.env["PATH"] = f"{Path(FTRUN).parent}{os.pathsep}{self.env['PATH']}"
        for script in (ROOT / "examples" / "train_gpt.py", ROOT / "tests" / "images" / "unprotected.py"):
            shutil.copy(script, self.folder)
        self._live: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, plan: str, options: Sequence[str], script: Sequence[str]) -> subprocess.Popen[bytes]:
        (self.folder / f"{name}.toml").write_text(plan)
        command = [FTRUN, "--nproc-per-node", "4", "--run-id", name, *options]
        command += ["--fault-plan", f"{name}.toml"] if plan else []
        with (self.folder / f"{name}.log").open("wb") as log:
            run = subprocess.Popen([*command, *script], cwd=self.folder, env=self.env, stdout=log, stderr=subprocess.STDOUT)
        self._live.append(run)
        return run

    def look(self, name: str) -> dict[str, Any]:
        """`ftrun status --json`; {} when there is nothing to see."""
        done = subprocess.run([FTRUN, "status", name, "--json"], env=self.env, capture_output=True, text=True)
        return json.loads(done.stdout) if done.stdout.startswith("{") else {}

    def wait(self, name: str, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first picture for which `condition` holds.

        Raises:
            SystemExit: When none comes.
        """
        deadline = time.monotonic() + DEADLINE
        while not condition(picture := self.look(name)):
            if time.monotonic() > deadline:
                sys.exit(f"images: {name} was never {what}: {(self.folder / f'{name}.log').read_text()[-2000:]}")
        return picture

    def close(self) -> None:
        for run in self._live:
            if run.poll() is None:
                run.terminate()
                run.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def states(runs: Runs, display: shots.Display, out: Path) -> None:
    """`ftrun status` in five states, each in two sizes."""

    def shoot(name: str, state: str) -> None:
        """All sizes at once: some states do not last."""

        def one(size: str) -> None:
            command = ["ftrun", "status", name, "--interval", "0.3"]
            display.terminal(command, runs.env, runs.folder, size, "q leave", out / f"{state}-{size}.png", SIZES[size])

        with ThreadPoolExecutor() as pool:
            list(pool.map(one, SIZES))
        found = runs.look(name).get("state")
        if found != state:
            sys.exit(f"images: the run was {found} by the time at which it was shown as {state}")
        print(f"images: {out}/{state}-*.png", flush=True)

    name = "brave-otter"
    options = ["--hang-timeout", "90", "--recover-timeout", "30", "--max-replacements", "9"]
    runs.start(name, STATES, options, ["train_gpt.py", "--steps", "600"])
    runs.wait(name, "healthy after its first incident", lambda p: p.get("state") == "healthy" and p["step"] > 100)
    shoot(name, "healthy")
    held = runs.wait(name, "stalled", lambda p: p.get("state") == "stalled")
    shoot(name, "stalled")
    os.kill(next(w["pid"] for w in held["workers"] if w["rank"] == held["stall"]["culprits"][0]), signal.SIGKILL)
    runs.wait(name, "recovering", lambda p: p.get("state") == "recovering" and p["step"] > 320)
    shoot(name, "recovering")

    runs.start("plain-otter", "", ["--max-restarts", "3"], ["unprotected.py"])
    runs.wait("plain-otter", "starting", lambda p: p.get("state") == "starting" and p["workers"])
    shoot("plain-otter", "starting")
    runs.wait("plain-otter", "unprotected", lambda p: p.get("state") == "unprotected" and p["spares_ready"] == 1)
    shoot("plain-otter", "unprotected")


def incidents(runs: Runs, out: Path) -> None:
    """`ftrun timeline` of four incidents, as a browser shows it; the first also for who prefers it dark."""
    name = "calm-heron"
    options = ["--snapshot-every", "20", "--max-replacements", "9"]
    run = runs.start(name, "\n".join(INCIDENTS.values()), options, ["train_gpt.py", "--steps", "100"])
    if run.wait(DEADLINE * 2):
        sys.exit(f"images: {name} failed: {(runs.folder / f'{name}.log').read_text()[-2000:]}")
    for number, kind in enumerate(INCIDENTS, 1):
        page = runs.folder / f"{kind}.html"
        order = [FTRUN, "timeline", f"ftrun-logs/{name}", "--incident", str(number), "--format", "html", "-o", str(page)]
        subprocess.run(order, cwd=runs.folder, env=runs.env, check=True)
        for dark in (False, True)[: 2 if number == 1 else 1]:
            picture = out / f"{kind}{'-dark' if dark else ''}.png"
            shots.browser(page, picture, 1290, 2000, dark)
            print(f"images: {picture}, {picture.stat().st_size / 1000:.0f} kB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the screenshots in docs/images from real runs.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", choices=("status", "timeline"), default="", help="make these only")
    given = parser.parse_args()
    shots.need()
    for folder in ("status", "timeline"):
        (given.out / folder).mkdir(parents=True, exist_ok=True)
    runs = Runs()
    try:
        if given.only != "timeline":
            with shots.Display() as display:
                states(runs, display, given.out / "status")
        if given.only != "status":
            incidents(runs, given.out / "timeline")
    finally:
        runs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
