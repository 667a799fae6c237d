"""What a rank writes into its slots, and what it reads there to do a step again.

A slot holds everything of a rank that is not in its arena: random streams, Python state, the loader's place, gradients that
must outlive a body. An END slot also says what the update region changed, for a replica's use of it.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.worker.kept.course import Course
from ftrun.worker.kept.recovery_points import END, GATE, LATE, SEALED, START, Slots
from ftrun.worker.kept.update_region import UpdateRegion
from ftrun.worker.state import rng, serialization
from ftrun.worker.state.protected_state import ProtectedState

Captured = tuple[rng.State, dict[str, bytes]]  # of the random streams, and packed Python state
Grads = list["torch.Tensor | None"]


def read_state(slots: Slots, slot: int) -> dict[str, Any]:
    """What a rank's START, GATE or END slot holds. Errors: DamagedSlot."""
    saved: dict[str, Any] = slots.read(slot)
    return saved


class Ledger:
    """The slots of this rank, with what has to be remembered between writing one and the next."""

    def __init__(self, state: ProtectedState) -> None:
        self.slots: Slots
        self.loader: Any = None  # position and batch in flight, kept by job.batches
        self.loader_state: Any = None  # the place from a slot, until job.batches takes it
        self.alive: list[bool] = []  # which gradients there were when last looked at
        self.updated = False  # the last complete body updated
        self.region = UpdateRegion(state)
        self._state = state
        self._at_gate: Captured | None = None
        self._sums: list[int] | None = None  # of the gradients at the gate, where replicas rest on the script's word
        self._at_end: tuple[int, Captured] | None = None  # tag and content of the END slot
        self._ever: set[str] = set()  # what some update region changed so far: Python state and buffers
        self._buffers_at_end: tuple[int, list[int]] = (0, [])
        self._drew = 0  # stands for the update regions that drew random numbers so far; 0 = none did
        self._between: int | None = None  # the first step that random numbers were drawn before, after the body before it
        self._carried = False  # gradients of a slot were put back and are in no other slot of ours
        self._buffers_at_gate: tuple[bytearray, list[int]] = (bytearray(), [])

    # -- writing -----------------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Seal the START slot of a step that is handed out for the first time. Errors: UsageError."""
        captured = (rng.capture(), self._state.python.capture())
        self._check_between(step, captured)
        self.alive = self._state.grads_alive()
        if self._state.buffers:  # they are copied aside for this step before its slot is written
            self.slots.invalidate(START)
            self._state.save_buffers(step)
        carried = self._carried and self.slots.tag(END) != step
        self._write(START, step, self._state.grads() if carried else None, captured)

    def gate(self, step: int, accumulating: bool, grads: Grads, optimizer: Any = None) -> None:
        """Seal the GATE slot, and the gradients where no other rank could give the result of the update that `optimizer` begins.

        `accumulating`: those of the gradients that are alive will be added to.
        """
        self._state.settle_buffers()
        self.alive = [grad is not None for grad in grads]
        self._at_gate = (rng.capture(), self._state.python.capture())
        by_word = optimizer is not None and self._state.holders.rest_on_word
        self._sums = self._state.sums_of(grads) if by_word else None
        seals = self.region.begins(optimizer, grads)
        self._write(GATE, step, grads if accumulating and any(self.alive) else None, self._at_gate)
        if seals:
            self.slots.write_large(SEALED, step, serialization.encode(grads, "gradients"))
        self._buffers_at_gate = self._state.buffer_values()

    def end(self, tag: int, accumulating: bool) -> None:
        """Seal the END slot: the state as of the start of gate step `tag`."""
        self._state.settle_buffers()
        self.alive = self._state.grads_alive()
        captured = (rng.capture(), self._state.python.capture())
        self._at_end = (tag, captured)
        self._buffers_at_end = self._state.buffers_mark(tag)
        grads = self._state.grads() if accumulating and any(self.alive) else None
        self._write(END, tag, grads, captured)

    def late(self, step: int) -> None:
        """A body turned out, after its hand-out, to accumulate on the gradients it found."""
        self.slots.write(LATE, step, serialization.encode(self._state.grads(), "gradients"))

    def log(self, records: list[dict[str, Any]]) -> None:
        """Keep what collectives outside the loops gave."""
        for record in records:
            self.slots.append(b"".join(serialization.plain(record)))

    def _write(self, slot: int, tag: int, grads: Grads | None, captured: Captured) -> None:
        if self.slots.keeps_old(slot, tag):
            return
        content: dict[str, Any] = {
            "rng": captured[0],
            "py": captured[1],
            "alive": self.alive,
            "grads": None if grads is None else serialization.pack(grads, "gradients"),
            "updated": self.updated,
            "updates": self.region.updates,
            "plain": self.region.plain,
            "alone": self.region.alone,
            "sums": self._sums,
            "kept": self.region.kept,
            "began": self.region.began,
            "course": self.region.course.saved(),
            "void": self.region.void,
            "between": self._between,
            "drew_before": self._drew,
            "ever": sorted(self._ever),
            "loader": self.loader.capture() if self.loader is not None else self.loader_state,
        }
        if slot == END and self._at_gate is not None:
            content.update(self._update_changed(tag, self._at_gate, captured))
        content["drew_so_far"] = self._drew
        self.slots.write(slot, tag, serialization.plain(content))

    def _update_changed(self, tag: int, before: Captured, now: Captured) -> dict[str, Any]:
        """What the update region changed: a replacement that has its own GATE slot takes just this from ours."""
        changed = [name for name, value in now[1].items() if value != before[1].get(name)]
        buffers = self._state.buffers_written(self._buffers_at_gate)
        self._ever.update(changed, buffers)
        drew = before[0] != now[0]
        if drew:
            self._drew = zlib.crc32(tag.to_bytes(8, "little"), self._drew) or 1
        return {"changed": changed, "drew": drew, "buffers": buffers}

    # -- between two bodies ------------------------------------------------------------------------------------------

    def new_loop(self) -> None:
        """What is between two loops is run by a replacement too, so anything may change there."""
        self._at_end = None

    def _check_between(self, step: int, now: Captured) -> None:
        """A replacement does not run what is between two bodies, so nothing that is guarded may change there."""
        if self._at_end is None or self._at_end[0] != step:
            return
        streams, packed = self._at_end[1]
        for name, value in now[1].items():
            if value != packed.get(name):
                raise UsageError(
                    f"{name} changed between the body of one step and the next (scheduler.step() after the `with`?): "
                    "do it inside `with step:`, or a replaced rank would miss it"
                )
        self._state.settle_buffers()
        if self._buffers_at_end != self._state.buffers_mark(step):
            raise UsageError(
                "a buffer of the model changed between the body of one step and the next (a forward in train mode after the "
                "`with`?): do it inside `with step:`, or a replaced rank would miss it"
            )
        # a loader draws as well when it fetches, and a replacement fetches again: that does not count
        drawn = now[0] if self.loader is None or self.loader.before is None else self.loader.before
        self._look_for_draws(step, streams, drawn)

    def loop_ends(self, end: int) -> None:
        """The last body of a loop is over, and the loader not yet asked for more."""
        if self._at_end is not None and self._at_end[0] == end:
            self._look_for_draws(end, self._at_end[1][0], rng.capture())
        self._at_end = None

    def _look_for_draws(self, step: int, before: rng.State, now: rng.State) -> None:
        if self._between is None and before != now:
            self._between = step

    def drew_first_before(self, step: int) -> bool:
        """Did this rank draw random numbers between a body and `step`, as never before? Then no rank's slots told of it until now."""
        return self._between == step

    # -- reading -----------------------------------------------------------------------------------------------------

    def start_state(self, step: int) -> dict[str, Any]:
        """What the START slot of `step` holds, with the gradients that the body before left to accumulate on."""
        saved = self.read(START)
        if saved["grads"] is None and self.slots.tag(LATE) == step:
            saved["grads"] = bytes(self.slots.sound(LATE))
        elif saved["grads"] is None and self.slots.tag(END) == step:
            saved["grads"] = self.read(END)["grads"]
        return saved

    def read(self, slot: int) -> dict[str, Any]:
        """What START, GATE or END of this rank holds. Errors: DamagedSlot."""
        return read_state(self.slots, slot)

    def put_back(self, saved: dict[str, Any], index: int, in_call: bool = False) -> None:
        """Apply a slot: Python state, gradients, the loader's place, and last the random streams.

        `in_call`: see `PythonState.apply`.
        """
        self._ever.update(saved["ever"])
        self._drew = self._drew or saved["drew_so_far"]
        self._between = saved["between"] if self._between is None else self._between
        self.region.course = Course(saved["course"])
        self.region.void |= saved["void"]
        self._state.python.apply(saved["py"], in_call)
        self.alive = saved["alive"]
        grads = saved["grads"]
        self._state.set_grads(saved["alive"], None if grads is None else serialization.decode(grads))
        self._carried = grads is not None
        if self.loader is not None and saved["loader"] is not None:
            self.loader.put_back(saved["loader"], index)
        rng.apply(saved["rng"])
