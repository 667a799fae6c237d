"""A replacement takes over a rank: it carries out the plan for the state that survived (see plan.py), and knows where to go on.

It maps the weights as they are, copies them from a replica, makes them by the rank's own update (own_update.py) or reloads them from the
host snapshot with all other ranks (rollback.py). The rank's own state comes from its slots. If the copy of one replica fails, it tries
the next.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from ftrun import native
from ftrun.core.errors import DeviceError, PlatformError
from ftrun.core.shared.board import Busy, F, Flag, Head, Inexact, Source
from ftrun.core.shared.notes import RELOAD, Move, UnrestorableNote
from ftrun.native import cuda
from ftrun.native.transfer import Extent, TransferError
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena, Manifest
from ftrun.worker.memory.log import Damaged
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair import far_snapshot, own_update, pipelines, transfer
from ftrun.worker.repair.far_memory import Unreached
from ftrun.worker.repair.handover import fetch, fetch_gpu, use_gpu
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.memories import Memories, Memory, Superseded, own_slots, tags_of
from ftrun.worker.repair.plan import (
    IF_A_PART,
    NONE,
    PEER,
    Evidence,
    LastWrites,
    Own,
    Peer,
    Refusal,
    Sources,
    Tags,
    Weights,
    completed,
    plan,
    with_remedies,
)
from ftrun.worker.repair.rank_state import RankState, read_state
from ftrun.worker.repair.recovery_points import BUFFERS, END, GATE, ON_GPU, START, Slots
from ftrun.worker.repair.rollback import lay_over, reload
from ftrun.worker.repair.snapshot import newest_common
from ftrun.worker.repair.snapshot_store import BadSnapshot
from ftrun.worker.repair.sources import NoSource, note_draws, parted, resume_of, take_changed

_FENCE = 10.0  # seconds
_LOWER_RUNG = 60.0  # seconds that the launcher gets to answer a rank without a source
_SHOWN = {Weights.ADOPT: Source.ADOPT, Weights.MAKE: Source.SEALED, Weights.COPY: Source.PEER}


class Restorer:
    """Puts a dead rank's state under the objects that this worker built."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.context = kit.context
        self.state = kit.state
        self.resume = resume_of(self.context)
        self._memories = Memories(kit.context)
        self._mapped: list[Arena] = []  # arenas whose memory on a GPU is not (yet) the state's
        self._last_writes = LastWrites.ENDED
        self._lost = False  # its own arena is unusable: a new one is filled from a replica,
        self._lost_buffers = False  # and its buffers are, too

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
        except (Damaged, Unreached, DeviceError) as error:
            raise NoSource(str(error)) from error
        finally:
            self._memories.close()
            self._unmap()

    def _unmap(self) -> None:
        """Unmap GPU memory that did not become the state's."""
        kept = self.state.arena if self.state.laid_out else None
        for arena in self._mapped:
            memory, arena.memory = (arena.memory, None) if arena is not kept else (None, arena.memory)
            if memory is not None:
                with contextlib.suppress(cuda.CudaError, DeviceError):  # a failing device gives nothing back
                    memory.settle()  # copies from there are done
                    memory.close()

    def _run(self) -> None:
        kit, context = self.kit, self.context
        world = context.world
        assert world is not None
        self._show_place()
        kit.observers.stage("restore", self.resume)
        segment, slots = fetch(context, context.rank, "arena"), own_slots(context)
        gpu = use_gpu(context, self.state)
        self._last_writes = self._await_fence()
        if self._last_writes is not LastWrites.MISSED:
            kit.snapshots.adopt()
        if world.rollback:
            decided = plan(Evidence(self.resume, Tags(), last_writes=self._last_writes, rollback=True, has_slots=slots is not None))
            if not isinstance(decided, Sources):
                raise NoSource(decided or "")
            assert slots is not None
            kit.ledger.use(Slots(slots))
            self._from_snapshot(segment, gpu)
            return
        if slots is None:
            own = self._without_own(gpu)
        elif segment is None:
            own = self._from_another_node(slots, gpu)
        else:
            kit.ledger.use(Slots(slots))
            own = self._usable(Arena(segment), gpu, "taking a replica's instead")
        decided, manifest, moved = self._weights(own)
        self.state.attach(own, manifest)
        kit.handover.follow()
        if self._lost_buffers and decided.replica is not None:
            self._take_buffers(self._memories.of(decided.replica))
        kit.reducers.load(manifest.facts.get("reducers"))
        if decided.weights is Weights.MAKE:
            own_update.make(kit, self.resume, self._everyones())
        restart = self._own_state(decided)
        self.state.python.apply(restart.python)
        self._take_over(restart)
        if self._lost or context.board[Head.FD_STORE_EPOCH] != context.mapped_epoch:
            kit.hand_over()  # the fd store that these segments came from is gone
        for slot in (BUFFERS, ON_GPU):
            kit.ledger.slots.invalidate(slot)
        is_far = decided.replica is not None and self._memories.is_far(decided.replica)
        context.cell[F.SOURCE] = Source.REMOTE if is_far else _SHOWN[decided.weights]
        context.cell[F.SOURCE_BYTES] = moved

    def _weights(self, own: Arena) -> tuple[Sources, Manifest, int]:
        """Decide, and bring adopted or copied weights into `own`. Return the decision, the manifest and the bytes moved.

        Raises:
            NoSource
            Superseded
        """
        same = self.state.holders.of_everything() - {self.context.rank}
        decided = plan(self._facts(own, (), 0.0))  # if the rank's own memory is enough, nothing else is fetched
        while True:
            if not isinstance(decided, Sources):
                decided = self._memories.until(same, lambda peers, waited: plan(self._facts(own, peers, waited)))
            assert decided is not None
            if isinstance(decided, Refusal):
                requeue = pipelines.has_a_part(self.state.tensors) if decided.requeue is IF_A_PART else decided.requeue
                raise NoSource(replace(decided, requeue=requeue))
            used = None
            try:
                for used in (decided.other, decided.replica):
                    self._map_gpu(used)
                if used is not None:
                    return decided, *self._copy(own, self._memories.of(used))
            except (NoSource, TransferError, DeviceError, Unreached) as error:
                assert used is not None
                self._memories.refuse(used, error)
                decided = None
                continue
            manifest = own.read_manifest()
            self._check_layout(manifest)
            if decided.weights is Weights.ADOPT and own.seal != self.resume:
                own.sealed(self.resume)
            return decided, manifest, 0

    def _facts(self, own: Arena, peers: tuple[Peer, ...], waited: float) -> Evidence:
        state, holders, before = self.state, self.state.holders, self.context.predecessor()
        return Evidence(
            self.resume,
            tags_of(self.kit.ledger.slots, own),
            peers,
            self._last_writes,
            lost=self._lost,
            on_gpu=own.has_gpu,
            in_call=before is not None and bool(before[F.BUSY] & Busy.CALL),
            differ=holders.differ(),
            sharded=state.is_sharded,
            lonely=holders.alone() if len(holders.of_everything()) < 2 else None,
            waited=waited,
        )

    def _show_place(self) -> None:
        """Show the rank on the board where its predecessor was, until its own script gets there."""
        cell = self.context.cell
        before = self.context.predecessor() or cell
        index, end = self.resume + before.shift, before[F.LOOP_END]
        if index < 0:  # all go back to an earlier loop
            cell[F.STEP] = self.resume + 1
            return
        cell.set_shift(before.shift)
        cell[F.EPOCH], cell[F.LOOP_END] = before[F.EPOCH], end
        cell[F.STEP] = 1 + (min(index, end) if end else index)  # the end of a loop is no step of it

    def _take_over(self, restart: RankState) -> None:
        """Take over the rank; the hand-out of its first step puts `restart` back."""
        kit = self.kit
        kit.pending.resume = self.resume
        kit.pending.restart = restart
        if kit.ledger.slots.tag(START) != self.resume:
            self.context.cell[F.MISSED] = self.resume + 1
        kit.ledger.loader_state = restart.loader
        if kit.ledger.slots.tag(START) == self.resume:
            kit.pending.again = True
        kit.observers.replaced()

    def _usable(self, own: Arena, gpu: int | None, instead: str) -> Arena:
        """Return the rank's own arena with its part on the GPU mapped, or a new one if that part cannot be mapped."""
        self._mapped.append(own)
        if gpu is None and not own.has_gpu:
            return own
        why = "it was on another kind of device"
        if gpu is not None and own.has_gpu:
            try:
                if self._last_writes is LastWrites.MISSED:
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
        self._lost = self._lost_buffers = True
        return self._new_arena(gpu)

    def _without_own(self, gpu: int | None) -> Arena:
        """Make a new arena: the fd store died with this rank, and with it the rank's own state."""
        print(
            f"ftrun: rank {self.context.rank}: the fd store died with this rank's worker, and with it the rank's random streams, "
            "buffers and place in the data; they are taken from a replica",
            file=sys.stderr,
            flush=True,
        )
        self.context.note_inexact(Inexact.OWN_STATE_LOST)
        self._lost = self._lost_buffers = True
        self.kit.ledger.use(Slots.create(self.context.rank))
        return self._new_arena(gpu)

    def _from_another_node(self, slots: Segment, gpu: int | None) -> Arena:
        """Make a new arena: this rank's node was lost, and another one mirrored its slots and its buffers."""
        mirror = Slots(slots)
        if max(mirror.tag(START), mirror.tag(GATE)) == NONE:
            why = "its node was lost, and the mirror of its slots was being written"
            raise NoSource(Refusal(why, requeue=True))
        self._lost, arena = True, self._new_arena(gpu)
        self.kit.ledger.use(mirror)
        places = (BUFFERS, ON_GPU) if arena.has_gpu else (BUFFERS,)
        if mirror.tag(GATE) == NONE or any(mirror.tag(slot) != mirror.tag(GATE) for slot in places):
            self._lost_buffers = bool(self.state.buffers)
        else:
            arena.fill_volatile([mirror.sound(slot) for slot in places], mirror.tag(START))
        return arena

    def _new_arena(self, gpu: int | None) -> Arena:
        try:
            arena = Arena.create(self.context.rank, max(self.state.bytes_now(), 1), gpu)
        except DeviceError as error:
            raise NoSource(str(error)) from error
        self._mapped.append(arena)
        return arena

    def _copy_on_gpu(self, to: list[Extent], source: list[Extent], gpu: int) -> None:
        transfer.peer_copy(self.context, to, source, gpu)

    def _take_buffers(self, replica: Memory) -> None:
        """Make of the replica's buffers those of the start of the step, where this rank's own are lost."""
        if replica.slots.tag(START) == self.resume:
            self.state.rewind_buffers()
        if self.state.buffers:
            self.context.note_inexact(Inexact.BUFFERS_FROM_PEER, [name for name, _, _ in self.state.buffers])

    def _from_snapshot(self, segment: Segment | None, gpu: int | None) -> None:
        """Reload the host snapshot, as every other rank of this world does.

        Raises:
            NoSource
            Superseded
        """
        context = self.context
        instead = "the snapshot is loaded into new memory"
        arena = self._usable(Arena(segment), gpu, instead) if segment else self._new_arena(gpu)
        try:
            manifest, restart, moved = reload(self.kit, arena)
            self._check_layout(manifest)
        except TransferError as error:
            if context.stop_pending():
                raise Superseded from error
            raise NoSource(f"the reload failed: {error}") from error
        except Interrupt:
            raise Superseded("the world was stopped") from None
        except (BadSnapshot, DeviceError) as error:
            raise NoSource(str(error)) from error
        lay_over(self.kit, arena, manifest, restart, moved)
        if segment is None or gpu is not None or context.board[Head.FD_STORE_EPOCH] != context.mapped_epoch:
            self.kit.hand_over()
        self._take_over(restart)

    def _await_fence(self) -> LastWrites:
        """Wait until the dead incarnation runs no more code; return what is known of its last writes."""
        cell, board = self.context.predecessor(), self.context.board
        if cell is None:
            return LastWrites.ENDED
        deadline = time.monotonic() + _FENCE
        while cell[F.FENCED] == 0 and time.monotonic() < deadline:
            seen = board.worker_bell.count()
            if cell[F.FENCED] == 0:
                board.worker_bell.wait(seen, 0.002)
        if cell[F.FENCED] != 1:
            return LastWrites.MISSED
        return LastWrites.CORRUPT if cell[F.CORRUPT] else LastWrites.ENDED

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

    def _map_gpu(self, rank: int | None) -> None:
        """Map a replica's part on a GPU, which is complete by now.

        Raises:
            DeviceError
        """
        if rank is not None and not self._memories.is_far(rank):
            self._map_part(rank, self._memories.of(rank).arena)

    def _map_part(self, rank: int, arena: Arena) -> None:
        if self.state.gpu is not None and arena.has_gpu and arena.memory is None:
            fetch_gpu(self.context, rank, arena, self.state.gpu, write=False)
            self._mapped.append(arena)

    def _copy(self, own: Arena, replica: Memory) -> tuple[Manifest, int]:
        """Copy the replica's committed zone over `own`. Return its manifest and the bytes moved.

        Raises:
            NoSource
            TransferError
            Unreached
        """
        if self.state.holders.rest_on_word and parted(self.kit.ledger.slots, replica.slots, self.resume):
            raise NoSource("protect(replicas=...) says that it holds the same, but its gradients of the last update were others")
        source = self._memories.with_weights(replica.rank).arena
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
        if self._lost_buffers:
            offset, size = source.volatile
            own.reserve("volatile", max(0, size - own.volatile[1]))
            native.copy(own.segment.address + offset, source.segment.address + offset, size)
            own.copy_gpu_from(source, "volatile", self._copy_on_gpu)
        transfer.tell(self.context, [Move(RELOAD, replica.rank, begin, time.monotonic_ns())])
        if source.seal != self.resume:
            raise NoSource("its memory changed while it was copied")
        own.write_manifest(manifest)
        own.sealed(self.resume)
        return manifest, moved.bytes + gpu_bytes

    def _own_state(self, decided: Sources) -> RankState:
        """Return the rank's own state as of the start of the resume step.

        Raises:
            NoSource
            Superseded
        """
        ledger, resume, memories = self.kit.ledger, self.resume, self._memories
        if decided.own is Own.START:
            if not self._lost_buffers:
                whole = self.state.shadow_is_whole(resume)
                self.state.rewind_buffers(gpu=whole)
                if not whole and decided.replica is not None:
                    self._take_updated_buffers(memories.of(decided.replica))
            return ledger.start_state(resume)
        if decided.own is Own.END:
            saved = ledger.read(END)
            note_draws(self.context, saved, saved)
            return saved
        if decided.own in (Own.REPLICA_START, Own.REPLICA_END):
            assert decided.replica is not None
            return read_state(memories.of(decided.replica).slots, START if decided.own is Own.REPLICA_START else END)
        saved = ledger.read(GATE)
        if decided.own is Own.GATE_AND_UPDATE:
            return own_update.apply_to(saved, self.kit, resume, self._everyones())
        assert decided.other is not None
        replica = memories.of(decided.other)
        after = read_state(replica.slots, END)
        take_changed(self.kit, saved, after, self._others(replica), resume)
        note_draws(self.context, saved, after)
        if not self._lost_buffers:
            self._take_updated_buffers(replica, saved)
        saved.alive = after.alive
        if after.updated:
            saved.grads = after.grads  # as the update left them: the same on every replica
        return saved

    def _others(self, replica: Memory) -> Iterator[Slots]:
        """Wait for, and yield, the slots of other replicas that complete the update before the resume step."""
        yield from self._ends(self.state.holders.of_everything() - {self.context.rank, replica.rank})[0]

    def _everyones(self) -> list[Slots]:
        """Return the slots of ranks that completed the update before the resume step: all of this node, or some of others.

        Raises:
            NoSource: If a living one did not.
            Superseded
        """
        assert self.context.world is not None
        done, doubt = self._ends(set(range(self.context.world.size)) - {self.context.rank})
        if doubt:
            why = f"not every rank is known to have completed the update before step {self.resume}: {doubt}"
            raise NoSource(Refusal(why, requeue=True))
        return done

    def _ends(self, ranks: Set[int]) -> tuple[list[Slots], str]:
        """Return what tells of the update before the resume step, and why some of it is missing."""
        found = self._memories.until(ranks, lambda peers, waited: completed(peers, self.resume, waited))
        assert found is not None
        slots, doubt = [], "" if found[1] else f"one that lives did not in {PEER:.0f} s"
        for rank in found[0]:
            try:
                slots.append(self._memories.of(rank).slots)
            except Unreached as error:
                doubt = str(error)
        return slots, doubt

    def _take_updated_buffers(self, replica: Memory, saved: RankState | None = None) -> None:
        """Take the buffers that the update before the resume step wrote; note as inexact those that may differ between ranks.

        `saved`: this rank's GATE slot, if it died in that update.
        """
        after = read_state(replica.slots, END)
        written, ever = after.buffers, saved.ever if saved is not None else []
        alone = [e.name for e in self.state.manifest.entries if e.name in ever and e.name not in written]
        if alone or written:
            replica = self._memories.with_weights(replica.rank, buffers_only=True)
        mine, theirs = (one.checksum_of(alone, self.state.manifest) for one in (self.state.arena, replica.arena))
        if mine != theirs:
            self.context.note_inexact(Inexact.BUFFERS_UNKNOWN, alone)
        if not written:
            return
        others = self.state.holders.of_everything() - {self.context.rank, replica.rank}
        sums = [one.checksum_of(written, self.state.manifest) for one in (replica.arena, *self._arenas(others))]
        if len(set(sums)) > 1 or (len(sums) < 2 and not (saved is not None and self._are_written_alike(written, saved, after))):
            self.context.note_inexact(Inexact.BUFFERS_UNKNOWN, written)
        self.state.copy_buffers(written, replica.arena)

    def _arenas(self, ranks: Set[int]) -> Iterator[Arena]:
        """Yield the memory of those ranks that can be read here."""
        for rank in ranks:
            segment = fetch(self.context, rank, "arena")
            if segment is None:
                continue
            arena = Arena(segment)
            try:
                self._map_part(rank, arena)
            except DeviceError:
                continue
            yield arena

    def _are_written_alike(self, names: Sequence[str], saved: RankState, after: RankState) -> bool:
        """Were these buffers the same on both ranks at the gate, after updates that wrote them, and do only updates write them?"""
        slots = self.kit.ledger.slots
        at_start = read_state(slots, START).stands if slots.tag(START) == self.resume - 1 else {}
        return all(at_start.get(n, n) == saved.stands.get(n) == after.stands.get(n) for n in names)


