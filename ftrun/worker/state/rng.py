"""The random streams of a worker: Python's, numpy's (when loaded), torch's on the CPU and on every used CUDA device.

Each state is asked of its library and put back there, by the public functions. Equal states compare equal.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ftrun.worker.runtime import crash_points
from ftrun.worker.state import serialization

State = dict[str, Any]  # plain values: what a slot keeps of the streams

_devices: list[int] = []  # GPUs whose streams are kept, the one that holds the model first


def use_device(ordinal: int) -> None:
    """The model is on this GPU: keep its random stream, whatever number the device has in the process that takes over."""
    _devices[:] = [ordinal]


def _cuda_devices() -> list[int]:
    """The model's device, and others on which this process has made a context to draw on."""
    current = int(torch.cuda.current_device())
    if current not in _devices:
        _devices.append(current)
    return _devices


def capture() -> State:
    """A copy of every stream's state."""
    state: State = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = serialization.pack(numpy.random.get_state(legacy=False), "numpy.random")
    if torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state(i).numpy().tobytes() for i in _cuda_devices()]
    return state


def apply(state: State) -> None:
    """Put every stream back to `state`."""
    if crash_points.broken("rng"):
        return
    random.setstate(state["python"])
    torch.set_rng_state(_tensor(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(serialization.decode(state["numpy"]))
    if state.get("cuda"):
        for ordinal, device_state in zip(_cuda_devices(), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(device_state), ordinal)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
