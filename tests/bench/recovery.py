"""ftrun against torchrun on this machine: the stall after a SIGKILL, cold start, cost per step, memory, detection.

    python tests/bench/recovery.py [--quick] [--json FILE] [--only SECTION] [--blocks N]

Definitions. Stall: from just before kill(2), on the killer's clock, to the moment when the slowest rank has finished
the first step that nobody finished before. That step counts as this run's median step; "rest" is the stall without it,
also as a part of a step, which tells more on a machine that is not always equally fast.
Runs of both systems take turns; every figure is a median, with the smallest and largest beside it. torchrun runs with a
fresh store for each restart (without it most of its restarts fail here) and a checkpoint every 10 steps; kills come
5 steps after one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import runs
from tests.bench.memory import descendants, memory
from tests.e2e import harness

RANKS = 4
BLOCK = 4  # steps; the shorter, the less the machine changes between two blocks, and the narrower the interval
ORDERS = {"early": "model built above the line where the rank is read", "late": "LOCAL_RANK read first"}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def shown(values: dict[str, float], unit: str = "ms") -> str:
    digits = 0 if values["median"] >= 100 else 1 if values["median"] >= 5 else 2
    median, low, high = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} {unit} ({low} to {high}, n={values['n']})"


def stalls(root: Path, rounds: int, kills: int) -> dict[str, Any]:
    """Stall, cold start and steady step of both systems, in both script orders, taking turns."""
    found: dict[tuple[str, str], list[runs.Run]] = {}
    for number in range(rounds):
        for order in ORDERS:
            for system in ("ftrun", "torchrun"):
                victims = [(1 + number + k) % RANKS for k in range(kills)]
                folder = root / f"{system}-{order}-{number}"
                run = runs.measure(system, order, folder, victims, ranks=RANKS)
                found.setdefault((system, order), []).append(run)
                each = ", ".join(f"{k.stall:.0f}" for k in run.kills)
                print(f"  {system:8s} {order:5s} round {number}: stalls {each} ms", flush=True)
                shutil.rmtree(folder)
    result: dict[str, Any] = {}
    for (system, order), these in found.items():
        killed = [(run, kill) for run in these for kill in run.kills]
        entry: dict[str, Any] = {
            "stall_ms": spread([k.stall for _, k in killed]),
            "rest_ms": spread([k.stall - run.step for run, k in killed]),
            "rest_steps": spread([k.stall / run.step - 1 for run, k in killed]),
            "steps_lost": spread([float(k.again) for _, k in killed]),
            "cold_start_ms": spread([run.cold_start for run in these]),
            "step_ms": spread([run.step for run in these]),
        }
        explained = [k for _, k in killed if k.journal_total is not None]
        if explained:
            entry["parts_ms"] = {p: spread([k.parts[p] for k in explained]) for p in explained[0].parts}
            entry["unexplained_percent"] = spread(
                [100 * abs(k.stall - float(k.journal_total or 0)) / k.stall for k in explained]
            )
            entry["explained"] = f"{len(explained)} of {len(killed)}"
        result[f"{system} {order}"] = entry
    return result


def print_stalls(result: dict[str, Any]) -> None:
    for order, words in ORDERS.items():
        ours, theirs = result[f"ftrun {order}"], result[f"torchrun {order}"]
        print(f"\n{words} ({RANKS} ranks, 10.6 M parameters, Adam)")
        for name, key in (("kill to first new step", "stall_ms"), ("cold start to first step", "cold_start_ms")):
            ratio = theirs[key]["median"] / ours[key]["median"]
            print(f"  {name:26s} ftrun {shown(ours[key])}, torchrun {shown(theirs[key])}: {ratio:.1f} times faster")
        rest = f"{shown(ours['rest_ms'])}, {ours['rest_steps']['median']:.2f} of a step"
        print(f"  {'without the redone step':26s} ftrun {rest}")
        print(f"  {'steady step':26s} ftrun {shown(ours['step_ms'])}, torchrun {shown(theirs['step_ms'])}")
        lost = f"ftrun {ours['steps_lost']['median']:.0f}, torchrun {theirs['steps_lost']['median']:.0f}"
        print(f"  {'finished steps lost':26s} {lost}")
        if "parts_ms" in ours:
            print("  where the stall goes (journal; each part ends with its slowest rank):")
            for part, values in ours["parts_ms"].items():
                print(f"    {part:12s} {shown(values)}")
            gap = ours["unexplained_percent"]
            print(f"    journal against the outside clock: off by {gap['median']:.1f} % (at most {gap['max']:.1f} %)")


COMPLETE = """PATH={tools}:$PATH
source {file}; COMP_WORDS=(ftrun {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _ftrun 2>/dev/null; true"""


def start_of_help(times: int) -> dict[str, Any]:
    """Milliseconds of `--help` and of a completion (by a bash that starts anew each time), taking turns."""
    tools, file = Path(harness.tool("ftrun")).parent, harness.SCRIPTS.parents[2] / "completions" / "ftrun.bash"
    commands = {name: [harness.tool(name), "--help"] for name in ("ftrun", "torchrun")}
    for name, words in (("completion", "--nproc"), ("completion_of_runs", "status ''")):
        commands[name] = ["bash", "--norc", "-c", COMPLETE.format(tools=tools, file=file, words=words)]
    found: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(times + 1):
        for name, values in found.items():
            begin = time.perf_counter()
            subprocess.run(commands[name], stdout=subprocess.DEVNULL, check=True)
            if number:  # the first one fills the caches
                values.append((time.perf_counter() - begin) * 1e3)
    return {f"{name}_ms": spread(values) for name, values in found.items()}


def detection(root: Path, kills: int) -> dict[str, Any]:
    """From kill(2) to the launcher's record of the death, by the victim's resident memory."""
    result = {}
    for megabytes in (100, 1000):
        folder = root / f"detect-{megabytes}"
        run = runs.measure("ftrun", "early", folder, [1] * kills, ranks=2, size="small", ballast=megabytes)
        result[f"{megabytes}_MB_ms"] = spread([k.parts["detect"] for k in run.kills if k.parts])
        shutil.rmtree(folder)
    return result


def footprint(root: Path) -> dict[str, Any]:
    """Memory of each kind of process while the benchmark's script trains."""
    result: dict[str, Any] = {}
    for system in ("ftrun", "torchrun"):
        folder = root / f"memory-{system}"
        (folder / "out").mkdir(parents=True)
        arguments = ["--system", system, "--steps", "60"]
        running = harness.start(folder, runs.command(system, folder, "train.py", arguments, RANKS, 0))

        def at_step(rank: int, folder: Path = folder) -> list[runs.Done]:
            return [d for d in runs.read_times(folder, rank) if d.step == 25]

        for rank in range(RANKS):
            runs.wait_for(running, "step 25", lambda rank=rank, at_step=at_step: at_step(rank))
        workers = {at_step(r)[0].pid for r in range(RANKS)}
        others = {p: n for p, n in descendants(running.process.pid).items() if p not in workers}
        result[system] = {
            "launcher": asdict(memory(running.process.pid)),
            "workers": [asdict(memory(p)) for p in sorted(workers)],
            "others": [{"name": n, **asdict(memory(p))} for p, n in sorted(others.items())],
        }
        code = running.wait(300)
        assert code == 0, running.output[-3000:]
        shutil.rmtree(folder)
    return result


def print_footprint(result: dict[str, Any]) -> None:
    print("\nmemory while training (MB)")
    for system, entry in result.items():
        launcher = entry["launcher"]
        print(f"  {system:8s} launcher {launcher['resident']:.0f} resident")
        own = statistics.median(w["own"] for w in entry["workers"])
        arena = statistics.median(w["shared_memory"] for w in entry["workers"])
        print(f"  {system:8s} worker   {own:.0f} own + {arena:.0f} shared memory = {own + arena:.0f}")
        for other in entry["others"]:
            words = (
                f"{other['resident']:.0f} resident, {other['own']:.0f} own, {other['shared_memory']:.0f} shared memory"
            )
            print(f"  {system:8s} {other['name']:16s} {words}")


def overhead(root: Path, blocks: int, ranks: int = 2) -> dict[str, Any]:
    """Cost of a protected step against a stock one: blocks of BLOCK inside one run, paired bootstrap over blocks."""
    folder = root / "overhead"
    (folder / "out").mkdir(parents=True)
    command = runs.command("ftrun", folder, "overhead.py", ["--blocks", str(blocks), "--block", str(BLOCK)], ranks, 0)
    running = harness.start(folder, command)
    assert running.wait(blocks * BLOCK * 0.6 + 120) == 0, running.output[-3000:]
    found = json.loads((folder / "out" / "blocks.json").read_text())
    return {"blocks": len(found["wall"])} | {name: _cost(pairs) for name, pairs in found.items()}


def _cost(pairs: list[list[float]]) -> dict[str, float]:
    stock = statistics.median(p[0] for p in pairs)
    costs = [100 * (ours - plain) / stock for plain, ours in pairs]
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(costs, k=len(costs))) for _ in range(4000))
    return {"stock_ms": stock * 1e3, "percent": statistics.median(costs), "low": medians[100], "high": medians[-101]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure ftrun against torchrun.")
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--only", choices=["stall", "help", "detect", "memory", "overhead"], help="one section")
    parser.add_argument("--blocks", type=int, help="pairs of blocks that tell the cost of a step (1500; quick: 75)")
    args = parser.parse_args()
    quick = args.quick
    results: dict[str, Any] = {"cores": os.cpu_count(), "ranks": RANKS, "quick": quick}
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))

    def wanted(section: str) -> bool:
        return args.only in (None, section)

    if wanted("help"):
        results["help"] = start_of_help(3 if quick else 9)
        ours, theirs = results["help"]["ftrun_ms"], results["help"]["torchrun_ms"]
        ratio = theirs["median"] / ours["median"]
        print(f"--help: ftrun {shown(ours)}, torchrun {shown(theirs)}: {ratio:.1f} times faster")
        option, names = results["help"]["completion_ms"], results["help"]["completion_of_runs_ms"]
        print(f"completion in bash: of an option {shown(option)}, of the names of live runs {shown(names)}")
    if wanted("stall"):
        print("stall after a SIGKILL in the middle of a step", flush=True)
        results["stall"] = stalls(root, 1 if quick else 4, 2 if quick else 4)
        print_stalls(results["stall"])
    if wanted("detect"):
        results["detection"] = detection(root, 3 if quick else 10)
        print("\nSIGKILL to its detection, by the victim's resident memory")
        for name, values in results["detection"].items():
            print(f"  {name.removesuffix('_ms').replace('_', ' '):8s} {shown(values)}")
    if wanted("memory"):
        results["memory"] = footprint(root)
        print_footprint(results["memory"])
    if wanted("overhead"):
        results["overhead"] = overhead(root, args.blocks or (75 if quick else 1500))
        print(f"\ncost of a protected step, {results['overhead']['blocks']} blocks")
        for name, what in (("wall", "wall clock"), ("cpu", "CPU time of rank 0")):
            cost = results["overhead"][name]
            limits = f"95 % interval {cost['low']:+.2f} to {cost['high']:+.2f} %"
            print(f"  {what:18s} {cost['percent']:+.2f} % of {cost['stock_ms']:.1f} ms ({limits})")
    shutil.rmtree(root)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
