"""Lets a script run twice: on stock torch as its author wrote it, and with the four lines of ftrun.

`protect`, and the job that it gives, are ftrun's in a converted run. On stock torch `Stock` stands in their place: it loops over
what it is given, and does nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from leave import leave
from torch import Tensor, nn

CONVERTED = os.environ["CASE_CONVERTED"] == "1"
STEPS = 24
WIDTH = 6


class StockStep:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> StockStep:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class Stock:
    """A job that protects nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def steps(self, total: int) -> Iterator[StockStep]:
        return map(StockStep, range(total))

    def epochs(self, total: int) -> Iterable[int]:
        return range(total)

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[StockStep, Any]]:
        for index, batch in enumerate(loader):
            yield StockStep(index), batch

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def state(self, **values: Any) -> SimpleNamespace:
        return SimpleNamespace(**values)


if CONVERTED:
    import ftrun

    protect: Any = functools.partial(ftrun.protect, variables="auto")
else:
    protect = Stock


def begin() -> int:
    """Make the process group; gives the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("ftrun" if CONVERTED else "gloo")
    torch.manual_seed(7)
    return dist.get_rank()


def small(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), *between, nn.Linear(10, 1))


def rows(count: int = 12) -> tuple[Tensor, Tensor]:
    """Random inputs, from torch's own stream, and their targets."""
    x = torch.randn(count, WIDTH)
    return x, x.mean(1, keepdim=True)


def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, wanted)


def strike(rank: int, epoch: int, index: int) -> None:
    """Die by SIGKILL, once, where CASE_KILL="rank:epoch:index" says: a plan of faults knows no epochs."""
    mark = Path(os.environ["TRUTH_OUT"]).with_name("struck")
    if CONVERTED and os.environ.get("CASE_KILL") == f"{rank}:{epoch}:{index}" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _feed(total: Any, value: Any) -> None:
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Tensor):
        value = value.detach().contiguous()
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, inner in value.items():
            total.update(repr(key).encode())
            _feed(total, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _feed(total, inner)
    else:
        total.update(repr(value).encode())


def end(rank: int, **held: Any) -> None:
    """Leave digests of what the rank holds, and of torch's random stream."""
    digests = {}
    for name, value in {**held, "rng": torch.get_rng_state()}.items():
        total = hashlib.sha256()
        _feed(total, value)
        digests[name] = total.hexdigest()[:16]
    leave(rank, **digests)
