"""Optimizer state that is made of several tensors: its parts lie in the arena, and a replacement makes it again from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftrun.core.errors import UsageError
from ftrun.worker.memory import composed
from ftrun.worker.memory.arena import Arena
from ftrun.worker.state.protected_state import ProtectedState
from tests.e2e.scripts.packed_sgd import Packed, PackedSGD


class Closed(Packed):
    """One that keeps something of which nobody could make it again."""

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["codes", "scale"], (print,)


class Mute(torch.Tensor):
    """One that does not say what it is made of."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Mute:
        made: Mute = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(call)


class Copies(Packed):
    """One that does not lie where its parts are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Copies:
        return Packed.__new__(cls, codes.clone(), scale.clone(), dtype)  # type: ignore[return-value]


class Numbered(Packed):
    """One whose scale is a number and no tensor: the recipe changes with each update, and no part does."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: Any, dtype: torch.dtype) -> Numbered:
        return Packed.__new__(cls, codes, scale, dtype)  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["codes"], (self.scale, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Numbered:
        return cls(inner["codes"], *context)


def packed(kind: type[Packed] = Packed) -> Packed:
    return kind(torch.arange(4, dtype=torch.int8), torch.tensor([0.5]), torch.float32)


def adopted(arena: Arena, size: int) -> tuple[torch.Tensor, Any]:
    """The parameter that another process finds in an arena, and its momentum."""
    param = torch.nn.Parameter(torch.zeros(size))
    optimizer = PackedSGD([param], lr=0.1)
    ProtectedState([torch.nn.ParameterList([param])], [optimizer], {}).attach(arena, arena.read_manifest())
    return param, optimizer.state[param]["momentum"]


def test_state_that_is_made_of_others_outlives_its_process() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = PackedSGD([param], lr=0.1)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    arena = Arena.create(0, state.bytes_now())
    state.move_in(arena)
    param.grad = torch.arange(8.0)
    optimizer.step()
    state.absorb()
    optimizer.step()  # into the arena
    wanted = optimizer.state[param]["momentum"]
    other, found = adopted(arena, 8)
    assert type(found) is Packed and found.dtype == torch.float32 and found.shape == (8,)
    assert torch.equal(found.codes, wanted.codes) and found.codes.max() == 127 and torch.equal(found.scale, wanted.scale)
    assert found.codes.data_ptr() != wanted.codes.data_ptr() or found.codes is not wanted.codes
    assert torch.equal(other, param)


def test_what_replaces_such_state_is_copied_to_its_place() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = PackedSGD([param], lr=0.1)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    state.move_in(Arena.create(0, state.bytes_now()))
    optimizer.state[param]["momentum"] = packed()
    state.absorb()
    place = optimizer.state[param]["momentum"].codes.data_ptr()
    before = state.stand()
    optimizer.state[param]["momentum"] = Packed(torch.full((4,), 9, dtype=torch.int8), torch.ones(1), torch.float32)
    assert state.stand() != before
    state.absorb()
    kept = optimizer.state[param]["momentum"]
    assert kept.codes.data_ptr() == place and kept.codes.tolist() == [9] * 4 and kept.scale.item() == 1.0


def test_parts_that_an_optimizer_puts_in_their_place_are_copied_to_it() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = PackedSGD([param], lr=0.1)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    arena = Arena.create(0, state.bytes_now())
    state.move_in(arena)
    momentum = optimizer.state[param]["momentum"] = packed()
    state.absorb()
    momentum = optimizer.state[param]["momentum"]
    place, before = momentum.codes.data_ptr(), state.stand()
    momentum.codes = torch.full((4,), 7, dtype=torch.int8)  # the same object, and none of its memory is the arena's
    assert state.stand() != before
    state.absorb()
    assert optimizer.state[param]["momentum"].codes.data_ptr() == place
    assert adopted(arena, 4)[1].codes.tolist() == [7] * 4
    optimizer.state[param]["momentum"].codes = torch.zeros(5, dtype=torch.int8)
    with pytest.raises(UsageError, match="momentum changed its kind or shape"):
        state.absorb()


def test_what_such_state_holds_beside_its_parts_is_kept_as_it_is_now() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = PackedSGD([param], lr=0.1)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    arena = Arena.create(0, state.bytes_now())
    state.move_in(arena)
    optimizer.state[param]["momentum"] = Numbered(torch.ones(4, dtype=torch.int8), 0.5, torch.float32)
    state.absorb()
    assert not state.absorb(), "nothing has changed"
    before = state.stand()
    optimizer.state[param]["momentum"].scale = 0.25
    assert state.stand() != before
    assert state.absorb()
    assert adopted(arena, 4)[1].scale == 0.25


def test_a_plain_tensor_may_take_the_place_of_one_that_was_dropped() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = PackedSGD([param], lr=0.1)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    arena = Arena.create(0, state.bytes_now())
    state.move_in(arena)
    optimizer.state[param]["momentum"] = packed()
    state.absorb()
    optimizer.state[param].clear()
    state.absorb()
    optimizer.state[param]["momentum"] = torch.arange(4.0)
    state.absorb()
    assert adopted(arena, 4)[1].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_class_that_copies_its_parts_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = PackedSGD([param], lr=0.1)
    state = ProtectedState([torch.nn.ParameterList([param])], [optimizer], {})
    state.move_in(Arena.create(0, state.bytes_now()))
    optimizer.state[param]["momentum"] = packed(Copies)
    with pytest.raises(UsageError, match="Copies copies what it is made of"):
        state.absorb()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (packed(Closed), "holds a builtin_function_or_method"),
        (Mute(torch.ones(4)), "does not say what it is made of"),
        (Packed(packed(), torch.ones(1), torch.float32), "made of tensors that are made of others"),  # type: ignore[arg-type]
    ],
)
def test_a_tensor_that_could_not_be_made_again_is_refused(value: torch.Tensor, why: str) -> None:
    with pytest.raises(UsageError, match=f"optimizer state x is a .*{why}"):
        composed.recipe_of(value, "optimizer state x")
