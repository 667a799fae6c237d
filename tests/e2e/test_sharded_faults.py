"""Sharded models under other faults than one death at a time: exceptions, freezes, several deaths at once, deaths in a repair.

FSDP2 on four ranks, and HSDP of two replicas, where ranks 0 and 2 hold the same shard, and 1 and 3. Everything is compared with
stock torch as in test_sharded.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import injected
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill
from tests.e2e.sharding import HSDP, exact, faulted, sources

pytestmark = pytest.mark.timeout(900)
LAYOUTS: dict[str, list[str]] = {"fsdp": [], "hsdp": [*HSDP, "--bf16"]}
STEPS = ["--steps", "12"]
CALLS = 1200  # of functions of torch's FSDP in a step, at the most


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "every"), [("fsdp", 151), ("fsdp", 10), ("hsdp", 10)])
def test_an_exception_anywhere_in_fsdp_is_done_again(
    sharded_stock: Reference, folder: Path, layout: str, every: int
) -> None:
    """Raised on one rank at every n-th Python call inside torch's FSDP, while the others are wherever they are. Nobody is replaced."""
    arguments = [*LAYOUTS[layout], "--steps", str(2 * CALLS // every + 2)]
    outcome = faulted(folder, [*arguments, "--raise-every", str(every)])
    exact(outcome, sharded_stock(*arguments))
    calls = {int((folder / "out" / f"calls-{rank}").read_text()) for rank in range(harness.RANKS)}
    raised = (folder / "out" / "raised").read_text().splitlines()
    assert len(calls) == 1 and max(calls) <= CALLS, calls
    assert [int(line.split()[0]) for line in raised] == list(range(every, min(calls) + 1, every))
    assert len(outcome.notes("incident")) == len(raised), outcome.tail()
    assert {i["fault"] for i in outcome.notes("incident")} == {"exception"}
    assert harness.replaced_ranks(outcome) == set()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_freeze_before_and_after_every_collective(sharded_stock: Reference, folder: Path, layout: str) -> None:
    """A rank that stops (SIGSTOP) is found by its missing beat, fenced and replaced; its shard is adopted."""
    arguments = [*LAYOUTS[layout], "--steps", "38"]
    outcome = faulted(folder, [*arguments, "--freezes"])
    exact(outcome, sharded_stock(*arguments))
    collectives = {int((folder / "out" / f"collectives-{rank}").read_text()) for rank in range(harness.RANKS)}
    assert len(collectives) == 1 and 6 <= min(collectives) <= 16, collectives
    frozen = [event for event in outcome.events("Died") if event["fault"] == "frozen"]
    assert len(frozen) == 2 * min(collectives), outcome.tail()
    assert set(sources(outcome)) == {"adopted in place, 0 B moved"}, outcome.tail()


@pytest.mark.slow
def test_two_deaths_at_once_one_in_each_replica(sharded_stock: Reference, folder: Path) -> None:
    """Of different shards: each has its other holder alive, also where both die in the update."""
    pairs = [(0, 3, "backward", 3), (1, 2, "forward", 5), (0, 3, "update", 7), (1, 2, "gate", 9)]
    faults = [kill(rank, at, step) for one, other, at, step in pairs for rank in (one, other)]
    outcome = faulted(folder, [*HSDP, *STEPS], faults)
    exact(outcome, sharded_stock(*HSDP, *STEPS))
    assert len(harness.deaths(outcome)) == len(faults), outcome.tail()
    copied = [source for source in sources(outcome) if source.startswith("copied from a peer")]
    assert len(copied) >= 2 and len(sources(outcome)) == len(faults), outcome.tail()


@pytest.mark.slow
def test_all_holders_of_a_shard_in_one_update_go_back_to_the_snapshot(sharded_stock: Reference, folder: Path) -> None:
    """Ranks 0 and 2: with them everybody, also those whose shard is whole."""
    faults = [kill(0, "update", 5), kill(2, "update", 5), *(kill(rank, "update", 9) for rank in range(harness.RANKS))]
    outcome = faulted(folder, [*HSDP, *STEPS], faults, ("--snapshot-every", "2"))
    exact(outcome, sharded_stock(*HSDP, *STEPS))
    assert len(harness.deaths(outcome)) == len(faults), outcome.tail()
    assert [a["resume"] for a in outcome.actions("Publish") if a["rollback"]] == [4, 8], outcome.tail()


def test_all_holders_of_a_shard_in_one_update_without_a_snapshot_end_the_run(folder: Path) -> None:
    outcome = faulted(folder, [*HSDP, *STEPS], [kill(0, "update", 5), kill(2, "update", 5)])
    assert outcome.code == 75, outcome.tail()
    assert "take host snapshots (--snapshot-every" in outcome.output, outcome.tail()
    assert not sources(outcome) and outcome.ranks == [None] * harness.RANKS, outcome.tail()


# what happens in the repair: faults, options, pauses, and how many die. Rank 1 dies first, rank 3 holds what it held under HSDP
FIRST = kill(1, "backward", 5)
BOTH = [kill(1, "update", 5), kill(3, "update", 5)]
REPAIRS: dict[str, tuple[list[str], tuple[str, ...], str, int]] = {
    "survivor stops": ([FIRST, kill(2, "stop")], (), "", 2),
    "survivor resets": ([FIRST, kill(2, "reset")], (), "", 2),
    "replacement resets": ([FIRST, kill(1, "reset")], (), "", 2),
    "replacement restores": ([FIRST, kill(1, "restore")], (), "", 2),
    "replacement has restored": ([FIRST], (), "restored:5:1", 2),
    "a second replacement restores": ([FIRST, kill(2, "backward", 5), kill(2, "restore")], (), "", 3),
    "everybody resets": ([FIRST, *(kill(rank, "reset") for rank in range(4))], (), "", 5),
    # of a death at a gate that opened: the update is made, or copied, in the repair
    "after a gate, replacement restores": ([kill(1, "restore")], (), "swap:5:1", 2),
    "after a gate, replacement has restored": ([], (), "swap:5:1,restored:6:1", 2),
    "after a gate, survivor resets": ([kill(3, "reset")], (), "swap:5:1", 2),
    "two after a gate, one restores": ([kill(2, "restore")], (), "pass:5:1,pass:5:2", 3),
    # of all holders of a shard in one update
    "rollback, survivor resets": ([*BOTH, kill(2, "reset")], ("--snapshot-every", "2"), "", 3),
    "rollback, replacement restores": ([*BOTH, kill(1, "restore")], ("--snapshot-every", "2"), "", 3),
    "rollback, survivor restores": ([*BOTH, kill(2, "restore")], ("--snapshot-every", "2"), "", 3),
}
QUICK = (("fsdp", "after a gate, replacement has restored"),)


def repairs() -> list[object]:
    every = [(layout, name) for layout in LAYOUTS for name in REPAIRS]
    return [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in every]


@pytest.mark.parametrize(("layout", "repair"), repairs())
def test_a_death_in_the_repair(sharded_stock: Reference, folder: Path, layout: str, repair: str) -> None:
    faults, options, pauses, died = REPAIRS[repair]
    arguments = [*LAYOUTS[layout], *STEPS]
    outcome = faulted(folder, arguments, faults, options, **injected.env(pauses))
    exact(outcome, sharded_stock(*arguments))
    assert len(harness.deaths(outcome)) == died, outcome.tail()


# a death in the update whose other holder dies, or is gone, too; HSDP only
PEERS: dict[str, tuple[list[str], int]] = {
    "the other holder stops": ([kill(1, "update", 5), kill(3, "stop")], 2),
    "the other holder resets": ([kill(1, "update", 5), kill(3, "reset")], 2),
    "the copy is begun again": ([kill(1, "update", 5), kill(1, "restore")], 2),
    "one of each shard": ([kill(1, "update", 5), kill(2, "update", 5), kill(2, "restore"), kill(0, "reset")], 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_death_while_a_shard_is_copied(sharded_stock: Reference, folder: Path, name: str) -> None:
    faults, died = PEERS[name]
    arguments = [*LAYOUTS["hsdp"], *STEPS]
    outcome = faulted(folder, arguments, faults)
    exact(outcome, sharded_stock(*arguments))
    assert len(harness.deaths(outcome)) == died, outcome.tail()
    assert "copied from a peer" in " ".join(sources(outcome)), outcome.tail()
