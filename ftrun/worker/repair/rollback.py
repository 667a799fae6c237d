"""Go back to the host snapshot with all ranks: reload a rank's memory, and put it under a survivor's used state."""

from __future__ import annotations

import errno

from ftrun.core.errors import DeviceError, WorkerError
from ftrun.core.shared.board import F, Source
from ftrun.native.cuda import CudaError
from ftrun.native.transfer import Facts, TransferError
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena, Manifest
from ftrun.worker.memory.gpu_memory import WAIT
from ftrun.worker.repair import transfer
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.rank_state import RankState
from ftrun.worker.repair.recovery_points import END
from ftrun.worker.repair.snapshot import own_places
from ftrun.worker.repair.snapshot_store import BadSnapshot, Places, Record, Store

_STOP = 60.0  # seconds in which the launcher stops a world whose reload failed


def survivor_goes_back(kit: Kit) -> None:
    """Bring this rank back to the step at which its world resumes.

    If the script cannot go back so far, this ends the process: a replacement's script can.

    Raises:
        Interrupt: If the world is stopped meanwhile.
        WorkerError: If this rank cannot go back, which ends the process as well.
    """
    context = kit.context
    world = context.world
    assert world is not None
    if world.resume < kit.position.base:
        context.make_way(f"the host snapshot of step {world.resume} is older than the loop that it was in")
    try:
        manifest, restart, moved = reload(kit, kit.state.arena)
    except TransferError as error:
        if error.errno != errno.EBADMSG and (error.failed >= 0 or error.errno in (errno.ECANCELED, errno.ETIMEDOUT)):
            # the rank at fault ends or reports it, so the launcher stops the world; a source does not notice damaged bytes
            context.wait_until(lambda: False, _STOP)
        raise WorkerError(f"the reload from the host snapshot failed: {error}") from error
    except (BadSnapshot, DeviceError, CudaError) as error:
        why = error.strerror if isinstance(error, CudaError) else error
        raise WorkerError(f"cannot go back to the host snapshot: {why}") from error
    lay_over(kit, kit.state.arena, manifest, restart, moved)
    kit.position.number = world.resume - 1


def lay_over(kit: Kit, arena: Arena, manifest: Manifest, restart: RankState, moved: int) -> None:
    """Put the state over arena and slots that hold the host snapshot, and reset what must go back with it."""
    context = kit.context
    kit.state.reattach(arena, manifest)
    kit.reducers.load(manifest.facts.get("reducers"))
    kit.state.python.apply(restart.python)
    kit.ledger.new_loop()
    kit.pending.went_back = context.generation
    kit.pending.restart = restart
    kit.pending.again = True
    context.cell[F.SOURCE_BYTES] = moved
    context.cell[F.SOURCE] = Source.SNAPSHOT


def reload(kit: Kit, arena: Arena) -> tuple[Manifest, RankState, int]:
    """Bring this rank's arena and slots back to the snapshot of the world's resume step, together with all ranks.

    Return the manifest, the END slot's content, and the bytes moved.

    Raises:
        BadSnapshot
        TransferError
        Interrupt
        DeviceError
        CudaError
        WorkerError
    """
    context = kit.context
    world = context.world
    assert world is not None
    step = world.resume
    store = kit.snapshots.of_step(step)
    kit.snapshots.went_back(step)
    record = store.record(step)
    store.check(record)
    manifest = Manifest.from_bytes(store.bytes(record.pieces["manifest"]))
    arena.open()
    moved = transfer.host_reload(context, _parts(context, store, record, arena))
    if not record.layout:
        moved += sum(piece.size for name, piece in record.pieces.items() if name.startswith("private"))
    _own_back(kit, store, record, manifest, arena)
    slots = kit.ledger.slots
    slots.forget_steps()
    slots.write(END, step, store.bytes(record.pieces["slot"]))
    arena.write_manifest(manifest)
    arena.sealed(step)
    return manifest, kit.ledger.read(END), moved


def _parts(context: Context, store: Store, record: Record, arena: Arena) -> list[transfer.Part]:
    """Return the parts of the state that all ranks share, in host memory and on a GPU.

    Raises:
        Interrupt
        DeviceError
        CudaError
    """
    world = context.world
    assert world is not None

    def facts(size: int) -> Facts:
        return Facts(len(world.places), 1, size, -1, world.generation, record.step, record.layout)

    parts = []
    begin, size = arena.shape_committed(record.zone), record.committed
    if size:
        share = store.extent(record.pieces["share"])
        parts.append(transfer.Part(facts(size), share, (arena.segment.address + begin, size)))
    if record.zone_gpu:
        memory, size = arena.gpu_part, record.committed_gpu
        begin = memory.shape("committed", record.zone_gpu)
        # work that an aborted step queued must not overwrite the reload
        if not memory.finished(context.stop_pending, WAIT):
            raise Interrupt
        share = store.extent(record.pieces["share_gpu"])
        if size:
            parts.append(transfer.Part(facts(size), share, (memory.base + begin, size), memory.ordinal))
    return parts


def _own_back(kit: Kit, store: Store, record: Record, manifest: Manifest, arena: Arena) -> None:
    """Put back this rank's own parts: parameters that are not replicated, and buffers."""

    def put_back(name: str, rows: list[tuple[int, int]], on_gpu: bool = False) -> None:
        address, _ = store.extent(record.pieces[name])
        Places(arena, rows, on_gpu).copy_in(address)

    put_back("private", own_places(kit.state, manifest, record.world_size, False))
    live = record.pieces["buffers"].size
    if arena.volatile[1] < 2 * live:
        arena.reserve("volatile", 2 * live)  # a new arena, made for this restore
    put_back("buffers", [(arena.volatile[0], live)])
    if "buffers_gpu" not in record.pieces:
        return
    put_back("private_gpu", own_places(kit.state, manifest, record.world_size, True), True)
    live = record.pieces["buffers_gpu"].size
    begin, size = arena.gpu_part.extent("volatile")
    if size < 2 * live:
        arena.gpu_part.shape("volatile", 2 * live)
    put_back("buffers_gpu", [(begin, live)], True)
