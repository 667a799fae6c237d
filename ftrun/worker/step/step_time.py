"""Measure a rank's own share of a step's time, which the launcher compares to detect a slow rank."""

from __future__ import annotations

import time
from typing import Any

from ftrun.core.shared.board import F
from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link.observer import StepObserver


class StepTime(StepObserver):
    """Measures own work until the first exchange of gradients: after that all ranks are as slow as the slowest."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._words = registry.context.cell.words()
        self._since = 0  # when this rank's own work in the step began, ns
        self._waited = 0  # ns of waiting for others before that

    def body_started(self) -> None:
        self._registry.first_exchange = self._measure
        if not self._since:
            self._since, self._waited = time.monotonic_ns(), self._registry.shown.waited

    def gate_ahead(self, number: int, optimizer: Any, grads: list[Any]) -> None:
        if self._registry.first_exchange is not None:
            self._measure()

    def gate_passed(self, number: int) -> None:
        """Every rank starts its next share of work at this moment."""
        self._since, self._waited = time.monotonic_ns(), self._registry.shown.waited

    def _measure(self) -> None:
        self._registry.first_exchange = None
        if self._since:
            waited = self._registry.shown.waited - self._waited
            self._words[F.WORK] = max(0, time.monotonic_ns() - self._since - waited)
