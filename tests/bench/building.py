"""Building a model whose layers draw their weights on the CPU: with ftrun's uniform numbers and with torch's, taking turns.

    python tests/bench/building.py [--quick] [--json FILE]

The weights of both must be equal to the bit, which is looked at each time. One thread, medians. "again": the weights of a
layer that exists, in memory that was used before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo

from ftrun.worker import uniform


def again(layer: torch.nn.Module, method: str = "reset_parameters") -> Callable[[], list[torch.Tensor]]:
    def make() -> list[torch.Tensor]:
        getattr(layer, method)()
        return list(layer.parameters())

    return make


def layers(width: int, depth: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [p for _ in range(depth) for p in torch.nn.Linear(width, 4 * width).parameters()]


WHAT = {
    "Linear(16, 16) again": again(torch.nn.Linear(16, 16)),
    "Linear(128, 128) again": again(torch.nn.Linear(128, 128)),
    "Linear(320, 320) again": again(torch.nn.Linear(320, 320)),
    "Linear(2048, 5184) again": again(torch.nn.Linear(2048, 5184)),
    "Conv2d(256, 256, 3) again": again(torch.nn.Conv2d(256, 256, 3)),
    "LSTM(512, 512) again": again(torch.nn.LSTM(512, 512)),
    "attention, 512, again": again(torch.nn.MultiheadAttention(512, 8), "_reset_parameters"),
    "8 x Linear(512, 2048)": layers(512, 8),
}


def timed(make: Callable[[], list[torch.Tensor]], fast: bool) -> tuple[float, list[torch.Tensor]]:
    """Milliseconds, and what was made."""
    (uniform.take_over if fast else uniform.hand_back)()
    torch.nn.Linear(128, 128)  # the first one is slower
    torch.manual_seed(1)
    begin = time.perf_counter()
    made = make()
    took = (time.perf_counter() - begin) * 1e3
    return took, [t.detach().clone() for t in made]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not uniform.take_over():
        print("not used with this torch or processor: the numbers would differ")
        return 0
    figures = {}
    for name, make in WHAT.items():
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(5 if args.quick else 25):
            (ours, one), (theirs, other) = timed(make, True), timed(make, False)
            assert all(map(torch.equal, one, other)), name
            found[True].append(ours)
            found[False].append(theirs)
        ftrun, stock = (statistics.median(found[fast]) for fast in (True, False))
        figures[name] = {"ftrun_ms": ftrun, "torch_ms": stock, "ratio": stock / ftrun}
        print(f"{name:26s} ftrun {ftrun:8.3f} ms, torch {stock:8.3f} ms: {stock / ftrun:.1f} times faster")
    uniform.hand_back()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
