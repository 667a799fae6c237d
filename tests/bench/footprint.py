"""What is there before and beside the training: `--help` and completions in milliseconds, each process's memory in MB.

python tests/bench/footprint.py [--rounds N] [--results FOLDER]
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import runs, tables
from tests.bench.memory import Memory, descendants, memory
from tests.e2e import harness

RANKS = 4
COMPLETE = """PATH={tools}:$PATH
source {file}; COMP_WORDS=(ftrun {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _ftrun 2>/dev/null; true"""


def start_of_help(times: int) -> dict[str, list[float]]:
    """Milliseconds of `--help` and of a completion (by a bash that starts anew each time), taking turns."""
    tools, file = Path(harness.tool("ftrun")).parent, harness.ROOT / "completions" / "ftrun.bash"
    commands = {name: [harness.tool(name), "--help"] for name in ("ftrun", "torchrun")}
    for name, words in (("completion of an option", "--nproc"), ("completion of a run's name", "status ''")):
        commands[name] = ["bash", "--norc", "-c", COMPLETE.format(tools=tools, file=file, words=words)]
    found: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(times + 1):
        for name, values in found.items():
            begin = time.perf_counter()
            subprocess.run(commands[name], stdout=subprocess.DEVNULL, check=True)
            if number:  # the first one fills the caches
                values.append((time.perf_counter() - begin) * 1e3)
    return found


def training(system: str, folder: Path) -> tuple[Memory, list[Memory], dict[str, list[Memory]]]:
    """Memory of the launcher, of the ranks, and of the processes beside them by name, while the script trains."""
    (folder / "out").mkdir(parents=True)
    running = harness.start(
        folder, runs.command(system, folder, "train.py", ["--system", system, "--steps", "60"], RANKS, 0)
    )

    def at_step(rank: int) -> list[runs.Done]:
        return [d for d in runs.read_times(folder, rank) if d.step == 25]

    for rank in range(RANKS):
        runs.wait_for(running, "step 25", lambda rank=rank: at_step(rank))
    ranks = {at_step(r)[0].pid for r in range(RANKS)}
    beside: dict[str, list[Memory]] = {}
    for pid, name in descendants(running.process.pid).items():
        if pid not in ranks:
            beside.setdefault(name, []).append(memory(pid))
    found = memory(running.process.pid), [memory(pid) for pid in ranks], beside
    assert running.wait(300) == 0, running.output[-3000:]
    return found


def main() -> int:
    args = tables.arguments("Measure start-up of commands and memory.").parse_args()
    times = start_of_help(args.rounds or 12)
    rows = [["`--help`", tables.figure(times.pop("ftrun")), tables.figure(times.pop("torchrun"))]]
    rows += [[what, tables.figure(values), ""] for what, values in times.items()]
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    (launcher, ranks, beside), (stock_launcher, stock_ranks, _) = (training(s, root / s) for s in ("ftrun", "torchrun"))
    shutil.rmtree(root)
    rows.append(["launcher, resident", f"{launcher.resident:.0f} MB", f"{stock_launcher.resident:.0f} MB"])

    def own(these: list[Memory]) -> str:
        return " + ".join(
            f"{statistics.median(getattr(m, part) for m in these):.0f} MB" for part in ("own", "shared_memory")
        )

    rows.append([f"worker (median of {RANKS}), own pages + shared memory", own(ranks), own(stock_ranks)])
    rows += [[f"`{name}` ({len(these)}), the same", own(these), ""] for name, these in sorted(beside.items())]
    notes = "Commands start anew each time. Memory is read in step 25 of a GPT of 10.6 M parameters with Adam, 4 ranks, 1 spare."
    tables.write(args.results, "footprint", "Commands and memory", ["what", "ftrun", "torchrun"], rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
