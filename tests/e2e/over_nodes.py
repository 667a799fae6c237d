"""Run the reference script on several nodes: launchers on this machine that share nothing but a folder to meet in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.harness import REFERENCE, TIMEOUT, Outcome, Running, check_journal, read, script_command, start


def begin(
    folder: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    *,
    nodes: Sequence[int] = (2, 2),
    script: Path = REFERENCE,
    options: Sequence[str] = (),
) -> list[Running]:
    """Start a run whose nodes have so many ranks each; every node has a folder of its own below `folder`."""
    meeting = folder / "meeting"
    meeting.mkdir(mode=0o700, parents=True)
    together = ["--nnodes", str(len(nodes)), "--rdzv-backend", "file", "--rdzv-endpoint", str(meeting), "--rdzv-id", "many"]
    words = ["--out", str(folder / "out"), *arguments]
    begun = []
    for number, ranks in enumerate(nodes):
        own = folder / f"node{number}"
        own_options = (*together, "--local-addr", "127.0.0.1", "--max-replacements", "50", *options)
        command = script_command(own, script, words, faults, ranks=ranks, options=own_options)
        begun.append(start(own, command))
    return begun


def end(begun: Sequence[Running], ranks: int = 4, timeout: float = TIMEOUT) -> list[Outcome]:
    """Wait for the end of every node; each outcome has the results of all ranks."""
    codes = [one.wait(timeout) for one in begun]
    for one in begun:
        check_journal(one.folder)
    found = []
    for one, code in zip(begun, codes, strict=True):
        own = read(one.folder, code, time.monotonic() - one.begun, 0)
        own.ranks = read(one.folder.parent, 0, 0.0, ranks).ranks if (one.folder.parent / "output.txt").touch() is None else []
        found.append(own)
    return found
