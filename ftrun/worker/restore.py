"""A replacement takes over a rank: finds the state that survived, maps or copies it, and knows where to go on.

The ladder's first rungs. Adopt: the dead rank's own arena is sealed for the resume step, so it is mapped as it is. Peer: its
weights are copied from a replica's arena that is sealed for it, and what is the rank's own (random streams, buffers,
loader) comes from its own slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftrun import native
from ftrun.core import gate
from ftrun.core.board import F, Flag, Head, Inexact, Source
from ftrun.core.errors import UsageError, WorkerError
from ftrun.worker.arena import Arena, Manifest
from ftrun.worker.context import Context, Interrupt
from ftrun.worker.engine import Engine
from ftrun.worker.segment import Segment
from ftrun.worker.slots import END, GATE, RECORDING, START, Slots
from ftrun.worker.state import Protected

_FENCE = 10.0  # seconds
_KEPT = 5.0  # seconds that a new keeper gets to be handed the survivors' memory
_PEER = 60.0  # seconds that survivors get to finish the update they are in


class NoSource(WorkerError):
    """No rung of the ladder holds for this rank."""


@dataclass(frozen=True)
class Replica:
    """Another rank's kept memory."""

    rank: int
    slots: Slots
    arena: Arena


def resume_of(context: Context) -> int:
    """Gate number at which this replacement goes on."""
    world = context.world
    if world is None:
        raise WorkerError("a replacement without a world")
    return gate.unpack(context.board.gate()).last + 1 if world.tail else world.resume


def attach_segment(context: Context, rank: int, name: str) -> Segment | None:
    """The kept segment of a rank, mapped; None when the keeper has none."""
    ready = context.mapped.pop((rank, name), None)
    if ready is not None:
        return ready
    try:
        fd = context.keeper.get(rank, name)
    except OSError:
        return None
    return Segment.attach(fd) if fd is not None else None


def load_recording(context: Context) -> tuple[dict[str, Any], memoryview]:
    """What the replaced rank's collectives gave before its first step. Errors: NoSource."""
    segment = attach_segment(context, context.rank, "slots")
    if segment is None:
        raise NoSource("the keeper has no slots of this rank (its keeper died, or the rank died before protect)")
    context.mapped[(context.rank, "slots")] = segment
    slots = Slots(segment)
    if slots.tag(RECORDING) < 0:
        raise NoSource("the replaced rank died before its first step, so what its collectives gave is not recorded")
    saved = slots.read(RECORDING)
    return saved["header"], memoryview(b"".join(saved["blobs"]))


