"""The fault plan: what is read, and that each mistake names its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrun.core.errors import ConfigError
from ftrun.faults.kinds import KINDS, PHASES
from ftrun.faults.plan import load_plan


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_reads_every_key(tmp_path: Path) -> None:
    plan = load_plan(
        write(
            tmp_path,
            'seed = 7\n\n[[fault]]\nkind = "exit:3"\nrank = 1\nstep = 0\nat = "gate"\ntimes = 2\n\n'
            '[[fault]]\nkind = "kill"\nrank = 0\n[[fault]]\nkind = "kill"\nrank = 0\nepoch = 3\nstep = 2\n',
        )
    )
    assert plan.seed == 7
    first, second, third = plan.faults
    assert (first.kind, first.argument, first.rank, first.step, first.at, first.times, first.line) == (
        "exit",
        3.0,
        1,
        0,
        "gate",
        2,
        3,
    )
    assert (second.kind, second.argument, second.step, second.at, second.times, second.line) == (
        "kill",
        None,
        None,
        "forward",
        1,
        10,
    )
    assert str(first) == "exit:3 on rank 1 in gate of step 0"
    assert (first.epoch, third.epoch, third.step) == (None, 3, 2)
    assert str(third) == "kill on rank 0 in forward of epoch 3, step 2"


def test_empty_plan_is_good(tmp_path: Path) -> None:
    assert load_plan(write(tmp_path, "")).faults == ()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_kind_and_phase(tmp_path: Path, name: str, phase: str) -> None:
    kind = {"exit": "exit:3", "slow": "slow:1.5", "xid": "xid:79"}.get(name, name)
    path = write(tmp_path, f'[[fault]]\nkind = "{kind}"\nrank = 0\nat = "{phase}"\n')
    if phase not in KINDS[name].phases:
        with pytest.raises(ConfigError, match=rf":4: {name} is possible in .*, not in {phase}"):
            load_plan(path)
        return
    (fault,) = load_plan(path).faults
    assert (fault.kind, fault.at) == (name, phase)


def test_a_duration_is_for_kinds_that_end_by_themselves(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path, '[[fault]]\nkind = "freeze"\nrank = 0\nfor = 2\n'))
    assert plan.faults[0].seconds == 2.0


HEAD = 'seed = 1\n[[fault]]\nkind = "kill"\nrank = 0\n[[fault]]\n'  # the second entry stands on line 5


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("sed = 1\n", 1, "unknown key 'sed'"),
        ("seed = 1\n[faults]\nx = 1\n", 2, "unknown key 'faults'"),
        ('seed = "x"\n', 1, "seed must be an integer"),
        ("seed = 1\nfault = 3\n", 2, "[[fault]]"),
        (HEAD + 'kind = "kill"\nrank = 0\nstpe = 3\n', 8, "unknown key 'stpe'"),
        (HEAD + 'kind = "boil"\nrank = 0\n', 6, "unknown fault kind 'boil'"),
        (HEAD + "kind = 3\nrank = 0\n", 6, "must be a string"),
        (HEAD + 'kind = "kill"\n', 5, "needs rank"),
        (HEAD + "rank = 0\n", 5, "needs kind"),
        (HEAD + 'rank = -1\nkind = "kill"\n', 6, "rank must be"),
        (HEAD + 'rank = true\nkind = "kill"\n', 6, "rank must be"),
        (HEAD + 'rank = 0\nkind = "kill"\nstep = 1.5\n', 8, "step must be"),
        (HEAD + 'rank = 0\nkind = "kill"\n\ntimes = 0\n', 9, "times must be"),
        (HEAD + 'rank = 0\nkind = "kill"\nepoch = -1\n', 8, "epoch must be"),
        (HEAD + 'rank = 0\nkind = "kill"\nat = "lunch"\n', 8, "unknown phase 'lunch'"),
        (HEAD + 'rank = 0\nkind = "kill:9"\n', 7, "takes no argument"),
        (HEAD + 'rank = 0\nkind = "exit"\n', 7, "write exit:CODE"),
        (HEAD + 'rank = 0\nkind = "exit:256"\n', 7, "CODE"),
        (HEAD + 'rank = 0\nkind = "slow:0.5"\n', 7, "FACTOR"),
        (HEAD + 'rank = 0\nkind = "slow:nan"\n', 7, "FACTOR"),
        (HEAD + "rank = = 0\n", 6, "not valid TOML"),
        (HEAD + 'rank = 0\nkind = "kil"\n', 7, "did you mean kill?"),
        (HEAD + 'rank = 0\nkind = "xid:0"\n', 7, "N must be"),
        (HEAD + 'rank = 0\nkind = "nan"\nat = "idle"\n', 8, "nan is possible in forward and backward, not in idle"),
        (HEAD + 'rank = 0\nkind = "kill"\nfor = 1\n', 8, "kill has no duration"),
        (HEAD + 'rank = 0\nkind = "hang"\nfor = -1\n', 8, "above 0"),
        (HEAD + 'rank = 0\nkind = "hang"\nfor = "x"\n', 8, "number of seconds"),
    ],
)
def test_mistakes_name_their_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_plan(tmp_path / "none.toml")


def test_rank_outside_the_world(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path, '[[fault]]\nkind = "kill"\nrank = 4\n'))
    plan.check_ranks(5)
    with pytest.raises(ConfigError, match=":1: rank 4"):
        plan.check_ranks(4)
