"""Infinities and NaNs in gradients are found wherever they are, in every kind of gradient, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ftrun.core.errors import NonFiniteError
from ftrun.core.shared.board import F, Phase
from ftrun.worker.step.finite_gradients import FiniteGradients, first_bad

SHAPE = (4, 5)
FORMATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_one_is_named(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 4097):
        for at in {0, size // 2, size - 1}:
            last = torch.randn(size).to(dtype)
            assert first_bad([("w", torch.ones(SHAPE)), ("b", last)]) is None
            last[at] = bad
            last[-1] = bad
            assert first_bad([("w", torch.ones(SHAPE)), ("b", last)]) == ("b", at)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_and_smallest_numbers_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = [info.max, info.max, info.tiny, 0.0, -0.0]
    assert first_bad([("w", torch.tensor(numbers, dtype=dtype))]) is None, "their sum is not"
    assert first_bad([("w", torch.tensor([*numbers, -float("inf")], dtype=dtype))]) == ("w", 5)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert first_bad([("w", torch.tensor([1.0, float("inf"), -float("inf")]))]) == ("w", 1)


def test_what_has_no_infinities_is_left_alone() -> None:
    assert first_bad([]) is None
    assert first_bad([("i", torch.ones(3, dtype=torch.int64)), ("e", torch.empty(0))]) is None


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        pytest.param(lambda t: t.to_sparse(), 19, id="COO"),
        pytest.param(lambda t: t.to_sparse_csr(), 19, id="CSR"),
        pytest.param(lambda t: t.t(), 19, id="transposed"),
        pytest.param(lambda t: t[:, ::2], 11, id="with gaps"),
        pytest.param(lambda t: t.to_mkldnn(), 19, id="mkldnn"),
        pytest.param(lambda t: torch.nn.Parameter(t), 19, id="a subclass"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_kind_of_gradient_is_looked_at(kind: Callable[[torch.Tensor], torch.Tensor], at: int) -> None:
    grad = torch.ones(SHAPE)
    assert first_bad([("w", kind(grad))]) is None
    grad[-1, -1] = float("nan")
    assert first_bad([("w", kind(grad))]) == ("w", at)


# -- on devices ----------------------------------------------------------------------------------------------------------

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class OnDevice(torch.Tensor):
    """A tensor that torch takes for one on a GPU; `work` is what the devices were told to do, in order."""

    held: torch.Tensor
    work: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        cls.work.append(func.overloadpacket.__name__)
        kwargs = dict(kwargs or {})
        wanted = kwargs.pop("device", None)
        devices = {one.device for one in tree_leaves(args) if isinstance(one, OnDevice)}
        (device,) = devices  # a kernel works on one
        result = func(*tree_map(lambda one: one.held if isinstance(one, OnDevice) else one, args), **kwargs)
        return OnDevice(result, device) if isinstance(result, torch.Tensor) and wanted != torch.device("cpu") else result


class Script:
    """What of a rank the check asks for: a model of two parameters on DEVICE, in the middle of a step with a backward."""

    def __init__(self) -> None:
        OnDevice.work = []
        self.params = [(name, torch.zeros(SHAPE), False) for name in ("a", "b")]
        self.few = [(number, SimpleNamespace(grad=None)) for number in range(2)]
        self.gpu = 0
        self.rank, self.world = 1, None
        self.position = SimpleNamespace(index_of=lambda number: number)
        self.cell = SimpleNamespace(words=lambda: {F.PHASE: Phase.BACKWARD})
        self.optimizer = object()
        self.looking = False
        looks: Any = SimpleNamespace(bodies=9, step_ns=0, spent=lambda since: None)
        rank: Any = self
        self.check = FiniteGradients(rank, rank, looks, "redo")
        self.check.body_started()

    def exchanges(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.check.collective_started("allreduce", (), [tensor])

    def comes_to_gate(self, bad: bool = False) -> list[str]:
        """The work of the devices from the end of their wait on."""
        grads: list[torch.Tensor | None] = [torch.full(SHAPE, float("nan") if bad else 1.0) for _ in range(2)]
        self.check.gate_ahead(7, self.optimizer, grads)
        begun = len(OnDevice.work)
        self.check.gate_reached(7, self.optimizer, grads)
        return OnDevice.work[begun:]


def on(device: torch.device, value: float = 1.0, dtype: torch.dtype = torch.float32) -> OnDevice:
    return OnDevice(torch.full(SHAPE, value, dtype=dtype), device)


def test_what_a_device_computes_for_the_gate_is_brought_to_the_host_before_the_wait() -> None:
    script = Script()
    script.exchanges(*(on(DEVICE, dtype=dtype) for dtype in FORMATS for _ in range(25)))
    assert len(OnDevice.work) <= 3 * 100, "more than a kernel or two for each exchange"
    before = len(OnDevice.work)
    assert script.comes_to_gate() == []
    assert OnDevice.work[before:] == ["stack", "sum", "_to_copy"]


def test_a_body_without_an_exchange_reads_no_device_after_the_wait() -> None:
    script = Script()
    script.few[0][1].grad = on(DEVICE)
    assert script.comes_to_gate() == []
    script.check.body_started()
    script.few[0][1].grad = on(DEVICE, float("inf"))
    with pytest.raises(NonFiniteError):
        script.comes_to_gate(bad=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", range(3))
def test_numbers_on_several_devices_are_found(where: int, bad: float) -> None:
    script = Script()
    tensors: list[Any] = [on(DEVICE), on(OTHER), torch.ones(SHAPE)]
    script.exchanges(*tensors)
    assert script.comes_to_gate() == ["_local_scalar_dense"], "that of the device which nobody waited for"
    script.check.body_started()
    getattr(tensors[where], "held", tensors[where])[3, 4] = bad
    script.exchanges(*tensors)
    with pytest.raises(NonFiniteError, match="its own, before the exchange"):
        script.comes_to_gate(bad=True)


def test_sums_that_overflow_are_no_infinities() -> None:
    script = Script()
    script.exchanges(on(DEVICE, torch.finfo(torch.float32).max))
    assert script.comes_to_gate() == []


# -- in parts -----------------------------------------------------------------------------------------------------------


def check(step_ns: int) -> tuple[FiniteGradients, Any, Any]:
    """A check whose budget is that of steps of this length, ns; in the first body everything is read. With state and looks."""
    words: dict[int, int] = {F.PHASE: Phase.BACKWARD}
    context: Any = SimpleNamespace(cell=SimpleNamespace(words=lambda: words))
    state: Any = SimpleNamespace(looking=True, few=[], params=[])
    looks: Any = SimpleNamespace(bodies=1, step_ns=step_ns)
    return FiniteGradients(context, state, looks, "redo"), state, looks


def sees(checked: tuple[FiniteGradients, Any, Any], bucket: torch.Tensor) -> bool:
    """Is a body's exchange of `bucket` found not to be finite? The next body is not looked at as a whole."""
    found, state, looks = checked
    found.body_started()
    found.collective_started("allreduce", ([bucket],), [bucket])
    state.looking, looks.bodies = False, looks.bodies + 1
    return found._poisoned


def test_of_a_large_exchange_in_short_steps_a_part_is_read_another_one_each_time() -> None:
    checked = check(step_ns=1_000)  # pays for nothing: the least is read
    bucket = torch.ones(1 << 20)
    assert not sees(checked, bucket), "all of it was read"
    checked[1].looking = True  # the next body knows what that took
    assert not sees(checked, bucket)
    bucket[777_777] = float("nan")
    turns = [sees(checked, bucket) for _ in range(2 * 16)]
    assert turns.count(True) == 2, "each part once in 16 turns"
    assert sees(checked, torch.full_like(bucket, float("inf"))), "a loss that is not finite is in every part"


def test_in_long_steps_all_of_it_is_read() -> None:
    checked = check(step_ns=60_000_000_000)
    bucket = torch.ones(1 << 20)
    assert not sees(checked, bucket)
    checked[1].looking = True
    assert not sees(checked, bucket)
    bucket[777_777] = float("nan")
    assert all(sees(checked, bucket) for _ in range(5))
