"""What ftrun is for, in under a minute: train a small GPT clean, then with two ranks killed, and compare the weights.

Run by `make demo`. The second run loses rank 2 to a SIGKILL in its backward pass, and later rank 0 in the middle of its
optimizer update. Exit code 0 when both runs end on the same digest, 1 when they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS = 4
PLAN = """\
seed = 1

[[fault]]
kind = "kill"
rank = 2
step = {first}
at = "backward"

[[fault]]
kind = "kill"
rank = 0
step = {second}
at = "update"
"""


def train(title: str, steps: int, digest: Path, options: list[str]) -> str:
    """Run the training under ftrun, its output on this terminal; the digest of all ranks' final states."""
    command = [
        str(Path(sys.executable).with_name("ftrun")),
        *("--nproc-per-node", str(RANKS)),
        *options,
        str(HERE / "train_gpt.py"),
        *("--steps", str(steps), "--print-every", str(max(steps // 5, 1)), "--hash", str(digest)),
    ]
    print(f"\n--- {title}\n$ ftrun {' '.join(command[1:])}", flush=True)
    begin = time.monotonic()
    code = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if code:
        sys.exit(f"demo: the run ended with exit code {code}")
    print(f"--- {time.monotonic() - begin:.1f} s", flush=True)
    ranks = "".join(Path(f"{digest}.{r}").read_text() for r in range(RANKS))
    return hashlib.sha256(ranks.encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="Clean and faulted training runs must end on the same weights.")
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="ftrun-demo-") as folder:
        plan = Path(folder) / "plan.toml"
        plan.write_text(PLAN.format(first=steps * 3 // 10, second=steps * 7 // 10))
        clean = train("without a fault", steps, Path(folder) / "clean", ["--spares", "0"])
        options = ["--spares", "1", "--fault-plan", str(plan)]
        faulted = train("rank 2 killed in backward, rank 0 killed in update", steps, Path(folder) / "faulted", options)
    same = clean == faulted
    print("\nsha256 of weights, optimizer state and random streams of all ranks")
    print(f"  without a fault  {clean}\n  with two kills   {faulted}\n  {'equal' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
