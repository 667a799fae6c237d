"""What is done before it is needed, so that the first step of a worker is not the first step of its process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from ftrun import native
from ftrun.core.board import F, Flag, Head
from ftrun.core.world import World, read_world
from ftrun.native import cuda
from ftrun.worker import compiled, uniform
from ftrun.worker.arena import Arena
from ftrun.worker.context import Context
from ftrun.worker.device import DeviceMemory, ordinal_of
from ftrun.worker.lookout import LEARNED
from ftrun.worker.segment import Segment

_ROOM = 64 << 20  # bytes of heap for what is not as large as the state: activations, alignment
_MANIFESTS_MOST = 2 << 20  # bytes of manifests, some 15,000 tensors, for which tensors are made ahead at the most
_HEAP_MOST = 1 << 30  # bytes of heap touched ahead of their use at the most
_GROUP_THREADS, _OTHER_THREADS, _THREADS_MOST = 2, 2, 8  # that a repair starts: each Gloo group's, and those around it
_THREAD_HEAP = 4 << 20  # bytes; those of Gloo's threads grow to 3 MB when buckets are large


def up() -> None:
    """Touch the code paths of a training step once, on a toy, and leave the random stream as it was.

    The nursery does it once for every worker: first calls cost a hundred times the second (attention 26 ms, a
    convolution 14 ms).
    """
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # a thread pool made here would not exist in the forked workers
    functional = torch.nn.functional
    embedding, norm = torch.nn.Embedding(8, 16), torch.nn.LayerNorm(16)
    first, last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)
    picture = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU())
    model = torch.nn.ModuleList([embedding, norm, first, last, picture])
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)]
    tokens = torch.zeros(2, 4, dtype=torch.long)
    for optimizer in optimizers:
        hidden = functional.dropout(functional.gelu(first(norm(embedding(tokens)))), 0.1)
        heads = hidden.view(2, 4, 2, 8).transpose(1, 2)
        hidden = (
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            .transpose(1, 2)
            .reshape(2, 4, 16)
        )
        loss = functional.cross_entropy(last(hidden).view(8, 8), tokens.view(8))
        (loss + picture(torch.ones(2, 1, 4, 4)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    uniform.try_out()
    compiled.stay_out()


def for_new_groups(groups: int) -> None:
    """Have the memory mapped that the threads of as many groups will take when they are built again, in the background.

    Each of those threads has a heap of its own in glibc, and would fault it in during the step that everybody waits for.
    """
    _in_background(lambda: _touch_heaps(groups))


def _touch_heaps(groups: int) -> None:
    native.malloc_touch_threads(min(_OTHER_THREADS + _GROUP_THREADS * groups, _THREADS_MOST), _THREAD_HEAP)
    native.malloc_touch(_THREAD_HEAP)  # this thread's, too, will be another's


def _in_background(what: Callable[[], None]) -> None:
    """In a thread of its own. What fails is not done: a repair then takes a bit longer."""

    def run() -> None:
        with contextlib.suppress(OSError):
            what()

    with contextlib.suppress(RuntimeError):  # the system gives no more threads
        threading.Thread(target=run, name="ftrun-warm", daemon=True).start()


class Ahead:
    """Maps every rank's memory into a parked spare, and follows its growth."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._attempt = 0
        self._extent: dict[int, tuple[int, int, int]] = {}
        self._heap = 0
        self._followed = False
        self._opened = False  # the device

    def look(self) -> None:
        """Map what is new since the last look. Never raises for a keeper or rank that is just gone."""
        context = self._context
        published = context.board[Head.PUBLISHED]
        if published == 0:
            return
        world = read_world(context.run_dir, published)
        if world.attempt != self._attempt:  # the world was started anew, with new memory
            self._attempt = world.attempt
            self._extent.clear()
            for segment in context.mapped.values():
                segment.close()
            context.mapped.clear()
        for place in world.places:
            if not context.board.cell(place.cell).has(Flag.LOOPING):
                continue
            try:
                self._map(place.rank)
            except OSError:
                continue  # no keeper just now: mapped at the next look, or when needed
        if not self._followed:
            self._follow(world)
        if not self._opened:
            self._open_device(world)

    def _open_device(self, world: World) -> None:
        """Make a context and load ftrun's kernels where all ranks are on one device: whatever rank this spare takes is there.

        Among several devices a spare has none of its own before it has a rank, and a context takes hundreds of megabytes, so
        it opens none. Nothing of torch's is made: its handles read settings that decide bits (CUBLAS_WORKSPACE_CONFIG), and
        the script may not have made them yet.
        """
        arenas = [self._context.mapped.get((place.rank, "arena")) for place in world.places]
        known = [segment for segment in arenas if segment is not None and DeviceMemory.used_by(segment)]
        if len(known) < world.size:
            return
        self._opened = True
        devices = {DeviceMemory.device_of(segment) for segment in known}
        if len(devices) == 1:
            with contextlib.suppress(cuda.CudaError):  # a replacement meets it again, and says so
                ordinal = ordinal_of(devices.pop())
                if ordinal is not None:
                    cuda.load_kernels(ordinal)

    def _follow(self, world: World) -> None:
        """Take the page faults that training has taken in another process of the nursery's: thousands, some 10 us each."""
        survivors_first = sorted(world.places, key=lambda place: place.rank in world.replaced)
        cells = [self._context.board.cell(place.cell) for place in survivors_first]
        trained = [cell for cell in cells if cell.has(Flag.LOOPING) and (cell.step or 0) >= LEARNED]
        if not trained:
            return
        self._followed = True

        def touch() -> None:
            if not trained[0][F.DEVICE]:  # else groups are not Gloo's
                _touch_heaps(1)
            for cell in trained:
                with contextlib.suppress(OSError):  # it just ended, or the system does not show us its pages
                    native.follow_pages(cell[F.PID])
                    return

        _in_background(touch)

    def _map(self, rank: int) -> None:
        context = self._context
        for name in ("arena", "slots"):
            if (rank, name) not in context.mapped:
                fd = context.keeper.get(rank, name)
                if fd is None:
                    return
                context.mapped[(rank, name)] = Segment.attach(fd)
        arena = Arena(context.mapped[(rank, "arena")])
        extent = (arena.committed[1], arena.volatile[1], arena.manifest_length)
        if self._extent.get(rank) == extent:
            return
        if not arena.manifest_length:
            return  # it is being written: at the next look
        self._make_ready(arena)
        self._extent[rank] = extent
        for offset, size in (arena.committed, arena.volatile):
            if size:
                native.populate(arena.segment.address + offset, size, True)
        self._touch_heap(extent[0])

    def _make_ready(self, arena: Arena) -> None:
        """Make the tensors, or none: whatever the script is in the middle of, it asked for its rank and nothing else."""
        arena.segment.ready = None
        made = sum(len(s.ready.written) for s in self._context.mapped.values() if s.ready is not None)
        if arena.has_gpu or made + arena.manifest_length > _MANIFESTS_MOST:
            return
        with contextlib.suppress(Exception), torch.inference_mode(False):
            arena.make_ready()

    def _touch_heap(self, size: int) -> None:
        """Gradients and buckets will be allocated at once: have the pages ready in the heap."""
        wanted = min(size + _ROOM, _HEAP_MOST)
        if wanted <= self._heap:
            return
        self._heap = wanted
        native.malloc_touch(wanted)
