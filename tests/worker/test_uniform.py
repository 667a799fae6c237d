"""Numbers drawn faster are the numbers that torch draws, and whatever is out of the ordinary is left to torch."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ftrun import native
from ftrun.worker import uniform

SIZE = uniform._AT_LEAST


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
    assert uniform.take_over()
    yield calls
    uniform.hand_back()
    assert not ours_is_used()


def ours_is_used() -> bool:
    return str(Path(uniform.__file__).parent) in torch._C._dispatch_dump("aten::uniform_")


def both(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the fast way makes, and torch, from the same place; where both leave the stream must be the same."""
    state = torch.get_rng_state()
    fast, after = make(), torch.get_rng_state()
    uniform.hand_back()
    torch.set_rng_state(state)
    slow = make()
    assert torch.equal(after, torch.get_rng_state())
    assert uniform.take_over()
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
    assert torch.equal(fast, torchs_numbers(twin))
    assert torch.equal(mine.get_state(), twin.get_state()) and drawn == [SIZE]
    assert not torch.equal(mine.get_state(), other.get_state()) and torch.equal(default, torch.get_rng_state())


def torchs_numbers(generator: torch.Generator) -> torch.Tensor:
    uniform.hand_back()
    return torch.empty(SIZE).uniform_(0, 1, generator=generator)


def test_the_version_counts_and_the_tensor_is_given_back(drawn: list[int]) -> None:
    tensor = torch.zeros(SIZE)
    version = tensor._version
    assert tensor.uniform_(0, 1) is tensor and tensor._version == version + 1 and drawn == [SIZE]
    assert tensor.max() > 0.9


