"""A script that does nothing, to measure a start.

With OUT/hold in place every rank writes OUT/here-RANK and waits until OUT/hold is gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def hold(out: Path) -> None:
    """Stay, and say so, for as long as OUT/hold is there (at most a minute)."""
    gate = out / "hold"
    if gate.exists():
        (out / f"here-{os.environ['RANK']}").touch()
        deadline = time.monotonic() + 60
        while gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
