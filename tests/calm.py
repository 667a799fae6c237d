"""A long run in which everything looks wrong and nothing is: ftrun must report nothing.

    python tests/calm.py [--minutes M] [--quick]

Steps jitter and some take ten times as long, the first one is long, rank 0 evaluates between steps and writes checkpoints
through job.call while the others wait, other programs take the processors, py-spy and gdb are attached to workers (where
installed), and the launcher itself is stopped for a while. Exit code 1 with what was reported.
"""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftrun.core.shared.board import Board, F
from tests.e2e import harness

SCRIPT = """
import os, random, sys, time
import torch
import torch.distributed as dist
import ftrun
from torch import nn

plan = dict(zip(sys.argv[1::2], map(float, sys.argv[2::2])))
torch.manual_seed(1)
dist.init_process_group("ftrun")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job = ftrun.protect(model=model, optimizer=optimizer)
dice = random.Random(job.rank)
end = time.monotonic() + plan["--seconds"]

def checkpoint():
    if job.rank == 0:
        time.sleep(plan["--checkpoint"])
        job.save("checkpoint.pt")
    dist.barrier()

def score():
    time.sleep(plan["--evaluation"] * (0.5 + 0.5 * job.rank / job.world_size))
    dist.all_reduce(torch.ones(1))

over = torch.zeros(1)
for step in job.steps(1_000_000):
    events = step.index and step.index % int(plan["--every"]) == 0
    if events and step.index // int(plan["--every"]) % 3 == 1:
        job.call(checkpoint)
    if events and step.index // int(plan["--every"]) % 3 == 2:
        job.call(score)
    if events and step.index // int(plan["--every"]) % 3 == 0 and job.rank == 0:
        time.sleep(plan["--evaluation"])  # the others wait in their next collective
    with step:
        if step.index == 0 and job.rank == 1:
            time.sleep(plan["--first"])
        work = plan["--step"] * dice.lognormvariate(0, 0.3) * (10 if dice.random() < 0.02 else 1)
        until = time.monotonic() + work / 2
        time.sleep(work / 2)
        loss = model(torch.randn(32, 64)).square().mean()
        while time.monotonic() < until:
            pass
        loss.backward()
        over[0] = float(time.monotonic() > end)
        dist.all_reduce(over)
        optimizer.step()
        optimizer.zero_grad()
    if over.item():
        break
print("steps", step.index, flush=True)
"""
# what a calm run says
QUIET = ("ftrun: run ", "ftrun: OMP_NUM_THREADS", "ftrun: protected: ", "ftrun: kept with each step: ", "ftrun: done: ")


@dataclass(frozen=True)
class Plan:
    """Times in seconds; `every`: steps between two of evaluation and checkpoint."""

    seconds: float
    step: float
    first: float
    evaluation: float
    checkpoint: float
    attached: float
    stopped: float
    every: int
    pause: float  # between two disturbances


HOUR = Plan(3600, 0.05, 45, 30, 60, 20, 10, 1500, 60)
QUICK = Plan(9, 0.02, 2, 2, 2.5, 1.5, 2.5, 60, 0.1)


def disturbances(
    launcher: int, workers: Callable[[], list[int]], plan: Plan
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is done to the run from outside, one after the other."""

    def stop() -> None:
        os.kill(launcher, signal.SIGSTOP)
        try:
            time.sleep(plan.stopped)
        finally:
            os.kill(launcher, signal.SIGCONT)

    def crowd() -> None:
        with crowded(2 * (os.cpu_count() or 1)):
            time.sleep(plan.attached)

    def gdb() -> None:
        command = ["gdb", "--batch", "-p", str(workers()[1]), "-ex", f"shell sleep {plan.attached}", "-ex", "detach"]
        subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL)

    def spy() -> None:
        for extra in ((), ("--nonblocking",)):
            command = ["record", "--pid", str(workers()[2]), "-d", str(max(1, round(plan.attached / 2))), "-r", "100"]
            subprocess.run([py_spy, *command, *extra, "-o", os.devnull], check=False, capture_output=True)

    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") or ""
    yield "the launcher stopped", stop
    if shutil.which("gdb"):
        yield "gdb attached", gdb
    if py_spy:
        yield "py-spy attached", spy
    yield "processors taken", crowd


@contextmanager
def crowded(processes: int) -> Iterator[None]:
    """Programs that take the processors."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def calm(folder: Path, plan: Plan, say: Callable[[str], None]) -> list[str]:
    """Run it; everything that should not have been said or journalled."""
    (folder / "train.py").write_text(SCRIPT)
    keys = ("seconds", "step", "first", "evaluation", "checkpoint", "every")
    arguments = [word for key in keys for word in (f"--{key}", str(getattr(plan, key)))]
    command = [harness.tool("ftrun"), "--nproc-per-node", "4", "--spares", "1", "train.py", *arguments]
    running = harness.start(folder, command)
    board = Board.open(running.run_dir() / "board")

    def workers() -> list[int]:
        """Processes of the ranks, by rank."""
        cells = [board.cell(i) for i in range(16)]
        held = {c.rank: c[F.PID] for c in cells if c.rank is not None and not c[F.EXITED]}
        return [pid for _, pid in sorted(held.items())]

    begun = time.monotonic()
    while len(workers()) < 4 or min(board.cell(i).step or 0 for i in range(4)) < 3:
        assert running.process.poll() is None and time.monotonic() - begun < plan.first + 120, running.output
        time.sleep(0.05)
    begun = time.monotonic()
    done: list[str] = []
    while time.monotonic() - begun < plan.seconds - plan.attached and running.process.poll() is None:
        for name, disturb in disturbances(running.process.pid, workers, plan):
            if running.process.poll() is not None or time.monotonic() - begun > plan.seconds:
                break
            say(f"{time.monotonic() - begun:6.0f} s: {name}")
            disturb()
            done.append(name)
            time.sleep(plan.pause)
    outcome = harness.finish(running, 4, plan.seconds + 4 * (plan.evaluation + plan.checkpoint) + 120)
    say(
        f"{time.monotonic() - begun:6.0f} s: ended; {len(done)} disturbances, {outcome.output.count('steps ')} ranks done"
    )
    return reported(outcome)


def reported(outcome: harness.Outcome) -> list[str]:
    """What a run reported that should have reported nothing."""
    found = [f"exit code {outcome.code}"] if outcome.code else []
    lines = [line for line in outcome.output.splitlines() if line.startswith("ftrun:")]
    found += [line for line in lines if not line.startswith(QUIET)]
    events = [line["event"] for line in outcome.journal if line.get("event", {}).get("fault")]
    found += [json.dumps(event) for event in events]
    found += [json.dumps(action) for action in outcome.actions("Publish")[1:]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="A run in which everything looks wrong and nothing is.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--quick", action="store_true", help="a sample of some seconds")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan(**{**vars(HOUR), "seconds": args.minutes * 60})
    folder = Path(tempfile.mkdtemp(prefix="ftrun-calm-"))
    try:
        found = calm(folder, plan, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(folder)
    for line in found:
        print(f"reported: {line}")
    print("reported something" if found else "nothing was reported")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
