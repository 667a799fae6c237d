"""A replacement takes over a rank: finds the state that survived, maps or copies it, and knows where to go on.

The ladder's rungs on one node. Adopt: the dead rank's own arena is sealed for the resume step, so it is mapped as it is. Peer:
its weights are copied from a replica's arena that is sealed for it, and what is the rank's own (random streams, buffers,
loader) comes from its own slots; a replica whose copy fails is passed over for the next. A rank without replica that died at its
gate is adopted as well, and its update made here (see own_update.py). Host snapshot: nobody has the state of the resume step any more,
so every rank goes back to an earlier one (see rollback.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ftrun import native
from ftrun.core.errors import DeviceError
from ftrun.core.shared.board import Busy, F, Flag, Head, Inexact, Source
from ftrun.core.shared.moves import RELOAD, Move
from ftrun.core.shared.world import World, newest_world
from ftrun.native import cuda
from ftrun.native.transfer import Extent, TransferError
from ftrun.worker.link import crash_points
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena, Manifest
from ftrun.worker.memory.log import Damaged
from ftrun.worker.repair import own_update, pipelines, transfer
from ftrun.worker.repair.completed import ends_of
from ftrun.worker.repair.handover import fetch, fetch_gpu, use_gpu
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.rank_state import RankState, read_state
from ftrun.worker.repair.recovery_points import END, GATE, START, Slots
from ftrun.worker.repair.rollback import lay_over, reload
from ftrun.worker.repair.snapshot import newest_common
from ftrun.worker.repair.snapshot_store import BadSnapshot
from ftrun.worker.repair.sources import (
    KEPT,
    PEER,
    SNAPSHOTS,
    NoSource,
    Replica,
    Superseded,
    donors,
    note_draws,
    parted,
    resume_of,
    take_changed,
)

_FENCE = 10.0  # seconds
_LOWER_RUNG = 60.0  # seconds that the launcher gets to answer a rank that found no source


class Restorer:
    """Puts a dead rank's state under the objects that this worker built."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.context = kit.context
        self.state = kit.state
        self.resume = resume_of(self.context)
        self._mapped: list[Arena] = []  # memory on a GPU, of replicas and for this rank, that is not the state's (yet)
        self._lost = False  # the memory on the GPU could not be mapped: a new one is filled from a replica

    def run(self) -> None:
        """Put the rank's state in place.

        Raises:
            NoSource
            Superseded
            UsageError
        """
        try:
            self._run()
        except cuda.CudaError as error:
            raise NoSource(f"device {self.state.gpu}: {error.strerror}") from error
        except TransferError as error:
            raise NoSource(f"the copy of a replica's buffers failed: {error}") from error
        except Damaged as error:
            raise NoSource(str(error)) from error
        finally:
            self._unmap()

    def _unmap(self) -> None:
        """Give up what was mapped on a GPU and did not become the state's."""
        kept = self.state.arena if self.state.laid_out else None
        for arena in self._mapped:
            memory, arena.memory = (arena.memory, None) if arena is not kept else (None, arena.memory)
            if memory is not None:
                with contextlib.suppress(cuda.CudaError, DeviceError):  # a device that fails gives nothing back
                    memory.settle()  # copies from there are done
                    memory.close()

    def _run(self) -> None:
        context = self.context
        world = context.world
        assert world is not None
        self._show_place(world)
        self.kit.observers.stage("restore", self.resume)
        if world.rollback:
            self._from_snapshot()
            return
        segment = fetch(context, context.rank, "arena")
        slots = fetch(context, context.rank, "slots")
        gpu = use_gpu(context, self.state)
        fenced = self._await_fence()
        if not self._may_still_run():
            self.kit.snapshots.adopt()
        if segment is None or slots is None:
            own = self._without_own(gpu)
        else:
            self.kit.ledger.use(Slots(slots))
            own = self._usable(Arena(segment), gpu, "taking a replica's instead")
        replica: Replica | None = None
        if (
            fenced
            and not self._lost
            and not self._may_be_swapped()
            and own_update.is_at_hand(self.kit, own, self.resume)
        ):
            manifest = own.read_manifest()
            self._check_layout(manifest)
            source, moved = Source.ADOPT if own.seal == self.resume else Source.SEALED, 0
        else:
            source = Source.PEER
            replica, manifest, moved = self._from_peer(own)
        self.state.attach(own, manifest)
        self.kit.handover.follow()
        if self._lost and replica is not None:
            self._take_buffers(replica)
        self.kit.reducers.load(manifest.facts.get("reducers"))
        if source == Source.SEALED:
            own_update.make(self.kit, self.resume, self._newest)
        restart = self._choose(replica)
        self.state.python.apply(restart.python)
        self._take_over(restart)
        if self._lost or context.board[Head.FD_STORE_EPOCH] != context.mapped_epoch:
            self.kit.hand_over()  # the fd store that gave us these segments is gone
        context.cell[F.SOURCE] = source
        context.cell[F.SOURCE_BYTES] = moved

    def _show_place(self, world: World) -> None:
        """On the board the rank is where its predecessor was, until its own script gets there."""
        cell, lost = self.context.cell, (world.lost or {}).get(str(self.context.rank))
        before = cell if lost is None else self.context.board.cell(lost)
        index, end = self.resume + before.shift, before[F.LOOP_END]
        if index < 0:  # all go back to an earlier loop
            cell[F.STEP] = self.resume + 1
            return
        cell.set_shift(before.shift)
        cell[F.EPOCH], cell[F.LOOP_END] = before[F.EPOCH], end
        cell[F.STEP] = 1 + (min(index, end) if end else index)  # the end of a loop is no step of it

    def _take_over(self, restart: RankState) -> None:
        """The rank is this worker's from here on: `restart` is put back when its first step is handed out."""
        kit = self.kit
        kit.pending.resume = self.resume
        kit.pending.restart = restart
        if kit.ledger.slots.tag(START) != self.resume:
            self.context.cell[F.MISSED] = self.resume + 1
        kit.ledger.loader_state = restart.loader
        if kit.ledger.slots.tag(START) == self.resume:
            kit.position.attempt = 1
        kit.observers.replaced()
        if crash_points.armed:
            crash_points.point("restored", self.resume, self.context.rank)

    def _usable(self, own: Arena, gpu: int | None, instead: str) -> Arena:
        """The rank's own arena with its part on the GPU mapped, or a new one when that cannot be had."""
        self._mapped.append(own)
        if gpu is None and not own.has_gpu:
            return own
        why = "it was on another kind of device"
        if gpu is not None and own.has_gpu:
            try:
                if self._may_still_run():
                    raise DeviceError("its last owner may still write there")
                fetch_gpu(self.context, self.context.rank, own, gpu, write=True)
                return own
            except DeviceError as error:
                why = str(error)
        print(
            f"ftrun: rank {self.context.rank}: the dead worker's memory is not used: {why}; {instead}",
            file=sys.stderr,
            flush=True,
        )
        self._lost = True
        return self._new_arena(gpu)

    def _without_own(self, gpu: int | None) -> Arena:
        """The fd store died with this rank: weights come from a replica, and what was the rank's own is lost."""
        print(
            f"ftrun: rank {self.context.rank}: the fd store died with this rank's worker, and with it the rank's random streams, "
            "buffers and place in the data; they are taken from a replica",
            file=sys.stderr,
            flush=True,
        )
        self.context.note_inexact(Inexact.OWN_STATE_LOST)
        self._lost = True
        self.kit.ledger.use(Slots.create(self.context.rank))
        return self._new_arena(gpu)

    def _new_arena(self, gpu: int | None) -> Arena:
        try:
            arena = Arena.create(self.context.rank, max(self.state.bytes_now(), 1), gpu)
        except DeviceError as error:
            raise NoSource(str(error)) from error
        self._mapped.append(arena)
        return arena

    def _copy_on_gpu(self, to: list[Extent], source: list[Extent], gpu: int) -> None:
        transfer.peer_copy(self.context, to, source, gpu)

    def _take_buffers(self, replica: Replica) -> None:
        """This rank's own buffers are lost: start from the replica's as of the start of the step."""
        mine, theirs = self.state.arena, replica.arena
        offset, size = theirs.volatile
        mine.reserve("volatile", max(0, size - mine.volatile[1]))
        native.copy(mine.segment.address + offset, theirs.segment.address + offset, size)
        mine.copy_gpu_from(theirs, "volatile", self._copy_on_gpu)
        if replica.slots.tag(START) == self.resume:
            self.state.rewind_buffers()
        if self.state.buffers:
            self.context.note_inexact(Inexact.BUFFERS_FROM_PEER, [name for name, _, _ in self.state.buffers])

    def _from_snapshot(self) -> None:
        """As every other rank of this world: the survivors do the same."""
        context = self.context
        segment, slots = (fetch(context, context.rank, name) for name in ("arena", "slots"))
        if slots is None:
            raise NoSource("the fd store has no slots of this rank")
        self._await_fence()
        if self._may_still_run():
            raise NoSource("its predecessor may still run, so its memory cannot be used")
        self.kit.snapshots.adopt()
        self.kit.ledger.use(Slots(slots))
        gpu, instead = use_gpu(context, self.state), "the snapshot is loaded into new memory"
        arena = self._usable(Arena(segment), gpu, instead) if segment else self._new_arena(gpu)
        try:
            manifest, restart, moved = reload(self.kit, arena)
            self._check_layout(manifest)
        except TransferError as error:
            raise (Superseded if context.stop_pending() else NoSource)(f"the reload failed: {error}") from error
        except Interrupt:
            raise Superseded("the world was stopped") from None
        except (BadSnapshot, DeviceError) as error:
            raise NoSource(str(error)) from error
        lay_over(self.kit, arena, manifest, restart, moved)
        if segment is None or gpu is not None or context.board[Head.FD_STORE_EPOCH] != context.mapped_epoch:
            self.kit.hand_over()
        self._take_over(restart)

    def _await_fence(self) -> bool:
        """Wait until the dead incarnation runs no more code; False = it may still write, or is corrupt: do not adopt."""
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
        return cell[F.FENCED] == 1 and not cell[F.CORRUPT]

    def _may_be_swapped(self) -> bool:
        """Did the predecessor die in a job.call, in which a script may have others in place of its weights, and has a replica them?"""
        world = self.context.world
        lost = (world.lost or {}).get(str(self.context.rank)) if world else None
        in_call = lost is not None and self.context.board.cell(lost)[F.BUSY] & Busy.CALL
        return bool(in_call) and not self.kit.ledger.region.alone

    def _may_still_run(self) -> bool:
        """Did the fence around the dead incarnation miss its deadline? Its bytes being wrong does not matter here."""
        world = self.context.world
        lost = (world.lost or {}).get(str(self.context.rank)) if world else None
        return lost is not None and self.context.board.cell(lost)[F.FENCED] in (0, 2)

    def _check_layout(self, manifest: Manifest) -> None:
        mine = {n: (str(p.dtype)[6:], tuple(self.state.shards.memory(p).shape)) for n, p, _ in self.state.params}
        for name, module, attribute in self.state.buffers:
            buffer = getattr(module, attribute)
            if buffer is not None:
                mine[name] = (str(buffer.dtype)[6:], tuple(buffer.shape))
        theirs = {e.name: (e.dtype, e.shape) for e in manifest.entries if not e.name.startswith("optim.")}
        if mine != theirs:
            different = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
            raise NoSource(f"this script built another model than the one that died: {', '.join(different[:3])} differ")

    def _replica(self, ready: Callable[[Slots, Arena], bool], refused: Mapping[int, str] | None = None) -> Replica:
        """The next replica after this rank whose memory is `ready` and that is not `refused`. Waits for those still updating.

        Raises:
            NoSource
            Superseded
        """
        context = self.context
        world = context.world
        assert world is not None
        found: dict[int, Replica] = {}
        unusable: dict[int, str] = {}
        begin = time.monotonic()
        same = self.state.holders.of_everything() - {context.rank}
        if not same and self.state.holders.void():
            raise self._no_replica("ranks that should hold the same were seen to differ, so none gives its values to another one")
        if not same and self.state.is_sharded:
            raise NoSource(
                f"it died inside its update, and its shard of {self.state.holders.alone()} is no other rank's",
                requeue=True,
                remedies=(SNAPSHOTS, "shard over a mesh that has replicas, too (HSDP)"),
            )
        if not same:
            alone = self.state.holders.alone()
            what = f"of {alone}" if alone else "of all its parameters at once"
            raise NoSource(
                f"no other rank is known to hold the same values {what}",
                requeue=pipelines.has_a_part(self.state.tensors),
                remedies=(
                    SNAPSHOTS,
                    "prove by DistributedDataParallel, or say by protect(..., replicas=group), which ranks hold the same",
                ),
            )
        while True:
            seen = context.board.worker_bell()
            others = [rank for rank in donors(context.board, world, context.rank) if rank in same]
            order = [rank for rank in others if rank not in (refused or ())]
            for rank in order:
                if rank not in found:
                    arena, slots = (fetch(context, rank, name) for name in ("arena", "slots"))
                    if arena is None or slots is None:
                        continue
                    found[rank] = Replica(rank, Slots(slots), Arena(arena))
                if rank not in unusable and ready(found[rank].slots, found[rank].arena):
                    try:
                        return self._with_gpu(found[rank])
                    except DeviceError as error:
                        unusable[rank] = str(error)
            world = self._newest(world)
            if refused and not order:
                raise self._no_replica("; ".join(refused.values()))
            if order and len(unusable) == len(order):
                raise NoSource(f"no replica's memory can be mapped: {next(iter(unusable.values()))}")
            if all(rank in world.replaced for rank in order):
                # only a living rank completes anything; what the dead ones left is as it is
                raise self._no_replica(f"no rank's memory is whole as of step {self.resume}: all of them died in its making")
            waited = time.monotonic() - begin
            if not found and waited > KEPT:
                raise NoSource("no other rank's memory is kept, and this rank's was being written when it died")
            if waited > PEER:
                raise NoSource(f"no replica completed the update before step {self.resume} within {PEER:.0f} s")
            context.board.wait_workers(seen, 0.002)

    def _no_replica(self, why: str) -> NoSource:
        return NoSource(why, pipelines.has_a_part(self.state.tensors), (SNAPSHOTS,))

    def _with_gpu(self, replica: Replica) -> Replica:
        """Map its part on a GPU, now that it is complete.

        Raises:
            DeviceError
        """
        gpu = self.state.gpu
        if gpu is not None and replica.arena.has_gpu and replica.arena.memory is None:
            fetch_gpu(self.context, replica.rank, replica.arena, gpu, write=False)
            self._mapped.append(replica.arena)
        return replica

    def _newest(self, world: World) -> World:
        """`world`, or the one that took its place: more ranks may be dead in it.

        Raises:
            Superseded
        """
        if self.context.board[Head.PUBLISHED] <= world.generation:
            return world
        newest = newest_world(self.context.run_dir, self.context.board)
        if newest.rollback:
            raise Superseded
        return newest

    def _from_peer(self, own: Arena) -> tuple[Replica, Manifest, int]:
        """Copy the first replica whose copy is good.

        Raises:
            NoSource: With what each was refused for.
        """
        refused: dict[int, str] = {}
        while True:
            replica = self._replica(lambda slots, arena: arena.seal == self.resume, refused)
            try:
                return replica, *self._copy(own, replica)
            except (NoSource, TransferError, DeviceError) as error:
                refused[replica.rank] = f"rank {replica.rank}: {error}"

    def _copy(self, own: Arena, replica: Replica) -> tuple[Manifest, int]:
        """Copy the replica's committed zone over `own`. Gives its manifest and the bytes moved.

        Raises:
            NoSource
            TransferError
        """
        if self.state.holders.rest_on_word and parted(self.kit.ledger.slots, replica.slots, self.resume):
            raise NoSource("protect(replicas=...) says that it holds the same, but its gradients of the last update were others")
        source = replica.arena
        manifest = source.read_manifest()
        self._check_layout(manifest)
        own.open()
        offset, size = source.committed
        _, have = own.committed
        if have < size:
            own.reserve("committed", size - have)
        mine, theirs = ([(arena.segment.address + offset, size)] if size else [] for arena in (own, source))
        begin = time.monotonic_ns()
        moved = transfer.peer_copy(self.context, mine, theirs)
        gpu_bytes = own.copy_gpu_from(source, "committed", self._copy_on_gpu)
        transfer.tell(self.context, [Move(RELOAD, replica.rank, begin, time.monotonic_ns())])
        if source.seal != self.resume:
            raise NoSource("its memory changed while it was copied")
        own.write_manifest(manifest)
        own.sealed(self.resume)
        return manifest, moved.bytes + gpu_bytes

    def _choose(self, replica: Replica | None) -> RankState:
        """The rank's own state as of the start of the resume step, from the slot that has it."""
        slots, resume = self.kit.ledger.slots, self.resume
        if slots.tag(START) == resume:
            if not self._lost:
                whole = self.state.shadow_is_whole(resume)
                self.state.rewind_buffers(gpu=whole)
                if not whole and replica is not None:
                    self._take_updated_buffers(replica)
            return self.kit.ledger.start_state(resume)
        if slots.tag(END) == resume:
            saved = read_state(slots, END)
            note_draws(self.context, saved, saved)
            return saved
        if slots.tag(END) < 0 and slots.tag(GATE) < 0 and replica is not None:
            return self._of_replica(replica)
        if resume == 0 or slots.tag(GATE) != resume - 1:
            raise NoSource(f"this rank's slots hold nothing for step {resume}")
        saved = read_state(slots, GATE)
        if self.kit.ledger.region.alone:
            return own_update.apply_to(saved, self.kit, self.resume, self._newest)
        if replica is None or replica.slots.tag(END) != resume:
            # our predecessor copied the weights and died before its first hand-out
            replica = self._replica(lambda slots, arena: slots.tag(END) == resume)
        after = read_state(replica.slots, END)
        take_changed(self.kit, saved, after, self._others(replica), resume)
        note_draws(self.context, saved, after)
        if not self._lost:
            self._take_updated_buffers(replica, saved)
        saved.alive = after.alive
        if after.updated:
            saved.grads = after.grads  # as the update left them: the same on every replica
        return saved

    def _of_replica(self, replica: Replica) -> RankState:
        """This rank's slots are new: a replica's state as of the start of the resume step.

        Raises:
            NoSource
        """
        for slot in (START, END):
            if replica.slots.tag(slot) == self.resume:
                return read_state(replica.slots, slot)
        raise NoSource(f"rank {replica.rank}'s slots hold nothing for step {self.resume}")

    def _others(self, replica: Replica) -> Iterator[Slots]:
        """Those of replicas beside `replica` that complete the update before the resume step. Waits for them when it begins."""
        replicas = self.state.holders.of_everything() - {self.context.rank, replica.rank}
        yield from ends_of(self.context, replicas, self.resume, self._newest)[0]

    def _take_updated_buffers(self, replica: Replica, saved: RankState | None = None) -> None:
        """Take what the update before the resume step wrote of the buffers; whether others have the same is looked at.

        `saved`: this rank's GATE slot, when it died in that update.
        """
        after = read_state(replica.slots, END)
        written, ever = after.buffers, saved.ever if saved is not None else []
        alone = [e.name for e in self.state.manifest.entries if e.name in ever and e.name not in written]
        mine, theirs = (one.zone_checksum(alone, self.state.manifest) for one in (self.state.arena, replica.arena))
        if mine != theirs:
            self.context.note_inexact(Inexact.BUFFERS_UNKNOWN, alone)
        if not written:
            return
        arenas = [fetch(self.context, rank, "arena") for rank in self.state.holders.of_everything() - {self.context.rank}]
        sums = [Arena(one).zone_checksum(written, self.state.manifest) for one in arenas if one is not None]
        if len(set(sums)) > 1 or (len(sums) < 2 and not (saved is not None and self._are_written_alike(written, saved, after))):
            self.context.note_inexact(Inexact.BUFFERS_UNKNOWN, written)
        self.state.copy_buffers(written, replica.arena)

    def _are_written_alike(self, names: Sequence[str], saved: RankState, after: RankState) -> bool:
        """Were they the same on both ranks at the gate, after updates that wrote them, and do only updates write them?"""
        slots = self.kit.ledger.slots
        at_start = read_state(slots, START).stands if slots.tag(START) == self.resume - 1 else {}
        return all(at_start.get(n, n) == saved.stands.get(n) == after.stands.get(n) for n in names)


