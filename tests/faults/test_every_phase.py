"""The plans that `ftrun verify --kill-every-phase` makes: good plans, every phase, spread over the run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ftrun.faults import everyphase
from ftrun.faults.kinds import PHASES
from ftrun.faults.plan import load_plan


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 100])
def test_every_phase_once(tmp_path: Path, ranks: int, steps: int) -> None:
    indices = list(range(5, 5 + steps))
    runs = everyphase.plans(indices, ranks)
    assert len(runs) == -(-len(PHASES) // steps)
    struck = []
    for number, kills in enumerate(runs):
        path = tmp_path / f"{number}.toml"
        path.write_text(everyphase.as_toml(kills))
        plan = load_plan(path)
        plan.check_ranks(ranks)
        assert [(f.at, f.rank, f.step) for f in plan.faults] == [(k.at, k.rank, k.step) for k in kills]
        own = [k for i, k in enumerate(kills) if i + 1 == len(kills) or kills[i + 1].at not in everyphase.IN_A_RECOVERY]
        assert len({k.step for k in own}) == len(own)  # no two phases in one step
        struck += [k.at for k in own]
        for first, then in itertools.pairwise(kills):
            if then.at in everyphase.IN_A_RECOVERY:
                assert first.at == "backward" and first.step == then.step and first.rank != then.rank
    assert sorted(struck) == sorted(PHASES)
    assert runs[0][0].step == indices[0] and (steps < 2 or runs[0][-1].step == indices[-1])


def test_one_rank_is_killed_where_it_can_come_back() -> None:
    kills = [kill for run in everyphase.plans([0, 1, 2, 3, 4], 1) for kill in run]
    assert {kill.rank for kill in kills} == {0}
    assert [kill.at for kill in kills] == ["idle", "forward", "backward", "gate"]
