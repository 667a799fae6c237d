"""Stop hooks beside torch.compile: a module is compiled as under torchrun, and uncompiled it looks for a stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from ftrun.core.shared.board import F
from ftrun.worker.link import compiling
from ftrun.worker.link.position import Interrupt, Where
from ftrun.worker.step import stop_hooks
from ftrun.worker.step.stop_hooks import StopHooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x))


class Registry:
    """As much of a rank's groups as the hooks read."""

    def __init__(self) -> None:
        self.words = {F.PROGRESS: 0}
        self.stop = False
        self.context: Any = SimpleNamespace(cell=SimpleNamespace(words=lambda: self.words), stop_pending=lambda: self.stop)
        self.position = SimpleNamespace(where=Where.BODY)
        self.local = False


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    monkeypatch.setattr(compiling, "_compiled", False)
    torch._dynamo.reset()
    compiling.stay_out()
    context: Any = SimpleNamespace(busy=lambda *_: None)
    compiling.excuse(context)
    return CompileCounter()


def hooks_on(net: nn.Module) -> tuple[Registry, StopHooks]:
    registry = Registry()
    hooks = StopHooks(registry, [net])  # type: ignore[arg-type]
    hooks.told_by = SimpleNamespace(ignore=lambda *_: None)  # type: ignore[assignment]
    return registry, hooks


def bodies(hooks: StopHooks, called: Any, count: int = 6) -> None:
    for _ in range(count):
        hooks.body_started()
        called(torch.ones(2, 4)).sum().backward()


def test_a_compiled_module_stays_whole_and_is_compiled_once(counter: CompileCounter) -> None:
    net = Net()
    _, hooks = hooks_on(net)
    bodies(hooks, torch.compile(net, backend=counter))
    assert counter.frame_count == 1


def test_a_hook_of_the_worker_itself_cuts_it(counter: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above could not fail."""
    monkeypatch.setattr(stop_hooks, "traced_away", lambda _, hook: hook)
    net = Net()
    _, hooks = hooks_on(net)
    bodies(hooks, torch.compile(net, backend=counter))
    assert counter.frame_count > 1


def test_hooks_that_are_not_needed_go_unless_something_is_compiled(counter: CompileCounter) -> None:
    net = Net()
    _, hooks = hooks_on(net)
    bodies(hooks, net)  # far shorter than 20 ms
    assert not any(layer._forward_pre_hooks for layer in net.layers)


def test_an_uncompiled_module_looks_for_a_stop_in_both_directions(counter: CompileCounter) -> None:
    net = Net()
    registry, _ = hooks_on(net)
    out = net(torch.ones(2, 4)).sum()
    assert registry.words[F.PROGRESS] > 0
    registry.stop = True
    with pytest.raises(Interrupt):
        net(torch.ones(2, 4))
    with pytest.raises(Interrupt):
        out.backward()
    registry.position.where = Where.PASSED
    net(torch.ones(2, 4))
