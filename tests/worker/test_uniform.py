"""Layers initialized faster have the numbers that torch draws, and whatever is out of the ordinary is left to torch."""

from __future__ import annotations

import _thread
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from ftrun import native
from ftrun.worker import uniform

SIZE = uniform._AT_LEAST
STOCK = {(kind, name): kind.__dict__[name] for kind, name in uniform._LAYERS}


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
    harness, threads = uniform._threads() - {threading.get_ident()}, uniform._threads
    monkeypatch.setattr(uniform, "_threads", lambda: threads() - harness)  # pytest-xdist has some
    assert uniform.take_over()
    yield calls
    uniform.hand_back()
    assert is_stock()


def is_stock() -> bool:
    return all(kind.__dict__[name] is method for (kind, name), method in STOCK.items())


def both(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the fast way makes, and torch, from the same place; where both leave the stream must be the same."""
    state = torch.get_rng_state()
    fast, after = make(), torch.get_rng_state()
    assert "uniform_" not in torch.Tensor.__dict__
    uniform.hand_back()
    assert is_stock()
    torch.set_rng_state(state)
    slow = make()
    assert torch.equal(after, torch.get_rng_state())
    assert uniform.take_over()
    return fast, slow


def weights(layer: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def linear() -> torch.Tensor:
    return weights(nn.Linear(128, SIZE // 128))


@pytest.mark.parametrize(
    "bounds", [(0, 1), (-0.05, 0.05), (-1 / 3, 2 / 7), (3.0, 3.0), (-1e38, 1e38), (1e-42, 1e-41), (1.0, 1.0000004)]
)
def test_the_numbers_and_the_stream_are_those_of_torch(drawn: list[int], bounds: tuple[float, float]) -> None:
    torch.manual_seed(11)
    sizes = [SIZE, SIZE + 1, 624 * 32, 624 * 32 + 1, 624 * 32 - 1, 100_003]
    for size, before in itertools.product(sizes, (0, 1, 623, 624, 625)):
        torch.rand(before)
        state = torch.get_rng_state()
        fast, after = uniform._uniform(torch.empty(size), *bounds), torch.get_rng_state()
        torch.set_rng_state(state)
        slow = torch.empty(size).uniform_(*bounds)
        assert torch.equal(fast.view(torch.int32), slow.view(torch.int32)), (size, before)
        assert torch.equal(after, torch.get_rng_state())
    assert len(drawn) == 30


def test_a_normal_that_the_generator_keeps_stays(drawn: list[int]) -> None:
    torch.manual_seed(3)
    torch.empty(1, dtype=torch.float64).normal_()
    fast, slow = both(lambda: linear().double() + torch.empty(1, dtype=torch.float64).normal_())
    assert torch.equal(fast, slow) and drawn == [SIZE]


def lazy(layer: nn.Module) -> nn.Module:
    layer(torch.zeros(3))
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(160, 170),
    "bilinear": lambda: nn.Bilinear(40, 41, 42),
    "convolution": lambda: nn.Conv2d(64, 32, 3),
    "transposed convolution": lambda: nn.ConvTranspose1d(64, 64, 5),
    "LSTM": lambda: nn.LSTM(80, 90),
    "GRU cell": lambda: nn.GRUCell(80, 90),
    "attention": lambda: nn.MultiheadAttention(96, 4),
    "transformer": lambda: nn.TransformerEncoderLayer(64, 4, 512),
    "lazy": lambda: lazy(nn.LazyLinear(SIZE)),
    "again": lambda: nn.Linear(160, 170).apply(lambda layer: layer.reset_parameters()),  # type: ignore[operator]
}


@pytest.mark.parametrize("what", LAYERS)
def test_layers_are_initialized_by_it(drawn: list[int], what: str) -> None:
    fast, slow = both(lambda: weights(LAYERS[what]()))
    assert torch.equal(fast, slow) and drawn


def test_nothing_else_draws_by_it(drawn: list[int]) -> None:
    torch.empty(SIZE).uniform_(0, 1)
    nn.init.uniform_(torch.empty(SIZE))
    torch.rand(SIZE)
    nn.Linear(127, 128)
    nn.LazyLinear(SIZE)
    assert torch.Tensor.uniform_ is uniform._torchs and not drawn


def test_a_generator_of_its_own_is_moved_and_no_other(drawn: list[int]) -> None:
    mine, twin = (torch.Generator().manual_seed(5) for _ in range(2))
    default = torch.get_rng_state()
    fast = uniform._uniform(torch.empty(SIZE), 0, 1, generator=mine)
    assert torch.equal(fast, torch.empty(SIZE).uniform_(0, 1, generator=twin))
    assert torch.equal(mine.get_state(), twin.get_state()) and drawn == [SIZE]
    assert torch.equal(default, torch.get_rng_state())


def test_the_version_counts_and_the_tensor_is_given_back(drawn: list[int]) -> None:
    tensor = torch.zeros(SIZE)
    version = tensor._version
    assert uniform._uniform(tensor, 0, 1) is tensor and tensor._version == version + 1 and drawn == [SIZE]
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
    fast, slow = both(linear)
    assert torch.equal(fast, slow) and drawn == [8, SIZE]


@pytest.mark.parametrize("args", [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf")), (-3e38, 3e38)])
def test_wrong_bounds_are_told_as_torch_tells_them(drawn: list[int], args: tuple[float, float]) -> None:
    with pytest.raises(RuntimeError, match=r"uniform_ expects|out of bounds"):
        uniform._uniform(torch.empty(SIZE), *args)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used"):
        uniform._uniform(nn.Parameter(torch.empty(SIZE)), 0, 1)
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
    state = torch.get_rng_state()
    fast = uniform._uniform(OTHERS[what](), -1, 1)
    torch.set_rng_state(state)
    slow = OTHERS[what]().uniform_(-1, 1)
    assert not drawn and (fast.is_meta or torch.equal(fast, slow))


def test_who_looks_sees_what_torch_does(drawn: list[int]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        linear()
    assert "aten.uniform_.default" in seen
    with torch.device("cpu"):
        linear()
    with torch.profiler.profile(record_shapes=True) as profile:
        linear()
    shapes = [e.input_shapes[0] for e in profile.events() if e.name == "aten::uniform_"]
    assert shapes == [[128, 128], [128]]
    for before in (False, True):
        graph = make_fx(lambda _: nn.Linear(128, 128).weight.detach(), pre_dispatch=before)(torch.zeros(1))
        assert "aten.uniform_.default(_param" in graph.code
    traced = torch.jit.trace(lambda t: t + linear(), torch.zeros(1), check_trace=False)
    assert "aten::uniform_" in str(traced.graph)
    torch.vmap(lambda t: t + linear(), randomness="same")(torch.zeros(2, 1))
    assert not drawn


def test_who_counts_calls_counts_those_of_torch(drawn: list[int]) -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def counted() -> list[str]:
        with Mode() as mode:
            nn.Linear(128, 128)
        return mode.called

    ours = counted()
    uniform.hand_back()
    assert ours == counted() and "uniform_" in ours and not drawn


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_first_compilation_ends_it(drawn: list[int], forgotten: bool) -> None:
    if forgotten:
        torch._dynamo.reset()
    layer = nn.Linear(128, 128)
    assert drawn == [SIZE]

    def again(t: torch.Tensor) -> torch.Tensor:
        layer.reset_parameters()
        return layer(t)

    compiled = torch.compile(again, backend="eager", fullgraph=True)
    compiled(torch.zeros(128))
    assert is_stock() and drawn == [SIZE]


def test_the_scripts_own_kernel_is_used(drawn: list[int]) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("uniform_", lambda tensor, *bounds, generator=None: tensor.fill_(7), "CPU")
    try:
        assert torch.equal(linear(), torch.full((SIZE + 128,), 7.0))
    finally:
        library._destroy()
    assert not drawn


def test_what_the_script_puts_in_its_place_stays(drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = nn.Linear.reset_parameters
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "reset_parameters", lambda layer: nn.init.ones_(layer.weight))
        uniform.hand_back()
        assert nn.Linear(128, 128).weight.eq(1).all()
    assert nn.Linear.reset_parameters is ours  # as patches go: what was there is put back, and does what torch does
    linear()
    nn.Linear.reset_parameters = STOCK[nn.Linear, "reset_parameters"]  # type: ignore[method-assign]
    assert uniform.take_over()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", lambda tensor, *bounds, **kwargs: tensor.fill_(3))
        assert nn.Linear(128, 128).weight.eq(3).all()
    with monkeypatch.context() as patch:
        patch.setattr(nn.init, "kaiming_uniform_", lambda tensor, a: tensor)
        linear()
    assert not drawn


@pytest.mark.parametrize("kind", ["thread", "low", "ours"])
def test_with_threads_of_the_script_torch_draws(drawn: list[int], kind: str) -> None:
    lock = threading.Lock()
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        with lock:
            pass

    with lock:
        thread = threading.Thread(target=wait, name="ftrun-test" if kind == "ours" else "loader")
        _thread.start_new_thread(wait, ()) if kind == "low" else thread.start()
        assert begun.wait(30)
        linear()
    assert drawn == ([SIZE] if kind == "ours" else [])
    if kind != "low":
        thread.join()


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
        numbers = linear()
        raises = True
        with pytest.raises(KeyboardInterrupt):
            nn.Linear(128, 128)
        following = torch.rand(3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "uniform_" not in torch.Tensor.__dict__
    uniform.hand_back()
    torch.manual_seed(9)
    assert torch.equal(handlers[0], torch.rand(3))  # the handler was first; the script's numbers come after its
    assert torch.equal(numbers, linear())
    torch.empty(SIZE).uniform_(0, 1)
    assert torch.equal(following, torch.rand(3)) and drawn == [SIZE] * 3


def test_another_default_device_or_format_does_not_matter() -> None:
    code = """
import torch, torch._dynamo
torch.set_default_device("meta"); torch.set_default_dtype(torch.float64)
from ftrun.worker import uniform
uniform.try_out()
assert uniform.take_over()
torch.nn.Linear(300, 300)
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
        assert not uniform.take_over() and is_stock()
    finally:
        uniform._rounding.cache_clear()
