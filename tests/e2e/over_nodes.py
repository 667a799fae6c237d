"""Run a script on several nodes: launchers on this machine that share a folder to meet in, and kill workers of theirs at random."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ftrun.core.errors import PlatformError
from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, Cell, F, Flag
from ftrun.core.shared.world import newest_world
from tests.conftest import wait_for
from tests.e2e.harness import (
    REFERENCE,
    TIMEOUT,
    Outcome,
    Running,
    check_journal,
    environment,
    read,
    same,
    script_command,
    start,
    tool,
)
from tests.e2e.lan import Lan

EXACT = "bit-identical to an uninterrupted run: yes"


def begin(
    folder: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    *,
    nodes: Sequence[int] = (2, 2),
    script: Path = REFERENCE,
    options: Sequence[str] = (),
    lan: Lan | None = None,
    backend: Sequence[str] = (),
    spares: Sequence[int] = (),
) -> list[Running]:
    """Start a run whose nodes have so many ranks each; every node has a folder of its own below `folder`.

    `lan`: the machines to start them on, else this one. `backend`: the options of the rendezvous, with {node} for a node's
    number, else a shared folder. `spares`: the ranks of spare nodes, which come when the others have met.
    """
    meeting = folder / "meeting"
    meeting.mkdir(mode=0o700, parents=True)
    together = ["--nnodes", str(len(nodes)), *(backend or ("--rdzv-backend", "file", "--rdzv-endpoint", str(meeting)))]
    together += ["--rdzv-id", "many", "--max-replacements", "50", *options]
    if spares:
        together += ["--spare-nodes", str(len(spares))]
    begun: list[Running] = []
    for number, ranks in enumerate((*nodes, *spares)):
        if number == len(nodes):
            wait_for(lambda: "world of" in begun[0].output, "a world of the others", TIMEOUT)
        own, address = folder / f"node{number}", "127.0.0.1" if lan is None else lan.address(number)
        told = (*(word.replace("{node}", str(number)) for word in together), "--local-addr", address)
        plan = faults if number < len(nodes) else ()  # a step that is done again on a spare node would end that one, too
        command = script_command(own, script, ["--out", str(folder / "out"), *arguments], plan, ranks=ranks, options=told)
        begun.append(start(own, command if lan is None else lan.command(number, command)))
    return begun


def end(begun: Sequence[Running], ranks: int = 4, timeout: float = TIMEOUT) -> list[Outcome]:
    """Wait for the end of every node. Each outcome has its node's output and journal, and what all ranks wrote."""
    codes = [one.wait(timeout) for one in begun]
    folder = begun[0].folder.parent
    (folder / "output.txt").touch()
    found = []
    for one, code in zip(begun, codes, strict=True):
        check_journal(one.folder)
        own = read(one.folder, code, time.monotonic() - one.begun, 0)
        own.ranks = read(folder, 0, 0.0, ranks).ranks
        found.append(own)
    return found


def until_gate(begun: Sequence[Running], number: int) -> None:
    """Wait until the gate of that number has opened on all nodes."""
    boards = [Board.open(one.run_dir() / "board") for one in begun]
    wait_for(lambda: min(gate.unpack(board.gate()).last for board in boards) >= number, f"gate {number}", TIMEOUT)


def all_exact(outcomes: Sequence[Outcome], wanted: Outcome, struck: Sequence[int] = ()) -> None:
    """Every node ended well, where stock torch ends; those that lost a rank say that the result is exact."""
    for node, outcome in enumerate(outcomes):
        same(wanted, outcome)
        assert outcome.code == 0, outcome.tail()
        if node in struck:
            assert EXACT in outcome.output, outcome.tail()
        elif "done again, " not in outcome.output:
            assert "done: " in outcome.output, outcome.tail()
    # a node may miss the decision of a repair that the next one has superseded
    decided = {(note["incident"], note["resume"]) for outcome in outcomes for note in outcome.notes("world-decided")}
    assert len(decided) == len(dict(decided)), f"two worlds: {decided}"


def ask(node: Running, *words: str, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run another command of ftrun on a node, in its folder."""
    command = [tool("ftrun"), *words]
    return subprocess.run(command, cwd=node.folder, env=environment(node.folder), capture_output=True, text=True, timeout=timeout)


class Killer:
    """Kills workers in the loop at random moments, on any node."""

    def __init__(self, begun: Sequence[Running], seed: int) -> None:
        self._begun = begun
        self._random = random.Random(seed)
        self._folders = [one.run_dir() for one in begun]

    def pids(self, node: int) -> list[int]:
        """The workers of a node that are in the loop; none while a world is being made."""
        return [cell[F.PID] for cell in self._cells(node) if cell.has(Flag.LOOPING) and not cell.has(Flag.LOOP_DONE)]

    def _cells(self, node: int) -> list[Cell]:
        with contextlib.suppress(OSError, PlatformError):
            board = Board.open(self._folders[node] / "board")
            return [board.cell(place.cell) for place in newest_world(self._folders[node], board).places]
        return []

    def wait_until(self, ranks: int, timeout: float) -> bool:
        """Wait until so many workers are in the loop of one world; False if a node ends, or time runs out."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and all(one.process.poll() is None for one in self._begun):
            cells = [cell for node in range(len(self._begun)) for cell in self._cells(node)]
            if sum(cell.has(Flag.LOOPING) and cell[F.RESUMED] >= cell[F.GENERATION] > 0 for cell in cells) == ranks:
                return True
            time.sleep(0.02)
        return False

    def wait_for_a_gate(self, timeout: float) -> bool:
        """Wait until a rank of a node has the result of its step's last collective: it comes to its gate. False after `timeout` seconds."""
        cells = self._cells(self._random.randrange(len(self._begun)))
        before = {cell.index: cell[F.ARRIVAL] for cell in cells}
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if any(cell[F.ARRIVAL] != before[cell.index] for cell in cells):
                return True
            time.sleep(0.0001)
        return False

    def wait_for_all(self, ranks: int) -> None:
        """Wait until so many workers are in the loop."""
        deadline = time.monotonic() + TIMEOUT
        while sum(len(self.pids(node)) for node in range(len(self._begun))) < ranks:
            assert time.monotonic() < deadline and all(one.process.poll() is None for one in self._begun), "\n".join(
                one.output for one in self._begun
            )
            time.sleep(0.05)

    def kill(self, nodes: int = 1) -> int:
        """Kill one worker of so many nodes, at once; return how many."""
        killed = 0
        for node in self._random.sample(range(len(self._begun)), nodes):
            pids = self.pids(node)
            if pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                    killed += 1
        return killed

    def kill_now_and_then(self, times: int) -> None:
        """Kill a worker so many times, in the training or in a repair."""
        for _ in range(times):
            self.pause(0.2, 0.8)
            self.kill()

    def pause(self, least: float, most: float) -> None:
        time.sleep(self._random.uniform(least, most))
