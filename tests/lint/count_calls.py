"""Prints how many calls of Python ftrun makes in an ordinary step; tests/e2e/test_calls_per_step.py is the test of that."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.test_calls_per_step import EACH, FEW, MOST, ordinary


def main() -> None:
    for what, tensors, layers in (("DDP", 8, 0), ("FSDP2", 18, 2)):
        with tempfile.TemporaryDirectory() as folder:
            calls, collectives = ordinary(Path(folder), tensors, layers)
        most = MOST + EACH * max(0, collectives - FEW)
        print(f"calls of a step, {what}, collectives: {collectives}: {calls.total()} of at most {most}")


if __name__ == "__main__":
    main()
