"""What several nodes cost a step, and what a worker's death costs there: ftrun beside torchrun, each node in a network namespace.

    python tests/bench/nodes.py [--rounds N] [--results FOLDER]      as root

All nodes run on this machine, joined by a bridge: its processors are shared by all ranks, and the network is as fast as its memory.
Step: whole runs of both systems in turn, no fault; the mean of the counted steps of all ranks. Stall: from just before kill(2), on the
killer's clock, until the slowest rank has finished the first step that nobody finished before. torchrun writes a checkpoint every
10 steps where something is killed; kills come 5 steps after one. With a spare node each node sends its ranks' slots to the next one at
each gate. "Launcher": the ftrun of a node gets SIGKILL, and what guards its workers ends them and tells the next node. "Node": its cable is
cut, then all its processes are killed, so that the others miss it after keep_alive: 10 s, or 3 s by `--rdzv-conf keep_alive=3`.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftrun.core.system.procfs import process_start
from tests.bench import runs, tables
from tests.e2e import harness, over_nodes
from tests.e2e import lan as lans
from tests.e2e.lan import Lan

ROUNDS = 3
WORLDS = ((1, 1), (2, 2), (2, 2, 2, 2))
WARM, STEPS = 20, 100
KILLED_AT, AFTER = 25, 10  # step after which a rank is killed, and steps behind the first new one
RANK, LAUNCHER, NODE, NODE_SOON = "rank", "launcher", "node", "node, with keep_alive=3"  # what is lost
SPARE = "ftrun, a spare node"
SYSTEMS = ("ftrun", SPARE, "torchrun")


def start(
    system: str,
    folder: Path,
    lan: Lan,
    nodes: Sequence[int],
    words: Sequence[str],
    backend: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[harness.Running]:
    """Start a launcher for each node. `backend`: where those of ftrun meet, else in a folder. `options`: where a spare node waits."""
    script, words = runs.SCRIPTS / "train.py", ["--system", system.partition(",")[0], *words]
    (folder / "out").mkdir(parents=True)
    if system == "ftrun":
        return over_nodes.begin(folder, words, nodes=nodes, script=script, lan=lan, backend=backend)
    if system == SPARE:
        begun = over_nodes.begin(folder, words, nodes=nodes, script=script, lan=lan, backend=backend, options=options, spares=nodes[:1])
        runs.wait_for(begun[-1], "the spare node", lambda: "this node is a spare" in begun[-1].output, 60)
        return begun
    begun = []
    for number, ranks in enumerate(nodes):
        own = folder / f"node{number}"
        command = [harness.tool("torchrun"), "--nnodes", str(len(nodes)), "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"{lan.address(0)}:29499", "--rdzv-id", "many", "--local-addr", lan.address(number)]
        command += ["--rdzv-conf", f"is_host={str(number == 0).lower()}"]  # it does not know its own address in a namespace
        command += ["--max-restarts", "3", str(script), "--out", str(folder / "out"), *words]
        begun.append(harness.start(own, lan.command(number, command), {"GLOO_SOCKET_IFNAME": "eth0"}))
    return begun


def finish(begun: Sequence[harness.Running]) -> None:
    for one in begun:
        assert one.wait(300) == 0, one.output[-3000:]


def step_of(system: str, folder: Path, lan: Lan, nodes: Sequence[int]) -> float:
    """Milliseconds a step of a run without a fault."""
    finish(start(system, folder, lan, nodes, ["--steps", str(WARM + STEPS), "--checkpoint-every", "0"]))
    means = []
    for rank in range(sum(nodes)):
        done = [d for d in runs.read_times(folder, rank) if d.step >= WARM - 1]
        assert len(done) == STEPS + 1
        means.append((done[-1].ns - done[0].ns) / 1e6 / STEPS)
    shutil.rmtree(folder)
    return statistics.mean(means)


def stall_of(system: str, folder: Path, lan: Lan, nodes: Sequence[int], victim: int, lost: str = RANK) -> tuple[float, float]:
    """Milliseconds of the stall after a rank, its launcher or its node was lost, and of a step that nothing touched."""
    ranks = sum(nodes)
    soon = ("--rdzv-conf", "keep_alive=3") if lost == NODE_SOON else ()
    begun = start(system, folder, lan, nodes, ["--steps", str(KILLED_AT + AFTER)], options=soon)
    runs.wait_for(begun[0], "the steps before the kill", lambda: runs.last_step(folder, victim) >= KILLED_AT - 1, 300)
    mine = runs.read_times(folder, victim)
    step = statistics.median((b.ns - a.ns) / 1e6 for a, b in pairwise(mine[5:]))
    time.sleep(step / 2e3)
    ranks_there = [runs.read_times(folder, rank)[-1].pid for rank in range(ranks - nodes[-1], ranks)]
    killed = time.monotonic_ns()
    if lost != RANK:
        dead = begun.pop(len(nodes) - 1)
        if lost == LAUNCHER:
            dead.process.send_signal(signal.SIGKILL)
        else:
            lan.destroy(len(nodes) - 1)
        dead.wait(60)
        runs.wait_for(begun[0], "the end of its workers", lambda: not any(map(process_start, ranks_there)), 60)
        if lost != LAUNCHER:
            lan.plug(len(nodes) - 1, into=True)  # for the next run
    else:
        os.kill(mine[-1].pid, signal.SIGKILL)
        time.sleep(0.05)  # an update that had begun is over
    before = max(runs.last_step(folder, rank) for rank in range(ranks))
    finish(begun)
    new = [min(d.ns for d in runs.read_times(folder, rank) if d.step == before + 1 and d.ns > killed) for rank in range(ranks)]
    shutil.rmtree(folder)
    return (max(new) - killed) / 1e6, step


def main() -> int:
    args = tables.arguments("Measure what several nodes cost, under ftrun and under torchrun.").parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    with lans.lan(1 + max(map(len, WORLDS))) as lan:
        rows = measure(lan, root, args.rounds or ROUNDS)
    shutil.rmtree(root)
    head = ["world", "what", *SYSTEMS, "ftrun over torchrun", "with a spare node over without"]
    tables.write(args.results, "nodes", "Several nodes", head, rows, " ".join((__doc__ or "").split("\n\n")[2].split()))
    return 0


def measure(lan: Lan, root: Path, rounds: int) -> list[list[str]]:
    """The lines of the table."""
    rows = []
    for nodes in WORLDS:
        name = f"{len(nodes)} nodes of {nodes[0]} {'rank' if nodes[0] == 1 else 'ranks'}"
        steps: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        stalls: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        losses: dict[str, list[float]] = {LAUNCHER: [], NODE: [], NODE_SOON: []}
        for number in range(rounds):
            for system in SYSTEMS[:: 1 if number % 2 else -1]:
                steps[system].append(step_of(system, root / "run", lan, nodes))
                stall, step = stall_of(system, root / "run", lan, nodes, victim=sum(nodes) - 1 - number % 2)
                stalls[system].append(stall)
                if system == SPARE:
                    for lost, found in losses.items():
                        found.append(stall_of(system, root / "run", lan, nodes, victim=sum(nodes) - 1, lost=lost)[0])
                print(f"  {name}, {system}, {number}: step {steps[system][-1]:.1f} ms, stall {stall:.0f} ms (step {step:.0f})", flush=True)
        for what, found, digits in (("a step", steps, 3), ("SIGKILL to the end of the first new step", stalls, 3)):
            ratios = [ours / theirs for ours, theirs in zip(found["ftrun"], found["torchrun"], strict=True)]
            cells = [tables.figure(found[system]) for system in SYSTEMS]
            more = [ours / theirs for ours, theirs in zip(found[SPARE], found["ftrun"], strict=True)]
            rows.append([name, what, *cells, tables.figure(ratios, "times", digits), tables.figure(more, "times", digits)])
        for lost, times in losses.items():
            rows.append([name, f"loss of a {lost} to the end of the first new step", "", tables.figure(times), "", "", ""])
    return rows


if __name__ == "__main__":
    sys.exit(main())
