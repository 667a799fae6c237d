"""What it costs to watch a run: processor time of a live `ftrun status`, and how long until its first picture.

    python tests/bench/status.py [--rounds N] [--results FOLDER]

On boards put back from a recording (8 and 10,000 ranks) whose ranks beat and step on meanwhile, and on a real run of 8
ranks. Bounds: 1 % of one core for 8 ranks, 5 % for 10,000; the first picture within 300 ms. Exit code 1 beyond them.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ftrun.core.shared import gate  # noqa: E402
from ftrun.core.shared.board import Board, F  # noqa: E402
from tests.bench import tables  # noqa: E402
from tests.view import boards  # noqa: E402
from tests.view.terminal import Terminal  # noqa: E402

SEEN = b"ranks healthy"
FTRUN = str(Path(sys.executable).with_name("ftrun"))
BOUNDS = {8: 1.0, 10_000: 5.0}  # % of one core
PAINT = 300.0  # ms
TICK = os.sysconf("SC_CLK_TCK")
TRAIN = """
import sys, time, torch, torch.distributed as dist
import ftrun
model = torch.nn.Linear(64, 64)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
dist.init_process_group("ftrun")
ddp = torch.nn.parallel.DistributedDataParallel(model)
job = ftrun.protect(model=ddp, optimizer=opt)
for step in job.steps(100000):
    with step:
        time.sleep(0.1)
        ddp(torch.ones(2, 64)).sum().backward()
        opt.step()
        opt.zero_grad()
"""


class Player(threading.Thread):
    """Lets the ranks of a board beat and step on, ten times a second."""

    def __init__(self, board: Board, ranks: int) -> None:
        super().__init__(daemon=True)
        self._board, self._ranks = board, ranks
        self.over = threading.Event()

    def run(self) -> None:
        step = boards_step(self._board)
        while not self.over.wait(0.1):
            step += 1
            now = time.monotonic_ns()
            for rank in range(self._ranks):
                words = self._board.cell(rank).words()
                words[F.BEAT], words[F.STEP], words[F.PHASE] = now, step + 1, 2 + (step + rank) % 3
            raw = self._board.gate()
            word = gate.unpack(raw)
            self._board.swap_gate(raw, gate.pack(gate.GateWord(word.generation, word.closed, step - 1)))
            self._board.show_opening(step - 1, now)


def boards_step(board: Board) -> int:
    return int(gate.unpack(board.gate()).last) + 1


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def painted(terminal: Terminal) -> float:
    """ms from the start to the first picture."""
    while SEEN not in terminal.raw:
        assert terminal.pump(), terminal.text
    return (time.monotonic() - terminal.began) * 1e3


def watch(env: dict[str, str], folder: Path, run: str, seconds: float) -> tuple[float, float]:
    """First picture (ms), and the share of one core (%) in the seconds after it."""
    with Terminal([FTRUN, "status", run], env, folder, 120, 40) as terminal:
        paint = painted(terminal)
        begin, before = time.monotonic(), cpu_seconds(terminal.pid)
        while time.monotonic() - begin < seconds:
            terminal.pump(0.2)
        share = (cpu_seconds(terminal.pid) - before) / (time.monotonic() - begin) * 100
        terminal.press("q")
        terminal.end()
    return paint, share


def first_paint(env: dict[str, str], folder: Path, run: str) -> float:
    with Terminal([FTRUN, "status", run], env, folder, 120, 40) as terminal:
        paint = painted(terminal)
        terminal.press("q")
        terminal.end()
    return paint


def recorded(folder: Path, ranks: int, seconds: float, starts: int) -> dict[str, Any]:
    env = environment(folder / f"runs-{ranks}")
    board = boards.put(folder / f"runs-{ranks}", "bench", ranks)
    player = Player(board, ranks)
    if ranks <= 64:  # ten thousand cells written by Python would take the core that is to be measured
        player.start()
    try:
        paints = [first_paint(env, folder, "bench") for _ in range(starts)]
        _, share = watch(env, folder, "bench", seconds)
    finally:
        player.over.set()
    return {"board": "recorded", "ranks": ranks, "cpu_percent": share, "paint_ms": paints}


def real(folder: Path, ranks: int, seconds: float, starts: int) -> dict[str, Any]:
    env = {**environment(folder / "runs-real"), "OMP_NUM_THREADS": "1"}
    (folder / "train.py").write_text(TRAIN)
    command = [FTRUN, "--nproc-per-node", str(ranks), "--spares", "0", "--run-id", "bench", "train.py"]
    with (folder / "out").open("wb") as out:
        run = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        _await_steps(env)
        paints = [first_paint(env, folder, "bench") for _ in range(starts)]
        _, share = watch(env, folder, "bench", seconds)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    return {"board": "real run", "ranks": ranks, "cpu_percent": share, "paint_ms": paints}


def _await_steps(env: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = subprocess.run([FTRUN, "status", "bench", "--json"], env=env, capture_output=True, text=True)
        if done.returncode in (0, 1) and json.loads(done.stdout)["step"] > 5:
            return
        time.sleep(0.3)
    raise SystemExit("the run makes no steps")


def environment(root: Path) -> dict[str, str]:
    root.mkdir(mode=0o700)
    return {**os.environ, "FTRUN_RUNS_ROOT": str(root), "PYTHONUTF8": "1"}


def main() -> int:
    args = tables.arguments("Cost of a live ftrun status.").parse_args()
    seconds, starts = (30.0, args.rounds or 15)
    found = []
    with tempfile.TemporaryDirectory(prefix="ftrun-bench-") as name:
        folder = Path(name)
        found += [recorded(folder, ranks, seconds, starts) for ranks in (8, 10_000)]
        found.append(real(folder, 8, seconds, starts))
    rows = [
        [
            r["board"],
            str(r["ranks"]),
            f"{r['cpu_percent']:.2f} %",
            f"{BOUNDS[r['ranks']]:g} %",
            tables.figure(r["paint_ms"]),
        ]
        for r in found
    ]
    notes = f"Processor time of `ftrun status` over {seconds:g} s, of one core; the first picture is to come within {PAINT:g} ms."
    head = ["board", "ranks", "processor", "bound", "first picture"]
    tables.write(args.results, "status", "Watching a run", head, rows, notes)
    late = [r for r in found if r["cpu_percent"] > BOUNDS[r["ranks"]] or statistics.median(r["paint_ms"]) > PAINT]
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