@pytest.mark.parametrize(("left", "following"), [(300, 324), (624, 0), (5, 5)])
def test_an_unlikely_state_is_left_to_torch(drawn: list[int], left: int, following: int) -> None:
    state = torch.Generator().manual_seed(1).get_state()
    state[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([following], dtype=torch.int64).view(torch.uint8)
    numbers = torch.empty(8)
    with pytest.raises(OSError, match="Invalid argument"):
        native.uniform(state.clone().data_ptr(), numbers.data_ptr(), 8, 0.0, 1.0, False)
    torch.set_rng_state(state)
    fast, slow = both(lambda: torch.empty(SIZE).uniform_(0, 1))
    assert torch.equal(fast, slow) and drawn == [8, SIZE]


@pytest.mark.parametrize("args", [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf")), (-3e38, 3e38)])
def test_wrong_bounds_are_told_as_torch_tells_them(drawn: list[int], args: tuple[float, float]) -> None:
    with pytest.raises(RuntimeError, match=r"uniform_ expects|out of bounds"):
        torch.empty(SIZE).uniform_(*args)
    assert not drawn


def test_what_torch_forbids_is_forbidden(drawn: list[int]) -> None:
    weight = torch.nn.Parameter(torch.empty(SIZE))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used"):
        weight.uniform_(0, 1)
    product = weight * 2
    needed = product.square()  # its backward wants what product is now
    product.uniform_(0, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        needed.sum().backward()
    with pytest.raises(TypeError, match="generator"):
        torch.empty(SIZE).uniform_(0, 1, generator=3)  # type: ignore[call-overload]
    assert drawn == [SIZE]


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


def test_each_way_to_call_it(drawn: list[int]) -> None:
    ways: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.empty(SIZE).uniform_(),
        lambda: torch.empty(SIZE).uniform_(0),
        lambda: torch.empty(SIZE).uniform_(to=2),
        lambda: torch.empty(SIZE).uniform_(**{"from": -1, "to": 2}),
        lambda: torch.empty(SIZE).uniform_(torch.tensor(0.0), 1),  # type: ignore[arg-type]
        lambda: torch.rand(SIZE),
        lambda: torch.rand_like(torch.empty(SIZE)),
        lambda: torch.zeros(2, SIZE)[1].uniform_(-1, 1),
        lambda: torch.ops.aten.uniform_(torch.zeros(SIZE), 2.0, 3.0),
    )
    for way in ways:
        fast, slow = both(way)
        assert torch.equal(fast, slow) and drawn.pop() == SIZE


def test_nothing_is_hidden_from_what_looks(drawn: list[int]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode(), torch.device("cpu"):
        torch.empty(SIZE).uniform_(0, 1)
    assert seen == ["aten.empty.memory_format", "aten.uniform_.default"]
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.empty(SIZE).uniform_(0, 1)
    assert [e.input_shapes[0] for e in profile.events() if e.name == "aten::uniform_"] == [[SIZE]]
    traced = torch.jit.trace(lambda t: t.clone().uniform_(0.0, 1.0), torch.zeros(SIZE), check_trace=False)
    assert "aten::uniform_" in str(traced.graph)
    assert drawn == [SIZE] * 3


def test_transforms_of_functions(drawn: list[int]) -> None:
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    def noise(t: torch.Tensor) -> torch.Tensor:
        return t.clone().uniform_(0, 1)

    each = torch.vmap(noise, randomness="different")(torch.zeros(2, SIZE))
    assert not torch.equal(each[0], each[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(SIZE), torch.ones(SIZE)).uniform_(0, 1)
        assert forward_ad.unpack_dual(dual).tangent.count_nonzero() == 0  # type: ignore[attr-defined]
    for before in (False, True):
        fast, slow = both(lambda b=before: make_fx(noise, pre_dispatch=b)(torch.zeros(SIZE))(torch.zeros(SIZE)))
        assert torch.equal(fast, slow) and fast.count_nonzero() > SIZE // 2
    assert drawn


def test_compilers_neither_see_it_nor_compile_it(drawn: list[int]) -> None:
    from torch._dynamo.utils import counters

    def model() -> torch.Tensor:
        return torch.nn.Linear(200, 200).weight.detach()

    noise = torch.compile(lambda t: torch.nn.init.uniform_(t, 0, 1) * 2, backend="aot_eager", fullgraph=True)
    fast, slow = both(lambda: noise(torch.zeros(SIZE)))
    assert torch.equal(fast, slow)
    frames, weights = [], []
    for enter in (uniform.take_over, uniform.hand_back):
        enter()
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(5)
        weights.append(torch.compile(model, backend="eager")())
        frames.append(counters["frames"]["total"])
    assert frames[0] == frames[1] > 0 and torch.equal(*weights) and len(drawn) == 2


def test_the_scripts_own_kernel_is_used(drawn: list[int]) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("uniform_", lambda tensor, *bounds, generator=None: tensor.fill_(7), "CPU")
    try:
        assert torch.equal(torch.empty(SIZE).uniform_(0, 1), torch.full((SIZE,), 7.0))
        uniform.hand_back()
        assert torch.equal(torch.empty(SIZE).uniform_(0, 1), torch.full((SIZE,), 7.0))
    finally:
        library._destroy()
    assert not torch.equal(torch.empty(SIZE).uniform_(0, 1), torch.full((SIZE,), 7.0)) and not drawn


def test_threads_of_the_script_draw_as_torch_lets_them(drawn: list[int]) -> None:
    made: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: made.append(torch.empty(200_000).uniform_(0, 1))) for _ in range(4)]
    torch.manual_seed(5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not drawn
    torch.manual_seed(5)
    wanted = [torch.empty(200_000).uniform_(0, 1) for _ in range(4)]
    assert len(drawn) == 4 and sorted(t[0].item() for t in made) == sorted(t[0].item() for t in wanted)


def test_a_signals_handler_may_draw_and_may_raise(drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = native.uniform
    raises = False
    handlers: list[torch.Tensor] = []

    def handler(number: int, frame: object) -> None:
        if raises:
            raise KeyboardInterrupt
        handlers.append(torch.rand(3))

    def interrupted(*args: Any) -> None:
        counted(*args)
        if not handlers or raises:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(native, "uniform", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        torch.manual_seed(9)
        numbers = torch.empty(SIZE).uniform_(0, 1)
        raises = True
        with pytest.raises(KeyboardInterrupt):
            torch.empty(SIZE).uniform_(0, 1)
        following = torch.rand(3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    uniform.hand_back()
    torch.manual_seed(9)
    assert torch.equal(handlers[0], torch.rand(3))  # the handler was first; the script's numbers come after its
    assert torch.equal(numbers, torch.empty(SIZE).uniform_(0, 1))
    torch.empty(SIZE).uniform_(0, 1)
    assert torch.equal(following, torch.rand(3)) and drawn == [SIZE] * 3


def test_another_default_device_or_format_does_not_matter() -> None:
    code = """
import torch
torch.set_default_device("meta"); torch.set_default_dtype(torch.float64)
from ftrun.worker import uniform
uniform.try_out()
assert uniform.take_over()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("fails", [True, False])
def test_it_is_not_used_where_it_would_draw_other_numbers(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def wrong(generator: int, numbers: int, count: int, *rest: Any) -> None:
        if fails:
            raise OSError(95, "Operation not supported")

    uniform._rounding.cache_clear()
    try:
        monkeypatch.setattr(native, "uniform", wrong)
        assert not uniform.take_over() and not ours_is_used()
    finally:
        uniform._rounding.cache_clear()
