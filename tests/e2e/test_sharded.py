"""Sharded models: a rank dies at every collective of a step, at its gate and in its update; the end is that of stock torch.

Weights, optimizer state, buffers, random streams and losses are compared, each rank's own shards. Tests marked slow run with
`make chaos`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests import injected
from tests.e2e import harness, layouts
from tests.e2e.conftest import Reference
from tests.e2e.harness import Outcome, fault, kill
from tests.e2e.sharding import exact, faulted, sources

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="FSDP2 of this torch is refused by name"),
]
MOST = 16  # collectives of a step, at the most


def at_every_collective(
    stock: Reference, folder: Path, arguments: list[str], faults: list[str], ranks: int = harness.RANKS
) -> Outcome:
    """A rank dies before and after each collective of a step, one a step; then the `faults`, in steps 34 and up."""
    wanted = stock("--steps", "38", *arguments, ranks=ranks)
    outcome = faulted(folder, ["--steps", "38", *arguments, "--kills"], faults, ranks=ranks)
    layouts.keep("sharded.py", arguments, outcome, wanted)
    collectives = {int((folder / "out" / f"collectives-{rank}").read_text()) for rank in range(ranks)}
    assert len(collectives) == 1 and 6 <= min(collectives) <= MOST, collectives
    assert len(harness.deaths(outcome)) == 2 * min(collectives) + len(faults), outcome.tail()
    exact(outcome, wanted)
    return outcome


def test_fsdp2_at_every_collective(sharded_stock: Reference, folder: Path) -> None:
    """Adopted in place each time: no byte of a shard moves. Norms of gradients are clipped, which takes a collective more."""
    outcome = at_every_collective(sharded_stock, folder, ["--clip", "1.0"], [])
    assert set(sources(outcome)) == {"adopted in place, 0 B moved"}, outcome.tail()


@pytest.mark.slow
def test_hsdp_at_every_collective_at_gates_and_in_updates(sharded_stock: Reference, folder: Path) -> None:
    """A death at a gate that opens all the same, or in an update: the rank that holds the same shard gives it."""
    faults = [kill(0, "gate", 34), kill(3, "update", 35), kill(1, "update", 36)]
    outcome = at_every_collective(sharded_stock, folder, ["--layout", "hsdp", "--bf16"], faults)
    copied = [source for source in sources(outcome) if source.startswith("copied from a peer")]
    assert len(copied) in (2, 3), outcome.tail()  # the gate of step 34 opens or not, by who is first
    assert len(sources(outcome)) - len(copied) >= 12


def test_a_shard_that_nobody_else_has_outlives_a_death_at_the_gate(sharded_stock: Reference, folder: Path) -> None:
    """The others go on, so the update is made from the gradients that the dead rank sealed: the first one, by the rank that opened
    the gate, by one that had passed, two at once, where the update was done, and where gradients were to be added up only."""
    pauses, arguments = (
        "swap:1:3,swap:3:1,pass:5:2,pass:5:0,slot-end:7:0,swap:8:2",
        ["--steps", "12", "--accum", "across"],
    )
    outcome = faulted(folder, arguments, [], **injected.env(pauses))
    layouts.keep("sharded.py", arguments, outcome, sharded_stock(*arguments), {7: layouts.AFTER})
    harness.same(sharded_stock(*arguments), outcome)
    assert len(harness.deaths(outcome)) == 6, outcome.tail()
    made = [source for source in sources(outcome) if "from the gradients that it had sealed" in source]
    assert len(made) == 5 and len(sources(outcome)) == 6, outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()


def test_a_death_in_the_update_goes_back_to_the_snapshot(sharded_stock: Reference, folder: Path) -> None:
    """Of uneven shards each rank keeps its own."""
    outcome = faulted(
        folder, ["--steps", "12"], [kill(1, "update", 5), kill(3, "update", 8)], ("--snapshot-every", "2")
    )
    layouts.keep("sharded.py", [], outcome, sharded_stock("--steps", "12"))
    harness.same(sharded_stock("--steps", "12"), outcome)
    assert len(harness.deaths(outcome)) == 2 and outcome.output.count("loaded from the host snapshot") == 2, (
        outcome.tail()
    )


@pytest.mark.slow
def test_a_snapshot_that_all_ranks_have_outlives_every_death(sharded_stock: Reference, folder: Path) -> None:
    """Rank 2 dies before it takes the snapshot of step 4, and its replacement goes on in the same memory; then rank 1 dies in the update
    before the snapshot of step 8, twice: the others have taken that one, and what they keep beside it must be what ranks 1 and 2 have."""
    faults = [fault("kill", 1, "update", 7, times=2)]
    outcome = faulted(
        folder, ["--steps", "9"], faults, ("--snapshot-every", "4"), **injected.env("sealed:3:2")
    )
    exact(outcome, sharded_stock("--steps", "9"))
    assert len(harness.deaths(outcome)) == 3, outcome.tail()
    assert [a["resume"] for a in outcome.actions("Publish") if a["rollback"]] == [0, 4], outcome.tail()


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [kill(1, "backward", 5), kill(2, "update", 7)],
        [fault("kill", 2, "update", 7, times=3)],
        [kill(3, "update", 7), kill(3, "backward", 9), kill(0, "update", 7), kill(3, "update", 11)],
    ],
    ids=["a replacement before", "the same rank again", "by turns"],
)
def test_deaths_before_a_snapshot_that_the_others_take(
    sharded_stock: Reference, folder: Path, faults: list[str]
) -> None:
    outcome = faulted(folder, ["--steps", "13"], faults, ("--snapshot-every", "4"))
    exact(outcome, sharded_stock("--steps", "13"))
    assert len(harness.deaths(outcome)) == sum(int(one.rpartition("times = ")[2]) for one in faults), outcome.tail()


@pytest.mark.parametrize(
    ("arguments", "env"), [([], {}), (["--decay"], injected.env("swap:3:1"))], ids=["update", "more"]
)
def test_what_nobody_has_ends_the_run_with_the_option_that_would_have_helped(
    folder: Path, arguments: list[str], env: dict[str, str]
) -> None:
    """A death in the update, and one at a gate after which the script does more than update: exit code 75, and no other weights."""
    faults = [] if env else [kill(1, "update", 5)]
    outcome = faulted(folder, ["--steps", "12", *arguments], faults, **env)
    layouts.keep("sharded.py", arguments, outcome, None)
    assert outcome.code == 75 and "take host snapshots (--snapshot-every" in outcome.output, outcome.tail()
    assert not sources(outcome), outcome.tail()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "step"), [("zeros", 5), ("cleared", 4), ("data", 9), ("hook", 5), ("hook of all", 5), ("argument", 5)]
)
def test_an_update_that_a_replacement_could_make_otherwise_is_not_made(tmp_path: Path, mode: str, step: int) -> None:
    """Nobody could compare the result, so the run ends with the option that would have helped."""
    command = ["--nproc-per-node", "4", str(harness.SCRIPTS / "after_the_gate.py"), "--mode", mode]
    folder = tmp_path / mode
    run = harness.start(folder, [harness.tool("ftrun"), *command], injected.env(f"swap:{step}:1"))
    code = run.wait(120)
    assert code == 75 and "--snapshot-every" in run.output and "result" not in run.output, run.output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--layout", "tp"],
        ["--layout", "fsdp-tp"],
        ["--optim", "sgdm", "--accum", "inside"],
        ["--accum", "across", "--fused"],
        ["--checkpoint", "--bf16"],
        ["--optim", "packed"],
        ["--prefetch", "--optim", "sgdm"],
        ["--layout", "hsdp", "--checkpoint", "--clip", "0.5"],
        ["--layout", "hsdp", "--accum", "inside", "--prefetch"],
    ],
    ids=" ".join,
)
def test_more_at_every_collective(sharded_stock: Reference, folder: Path, arguments: list[str]) -> None:
    at_every_collective(sharded_stock, folder, arguments, [])


@pytest.mark.slow
def test_eight_ranks_in_two_replicas_at_every_collective(sharded_stock: Reference, folder: Path) -> None:
    """HSDP of 2 x 4: a shard has another holder in the other replica, four ranks away."""
    faults = [kill(6, "gate", 34), kill(3, "update", 35), kill(4, "update", 36)]
    arguments = ["--layout", "hsdp", "--clip", "1.0"]
    outcome = at_every_collective(sharded_stock, folder, arguments, faults, ranks=8)
    assert len([source for source in sources(outcome) if source.startswith("copied from a peer")]) in (2, 3), (
        outcome.tail()
    )


@pytest.mark.slow
def test_compiled(sharded_stock: Reference, folder: Path) -> None:
    """By Inductor: no hook of ours cuts the graphs elsewhere."""
    outcome = faulted(folder, ["--compile"], [kill(1, "backward", 3)])
    layouts.keep("sharded.py", ["--compile"], outcome, sharded_stock("--compile"))
    harness.same(sharded_stock("--compile"), outcome)
    assert len(harness.deaths(outcome)) == 1, outcome.tail()


@pytest.mark.slow
def test_by_torchs_reset_alone_the_end_is_another(sharded_stock: Reference, folder: Path) -> None:
    outcome = faulted(folder, ["--steps", "38", "--clip", "1.0", "--kills"], [], **injected.env(without="sharded"))
    assert harness.differences(sharded_stock("--steps", "38", "--clip", "1.0"), outcome)[0].startswith(
        "rank 0: losses: first at"
    )
