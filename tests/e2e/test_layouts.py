"""What the docs say of deaths in sharded models and pipelines is what the runs left, for every layout, and nothing ended otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs import generate
from tests.docs.blocks import DOCS
from tests.e2e import layouts, test_pipeline, test_sharded
from tests.e2e.harness import Outcome

PAGE = DOCS / "how-to" / "sharded.md"
SOURCES = ("adopted in place", "copied from a peer", "loaded from the host snapshot", "exit code")
WANTED = {  # what must be there, of each layout alone and of what goes with it
    "FSDP2",
    "FSDP2, clipping",
    "FSDP2, activation checkpointing, bf16",
    "FSDP2, SGD, accumulation in a body",
    "FSDP2, accumulation over bodies",
    "FSDP2, prefetch, SGD",
    "FSDP2, torch.compile",
    "HSDP, bf16",
    "HSDP, activation checkpointing, clipping",
    "HSDP, accumulation in a body, prefetch",
    "TP × DP",
    "FSDP2 × TP",
    "PP × DP, GPipe",
    "PP × DP, 1F1B",
    "PP × DP, 1F1B, DP by hand",
    "PP × DP, interleaved 1F1B",
}


def test_the_page_shows_what_the_runs_left() -> None:
    text = PAGE.read_text()
    assert generate.with_parts(text) == text, "run: python -m tests.docs.generate"
    for run in layouts.load():
        assert f"| {layouts.named(run)} |" in text
    assert {layouts.named(run) for run in layouts.load()} >= WANTED


@pytest.mark.parametrize("run", layouts.load(), ids=lambda run: run["test"])
def test_each_run_says_where_it_comes_from_and_ended_as_promised(run: dict[str, Any]) -> None:
    assert re.match(r"\d+\.\d+", run["torch"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}", run["commit"]), "recorded with changes that were not committed"
    assert run["deaths"] and all(death["source"].startswith(SOURCES) for death in run["deaths"])
    ended = run["deaths"][-1]["source"].startswith("exit code")
    assert run["equal"] is (None if ended else True)
    module, _, name = run["test"].partition("::")
    tests = {"test_sharded.py": test_sharded, "test_pipeline.py": test_pipeline}[module]
    assert hasattr(tests, name.partition("[")[0]), "a run of a test that is no more"
    at = [death["place"] for death in run["deaths"] if " collective " in death["place"]]
    if at:
        most = int(at[0].rpartition(" ")[2])
        assert {*at} == {f"{when} collective {i} of {most}" for i in range(1, most + 1) for when in ("before", "after")}


def _outcome(folder: Path, code: int, weights: str) -> Outcome:
    """Two ranks; the second died before the first collective of step 1 of two, and at its gate of step 9."""
    (folder / "out").mkdir(exist_ok=True)
    for rank in range(2):
        (folder / "out" / f"collectives-{rank}").write_text("2")
    died = [
        {"kind": "Died", "worker": cell, "cause": "SIGKILL", "step": step, "phase": phase}
        for cell, step, phase in ((1, 1, "forward"), (2, 9, "gate"))
    ]
    published = [{"actions": [{"kind": "Publish", "workers": cells, "replaced": []}]} for cells in ([0, 1], [0, 2])]
    said = ["spare 2 takes over rank 1; step 1 again; state adopted in place, 0 B moved"]
    said += (
        ["new worker 3 takes over rank 1; going on with step 10; state copied from a peer, 1.2 kB"] if not code else []
    )
    journal: list[dict[str, Any]] = [published[0], {"event": died[0]}, published[1], {"event": died[1]}]
    ranks: list[dict[str, Any] | None] = [{"weights": weights, "pid": code}] * 2
    return Outcome(code, 1.0, "\n".join(f"ftrun: {line}" for line in said), folder, ranks, journal)


@pytest.mark.parametrize(("code", "weights", "equal"), [(0, "same", True), (0, "others", False), (75, "same", False)])
def test_what_is_kept_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, weights: str, equal: bool
) -> None:
    """Also that of an end on other weights: it is not called equal."""
    monkeypatch.setattr(layouts, "RESULTS", tmp_path / "layouts.json")
    monkeypatch.setenv(layouts.KEEP, "1")
    wanted: list[dict[str, Any]] = [{"weights": "same"}] * 2
    layouts.keep("sharded.py", ["--clip", "1.0", "--steps", "3"], _outcome(tmp_path, code, weights), wanted)
    (run,) = layouts.load()
    assert run["equal"] is equal and run["arguments"] == ["--clip 1.0"]
    second = "exit code 75" if code else "copied from a peer, 1.2 kB"
    assert [(death["place"], death["source"]) for death in run["deaths"]] == [
        ("before collective 1 of 2", "adopted in place, 0 B moved"),
        ("gate", second),
    ]
    shown = layouts.rows([run])
    assert [row[1] for row in shown] == ["before or after 1 of 2 collectives", "at its gate"]
    assert all(row[5] == ("yes" if equal else "**no**") for row in shown)