def restore(kit: Kit) -> None:
    """Restore this rank, on whatever rung holds; the launcher is asked for the lower ones.

    Raises:
        UsageError
        WorkerError
    """
    context = kit.context
    while True:
        try:
            Restorer(kit).run()
            return
        except NoSource as error:
            step, why_none = _snapshot_for(context)
            _tell_no_source(context, _with_remedies(error, step, why_none), step)
        except Superseded:
            pass
        _join_rollback(context)


def _snapshot_for(context: Context) -> tuple[int, str]:
    """The host snapshot that everyone can go back to; -1 and why, when there is none, or no snapshots are taken."""
    going_back = context.world is not None and context.world.rollback
    return (-1, "") if going_back or context.snapshot_every <= 0 else newest_common(context)


def _with_remedies(error: NoSource, step: int, why_none: str) -> NoSource:
    """`error` with what would have helped, but for what the run has: then why that does not help."""
    if step >= 0:
        return error
    remedies = [remedy for remedy in error.remedies if not (why_none and remedy is SNAPSHOTS)]
    text = "; ".join(filter(None, (str(error), why_none, ", or ".join(remedies))))
    return NoSource(text, error.requeue)


def _join_rollback(context: Context) -> None:
    """Wait for the world in which everyone goes back.

    Raises:
        WorkerError: When it does not come, or the run ends.
    """
    mine = context.cell.index
    world = context.await_world(lambda w: w.rollback and w.rank_of(mine) is not None, context.generation, _LOWER_RUNG)
    context.world = world
    context.cell[F.GENERATION] = world.generation


def report_no_source(context: Context, error: Exception) -> None:
    """Nothing of this rank is left, not even for the host snapshot: the launcher ends this process.

    Raises:
        WorkerError
    """
    _tell_no_source(context, error, -1)
    context.await_world(lambda w: False, context.generation, _LOWER_RUNG)


def _tell_no_source(context: Context, error: Exception, step: int) -> None:
    """`step`: gate number of the newest host snapshot that everyone has, -1 = none."""
    told = {"why": str(error), "snapshot": step, "requeue": getattr(error, "requeue", False)}
    context.report(f"{context.cell.index}-{context.generation}-unrestorable", told)
    context.cell[F.NO_SOURCE] = context.generation
    context.milestone(Flag.UNRESTORABLE)
