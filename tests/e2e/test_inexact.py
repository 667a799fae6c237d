"""`--inexact stop`: a repair that cannot be called exact ends the run when that is known; one that is exact goes on. And what the closing
line says of where a run differs. Each script runs under torchrun as well, and what was saved is compared with it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.e2e.harness import kill
from tests.truth import harness
from tests.truth.not_exact import CONNECTION
from tests.truth.pattern import END, LEARN, STD
from tests.truth.patterns import PATTERNS

STOP = ("--inexact", "stop")
# what the run had reached, saved by rank 0 after each step, as a checkpoint would be
SAVED = "    if rank == 0 and step.committed: save(step.index)\n"
SAVE = """
import json, os
from tests.truth.prelude import digest
def save(index):
    path = os.path.join(os.environ["TRUTH_OUT"], f"step-{index}.json"); os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write(json.dumps(digest([p for p in ddp.parameters()])))
"""


def script(folder: Path, source: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(harness.PRELUDE + SAVE + source)
    return path


def saved(folder: Path) -> dict[str, str]:
    return {path.name: json.loads(path.read_text()) for path in (folder / "out").glob("step-*.json")}


def sentence(output: str) -> str:
    found = re.search(r"ftrun: (the repair of .* cannot be called exact: .*)", output)
    assert found, output
    return found[1]


def nobody_is_left(seen: harness.Seen) -> None:
    """The script of this run, which no other run has, is on no command line any more."""
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", seen.output)]
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


ITERATOR = "it = iter([data(i) for i in range(100)])\n"
BEST = "; best = loss.item() if best is None else min(best, loss.item())"
# name: what stands before the loop, its body, what is named, and the ranks that it happened to
LOST = {
    "lost-in-the-update": ("best = None\n", f"x, y = data(step.index)\n{LEARN}{BEST}", "best", "rank 2"),
    "known-before": (ITERATOR, f"x, y = next(it)\n{LEARN}", "it", "ranks 0-3"),
}


def loop(body: str, head: str = "for step in job.steps(STEPS):", indent: str = "") -> str:
    lines = [head, "    with step:", *(f"        {line}" for line in body.splitlines())]
    return "".join(f"{indent}{line}\n" for line in lines)


@pytest.mark.parametrize("name", LOST)
def test_stop_ends_the_run_with_the_reason_and_nothing_saved_is_lost(name: str, tmp_path: Path) -> None:
    setup, body, named, whom = LOST[name]
    path = script(tmp_path, STD + setup + loop(body) + SAVED + END)
    killed = harness.under_ftrun(tmp_path / "killed", path, [kill(2, "update", 6)], STOP)
    stock = harness.by_torch(tmp_path / "stock", path)
    assert killed.code == 75 and not killed.ranks, killed.output
    told = sentence(killed.output)
    assert told.startswith("the repair of rank 2 cannot be called exact: "), told
    assert re.search(rf"and what it feeds may differ: {named} \([^)]*\), on {whom};", told), told
    assert "the run ends (--inexact stop): start it again, from its last checkpoint [ftrun explain F408]" in told
    assert "result bit-identical" not in killed.output
    assert "then gave up: that repair cannot be called exact (--inexact stop)" in killed.output
    nobody_is_left(killed)
    kept, wanted = saved(tmp_path / "killed"), saved(tmp_path / "stock")
    assert stock.code == 0 and len(wanted) == 12
    assert 6 <= len(kept) <= 8 and kept.items() <= wanted.items()  # the steps before the death, each as under torchrun


def test_stop_acts_as_soon_as_a_step_that_is_done_again_differs(tmp_path: Path) -> None:
    """Nothing was known before the repair, and the end of the loop is far."""
    source = STD + CONNECTION + loop(f"x, y = get()\n{LEARN}", "for step in job.steps(200):") + SAVED + END
    killed = harness.under_ftrun(tmp_path / "killed", script(tmp_path, source), [kill(2, "backward", 6)], STOP)
    assert killed.code == 75, killed.output
    assert "since step 6: a step that was done again got other inputs than the first time" in sentence(killed.output)
    assert len([*(tmp_path / "killed" / "out").glob("step-*.json")]) < 20


def test_stop_ends_a_run_in_whose_loop_a_difference_is_found_at_its_end(tmp_path: Path) -> None:
    """A hook that comes late is in no name that is bound anew: it is found when the loop ends, long after the repair."""
    pattern = PATTERNS["late-hook"]
    path = script(tmp_path, pattern.source)
    for word, code in (("go-on", 0), ("stop", 75)):
        killed = harness.under_ftrun(tmp_path / word, path, pattern.faults, env={"FTRUN_INEXACT": word})
        assert killed.code == code, killed.output
    assert "model 0.module.0.hooks" in sentence(killed.output)


@pytest.mark.parametrize("at", ["forward", "update"])
def test_an_exact_repair_goes_on(at: str, tmp_path: Path) -> None:
    path = script(tmp_path, PATTERNS[f"plain-{at}"].source)
    killed = harness.under_ftrun(tmp_path / "killed", path, [kill(2, at, 4), kill(0, at, 8)], STOP)
    stock = harness.by_torch(tmp_path / "stock", path)
    assert killed.code == 0 and killed.answer == "yes", killed.output
    assert killed.ranks == stock.ranks


def test_a_clean_run_ends_well_whatever_it_leaves_out(tmp_path: Path) -> None:
    path = script(tmp_path, PATTERNS["own-iterator"].source)
    clean = harness.under_ftrun(tmp_path / "clean", path, (), STOP)
    assert clean.code == 0 and clean.ranks == harness.by_torch(tmp_path / "stock", path).ranks


def test_the_closing_line_says_since_which_step_of_which_epoch(tmp_path: Path) -> None:
    body = loop(f"x, y = next(it)\n{LEARN}", "for step in job.steps(6):", "    ")
    source = STD + ITERATOR + "for epoch in job.epochs(2):\n" + body + END
    plan = '[[fault]]\nkind = "kill"\nrank = 2\nat = "backward"\nepoch = 1\nstep = 2\ntimes = 1\n'
    killed = harness.under_ftrun(tmp_path / "killed", script(tmp_path, source), [plan])
    assert killed.answer == "no", killed.output
    assert killed.reason.startswith("since epoch 1, step 2 of 6: a step that was done again got other inputs"), killed.reason
