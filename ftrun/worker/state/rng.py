"""The random streams of a worker: Python's, numpy's (when loaded), torch's on the CPU and on every used CUDA device.

Public functions of each library read its state and put it back. Equal states compare equal. A step reads the streams three times, so
this module reads them in the cheapest public way and keeps them as bytes: it compares numpy's generator by the words behind its
`ctypes` interface, and asks for the state only if those changed, or if a normal that numpy drew ahead may have been taken.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

from ftrun.worker.memory import serialization

State = dict[str, Any]  # plain values, for a slot

_PYTHON = struct.Struct("<625I")  # the Mersenne Twister's words and its position
_MT19937_BYTES = 625 * 4  # words and position of numpy's Mersenne Twister

_devices: list[int] = []  # GPUs whose streams are kept, the one that holds the model first


def use_device(ordinal: int) -> None:
    """Keep the random stream of the model's GPU, whatever number the device has in the process that takes over."""
    _devices[:] = [ordinal]


def _cuda_devices() -> list[int]:
    """Return the model's device, and others that were current when the streams were read."""
    current = int(torch.cuda.current_device())
    if current not in _devices:
        _devices.append(current)
    return _devices


_FEW = 32  # words of Python's generator that are compared


class _Streams:
    """The streams of this process, with the last state of those that are expensive to read and to pack."""

    def __init__(self) -> None:
        self._python: tuple[Any, ...] = ()
        self._python_packed = b""
        self._numpy: Any = None  # its generator
        self._words = b""
        self._numpy_packed = b""
        self.ahead = (
            True  # numpy drew a normal ahead, or its state was set: the state may differ while the words are equal
        )

    def capture(self) -> State:
        """Return a copy of every stream's state."""
        _, words, ahead = random.getstate()
        # a draw moves the position, and after the last word all words are renewed: it is enough to compare the first ones
        seen = words[-1], words[:_FEW]
        if seen != self._python:
            self._python, self._python_packed = seen, _PYTHON.pack(*words)
        state: State = {
            "python": (self._python_packed, ahead),
            "torch": torch.default_generator.get_state().numpy().tobytes(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            find = getattr(numpy.random, "get_bit_generator", None)  # numpy 1.24 and later
            of: Any = find() if find is not None else None
            if type(of) is not getattr(numpy.random, "MT19937", None):
                state["numpy"] = serialization.pack(numpy.random.get_state(legacy=False), "numpy.random")
            else:
                now = ctypes.string_at(of.ctypes.state_address, _MT19937_BYTES)
                if self.ahead or now != self._words or of is not self._numpy:
                    self._numpy, self._words = of, now
                    self._pack_numpy(numpy.random.get_state(legacy=False))
                state["numpy"] = self._numpy_packed
        if torch.cuda.is_initialized():
            state["cuda"] = [torch.cuda.get_rng_state(i).numpy().tobytes() for i in _cuda_devices()]
        return state

    def _pack_numpy(self, state: dict[str, Any]) -> None:
        self.ahead = bool(state["has_gauss"])
        key = state["state"]["key"].tobytes()
        self._numpy_packed = serialization.plain({**state, "state": {**state["state"], "key": key}})


_streams = _Streams()
capture = _streams.capture


def apply(state: State) -> None:
    """Put every stream back to `state`."""
    words, ahead = state["python"]
    random.setstate((random.Random.VERSION, _PYTHON.unpack(words), ahead))
    torch.set_rng_state(_tensor(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = serialization.decode(state["numpy"])
        key = saved["state"].get("key")
        if isinstance(key, bytes):
            saved["state"]["key"] = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state(saved)
        _streams.ahead = True
    if state.get("cuda"):
        for ordinal, device_state in zip(_cuda_devices(), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(device_state), ordinal)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
