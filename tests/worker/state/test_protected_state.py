"""What of an optimizer's state is kept where: tensors in the arena, everything else in a rank's slots."""

from __future__ import annotations

import torch

from ftrun.worker.memory.arena import Arena
from ftrun.worker.state.protected_state import ProtectedState


def test_a_value_that_is_none_is_kept_as_well() -> None:
    """A replacement's optimizer would raise a KeyError, or take another way."""
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    state.move_in(Arena.create(0, state.bytes_now()))
    optimizer.state[param] = {"average": torch.ones(8), "previous": None}
    assert state.absorb()
    assert any(entry.name == "optim.0.0.average" for entry in state.manifest.entries)
    kept = b"".join(state.python.capture().values())
    assert b"previous" in kept


def test_optimizer_state_that_is_made_anew_is_not_taken_for_the_old() -> None:
    """As after a return to a snapshot: the same dict, as many entries, other tensors in them."""
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    optimizer = torch.optim.Adam(model.parameters())
    state = ProtectedState([model], [optimizer], {})
    state.move_in(Arena.create(0, state.bytes_now()))

    def update() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    update()
    state.absorb()
    assert not state._made.is_steady(), "it was made just now"
    state.absorb()
    assert state._made.is_steady()
    optimizer.state.clear()
    update()
    assert len(optimizer.state) == 6 and not state._made.is_steady()
    state.looking = False
    state.absorb()
    address, length = state.arena.segment.address, state.arena.segment.length
    kept = [one for values in optimizer.state.values() for one in values.values()]
    assert all(address <= one.data_ptr() < address + length for one in kept)
