"""Warm up a parked spare: run one toy step and map the memory of every rank, so that a repair pays for no first call."""

from __future__ import annotations

import contextlib

import torch

from ftrun import native
from ftrun.core.shared.board import Flag, Head
from ftrun.core.shared.world import World, newest_world
from ftrun.native import cuda
from ftrun.worker.link.run_link import LOOK_AGAIN, LOOK_RARELY, Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.gpu_memory import DeviceMemory, ordinal_of
from ftrun.worker.memory.segment import Segment


def up() -> None:
    """Run one training step of a toy model, so that a parked spare does not pay for first calls when it is needed.

    A first call costs a hundred times the second (attention 26 ms, a convolution 14 ms). The toy step leaves the script's random
    stream as it was, and uses none of its modules, hooks or default device. It omits the backward where torch could open an
    accelerator: autograd counts the devices, and a script that has read its rank may still choose which of them to see.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Exception))  # a spare can do without
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for mode in (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            stack.enter_context(mode)
        loss = _toy_loss()
        if _may_differentiate():
            loss.backward()


def _may_differentiate() -> bool:
    built_for = [getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")]
    return not any(built_for) or torch.cuda.is_initialized()


def _toy_loss() -> torch.Tensor:
    functional = torch.nn.functional
    weight = torch.full((16, 16), 0.1, dtype=torch.float32, requires_grad=True)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    hidden = functional.layer_norm(functional.embedding(tokens, weight), (16,))
    hidden = functional.dropout(functional.gelu(functional.linear(hidden, weight)), 0.1)
    heads = hidden.view(2, 4, 2, 8).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)
    loss = functional.cross_entropy(functional.linear(mixed.reshape(8, 16), weight), tokens.view(8))
    picture = functional.conv2d(torch.ones(2, 1, 4, 4, dtype=torch.float32), weight[:9].sum(1).view(1, 1, 3, 3))
    batch_norm = functional.batch_norm(picture, None, None, training=True)
    return loss + functional.relu(batch_norm).square().mean()


class Ahead:
    """Maps every rank's memory into a parked spare, and follows its growth."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._attempt = 0
        self._extent: dict[int, tuple[int, int, int]] = {}
        self._opened = False  # is the device open?
        self._world: World | None = None  # the newest one
        self._missed = False  # some memory did not exist yet, or may grow soon

    def look(self) -> float:
        """Map memory that is new since the last look; return seconds until the next one. A missing fd store or rank raises nothing."""
        self._missed = False
        self._look()
        return LOOK_AGAIN if self._missed else LOOK_RARELY

    def _look(self) -> None:
        context = self._context
        if context.board[Head.PUBLISHED] == 0:
            return
        world = self._world
        if world is None or world.generation != context.board[Head.PUBLISHED]:
            world = self._world = newest_world(context.run_dir, context.board)
        if world.attempt != self._attempt:  # the launcher restarted all workers, with new memory
            self._attempt = world.attempt
            self._extent.clear()
            for segment in context.mapped.values():
                segment.close()
            context.mapped.clear()
        for place in world.places:
            if not context.board.cell(place.cell).has(Flag.LOOPING):
                self._missed = True
                continue
            try:
                self._map(place.rank)
            except OSError:
                self._missed = True  # no fd store now: the next look maps it, or the repair does
        if not self._opened:
            self._open_device(world)

    def _open_device(self, world: World) -> None:
        """Make a context and load ftrun's kernels if all ranks are on one device, where this spare's rank will be.

        Among several devices a spare has none of its own before it has a rank, and a context takes hundreds of megabytes, so
        it opens none. It makes no handle of torch's: these read settings that decide bits (CUBLAS_WORKSPACE_CONFIG), and
        the script may not have set them yet.
        """
        arenas = [self._context.mapped.get((place.rank, "arena")) for place in world.places]
        known = [segment for segment in arenas if segment is not None and DeviceMemory.used_by(segment)]
        if len(known) < len(world.places):
            return
        self._opened = True
        devices = {DeviceMemory.device_of(segment) for segment in known}
        if len(devices) == 1:
            with contextlib.suppress(cuda.CudaError):  # a replacement meets it again, and reports it
                ordinal = ordinal_of(devices.pop())
                if ordinal is not None:
                    cuda.load_kernels(ordinal)

    def _map(self, rank: int) -> None:
        context = self._context
        for name in ("arena", "slots"):
            if (rank, name) not in context.mapped:
                fd = context.fd_store.get(rank, name)
                if fd is None:
                    self._missed = True
                    return
                context.mapped[(rank, name)] = Segment.attach(fd)
        arena = Arena(context.mapped[(rank, "arena")])
        extent = (arena.committed[1], arena.volatile[1], arena.manifest_length)
        if self._extent.get(rank) == extent:
            return
        self._missed = True  # what grows may grow again soon
        if not arena.manifest_length:
            return  # its rank is writing it: the next look maps it
        self._extent[rank] = extent
        for offset, size in (arena.committed, arena.volatile):
            if size:
                native.populate(arena.segment.address + offset, size, True)
