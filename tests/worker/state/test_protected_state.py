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
