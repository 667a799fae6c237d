"""Draw a bar over the steps of a loop, on rank 0. It shows the step that runs, also when it is done again or after a replacement."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

from ftrun.core.errors import UsageError
from ftrun.worker.step.body import Step


def require() -> None:
    """Require tqdm on every rank, though only one draws. Raises UsageError without it."""
    if importlib.util.find_spec("tqdm") is None:
        raise UsageError("progress=True draws its bar with tqdm, which is not installed here; run: pip install tqdm")


def shown(steps: Iterator[Step], total: int, epoch: int | None) -> Iterator[Step]:
    """Yield the same steps and draw the bar. `total`: the index at which they end; `epoch`: that of job.epochs."""
    bar = None
    try:
        for step in steps:
            if bar is None:
                bar = _bar(step.index, total, epoch)
            elif bar.n != step.index:
                bar.n = step.index
                bar.refresh()
            yield step
            if step.committed:
                bar.update(1)
    finally:
        if bar is not None:
            bar.close()


def _bar(first: int, total: int, epoch: int | None) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class StepBar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        monitor_interval = 0  # no thread of its own

    StepBar.set_lock(threading.RLock())
    what = "step" if epoch is None else f"epoch {epoch}"
    return StepBar(total=total, initial=first, desc=what, unit="step", dynamic_ncols=True)
