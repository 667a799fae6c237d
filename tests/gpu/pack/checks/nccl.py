"""NCCL: groups that are aborted in a collective and made again."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from tests.gpu import real
from tests.gpu.pack.here import Here, NotHere

_ROUNDS = 10


def _line(here: Here, rank: int, size: int, backend: str) -> list[str]:
    import torch.distributed as dist

    # from torch 2.15 on "nccl" is a new class, and the old one has a name of its own
    if backend != "nccl" and not hasattr(dist.distributed_c10d, "ProcessGroupNCCL2"):
        raise NotHere(f"this torch has one class for NCCL only, tried under its name; no {backend}")
    return [os.fspath(real.SCRIPTS / "nccl_world.py"), os.fspath(here.folder), *map(str, (rank, size)), backend, str(_ROUNDS)]


def _tell(here: Here, found: dict[str, list[float]]) -> None:
    for name in ("made_ms", "aborted_ms"):
        first, *rest = found[name]
        here.note(name, f"{first} first, then {statistics.median(rest):.0f} ({min(rest)}-{max(rest)})")
    for name in ("threads", "fds", "memory_mib"):
        here.note(name, f"{found[name][0]} after the first, {found[name][-1]} after {_ROUNDS}")
    assert len(found["made_ms"]) == _ROUNDS


def world_of_one(here: Here, backend: str) -> None:
    _tell(here, real.program(_line(here, 0, 1, backend), 55.0, real.NCCL))


def two_ranks(here: Here, backend: str) -> None:
    """Rank 0 waits in a collective that rank 1 never joins, as for a dead peer: only the abort ends it."""
    env = {**os.environ, **real.SETTINGS, **real.NCCL}
    both = [
        subprocess.Popen(
            [sys.executable, *_line(here, rank, 2, backend)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=55)[0] for process in both]
    for process, text in zip(both, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    _tell(here, json.loads(said[0].splitlines()[-1]))
