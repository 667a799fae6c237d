"""An arena on the fake GPU by itself, in one process: laid out, grown, sealed, mapped again, copied."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.native import fake
from tests.native.fake import Control

CODE = """
import os, sys, time
import torch
from ftrun.native import transfer
from ftrun.native.transfer import CHECK_BACK, Terms
from ftrun.worker.memory.arena import OPEN, Arena
from ftrun.worker.memory.segment import Segment
from ftrun.worker.state.protected_state import ProtectedState
from tests.gpu.gpu_model import Gpu, QueuedSGD

gpu = Gpu(1)
torch.manual_seed(0)

def build():
    model = gpu.take(torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 5)))
    return model, QueuedSGD(model.parameters(), gpu)

def step(model, optimizer):
    model(torch.randn(8, 300)).square().sum().backward()
    optimizer.step()

def values(model, optimizer):
    states = [v for s in optimizer.state.values() for _, v in sorted(s.items())]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *states]]

def mapped(arena):
    "The same memory as another process maps it."
    other = Arena(Segment.attach(os.dup(arena.segment.fd)))
    other.attach_gpu(1, lambda k: os.dup(arena.memory.chunks[k].fd), write=True)
    return other

def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))

model, optimizer = build()
before = values(model, optimizer)
state = ProtectedState([model], [optimizer], {})
assert state.gpu == 1
arena = Arena.create(0, state.bytes_now(), state.gpu)
heard = []
arena.memory.on_chunk = lambda index, chunk: heard.append(index)
state.move_in(arena)
assert same(before, values(model, optimizer)) and len(heard) == 2
step(model, optimizer)
gpu.synchronize()
assert state.absorb() and len(heard) == 3
"""


def run(control: Control, code: str) -> None:
    env = {**os.environ, **control.env, "PYTHONPATH": os.fspath(fake.ROOT), "OMP_NUM_THREADS": "1"}
    program = CODE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_was_laid_out_is_found_again(control: Control) -> None:
    """Parameters, buffers and momenta on the device, step counts on the host; nothing is copied to map them."""
    run(
        control,
        """
        gpu_of_state = [e.on_gpu for e in state.manifest.entries if e.name.startswith("optim.")]
        assert True in gpu_of_state and False in gpu_of_state
        arena.sealed(1)
        state.finish_device(lambda: False)
        other = mapped(arena)
        manifest = other.read_manifest()
        assert other.seal == 1 and manifest == state.manifest
        second, its = build()
        replacement = ProtectedState([second], [its], {})
        replacement.attach(other, manifest)
        assert same(values(model, optimizer), values(second, its))
        step(second, its)
        gpu.synchronize()
        assert same(values(model, optimizer), values(second, its)), "one memory, two mappings"
        """,
    )


def test_the_seal_follows_the_device(control: Control) -> None:
    run(
        control,
        """
        arena.sealed(1)
        state.finish_device(lambda: False)
        assert arena.seal == 1
        open(os.environ["FAKE_CUDA_CONTROL"], "w").write("rate 1000000\\n")
        arena.open()
        step(model, optimizer)
        arena.sealed(2)
        assert arena.seal == OPEN, "the device has not done the update that the host has queued"
        assert not state.finish_device(lambda: True)
        assert state.finish_device(lambda: False) and arena.seal == 2
        """,
    )


def test_buffers_go_back_to_the_start_of_the_step(control: Control) -> None:
    run(
        control,
        """
        start = values(model, optimizer)
        state.save_buffers(7)
        state.finish_device(lambda: False)
        assert state.shadow_is_whole(7) and not state.shadow_is_whole(8)
        mark = state.checksum(), state.buffer_values()
        model(torch.randn(8, 300))
        assert state.buffer_values() != mark[1]
        state.rewind_buffers()
        state.finish_device(lambda: False)
        assert same(start, values(model, optimizer)) and state.checksum() == mark[0]
        model[0].weight.data[0, 0] += 1
        assert state.checksum() != mark[0]
        """,
    )


@pytest.mark.slow
def test_a_replica_takes_it_over(control: Control) -> None:
    """As a rank does whose own memory is gone: through the transfer engine, checked on the way."""
    run(
        control,
        """
        fresh = Arena.create(1, state.bytes_now(), 1)
        asked = []
        def copy(to, source, gpu):
            asked.append(sum(size for _, size in source))
            transfer.copy(to, source, Terms(check=CHECK_BACK, timeout=20), gpu)
        for zone in ("committed", "volatile"):
            offset, size = arena.committed if zone == "committed" else arena.volatile
            have = fresh.committed[1] if zone == "committed" else fresh.volatile[1]
            fresh.reserve(zone, size - have)
            fresh.segment.view(offset, size)[:] = arena.segment.view(offset, size)
            assert fresh.copy_gpu_from(arena, zone, copy) == arena.memory.extent(zone)[1]
        assert len(asked) == 2
        fresh.write_manifest(state.manifest)
        second, its = build()
        ProtectedState([second], [its], {}).attach(fresh, fresh.read_manifest())
        assert same(values(model, optimizer), values(second, its))
        """,
    )
