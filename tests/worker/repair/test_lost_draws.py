"""What a dead rank did after its gate, and no other rank did: a replacement cannot have it, and ftrun must not say "yes"."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.truth.harness import PRELUDE, Seen, by_torch, under_ftrun

BODY = """
torch.manual_seed(100 + rank)
ddp = DDP(net(nn.Dropout(0.3))); opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
job = ftrun.protect(ddp, opt)
for step in job.steps(STEPS):
    with step:
        x, y = data(step.index)
        loss_of(ddp(x), y).backward(); opt.step(); opt.zero_grad()
        {inside}
    {after}
end(model=ddp, opt=opt, rng=torch.get_rng_state())
"""
OWN = "if rank == 0 and step.index % 3 == 2: torch.rand(4)"
ALL = "if step.index % 3 == 2: torch.rand(4)"
LATE = "if step.committed and step.index % 6 == 5: torch.rand(4)"
AFTER = "if step.committed and rank == 0: torch.rand(4)"
LAST = "if step.committed and step.index == STEPS - 1: torch.rand(4)"


def both(folder: Path, fault: str, inside: str = "pass", after: str = "pass") -> tuple[Seen, Seen]:
    """Under ftrun with a kill, and under torchrun."""
    script = folder / "script.py"
    script.write_text(PRELUDE + BODY.format(inside=inside, after=after))
    return under_ftrun(folder / "killed", script, [fault]), by_torch(folder / "stock", script)


@pytest.mark.parametrize(
    ("rank", "at", "step", "inside", "after", "why"),
    [
        pytest.param(0, "update", 5, OWN, "pass", "from optimizer.step", id="its own, in the update"),
        pytest.param(0, "update", 5, "pass", AFTER, "between two bodies", id="its own, after each body", marks=pytest.mark.slow),
        pytest.param(2, "update", 5, "pass", LATE, "between two bodies", id="everyone's first, after the body"),
        pytest.param(2, "update", 11, "pass", LAST, "between two bodies", id="everyone's first, in the end", marks=pytest.mark.slow),
    ],
)
def test_lost(tmp_path: Path, rank: int, at: str, step: int, inside: str, after: str, why: str) -> None:
    killed, stock = both(tmp_path, harness.kill(rank, at, step), inside, after)
    assert killed.code == stock.code == 0, killed.output
    assert killed.ranks != stock.ranks, "nothing was lost: the test tests nothing"
    assert killed.answer == "not known" and why in killed.output, killed.output


@pytest.mark.parametrize(
    ("rank", "step", "inside", "after"),
    [
        pytest.param(1, 5, OWN, "pass", id="another rank's", marks=pytest.mark.slow),
        pytest.param(2, 3, "pass", LATE, id="everyone's, not after this body", marks=pytest.mark.slow),
    ],
)
def test_not_lost(tmp_path: Path, rank: int, step: int, inside: str, after: str) -> None:
    killed, stock = both(tmp_path, harness.kill(rank, "update", step), inside, after)
    assert killed.ranks == stock.ranks and killed.answer == "yes", killed.output


@pytest.mark.slow
def test_where_updates_draw_nobody_knows_which_one_does(tmp_path: Path) -> None:
    """They all drew in an earlier update, and not in that of the death: a rank of its own rhythm would look the same."""
    killed, stock = both(tmp_path, harness.kill(2, "update", 6), ALL)
    assert killed.ranks == stock.ranks and killed.answer == "not known" and "from optimizer.step" in killed.output, killed.output
