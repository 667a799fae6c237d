"""What ftrun costs per step of a sharded model: whole runs under ftrun and under torchrun take turns, as in cost.py.

    python tests/bench/cost_sharded.py [--rounds N] [--steps N] [--only WORD] [--results FOLDER]

FSDP2 over 4 ranks, and HSDP with 2 replicas of 2 shards. With FSDP2 a third run takes its turn: ftrun without sealed gradients
(what is kept at a gate of a shard that no other rank holds, kept/update_region.py), by a switch that only tests have.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import cost, tables
from tests.bench.cost import FTRUN, TORCHRUN, System

UNSEALED = System("ftrun, no sealed gradients", "ftrun", env={"FTRUN_TEST_BREAK": "sealed"})
# what trains -> arguments of scripts/train.py
MODELS = {
    "GPT of 10.6 M parameters": ["--size", "10m"],
    "GPT of 1.0 M parameters": ["--size", "1m", "--batch", "12", "--context", "64"],
}
LAYOUTS = {  # what takes turns
    "fsdp2": ("FSDP2", [FTRUN, UNSEALED, TORCHRUN]),
    "hsdp": ("HSDP", [FTRUN, TORCHRUN]),
}
HEAD = [
    "model",
    "a step",
    FTRUN.name,
    UNSEALED.name,
    TORCHRUN.name,
    "cost",
    "cost, no sealed gradients",
    "of sealed gradients",
]


def rows(model: str, found: dict[str, list[cost.Cost]]) -> list[list[str]]:
    """Lines of the table; empty where nothing is sealed anyway."""
    lines = []
    for what, part in cost.WHAT:
        values = cost.parts(found, part)
        ours, bare, theirs = (values.get(system.name, []) for system in (FTRUN, UNSEALED, TORCHRUN))
        pairs = [(ours, theirs), (bare, theirs), (ours, bare)]
        shown = [cost.more(one, other) if one and other else "" for one, other in pairs]
        lines.append([model, what, *(tables.figure(some) if some else "" for some in (ours, bare, theirs)), *shown])
    beside = cost.parts(found, "others")
    figures = [tables.figure(beside[name]) if name in beside else "" for name in HEAD[2:5]]
    return [*lines, [model, cost.BESIDE, *figures, "", "", ""]]


def main() -> int:
    parser = tables.arguments("Measure what a step of a sharded model costs under ftrun and under torchrun.")
    parser.add_argument("--steps", type=int, default=100, help="steps that are counted in each run")
    parser.add_argument("--only", choices=LAYOUTS, help="one layout, for a quick look")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    lines = []
    for layout, (name, systems) in LAYOUTS.items():
        for model, arguments in MODELS.items():
            if args.only in (None, layout):
                what = f"{name}, {model}"
                words = ["--layout", layout, *arguments]
                lines += rows(what, cost.compare(what, words, systems, args.rounds or 3, args.steps, root))
    shutil.rmtree(root)
    tables.write(
        args.results,
        "step_cost_sharded",
        "Cost of a protected step of a sharded model",
        HEAD,
        lines,
        cost.notes(args.steps),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
