"""Numbers drawn faster are the numbers that torch draws, and whatever is out of the ordinary is left to torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ftrun import native
from ftrun.worker import uniform

SIZE = uniform._AT_LEAST
stock = uniform._torchs


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many numbers the fast way drew, a call each."""
    calls: list[int] = []
    original = native.uniform

    def count(generator: int, numbers: int, count: int, *rest: Any) -> None:
        calls.append(count)
        original(generator, numbers, count, *rest)

    uniform.try_out()
    monkeypatch.setattr(native, "uniform", count)
    uniform.take_over()
    yield calls
    uniform.hand_back()
    assert "uniform_" not in torch.Tensor.__dict__


def both(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the fast way makes, and torch, from the same place; where both leave the stream must be the same."""
    state = torch.get_rng_state()
    fast, after = make(), torch.get_rng_state()
    uniform.hand_back()
    torch.set_rng_state(state)
    slow = make()
    assert torch.equal(after, torch.get_rng_state())
    uniform.take_over()
    return fast, slow


@pytest.mark.parametrize(
    "bounds", [(0, 1), (-0.05, 0.05), (-1 / 3, 2 / 7), (3.0, 3.0), (-1e38, 1e38), (1e-42, 1e-41), (1.0, 1.0000004)]
)
def test_the_numbers_and_the_stream_are_those_of_torch(drawn: list[int], bounds: tuple[float, float]) -> None:
    torch.manual_seed(11)
    sizes = [SIZE, SIZE + 1, 624 * 32, 624 * 32 + 1, 624 * 32 - 1, 100_003]
    for size, before in itertools.product(sizes, (0, 1, 623, 624, 625)):
        torch.rand(before)
        fast, slow = both(lambda n=size: torch.empty(n).uniform_(*bounds))
        assert torch.equal(fast.view(torch.int32), slow.view(torch.int32)), (size, before)
    assert len(drawn) == 30


def test_a_normal_that_the_generator_keeps_stays(drawn: list[int]) -> None:
    torch.manual_seed(3)
    torch.empty(1, dtype=torch.float64).normal_()
    fast, slow = both(lambda: torch.empty(SIZE).uniform_(0, 1).double() + torch.empty(1, dtype=torch.float64).normal_())
    assert torch.equal(fast, slow) and drawn == [SIZE]


def test_layers_are_initialized_by_it(drawn: list[int]) -> None:
    layers: list[Callable[[], torch.nn.Module]] = [
        lambda: torch.nn.Linear(160, 170),
        lambda: torch.nn.Conv2d(64, 32, 3),
        lambda: torch.nn.LSTM(80, 90),
        lambda: torch.nn.TransformerEncoderLayer(64, 4, 512),
    ]
    for make in layers:
        before = len(drawn)
        fast, slow = both(lambda m=make: torch.cat([p.detach().flatten() for p in m().parameters()]))
        assert torch.equal(fast, slow) and len(drawn) > before


def test_a_generator_of_its_own_is_moved_and_no_other(drawn: list[int]) -> None:
    mine, twin, other = (torch.Generator().manual_seed(5) for _ in range(3))
    default = torch.get_rng_state()
    fast = torch.empty(SIZE).uniform_(0, 1, generator=mine)
    assert torch.equal(fast, stock(torch.empty(SIZE), 0, 1, generator=twin))
    assert torch.equal(mine.get_state(), twin.get_state()) and drawn == [SIZE]
    assert not torch.equal(mine.get_state(), other.get_state()) and torch.equal(default, torch.get_rng_state())


def test_the_version_counts_and_the_tensor_is_given_back(drawn: list[int]) -> None:
    tensor = torch.zeros(SIZE)
    version = tensor._version
    assert tensor.uniform_(0, 1) is tensor and tensor._version == version + 1 and drawn == [SIZE]
    assert tensor.max() > 0.9


def test_an_unlikely_state_is_refused() -> None:
    state, numbers = torch.Generator().manual_seed(1).get_state(), torch.empty(8)
    state[8:12] = 0  # how many words are left
    with pytest.raises(OSError, match="Invalid argument"):
        native.uniform(state.data_ptr(), numbers.data_ptr(), 8, 0.0, 1.0, False)


@pytest.mark.parametrize("args", [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf")), (-3e38, 3e38)])
def test_wrong_bounds_are_told_as_torch_tells_them(drawn: list[int], args: tuple[float, float]) -> None:
    with pytest.raises(RuntimeError, match=r"uniform_ expects|out of bounds"):
        torch.empty(SIZE).uniform_(*args)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch.nn.Parameter(torch.empty(SIZE)).uniform_(0, 1)
    with pytest.raises(TypeError):
        torch.empty(SIZE).uniform_(0, 1, 2)
    assert not drawn


class Subclass(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "few numbers": lambda: torch.empty(SIZE - 1),
    "another format": lambda: torch.empty(SIZE, dtype=torch.float64),
    "half": lambda: torch.empty(SIZE, dtype=torch.bfloat16),
    "transposed": lambda: torch.empty(64, SIZE // 32).t(),
    "every second": lambda: torch.empty(2 * SIZE)[::2],
    "subclass": lambda: torch.empty(SIZE).as_subclass(Subclass),
    "meta": lambda: torch.empty(SIZE, device="meta"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_ordinary_is_left_to_torch(drawn: list[int], what: str) -> None:
    fast, slow = both(lambda: OTHERS[what]().uniform_(-1, 1))
    assert not drawn and (fast.is_meta or torch.equal(fast, slow))


def test_other_ways_to_call_it_are_left_to_torch(drawn: list[int]) -> None:
    for call in (
        lambda t: t.uniform_(),
        lambda t: t.uniform_(0),
        lambda t: t.uniform_(to=2),
        lambda t: t.uniform_(**{"from": -1, "to": 2}),
        lambda t: t.uniform_(torch.tensor(0.0), 1),
    ):
        fast, slow = both(lambda c=call: c(torch.empty(SIZE)))  # type: ignore[misc]
        assert torch.equal(fast, slow)
    assert not drawn


def test_nothing_is_hidden_from_modes(drawn: list[int]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    tensor = torch.empty(SIZE)
    with Mode():
        tensor.uniform_(0, 1)
    assert seen == ["aten.uniform_.default"]
    assert not drawn
    with torch.device("cpu"):  # a mode for functions: it is asked first
        tensor.uniform_(0, 1)
    assert drawn.pop() == SIZE
    each = torch.vmap(lambda t: t.clone().uniform_(0, 1), randomness="different")(torch.zeros(2, SIZE))
    assert not torch.equal(each[0], each[1])
    traced = torch.jit.trace(lambda t: t.clone().uniform_(0.0, 1.0), torch.zeros(SIZE), check_trace=False)
    assert "uniform_" in str(traced.graph)
    assert not drawn


def test_what_the_script_put_there_stays() -> None:
    uniform.take_over()

    def mine(self: torch.Tensor, *args: Any) -> torch.Tensor:
        return self

    torch.Tensor.uniform_ = mine  # type: ignore[assignment,method-assign]
    try:
        uniform.hand_back()
        uniform.take_over()
        assert torch.Tensor.uniform_ is mine
    finally:
        del torch.Tensor.uniform_


def test_it_is_not_used_where_it_would_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(generator: int, numbers: int, count: int, *rest: Any) -> None:
        raise OSError(95, "Operation not supported")

    uniform._rounding.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(native, "uniform", wrong)
            uniform.take_over()
            assert torch.Tensor.uniform_ is stock
        uniform._rounding.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(native, "uniform", lambda *_: None)
            uniform.take_over()
            assert torch.Tensor.uniform_ is stock
    finally:
        uniform._rounding.cache_clear()
