"""What nodes tell each other in an ordinary step is counted: one all-reduce of one rank of each node, beside the script's own collectives.

tests/bench/wire.py counts the same on the cables.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.e2e import harness, over_nodes

NODES = (2, 2, 2)
SCRIPT_S, PROOF, SLOTS = "allreduce of 6", "allreduce of 3", "alltoall_base of 3"


@pytest.mark.parametrize("spares", [(), pytest.param((2,), marks=pytest.mark.slow)], ids=["alone", "with a spare node"])
def test_a_step_has_one_round_of_all_nodes(spares: tuple[int, ...], folder: Path) -> None:
    """The slots of a node's ranks go on before it, to the next node, and only where a spare node may need them."""
    begun = over_nodes.begin(folder, [], script=harness.SCRIPTS / "rounds.py", nodes=NODES, spares=spares)
    if spares:
        wait_for(lambda: "this node is a spare" in begun[-1].output, "the spare node", harness.TIMEOUT)
    assert [one.wait(harness.TIMEOUT) for one in begun] == [0] * len(begun), begun[0].output
    for rank in range(sum(NODES)):
        steps = [collections.Counter(step) for step in json.loads((folder / "out" / f"rank-{rank}.json").read_text())]
        ours = [] if rank % 2 else [PROOF, *[SLOTS] * len(spares)]
        assert steps == [collections.Counter([SCRIPT_S, *ours])] * len(steps) and len(steps) > 20, steps