def restore(kit: Kit) -> None:
    """Restore this rank on the first rung that holds; ask the launcher for the lower ones.

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
            _tell_no_source(context, with_remedies(error.refusal, step, why_none), step)
        except Superseded:
            pass
        _join_rollback(context)


def _snapshot_for(context: Context) -> tuple[int, str]:
    """Return the newest host snapshot that everyone on this node can go back to, or NONE and why ("": it takes none, or goes back already).

    Of several nodes the leader knows which one all of them have. If this node has none, another one may have copies: this rank's tells.
    """
    world = context.world
    if context.snapshot_every <= 0 or (world is not None and world.rollback):
        return NONE, ""
    step, why = newest_common(context)
    if step == NONE and world is not None and world.span is not None and world.span.mirrored:
        try:
            return far_snapshot.newest(context), ""
        except (OSError, PlatformError) as error:
            return NONE, f"{why}, and no copy on another node ({error})"
    return step, why


def _join_rollback(context: Context) -> None:
    """Wait for the world in which everyone goes back.

    Raises:
        WorkerError: If it does not come, or the run ends.
    """
    mine = context.cell.index
    world = context.await_world(lambda w: w.rollback and w.rank_of(mine) is not None, context.generation, _LOWER_RUNG)
    context.world = world
    context.cell[F.GENERATION] = world.generation


def report_no_source(context: Context, error: Exception) -> None:
    """Report that nothing of this rank is left, even for the host snapshot; the launcher then ends this process.

    Raises:
        WorkerError
    """
    _tell_no_source(context, error.refusal if isinstance(error, NoSource) else Refusal(str(error)), NONE)
    context.await_world(lambda w: False, context.generation, _LOWER_RUNG)


def _tell_no_source(context: Context, refusal: Refusal, step: int) -> None:
    """Tell the launcher why no source holds. `step`: gate number of the newest common host snapshot, or NONE."""
    note = UnrestorableNote(context.cell.index, context.generation, refusal.why, step, bool(refusal.requeue))
    context.note(note, needed=True)
    context.cell[F.NO_SOURCE] = context.generation
    context.milestone(Flag.UNRESTORABLE)
