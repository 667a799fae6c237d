"""Python state that an update changed is taken from another rank: only where further ranks show that it is everyone's, or it must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.truth.harness import PRELUDE, Seen, by_torch, under_ftrun

LOOP = """
for step in job.steps(STEPS):
    with step:
        x, y = data(step.index)
        {before}
        loss = loss_of(ddp(x), y); loss.backward(); opt.step(); opt.zero_grad()
        {inside}
"""
TOTAL = """
import time
ddp = DDP(net()); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
job = ftrun.protect(ddp, opt, sched)
kept = job.state(total=0.0)
"""
BUFFER = """
m = net(); m.register_buffer("seen", torch.zeros(3))
ddp = DDP(m, broadcast_buffers=False); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
job = ftrun.protect(ddp, opt)
"""
LOSS = "kept.total += loss.item()"


def both(folder: Path, inside: str, step: int, ranks: int, before: str = "pass") -> tuple[Seen, Seen]:
    """Under ftrun with rank 1 killed in an update, and under torchrun."""
    script = folder / "script.py"
    end = "end(model=ddp, opt=opt, sched=sched, total=kept.total)\n"
    script.write_text(PRELUDE + TOTAL + LOOP.format(inside=inside, before=before) + end)
    killed = under_ftrun(folder / "killed", script, [harness.kill(1, "update", step)], ranks=ranks)
    return killed, by_torch(folder / "stock", script, ranks)


@pytest.mark.slow
def test_others_that_are_late_are_waited_for(tmp_path: Path) -> None:
    late = f"{LOSS}\n        if step.index == 0 and rank in (0, 3): time.sleep(2)"
    killed, _ = both(tmp_path, late, 0, 4)
    assert killed.code == 0 and killed.answer == "not known" and "state.total" in killed.output, killed.output


def test_what_is_a_ranks_own_is_put_back_as_it_was_at_the_gate_and_named(tmp_path: Path) -> None:
    """The run goes on, and everything else ends as without a fault."""
    killed, stock = both(tmp_path, LOSS, 5, 4)
    assert killed.code == 0 and killed.answer == "not known" and "state.total" in killed.output, killed.output
    differs = [rank for rank in range(4) if killed.ranks[rank] != stock.ranks[rank]]
    assert differs == [1], killed.output
    parts = [part for part in stock.ranks[1] if killed.ranks[1][part] != stock.ranks[1][part]]
    assert parts == ["total"]


def test_with_nobody_to_compare_it_is_not_known(tmp_path: Path) -> None:
    killed, stock = both(tmp_path, LOSS, 0, 2)
    assert killed.code == 0 and killed.ranks != stock.ranks, killed.output
    assert killed.answer == "not known" and "may have had another value" in killed.output, killed.output


def test_what_is_equal_at_every_gate_may_differ_after_it(tmp_path: Path) -> None:
    """A meter that each body sets back, changed after each update so far."""
    killed, _ = both(tmp_path, LOSS, 5, 2, before="kept.total = 0.0")
    assert killed.code == 0 and killed.answer == "not known" and "may have had another value" in killed.output, killed.output


@pytest.mark.slow
def test_what_every_rank_changes_alike(tmp_path: Path) -> None:
    killed, stock = both(tmp_path, "sched.step()", 0, 2)
    assert killed.ranks == stock.ranks and killed.answer == "yes", killed.output


@pytest.mark.parametrize(
    ("inside", "before", "answer"),
    [
        ("m.seen.add_(1)", "pass", "yes"),
        ("m.seen.add_(loss.item())", "pass", "not known"),
        ("m.seen.add_(loss.item())", "m.seen.zero_()", "not known"),
    ],
    ids=["alike", "a rank's own", "equal at every gate"],
)
def test_a_buffer_that_updates_write_is_the_only_replicas_to_give_where_it_was_alike(
    tmp_path: Path, inside: str, before: str, answer: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + BUFFER + LOOP.format(inside=inside, before=before) + "end(model=ddp, opt=opt)\n")
    killed = under_ftrun(tmp_path / "killed", script, [harness.kill(1, "update", 5)], ranks=2)
    assert killed.code == 0 and killed.answer == answer, killed.output
    if answer == "yes":
        assert killed.ranks == by_torch(tmp_path / "stock", script, 2).ranks, killed.output
