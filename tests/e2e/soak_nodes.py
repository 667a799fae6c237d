"""Kills at random moments on several nodes, half of them at the end of a step's last collective.

    python tests/e2e/soak_nodes.py [--kills 500] [--seed S] [--programs ddp,hsdp,fsdp,snapshots] [--each 25] [--json FILE]        as root

Each node is a network namespace with a launcher; eight ranks on two to four nodes, Gloo over virtual cables. A run takes `--each` kills,
some of two ranks at once, and most when the last repair is over, the others in it. Every run must end where plain torch's ends, and all
nodes must have decided alike. A rank of a fully sharded model that dies inside its update takes its shard with it: such a run ends with 75
on every node and names the shard; it is counted, and is no failure. With host snapshots ("snapshots") all ranks go back to one, and the
run ends like the others. Exit code 0 when nothing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e import harness, over_nodes, sharding
from tests.e2e import lan as lans
from tests.e2e.harness import Outcome, Running

RANKS = 8
NODES = ((4, 4), (2, 2, 2, 2), (3, 5), (4, 2, 2))
STEPS = 500
AT_GATE, WITH_ANOTHER, IN_REPAIR = 0.5, 0.1, 0.25  # of all kills
PATIENCE = 600.0  # seconds for the end of a run
_LOST = "its shard of "


@dataclass(frozen=True)
class Program:
    script: Path
    told: tuple[str, ...]
    plain: Callable[[Path, tuple[str, ...]], Outcome]
    may_lose: bool = False
    options: tuple[str, ...] = ()


def _plain_sharded(folder: Path, told: tuple[str, ...]) -> Outcome:
    return sharding.stock(folder, told, RANKS)


PROGRAMS = {
    "ddp": Program(
        harness.REFERENCE,
        ("--steps", str(STEPS), "--stretch", "0.01", "--accum", "across", "--data", "loader"),
        lambda folder, told: harness.stock(folder, harness.unhurried(told), RANKS),
    ),
    "hsdp": Program(sharding.SCRIPT, ("--steps", str(STEPS), "--layout", "hsdp"), _plain_sharded),
    "fsdp": Program(sharding.SCRIPT, ("--steps", str(STEPS), "--layout", "fsdp"), _plain_sharded, may_lose=True),
    "snapshots": Program(sharding.SCRIPT, ("--steps", str(STEPS), "--layout", "fsdp"), _plain_sharded, options=("--snapshot-every", "2")),
}


@dataclass
class Done:
    """What one run came to. `lost`: it ended since a shard was gone."""

    kills: int
    at_gate: int
    lost: bool
    wrong: str
    seconds: float


def run(folder: Path, program: Program, wanted: Outcome, seed: int, kills: int) -> Done:
    """Do one run, which takes so many kills if it lasts."""
    chosen, begun_at = random.Random(seed), time.monotonic()
    nodes = NODES[seed % len(NODES)]
    with lans.lan(len(nodes)) as lan:
        begun: list[Running] = []
        killed, at_gate, wrong = 0, 0, ""
        try:
            begun = over_nodes.begin(folder, program.told, nodes=nodes, script=program.script, lan=lan, options=program.options)
            killer = over_nodes.Killer(begun, seed)
            killer.wait_for_all(RANKS)
            while killed < kills and all(one.process.poll() is None for one in begun):
                gate = chosen.random() < AT_GATE
                if gate and not killer.wait_for_a_gate(5.0):
                    continue
                now = killer.kill(2 if chosen.random() < WITH_ANOTHER else 1)
                killed, at_gate = killed + now, at_gate + now * gate
                if chosen.random() < IN_REPAIR:
                    killer.pause(0.0, 1.0)
                elif not killer.wait_until(RANKS, 60.0):
                    break  # the last steps, or the end
                else:
                    killer.pause(0.0, 0.3)
            outcomes = over_nodes.end(begun, RANKS, PATIENCE)
            if program.may_lose and {outcome.code for outcome in outcomes} == {75}:
                lost = any(_LOST in outcome.output for outcome in outcomes)
                return Done(killed, at_gate, lost, "" if lost else "75 without a lost shard", time.monotonic() - begun_at)
            over_nodes.all_exact(outcomes, wanted)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:
            for one in begun:
                if one.process.poll() is None:
                    os.killpg(one.process.pid, signal.SIGTERM)
            for one in begun:
                with contextlib.suppress(harness.StillRunning):
                    one.wait(30.0)
    return Done(killed, at_gate, False, wrong, time.monotonic() - begun_at)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills on several nodes; every run must end as if there had been none.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--each", type=int, default=25, help="kills of one run")
    parser.add_argument("--json", type=Path, help="write what was done and found there, too")
    args = parser.parse_args()
    names = args.programs.split(",")
    root = Path(tempfile.mkdtemp(prefix="ftrun-soak-"))
    print(f"soak of nodes: seed {args.seed}, folder {root}", flush=True)
    wanted = {name: PROGRAMS[name].plain(root / f"plain-{name}", PROGRAMS[name].told) for name in names}
    done: dict[str, list[Done]] = {name: [] for name in names}
    killed = 0
    for turn, name in enumerate(itertools.islice(itertools.cycle(names), 4 * (args.kills // args.each + 1))):
        if killed >= args.kills:
            break
        folder, seed = root / f"{name}-{turn}", args.seed + turn
        one = run(folder, PROGRAMS[name], wanted[name], seed, min(args.each, args.kills - killed))
        done[name].append(one)
        killed += one.kills
        how = f"FAILED, see {folder}: {one.wrong[:2000]}" if one.wrong else "a shard is gone, and said so" if one.lost else "equal"
        print(f"{name}, seed {seed}, nodes {NODES[seed % len(NODES)]}: {one.kills} kills, {one.at_gate} at a gate: {how}", flush=True)
        if not one.wrong:
            shutil.rmtree(folder)
    failed = sum(bool(one.wrong) for ones in done.values() for one in ones)
    print(table(done))
    if args.json:
        args.json.write_text(json.dumps({name: [vars(one) for one in ones] for name, ones in done.items()}, indent=1))
    print(f"{killed} kills, {failed} failures")
    return 1 if failed or killed < args.kills else 0


def table(done: dict[str, list[Done]]) -> str:
    lines = [f"{'program':10s}{'runs':>6s}{'kills':>8s}{'at a gate':>11s}{'equal':>8s}{'shard gone':>12s}{'failed':>8s}{'seconds':>9s}"]
    for name, ones in done.items():
        sums: Counter[str] = Counter()
        for one in ones:
            sums.update({"kills": one.kills, "gate": one.at_gate, "lost": one.lost, "failed": bool(one.wrong), "s": round(one.seconds)})
        equal = len(ones) - sums["lost"] - sums["failed"]
        numbers = f"{len(ones):6d}{sums['kills']:8d}{sums['gate']:11d}{equal:8d}{sums['lost']:12d}{sums['failed']:8d}{sums['s']:9d}"
        lines.append(f"{name:10s}{numbers}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
