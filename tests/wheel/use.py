"""Use an installed ftrun as a stranger would: the README's script, four ranks, one of them killed while it trains.

Run by `make wheel-test` with the Python of an empty environment: `python -I use.py README.md FOLDER`; FOLDER is empty
and outside the checkout. Exit code 0 when the run was repaired.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ftrun
from ftrun import native
from ftrun.core.shared.board import Board, F

RANKS = 4
VICTIM = 2
DEADLINE = 60.0
COMPLETIONS = ("bash-completion/completions/ftrun", "zsh/site-functions/_ftrun", "fish/vendor_completions.d/ftrun.fish")


def victim(runs: Path, process: subprocess.Popen[str]) -> int:
    """The pid of the rank to kill, once it has done some steps."""
    deadline = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < deadline:
        for path in runs.glob("*/board"):
            if path.parent.name.startswith("."):
                continue  # not complete yet
            board = Board.open(path)
            for index in range(RANKS + 1):
                cell = board.cell(index)
                if cell.rank == VICTIM and (cell.step or 0) >= 20:
                    return int(cell[F.PID])
        time.sleep(0.005)
    raise SystemExit("wheel-test: no rank began to train")


def main() -> int:
    readme, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    here = Path(ftrun.__file__).resolve()
    assert here.is_relative_to(Path(sys.prefix).resolve()), f"this is not the installed ftrun: {here}"
    assert native.available(), "the wheel has no native library"
    tool = str(Path(sys.executable).with_name("ftrun"))
    page = subprocess.run([tool, "explain", "F305"], cwd=folder, capture_output=True, text=True, timeout=DEADLINE).stdout
    assert page.startswith("# F305: "), f"the wheel has no pages: {page!r}"
    for completion in COMPLETIONS:
        assert (Path(sys.prefix) / "share" / completion).stat().st_size, f"the wheel has no {completion}"
    script = folder / "train.py"
    shown = readme.read_text().partition("```python\n")[2].partition("```")[0]
    script.write_text(shown.replace("job.steps(5000)", "job.steps(1000)"))
    runs = folder / "runs"
    runs.mkdir(mode=0o700)
    command = [tool, "--nproc-per-node", str(RANKS), str(script)]
    environment = {**os.environ, "FTRUN_RUNS_ROOT": str(runs), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        os.kill(victim(runs, process), signal.SIGKILL)
        output, _ = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(20)
    print(output, end="")
    wanted = (f"rank {VICTIM} died", "recovered in", "every weight is 1", "bit-identical to an uninterrupted run: yes")
    missing = [text for text in wanted if text not in output]
    if process.returncode or missing:
        print(f"wheel-test: exit code {process.returncode}, not in the output: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