class Restorer:
    """Puts a dead rank's state under the objects that this worker built."""

    def __init__(self, engine: Engine, state: Protected) -> None:
        self.engine = engine
        self.context = engine.context
        self.state = state
        self.resume = resume_of(self.context)

    def run(self) -> None:
        """Restore, or tell the launcher that there is no source. Errors: NoSource, UsageError."""
        context = self.context
        context.cell[F.STEP] = self.resume + 1
        self.engine.fire("restore", self.resume)
        segment = attach_segment(context, context.rank, "arena")
        slots = attach_segment(context, context.rank, "slots")
        if segment is None or slots is None:
            raise NoSource("the keeper has no memory of this rank")
        self.engine.ledger.slots = Slots(slots)
        own = Arena(segment)
        fenced = self._await_fence()
        replica: Replica | None = None
        if fenced and own.seal == self.resume:
            manifest = own.read_manifest()
            self._check_layout(manifest)
            source, moved = Source.ADOPT, 0
        else:
            source = Source.PEER
            replica = self._replica(lambda slots, arena: arena.seal == self.resume)
            manifest, moved = self._copy(own, replica)
        self.state.attach(own, manifest)
        if "reducers" in manifest.facts:
            self.engine.reducers.load(manifest.facts["reducers"])
        else:
            self.engine.reducers.record()
        restart = self._choose(replica)
        self.state.apply_python_state(restart["py"])
        self.engine.resume_with(self.resume, restart)
        if context.board[Head.KEEPER_EPOCH] != context.mapped_epoch:
            self.engine.send_descriptors()  # the keeper that gave us these segments is gone
        context.cell[F.SOURCE] = source
        context.cell[F.SOURCE_BYTES] = moved

    def _await_fence(self) -> bool:
        """Wait until the dead incarnation runs no more code; False = it may still write: do not adopt."""
        world = self.context.world
        assert world is not None
        lost = (world.lost or {}).get(str(self.context.rank))
        if lost is None:
            return True
        cell = self.context.board.cell(lost)
        deadline = time.monotonic() + _FENCE
        while cell[F.FENCED] == 0:
            seen = self.context.board.worker_bell()
            if cell[F.FENCED] or time.monotonic() > deadline:
                break
            self.context.board.wait_workers(seen, 0.002)
        return cell[F.FENCED] == 1

    def _check_layout(self, manifest: Manifest) -> None:
        mine = {n: (str(p.dtype)[6:], tuple(p.shape)) for n, p, _ in self.state.params}
        for name, module, attribute in self.state.buffers:
            buffer = module._buffers[attribute]
            if buffer is not None:
                mine[name] = (str(buffer.dtype)[6:], tuple(buffer.shape))
        theirs = {e.name: (e.dtype, e.shape) for e in manifest.entries if not e.name.startswith("optim.")}
        if mine != theirs:
            different = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
            raise NoSource(f"this script built another model than the one that died: {', '.join(different[:3])} differ")

    def _replica(self, ready: Callable[[Slots, Arena], bool]) -> Replica:
        """The next rank after this one whose memory is `ready`. Waits for those still in the update. Errors: NoSource."""
        context = self.context
        world = context.world
        assert world is not None
        rotten = {int(r) for r, cell in (world.lost or {}).items() if context.board.cell(cell)[F.FENCED] == 3}
        order = [r for k in range(1, world.size) if (r := (context.rank + k) % world.size) not in rotten]
        found: dict[int, Replica] = {}
        begin = time.monotonic()
        while True:
            seen = context.board.worker_bell()
            for rank in order:
                if rank not in found:
                    arena, slots = (attach_segment(context, rank, name) for name in ("arena", "slots"))
                    if arena is None or slots is None:
                        continue
                    found[rank] = Replica(rank, Slots(slots), Arena(arena))
                if ready(found[rank].slots, found[rank].arena):
                    return found[rank]
            waited = time.monotonic() - begin
            if not found and waited > _KEPT:
                raise NoSource("no other rank's memory is kept, and this rank's was being written when it died")
            if waited > _PEER:
                raise NoSource(f"no replica completed the update before step {self.resume} within {_PEER:.0f} s")
            context.board.wait_workers(seen, 0.002)

    def _copy(self, own: Arena, replica: Replica) -> tuple[Manifest, int]:
        """Copy the replica's committed zone over `own`. Gives its manifest and the bytes moved."""
        source = replica.arena
        manifest = source.read_manifest()
        self._check_layout(manifest)
        own.open()
        offset, size = source.committed
        _, have = own.committed
        if have < size:
            own.reserve("committed", size - have)
        mine, theirs = own.segment.address, source.segment.address
        private = [e for e in manifest.entries if e.private and e.zone == "committed"]
        own_bytes = [bytes(own.segment.view(e.offset, e.block)) for e in private if not e.name.startswith("optim.")]
        native.copy(mine + offset, theirs + offset, size)
        if native.checksum(mine + offset, size) != native.checksum(theirs + offset, size):
            raise NoSource(f"the copy of rank {replica.rank}'s weights does not match its checksum")
        if private:
            # nobody else has these; the dead rank's own values may be one update old
            for entry, data in zip((e for e in private if not e.name.startswith("optim.")), own_bytes, strict=True):
                own.segment.view(entry.offset, entry.block)[:] = data
            self.engine.note_inexact(Inexact.PRIVATE_FROM_PEER)
        own.write_manifest(manifest)
        own.sealed(self.resume)
        return manifest, size

    def _choose(self, replica: Replica | None) -> dict[str, Any]:
        """The rank's own state as of the start of the resume step, from the slot that has it."""
        slots, resume = self.engine.ledger.slots, self.resume
        if slots.tag(START) == resume:
            self.state.rewind_buffers()
            return self.engine.ledger.start_state(resume)
        if slots.tag(END) == resume:
            saved: dict[str, Any] = slots.read(END)
            self._note_between(saved)
            return saved
        if resume == 0 or slots.tag(GATE) != resume - 1:
            raise NoSource(f"this rank's slots hold nothing for step {resume}")
        saved = slots.read(GATE)
        if replica is None or replica.slots.tag(END) != resume:
            # our predecessor copied the weights and died before its first hand-out
            replica = self._replica(lambda slots, arena: slots.tag(END) == resume)
        after = replica.slots.read(END)
        for key in after["changed"]:
            saved["py"][key] = after["py"][key]
        if after["drew"]:
            self.engine.note_inexact(Inexact.UPDATE_USED_RNG)
        self._note_between(after)
        if after["buffers"] is None:
            self.engine.note_inexact(Inexact.UPDATE_CHANGED_BUFFERS)
        elif after["buffers"]:
            self.state.copy_buffers(after["buffers"], replica.arena)
        saved["alive"] = after["alive"]
        if after["updated"]:
            saved["grads"] = after["grads"]  # as the update left them: the same on every replica
        return saved

    def _note_between(self, saved: dict[str, Any]) -> None:
        """The code between two bodies is not run again: what it draws is missing from this rank's streams."""
        if saved["between"]:
            self.engine.note_inexact(Inexact.UPDATE_USED_RNG)


def report_no_source(context: Context, error: Exception) -> None:
    """Tell the launcher, which falls to a lower rung and ends this process."""
    context.report(f"{context.cell.index}-{context.generation}-unrestorable", {"why": str(error)})
    context.milestone(Flag.UNRESTORABLE)
    context.await_world(lambda w: False, context.generation, 60.0)


__all__ = ["Interrupt", "NoSource", "Restorer", "UsageError", "load_recording", "report_no_source", "resume_of"]
