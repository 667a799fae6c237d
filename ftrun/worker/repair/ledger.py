"""The ledger writes a rank's slots, and reads them to do a step again.

A slot holds everything of a rank that is not in its arena: random streams, Python state, the loader's place, gradients that
must outlive a body. An END slot also records what the update region changed, for a replica's replacement.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.worker.memory import serialization
from ftrun.worker.repair.constants import Constants
from ftrun.worker.repair.rank_state import BETWEEN, IN_UPDATE, RankState, fields_of, read_state
from ftrun.worker.repair.recovery_points import END, GATE, LATE, MOST_BUFFERS, ON_GPU, START, Slots
from ftrun.worker.repair.sealed_gradients import SealedGradients
from ftrun.worker.repair.update_region import UpdateRegion
from ftrun.worker.state import rng
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.variables.variables import PREFIX, WHOLE, Variables

Captured = tuple[rng.State, dict[str, bytes]]  # random streams, and packed Python state
Grads = list["torch.Tensor | None"]

_is_there = functools.partial(operator.is_not, None)


class Ledger:
    """The slots of this rank, with what it must remember from one write to the next."""

    def __init__(self, state: ProtectedState, variables: Variables, constants: Constants) -> None:
        self.slots: Slots
        self.variables = variables
        self.constants = constants
        self.loader: Any = None  # position and batch in flight, kept by job.batches
        self.loader_state: Any = None  # the place from a slot, until job.batches takes it
        self.alive: list[bool] = []  # which gradients existed at the last look
        self._alive_at_gate: list[bool] = []
        self.updated = False  # the last complete body updated
        self.region = UpdateRegion(state)
        self._state = state
        self._at_gate: Captured | None = None
        self._sums: list[int] | None = None  # of the gradients at the gate, where replicas rest on the script's word
        self._at_end: tuple[int, Captured] | None = None  # tag and content of the END slot
        self._ever: set[str] = set()  # Python state and buffers that some update region has changed
        self._written: set[str] = set()  # the buffers among them
        self._stands: dict[str, int] = {}  # checksums of those at the last START or GATE slot
        self._buffers_at_end: tuple[int, list[int]] = (0, [])
        self._drew = 0  # where the script has drawn random numbers: IN_UPDATE, BETWEEN
        self.drew_before = -1  # the first step with draws between it and the body before; no earlier slot has them
        self.changed_between: tuple[int, list[str]] = (
            -1,
            [],
        )  # a step, and the script's values that changed between it and the body before
        self._carried = False  # gradients were put back from a slot, and no other slot of this rank has them
        self._buffers_at_gate: tuple[bytes, list[int]] = (b"", [])
        self._recorded: tuple[int, bytes] = (-1, b"")  # gate number and content of a GATE slot that is not written yet
        self._sealed = SealedGradients()
        self._seals: Grads | None = None  # gradients to seal with it

    def use(self, slots: Slots) -> None:
        """Use these slots from now on."""
        self.slots = slots
        self.variables.histories.logs = slots.histories

    # -- writing -----------------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Seal the START slot of a step at its first hand-out.

        Raises:
            UsageError
        """
        captured = self.captured()
        self._check_between(step, captured)
        self.alive = self._state.alive_now(self.alive)
        if self._state.buffers:  # copy them aside for this step before its slot is written
            self.slots.invalidate(START)
            self._state.save_buffers(step)
        carried = self._carried and self.slots.tag(END) != step
        self.slots.write(START, step, self._encoded(START, self._state.grads() if carried else None, captured))

    def record_gate(self, step: int, accumulating: bool, grads: Grads, optimizer: Any = None) -> None:
        """Capture the content of the GATE slot, for `seal_gate` to write.

        `accumulating`: later bodies add to the gradients that are alive, so the slot keeps them. This reads them from the device.
        """
        if self._state.buffers:
            self._state.settle_buffers()
        self.alive = [*map(_is_there, grads)]
        if self._state.looking or self.alive != self._alive_at_gate:  # parameters may be frozen or unfrozen
            self._alive_at_gate = self.alive
            self._state.python.look_again()
        self._at_gate = self.captured()
        holders = self._state.holders
        by_word = optimizer is not None and holders.by_word and holders.rest_on_word
        self._sums = self._state.sums_of(grads) if by_word else None
        self._seals = grads if self.region.begins(optimizer, grads) else None
        if self._state.buffers:
            self._buffers_at_gate = self._state.buffer_values()
        self._recorded = step, self._encoded(GATE, grads if accumulating and True in self.alive else None, self._at_gate)

    def seal_gate(self) -> None:
        """Seal the GATE slot, and the gradients if no other rank can give the result of the update that begins.

        Call it after the collectives of the step: until then, a rank that died in the update before may need the old slot.
        """
        step, data = self._recorded
        self.slots.write(GATE, step, data)
        if self._seals is not None:
            self._sealed.write(self.slots, step, self._seals)
            self._seals = None

    def seal_buffers_on_gpu(self, step: int) -> None:
        """Bring the buffers on a GPU to where another node's mirror takes them from. Waits for the device, which is done by then."""
        memory = self._state.arena.gpu_part
        offset, size = memory.extent("volatile")
        if size <= MOST_BUFFERS:
            self.slots.write(ON_GPU, step, memory.read(offset, size) if size else b"")

    def reads_device_at_gate(self, accumulating: bool, optimizer: Any) -> bool:
        """Does `record_gate` read what the device computes? If not, it may run before the device is done."""
        holders = self._state.holders
        compares = (holders.by_word and holders.rest_on_word) or (self._state.looking and self.region.alone)
        return accumulating or (optimizer is not None and compares)

    def end(self, tag: int, accumulating: bool) -> None:
        """Seal the END slot: the state as of the start of gate step `tag`."""
        if self._state.buffers:
            self._state.settle_buffers()  # first: the Python state keeps a buffer of another shape
        self.alive = self._state.alive_now(self.alive)
        captured = self.captured()
        self._at_end = (tag, captured)
        if self._state.buffers:
            self._buffers_at_end = self._state.buffers_mark(tag)
        grads = self._state.grads() if accumulating and True in self.alive else None
        self.slots.write(END, tag, self._encoded(END, grads, captured))

    def captured(self) -> Captured:
        """Return the current random streams and Python state, with the script's own values."""
        python = self._state.python.capture()
        python.update(self.variables.capture(self._state.looking))
        return rng.capture(), python

    def late(self, step: int) -> None:
        """Seal the gradients on which a body, as it turns out after its hand-out, accumulates."""
        self.slots.write(LATE, step, serialization.pack(self._state.grads(), "gradients"))

    def log(self, records: list[dict[str, Any]]) -> None:
        """Log the results of collectives outside the loops."""
        for record in records:
            self.slots.log.append(serialization.plain(record))

    def _encoded(self, slot: int, grads: Grads | None, captured: Captured) -> bytes:
        region = self.region
        changed: dict[str, bytes | None] = {}
        buffers: list[str] = []
        if slot == END and self._at_gate is not None:
            changed, buffers = self._update_changed(self._at_gate, captured)
        elif slot != END and self._written:
            self._stands = self._state.stands_of(self._written)
        state = RankState(
            streams=captured[0],
            python=captured[1],
            alive=self.alive,
            grads=None if grads is None else serialization.pack(grads, "gradients"),
            loader=self.loader.capture() if self.loader is not None else self.loader_state,
            updated=self.updated,
            updates=region.updates,
            began=region.began,
            plain=region.plain,
            alone=slot == END and region.alone,
            kept=region.kept,
            usual=region.usual,
            gave_up=region.gave_up,
            sums=self._sums,
            drew=self._drew,
            ever=sorted(self._ever),
            stands=self._stands,
            changed=changed,
            buffers=buffers,
        )
        return serialization.plain(fields_of(state))

    def _update_changed(self, before: Captured, now: Captured) -> tuple[dict[str, bytes | None], list[str]]:
        """Return what the update region changed: Python state (with its values before), and buffers.

        A replacement that has its own GATE slot takes only this from another rank's END slot.
        """
        was = before[1]
        changed = {} if now[1] == was else {name: was.get(name) for name, value in now[1].items() if value != was.get(name)}
        buffers = self._state.buffers_written(self._buffers_at_gate) if self._state.buffers else []
        if changed or buffers:
            self._ever.update(changed, buffers)
            self._written.update(buffers)
        if before[0] != now[0]:
            self._drew |= IN_UPDATE
        return changed, buffers

    # -- between two bodies ------------------------------------------------------------------------------------------

    def new_loop(self) -> None:
        """Allow any change before the next loop: a replacement runs the code between two loops, too."""
        self._at_end = None

    def _check_between(self, step: int, now: Captured) -> None:
        """Refuse changes of guarded state between two bodies: a replacement does not run that code."""
        if self._at_end is None or self._at_end[0] != step:
            return
        (streams, packed), python = self._at_end[1], now[1]
        if self.variables.as_before is not None:  # keeping values together is no change of them
            python = {name: value for name, value in python.items() if not name.startswith(PREFIX)} | self.variables.as_before
        changed = [name for name, value in python.items() if value != packed.get(name)] if python != packed else []
        self.changed_between = (
            step,
            [name for name in changed if name.startswith(PREFIX) and name != WHOLE] if changed else changed,
        )
        for name in changed:
            if not name.startswith(PREFIX):
                raise UsageError(
                    f"{name} changed between the body of one step and the next (scheduler.step() after the `with`?): "
                    "do it inside `with step:`, or a replaced rank would miss it",
                    explain="F306",
                )
        if self._state.buffers and self._buffers_changed(step):
            raise UsageError(
                "a buffer of the model changed between the body of one step and the next (a forward in train mode after the "
                "`with`?): do it inside `with step:`, or a replaced rank would miss it",
                explain="F306",
            )
        if self._drew & BETWEEN:
            return
        # a loader's draws in a fetch do not count: a replacement fetches again
        if (now[0] if self.loader is None or self.loader.before is None else self.loader.before) != streams:
            self._draws_before(step)

    def _draws_before(self, step: int) -> None:
        self._drew |= BETWEEN
        self.drew_before = step

    def _buffers_changed(self, step: int) -> bool:
        self._state.settle_buffers()
        return self._buffers_at_end != self._state.buffers_mark(step)

    def loop_ends(self, end: int) -> None:
        """Detect draws after the last body of a loop, before the loader is asked for more."""
        if self._at_end is not None and self._at_end[0] == end and not self._drew & BETWEEN and self._at_end[1][0] != rng.capture():
            self._draws_before(end)
        self._at_end = None

    # -- reading -----------------------------------------------------------------------------------------------------

    def start_state(self, step: int) -> RankState:
        """Read the START slot of `step`, with the gradients that the body before left to accumulate on."""
        saved = self.read(START)
        if saved.grads is None and self.slots.tag(LATE) == step:
            saved.grads = bytes(self.slots.sound(LATE))
        elif saved.grads is None and self.slots.tag(END) == step:
            saved.grads = self.read(END).grads
        return saved

    def read(self, slot: int) -> RankState:
        """Read the START, GATE or END slot of this rank.

        Raises:
            Damaged
        """
        return read_state(self.slots, slot)

    def put_back(self, saved: RankState, index: int, in_call: bool = False) -> None:
        """Apply a slot: Python state, gradients, the loader's place, and last the random streams.

        `in_call`: see `PythonState.apply`.
        """
        self._ever.update(saved.ever)
        self._written.update(name for name in saved.ever if name.startswith("buffer."))
        self._drew |= saved.drew
        self.region.usual = saved.usual
        self.region.gave_up |= saved.gave_up
        self._state.python.apply(saved.python, in_call)
        self.alive, grads = saved.alive, saved.grads
        self._state.set_grads(saved.alive, None if grads is None else serialization.decode(grads))
        self._carried = grads is not None
        if self.loader is not None and saved.loader is not None:
            # before the fetch: the batch may depend on the script's values, or change them
            before = self.slots.tag(END) == self.slots.tag(START)
            self.variables.put_back(self.read(END).python if before else saved.python)
            self.loader.put_back(saved.loader, index)
        self.variables.put_back(self.constants.completed(saved.python))
        rng.apply(saved.streams)
