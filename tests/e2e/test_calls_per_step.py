"""What ftrun does in an ordinary step is counted: calls of Python in its own code, which a loop over tensors would multiply."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from tests.e2e import harness

MOST = 200  # calls of a step with up to FEW collectives
FEW, EACH = 4, 12  # collectives, and calls for each further one
RANKS = 2
# Calls that depend on how long something takes: a look every 20 ms, a rank that is woken at its gate or opens it, and the end of a
# collective, which is the backend's thread's, or this one's where it had ended already.
BY_TIME = (
    "worker/step/stop_hooks.py:look", "core/traced_away.py:", "worker/step/gate.py:", "core/shared/gate.py:", "core/shared/bell.py:",
    "core/shared/board.py:", "worker/step/same_gate.py:", "worker/step/replica_check.py:may_open", "worker/link/run_link.py:world",
    "worker/link/observer.py:tell",
    "worker/link/run_link.py:stop_pending", "worker/link/run_link.py:cut_short",
    "worker/comm/work.py:_ended", "worker/comm/work.py:complete", "worker/comm/process_group.py:ended", "worker/comm/on_board.py:left",
)  # fmt: skip


def ordinary(folder: Path, tensors: int, layers: int = 0) -> tuple[collections.Counter[str], int]:
    """Calls by function in a step that nothing looks at as a whole, and how many collectives it had."""
    script = harness.SCRIPTS / "counted.py"
    command = harness.script_command(folder, script, [str(tensors), str(layers), str(folder / "calls.json")], ranks=RANKS, spares=0)
    running = harness.start(folder, command)
    assert running.wait(harness.TIMEOUT) == 0, (folder / "output.txt").read_text()
    found = json.loads((folder / "calls.json").read_text())
    steps = [collections.Counter(calls) for calls in found["calls"]]
    assert len(steps) > 20
    middle = sorted(range(len(steps)), key=lambda i: steps[i].total())[len(steps) // 2]
    return steps[middle], found["collectives"][middle]


def shown(calls: collections.Counter[str]) -> str:
    return "\n".join(f"{n:6d} {name}" for name, n in calls.most_common(40))


def of_code(calls: collections.Counter[str]) -> dict[str, int]:
    """Those that do not depend on how long something took."""
    return {name: n for name, n in calls.items() if not name.startswith(BY_TIME)}


def test_a_step_costs_as_many_calls_for_many_tensors_as_for_few(folder: Path) -> None:
    few, collectives = ordinary(folder / "few", 8)
    many, others = ordinary(folder / "many", 200)
    assert collectives == others == 1
    assert few.total() <= MOST, shown(few)
    assert many.total() <= MOST, shown(many)
    assert of_code(few) == of_code(many), sorted({*of_code(few).items()} ^ {*of_code(many).items()})


@pytest.mark.parametrize("layers", [2, 8])
def test_sharded_models_are_counted_by_their_collectives(folder: Path, layers: int) -> None:
    calls, collectives = ordinary(folder, 2 * 8 + 2, layers)
    assert collectives > FEW
    assert calls.total() <= MOST + EACH * (collectives - FEW), f"{collectives} collectives\n{shown(calls)}"
