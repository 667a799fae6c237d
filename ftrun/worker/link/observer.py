"""Tell observers the events of a rank's loop: checks first, then instruments. They never see the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ftrun.core.shared.replicas import SumRow


class StepObserver:
    """Overrides the events that it wants to hear. `number` is a gate number; an exception raised here leaves the body or the loop.

    `told_by`: the `Observers` that tell it, from `Observers.add` on; its `listen` and `ignore` change which events it hears.
    """

    told_by: Observers

    def loop_started(self, first: int, length: int) -> None:
        """A loop of `length` steps begins at step index `first`, or is skipped by a replacement."""

    def handed_out(self, number: int) -> None:
        """The loop gives a step to the script, or is about to reach the virtual gate after its last step."""

    def body_started(self) -> None:
        """The script enters the body of the step that was handed out."""

    def forward_started(self) -> None:
        """A protected model is called for the first time in this body, or the body reached its gate without that."""

    def model_called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A protected model is called in a body, before its gate."""

    def backward_started(self) -> None:
        """The first gradient of a body is about to be computed."""

    def collective_started(self, name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        """A collective is about to start in a body. `outputs`: the tensors of args[0], still with this rank's own values."""

    def gate_ahead(self, number: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        """The collectives are over, and the device may still compute: enqueue the gate's computations on it now."""

    def gate_reached(self, number: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        """The device has finished, and nothing is published yet: raising here keeps the gate shut.

        `optimizer` will update with `grads`; None if no optimizer does.
        """

    def arrived(self, number: int) -> None:
        """This rank has arrived at its gate, also at a virtual one."""

    def waiting(self, number: int) -> None:
        """This rank looks again while it waits at its gate (ten times a second between two loops): raising leaves the gate."""

    def may_open(self, number: int) -> bool:
        """Every rank has arrived: may this one open the gate? Asked again and again; never waits."""
        return True

    def sums_gathered(self, number: int, rows: list[SumRow]) -> bool:
        """Every rank of every node has arrived, and this one speaks for its node: may it open the gate?

        `rows` are the checksums of all ranks that made one. Every node has the same ones, and answers the same.
        """
        return True

    def gate_passed(self, number: int) -> None:
        """The gate opened, and nothing is updated yet."""

    def update_started(self, number: int) -> None:
        """From here on the rank's memory changes."""

    def loop_ending(self, number: int) -> None:
        """This rank is about to arrive at the virtual gate after a loop's last step: raising keeps it shut."""

    def step_done(self, number: int) -> None:
        """The step is sealed."""

    def aborted(self, raised: bool) -> None:
        """This rank left a stopped world. `raised`: it was stopped because the body of a rank raised an exception."""

    def stage(self, name: str, number: int) -> None:
        """The recovery is in its stage stop, reset or restore."""

    def replaced(self) -> None:
        """This worker has restored the state of the rank that it took over."""


class Observers(StepObserver):
    """Several observers, told in turn; an event calls only those that override it."""

    def __init__(self) -> None:
        self._each: list[StepObserver] = []  # in the order in which they are told
        self._hear: dict[str, list[StepObserver]] = {}
        self.heard: set[str] = set()  # the events that somebody hears

    def add(self, *observers: StepObserver) -> None:
        """Add observers for all events that they override."""
        self._each += observers
        for one in observers:
            one.told_by = self
        for event in _EVENTS:
            self.listen(event, *(one for one in observers if getattr(type(one), event) is not getattr(StepObserver, event)))

    def listen(self, event: str, *observers: StepObserver) -> None:
        """Tell these observers of an event from now on, each once."""
        hear = self._hear.get(event, [])
        self._bind(event, [one for one in self._each if one in hear or one in observers])

    def ignore(self, event: str, *observers: StepObserver) -> None:
        """Do not tell these observers of an event any more."""
        self._bind(event, [one for one in self._hear[event] if one not in observers])

    def _bind(self, event: str, those: list[StepObserver]) -> None:
        # a single observer is called directly, since some events come many times a step
        self._hear[event] = those
        hear = [getattr(one, event) for one in those]
        (self.heard.add if hear else self.heard.discard)(event)
        setattr(self, event, hear[0] if len(hear) == 1 else _in_turn(hear))


_EVENTS = [name for name in vars(StepObserver) if not name.startswith("_")]


def _in_turn(hear: list[Callable[..., Any]]) -> Callable[..., bool]:
    def tell(*args: Any) -> bool:
        result = True
        for one in hear:
            if one(*args) is False:
                result = False
        return result

    return tell
