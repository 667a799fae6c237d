"""The random streams of a worker: Python's, numpy's (when loaded), torch's on the CPU and on every used CUDA device."""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any

import torch

from ftrun.worker import probe


def capture() -> dict[str, Any]:
    """A copy of every stream's state, made of plain values: equal states compare equal."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, array.array("I", words).tobytes(), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy(numpy)
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        state["cuda"] = [torch.cuda.get_rng_state(i).numpy().tobytes() for i in devices]
    return state


def _numpy(numpy: Any) -> list[Any]:
    """numpy's global stream. get_state() takes longer than all the rest, so it is only asked when the words moved.

    While no Gaussian is cached, one can only appear by drawing, which moves them.
    """
    global _seen
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        return [name, keys.tobytes(), int(position), int(has_gauss), float(cached)]
    words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    if _seen is None or _seen[0] != words or _seen[1][3]:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        _seen = (words, [name, keys.tobytes(), int(position), int(has_gauss), float(cached)])
    return _seen[1]


_MT19937_BYTES = 625 * 4  # numpy's mt19937_state: 624 words and the position
_seen: tuple[bytes, list[Any]] | None = None


def apply(state: dict[str, Any]) -> None:
    """Put every stream back to `state`."""
    if probe.broken("rng"):
        return
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, cached))
    for i, device_state in enumerate(state.get("cuda", [])):
        torch.cuda.set_rng_state(_tensor(device_state), i)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
