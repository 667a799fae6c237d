"""What is put back in place is written into nothing that holds something else by now: no weight, no other variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ftrun.worker.memory.arena import Arena
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.variables.copies import CannotPlace, copied, placed
from ftrun.worker.variables.guarded_memory import GuardedMemory
from ftrun.worker.variables.in_place import InPlace
from tests.worker.variables.kept_values import Steps
from tests.worker.variables.test_variables import run


class Meter:
    def __init__(self) -> None:
        self.n = 0


def guarded() -> tuple[torch.nn.Module, torch.optim.Optimizer, GuardedMemory]:
    """A model and its optimizer, of which one update was made."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    state = ProtectedState([model], [optimizer], {})
    state.move_in(Arena.create(0, state.bytes_now()))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state.absorb()
    return model, optimizer, GuardedMemory(state)


def test_what_lies_over_a_weight_lies_over_the_same_one_in_a_replacement() -> None:
    model, optimizer, memory = guarded()
    weight = model[0].weight
    value = {
        "model": model.state_dict(),
        "moments": optimizer.state_dict(),
        "row": weight.detach()[1],
        "turned": weight.detach().numpy().T[::-1],
    }
    made = copied(value, {}, memory=memory)
    with torch.no_grad():
        weight.fill_(7.0)
    assert copied(value, {}, memory=memory).data == made.data, "an update changes it, and no variable by that"
    other, of_other, theirs = guarded()
    found = placed(None, made.data, {}, InPlace(theirs))
    with torch.no_grad():
        other[0].weight.fill_(3.0)
        other[1].running_mean.fill_(4.0)
    of_other.state[other[0].weight]["exp_avg"].fill_(5.0)
    assert found["model"]["0.weight"].eq(3.0).all() and found["model"]["1.running_mean"].eq(4.0).all()
    assert found["moments"]["state"][0]["exp_avg"].eq(5.0).all()
    assert found["row"].tolist() == [3.0] * 3 and found["turned"].shape == (3, 2)
    found["turned"][0, 1] = 9.0
    assert other[0].weight[1, 2] == 9.0


def test_nothing_is_written_through_what_lies_over_a_weight() -> None:
    model, _, memory = guarded()
    before = [torch.full((2, 3), 8.0), np.full((2, 3), 8.0, np.float32)]
    data = copied(before, {}, memory=memory).data
    now = [model[0].weight.detach(), model[0].weight.detach().numpy()]
    wanted = model[0].weight.detach().clone()
    found = placed(now, data, {}, InPlace(memory))
    assert found is now and found[0].eq(8.0).all() and (found[1] == 8.0).all()
    assert torch.equal(model[0].weight, wanted)


def test_what_lies_over_the_same_stays() -> None:
    model, _, memory = guarded()
    now = {"w": model[0].weight.detach().view(-1)}
    same = now["w"]
    assert placed(now, copied(now, {}, memory=memory).data, {}, InPlace(memory))["w"] is same


def test_over_nothing_that_is_guarded_here() -> None:
    model, _, memory = guarded()
    data = copied(model[1].running_mean.detach()[:], {}, memory=memory).data
    with pytest.raises(CannotPlace, match="buffer"):
        placed(None, data.replace(b"running_mean", b"running_maen"), {}, InPlace(memory))


def test_two_parts_of_a_copy_that_are_found_at_one_thing() -> None:
    for value, there in [
        ([[1], [2]], [0]),
        ([np.ones(2), np.zeros(2)], np.full(2, 5.0)),
        ([torch.ones(2), torch.zeros(2)], torch.full((2,), 5.0)),
    ]:
        found = placed([there, there], copied(value, {}).data, {})
        assert repr(found) == repr(value) and found[0] is there


def test_two_arrays_over_one_memory() -> None:
    table = np.arange(6.0).reshape(3, 2)
    row = table[1]
    kept = copied([row, table], {}).data, copied([np.full(2, 8.0), table], {}).data
    table[:] = 0.0
    found = placed([row, table], kept[0], {})
    assert found[0] is row and found[1] is table and table.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    found = placed([row, table], kept[1], {})
    assert found[0].tolist() == [8.0, 8.0] and found[1].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def two_names_that_part(steps: Steps) -> Any:
    a = b = [0]
    for step in steps:
        if step == 0:
            b = [5]
        a.append(step)
        b.append(-step)
    return a, b


def two_names_that_part_late(steps: Steps) -> Any:
    a = b = [0]
    for step in steps:
        if step == 3:
            b = [5]
        a.append(step)
        b.append(-step)
    return a, b


def the_best_of_a_checkpoint(steps: Steps) -> Any:
    checkpoint = {"best": torch.tensor(9.0)}
    best, losses = checkpoint["best"], None
    for step in steps:
        if step % 2 == 0:
            losses = {"val": torch.tensor(float(abs(step - 3)))}
            best = min(best, losses["val"])
    return best.item(), checkpoint["best"].item(), losses


def the_best_beside_a_checkpoint(steps: Steps) -> Any:
    checkpoint = {"best": torch.tensor(9.0)}
    best = checkpoint["best"]
    for step in steps:
        best = torch.minimum(best, torch.tensor(float(abs(step - 3))))
    return best.item(), checkpoint["best"].item()


def one_object_that_becomes_two(steps: Steps) -> Any:
    one = Meter()
    table = {"a": one, "b": one}
    for step in steps:
        if step == 1:
            table["b"] = Meter()
        table["a"].n += 1
        table["b"].n -= 1
    return one.n, table["a"].n, table["b"].n


def one_row_that_becomes_two(steps: Steps) -> Any:
    row = [0]
    table = [row, row]
    for step in steps:
        if step == 1:
            table[1] = [7]
        table[0].append(step)
        table[1].append(-step)
    return table, row


@pytest.mark.parametrize("cut", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "script",
    [
        two_names_that_part, two_names_that_part_late, the_best_of_a_checkpoint, the_best_beside_a_checkpoint, one_object_that_becomes_two,
        one_row_that_becomes_two,
    ],
    ids=lambda script: script.__name__,
)  # fmt: skip
def test_what_was_one_thing_before_the_loop_and_is_two_by_now(script: Callable[[Steps], Any], cut: int) -> None:
    wanted, slots, _, _ = run(script)
    found, _, _, lost = run(script, cut, slots[cut])
    assert found == wanted and not lost
