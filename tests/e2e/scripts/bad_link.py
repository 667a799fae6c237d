"""Runs a script in which one rank cannot connect: `bad_link.py RANK TIMES WHEN SCRIPT ARGS...`.

From the second process group that RANK connects on, TIMES times, Gloo fails: "before" the others are connected with it, or
"after", when they are. A rank's workers are counted as one.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo

from ftrun.worker.comm import backend

RANK, TIMES, WHEN = sys.argv[1], int(sys.argv[2]), sys.argv[3]
MADE = Path("groups-made")


class BadGloo(ProcessGroupGloo):
    """torch's, but for the groups that are to fail."""

    def __init__(self, *args: Any) -> None:
        number = 0
        if os.environ["RANK"] == RANK:
            with MADE.open("a") as made:
                made.write("x")
            number = len(MADE.read_text())
        bad = 1 < number <= 1 + TIMES
        if not bad or WHEN == "after":
            super().__init__(*args)
        if bad:
            raise RuntimeError(
                "Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
            )


backend.ProcessGroupGloo = BadGloo  # type: ignore[misc]
sys.argv = sys.argv[4:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
