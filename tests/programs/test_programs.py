"""Programs as people write them, converted as docs/how-to/convert says: with kills they end as the unconverted ones under torchrun.

Each runs twice: the second time it goes on from the checkpoint of the first, if it writes any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import harness
from tests.programs import convert

HERE = [kind for kind in convert.KINDS if kind not in convert.FRAMEWORKS]  # those are run by `make compat`
LENGTHS = {  # of the first and the second run
    "loop": [{}],
    "resume": [{"STEPS": "15"}, {"STEPS": "25"}],
    "epochs": [{"EPOCHS": "2"}, {"EPOCHS": "4"}],
    "prefetch": [{}],
    "trainer": [{"EPOCHS": "3"}, {"EPOCHS": "5"}],
    "nanogpt": [{"STEPS": "12"}, {"STEPS": "24"}],
    "accelerate_loop": [{"EPOCHS": "4"}],
    "hf_trainer": [{"STEPS": "8"}, {"STEPS": "16"}],
    "lightning_trainer": [{}],
}
KILLS = {
    "loop": ["step-3@1 step-4@2 step-29@0"],
    "resume": ["step-4@3 before-10@0 saved-10@0", "step-11@1 before-20@0 step-24@2"],
    "epochs": ["epoch-0@2 evaluation-0@1 before-1@0", "epoch-2@1 reduced-2@3 saved-2@0 evaluation-3@0 epoch-3@2"],
    "prefetch": ["step-0@2 step-9@1 step-23@0 updated-24@3"],
    "nanogpt": ["step-0@1 before-5@0 updated-7@2", "saved-15@0 step-16@3 updated-20@0 updated-24@0"],
    "accelerate_loop": ["epoch-1@2 evaluation-1@1 epoch-3@0"],
    "lightning_trainer": ["batch-0.0@0 validation-1@3 updated-0.10@1 batch-2.9@2 validated-1@0"],
    "hf_trainer": ["step-0@3 update-2@1 step-3@1 saved-8@0", "step-8@2 evaluation-12@3 update-13@0 evaluated-16@2"],
    "trainer": ["epoch-0@1 before-1@0 saved-1@0 epoch-2@3", "epoch-3@2 before-3@0 epoch-4@0"],
}


def run(folder: Path, kind: str, command: Sequence[str], kills: Sequence[str] = ()) -> list[tuple[Any, str]]:
    """What the ranks and the checkpoint hold after each run, and what was printed."""
    (folder / "out").mkdir(parents=True)
    found = []
    for number, length in enumerate(LENGTHS[kind]):
        env = {"PROGRAM_OUT": str(folder / "out"), "PROGRAM_KILLS": kills[number] if kills else ""}
        env |= {**length, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        outcome = harness.finish(harness.start(folder, command, env), 0)
        assert outcome.code == 0, outcome.tail()
        ranks = [json.loads((folder / "out" / f"rank-{rank}.json").read_text()) for rank in range(4)]
        if kills:
            assert outcome.output.count(" (SIGKILL") >= len(kills[number].split()), outcome.tail()
        found.append((ranks, outcome.output))
    return found


def checkpoint(folder: Path) -> Any:
    path = folder / "out" / "checkpoint.pt"
    return _plain(torch.load(path)) if path.exists() else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _here(kind: str) -> Any:
    return kind if kind == "loop" else pytest.param(kind, marks=pytest.mark.slow)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind", [*map(_here, HERE), *(pytest.param(kind, marks=pytest.mark.compat) for kind in convert.FRAMEWORKS)]
)
def test_killed_it_ends_as_it_would(folder: Path, kind: str) -> None:
    plain = [harness.tool("torchrun"), "--standalone", "--nproc-per-node", "4", str(convert.FOLDER / f"{kind}.py")]
    wanted = run(folder / "stock", kind, plain)
    options = ["--max-replacements", "9"]
    ours = harness.script_command(folder, convert.FOLDER / f"{kind}_converted.py", [], options=options)
    found = run(folder / "ours", kind, ours, KILLS[kind])
    for (theirs, _), (mine, output) in zip(wanted, found, strict=True):
        assert mine == theirs, output
        assert "bit-identical to an uninterrupted run: yes" in output and "not kept" not in output, output
    assert checkpoint(folder / "ours") == checkpoint(folder / "stock")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("epochs", "prefetch")])
def test_converted_it_runs_under_torchrun(folder: Path, kind: str) -> None:
    line = [harness.tool("torchrun"), "--standalone", "--nproc-per-node", "4"]
    wanted = run(folder / "plain", kind, [*line, str(convert.FOLDER / f"{kind}.py")])
    found = run(folder / "converted", kind, [*line, str(convert.FOLDER / f"{kind}_converted.py")])
    assert [ranks for ranks, _ in found] == [ranks for ranks, _ in wanted]


def test_the_page_shows_what_is_run() -> None:
    there = {path.name: path.read_text() for path in convert.PAGES.glob("*.md")}
    assert there == convert.pages(), "run: python -m tests.programs.convert"


@pytest.mark.parametrize("kind", convert.KINDS)
def test_few_lines_change(kind: str) -> None:
    assert convert.added(kind) <= {"epochs": 7, "accelerate_loop": 8}.get(kind, 6), convert.changes(kind)
