"""`[policy]` and --xid-policy: what they set, and their mistakes: file, line, key, nearest name, exit code 78."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Plan

GOOD = """
spares = 0

[policy]
signal = "stop"
straggler = "replace"
device-faults = 5
window = 60

[policy.xid]
79 = "quarantine"
"144-146" = "report"
"""


def test_rows_of_the_configuration_file(folder: Path, plan: Plan) -> None:
    (folder / "run.toml").write_text(GOOD)
    settings = plan("--config", "run.toml")["settings"]
    assert settings["policy"]["faults"] == [["signal", "stop"], ["straggler", "replace"]]
    assert settings["policy"]["xids"] == [[79, "quarantine"], *([n, "report"] for n in (144, 145, 146))]
    assert (settings["device_faults"], settings["window"]) == (5, 60.0)


def test_the_file_of_xid_policy_goes_first(folder: Path, plan: Plan) -> None:
    (folder / "run.toml").write_text(GOOD)
    (folder / "xids.toml").write_text('79 = "report"\n')
    xids = plan("--config", "run.toml", "--xid-policy", "xids.toml")["settings"]["policy"]["xids"]
    assert xids[0] == [79, "quarantine"] and xids[-1] == [79, "report"]  # the last one counts
    (folder / "xids.toml").write_text('[xid]\n13 = "report"\n')
    assert plan("--xid-policy=xids.toml")["settings"]["policy"]["xids"] == [[13, "report"]]


def test_pyproject(folder: Path, plan: Plan) -> None:
    (folder / "pyproject.toml").write_text('[tool.ftrun.policy]\nfrozen = "quarantine"\n')
    assert plan()["settings"]["policy"]["faults"] == [["frozen", "quarantine"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[policy]\nsignal = "stop"\nsingal = "stop"\n',
            "run.toml:3: there is no fault 'singal'; did you mean signal?",
        ),
        ('[policy]\nsignal = "stopp"\n', "run.toml:2: signal = 'stopp': there is no such answer; did you mean stop?"),
        (
            '[policy]\nexit = "quarantine"\n',
            "run.toml:2: quarantine is no answer to exit; there are replace, roll-back",
        ),
        ("[policy]\nsignal = 3\n", "run.toml:2: signal = 3: there is no such answer; there are replace"),
        ("spares = 1\npolicy = 3\n", "run.toml:2: policy must be a table, not 3"),
        ('[policy.xid]\n7x9 = "report"\n', "run.toml:2: '7x9' is no Xid"),
        ('[policy.xid]\n"9-3" = "report"\n', "run.toml:2: '9-3' is no Xid"),
        ('[policy.xid]\n79 = "redo"\n', "run.toml:2: redo is no answer to 79"),
        ("[policy]\ndevice-faults = -1\n", "run.toml:2: device-faults must be a whole number"),
        ("[policy]\nwindow = 0\n", "run.toml:2: window must be a number of seconds"),
        ('[policy]\nxid = "report"\n', "run.toml:2: xid must be a table"),
    ],
)
def test_mistakes_of_the_configuration_file(folder: Path, mistake: Callable[..., str], text: str, message: str) -> None:
    (folder / "run.toml").write_text(text)
    assert message in mistake("--config=run.toml", "train.py", code=78)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '79 = "quarantine"\n48 = "quarantin"\n',
            "xids.toml:2: 48 = 'quarantin': there is no such answer; did you mean",
        ),
        ('[xid]\n13 = "report"\n[more]\n', "xids.toml:3: 'more' stands beside [xid]"),
        ("13 = \n", "xids.toml:1: not valid TOML"),
    ],
)
def test_mistakes_of_the_xid_policy(folder: Path, mistake: Callable[..., str], text: str, message: str) -> None:
    (folder / "xids.toml").write_text(text)
    assert message in mistake("--xid-policy=xids.toml", "train.py", code=78)


def test_a_missing_file_and_an_impossible_wait(folder: Path, mistake: Callable[..., str]) -> None:
    assert "none.toml: cannot read the Xid policy" in mistake("--xid-policy=none.toml", "train.py", code=78)
    several = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "--on-exhausted=wait")
    assert "--on-exhausted wait is for one node" in mistake(*several, "train.py")


def test_the_example_of_the_docs(folder: Path, plan: Plan) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/xid-policy.md").read_text()
    (example,) = [block for block in page.split("```toml\n")[1:] if block.startswith("[policy]")]
    (folder / "run.toml").write_text(example.partition("```")[0])
    settings = plan("--config=run.toml")["settings"]
    assert settings["policy"]["faults"] == [["signal", "stop"]] and len(settings["policy"]["xids"]) == 8
