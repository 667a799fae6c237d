"""The random streams of a worker: Python's, numpy's (when loaded), torch's on the CPU and on every used CUDA device.

Most of it is copied as plain memory, in one call, from where the generators keep it (see generators.py).
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ftrun import native
from ftrun.worker import codec, generators, probe

Mark = tuple[bytes, dict[str, Any]]  # what tells the memory of one state from that of any other, and the rest

_NUMPY_BYTES = 625 * 4  # numpy's mt19937_state: 624 words and the position
_RAW_BYTES = {"python": generators.PYTHON_BYTES, "torch": generators.TORCH_BYTES, "numpy": _NUMPY_BYTES}
_STEADY = {"parts", "python_normal", "numpy_normal"}  # beside the memory, when all generators' can be read
# Where an mt19937 stands (its position and, in 64 bytes, how often its words were made anew, or from what seed) is in these
# (offset, length) of its raw bytes. The other words follow from these, but for collisions and states that somebody makes up,
# so they need not be read to see that it was used.
_TELLING = {"python": [(0, 64)], "torch": generators.TELLING, "numpy": [(0, 64), (_NUMPY_BYTES - 4, 4)]}


class _Memory:
    """The generators whose memory can be read, in one list of ranges."""

    def __init__(self, numpy_generator: Any) -> None:
        self.numpy_generator = numpy_generator
        found: dict[str, list[generators.Range] | None] = {"torch": generators.torch_ranges()}
        python = generators.python_range()
        found["python"] = [python] if python else None
        self._words = memoryview(b"").cast("I")  # numpy's
        if type(numpy_generator).__name__ == "MT19937":
            address = numpy_generator.ctypes.state_address
            found["numpy"] = [(address, _NUMPY_BYTES)]
            self._words = memoryview((ctypes.c_uint32 * 625).from_address(address)).cast("B").cast("I")
        self.parts = [name for name, ranges in found.items() if ranges]
        self.ranges = native.RangeList([r for name in self.parts for r in found[name] or ()])
        telling = [piece for name in self.parts for piece in _pieces(found[name] or [], _TELLING[name])]
        self._telling = native.RangeList(telling)
        self._told = ctypes.create_string_buffer(self._telling.size)
        self._normal: tuple[tuple[int, int], list[Any]] | None = None
        self._last: Mark | None = None  # what `mark` gave, when only drawing changes it

    def read(self) -> bytes:
        """The bytes of all ranges."""
        buffer = ctypes.create_string_buffer(self.ranges.size)
        native.gather(buffer, self.ranges)
        return buffer.raw

    def mark(self) -> Mark:
        """Another one for every other state that drawing or seeding can lead to; the same object while nothing was drawn."""
        native.gather(self._told, self._telling)
        told, last = self._told.raw, self._last
        if last is not None and last[0] == told and not torch.cuda.is_initialized():
            if last[1]["python_normal"] is random._inst.gauss_next:  # type: ignore[attr-defined]
                return last
        beside = _beside(self)
        # that a normal which numpy keeps was used does not show in its position, and other parts have to be asked each time
        steady = beside.keys() == _STEADY and not beside["numpy_normal"][0]
        self._last = (told, beside) if steady else None
        return told, beside

    def forget(self) -> None:
        """A state was put back: what was last seen says nothing of it."""
        self._normal = self._last = None

    def numpy_normal(self, numpy: Any) -> list[Any]:
        """Whether numpy's generator has a normal cached, and which. Asking takes longer than all the rest.

        While none is cached, one can only appear by drawing, which moves the position, or all words and the position; or by
        putting back a state, which only `apply` is known to do: a script that takes a normal and then restores the state in
        which it was cached, by `numpy.random.set_state`, is not seen.
        """
        place = self._words[624], self._words[0]
        if self._normal is None or self._normal[0] != place or self._normal[1][0]:
            _, _, _, has, value = numpy.random.get_state()
            self._normal = (place, [int(has), float(value)])
        return self._normal[1]


_memory: _Memory | None = None
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


def capture() -> dict[str, Any]:
    """A copy of every stream's state, made of plain values: equal states compare equal."""
    memory = _memory_now()
    return join(_beside(memory), memory.read())


def look() -> tuple[Mark, native.RangeList]:
    """What tells the state of now from any other, and where the part of it lies that is copied as memory.

    `join` makes of the mark's second half and those bytes what `capture` gives.
    """
    memory = _memory_now()
    return memory.mark(), memory.ranges


def mark_of(state: dict[str, Any]) -> Mark:
    """The mark that `look` would have given when `state` was captured."""
    parts = _split(state)
    told = [parts[name][at : at + length] for name in state["parts"] for at, length in _TELLING[name]]
    return b"".join(told), {k: v for k, v in state.items() if k != "raw"}


def join(beside: dict[str, Any], raw: bytes) -> dict[str, Any]:
    """A state as `capture` gives it, of what a slot holds."""
    return {**beside, "raw": raw}


def _memory_now() -> _Memory:
    global _memory
    numpy = sys.modules.get("numpy")
    generator = numpy.random.mtrand._rand._bit_generator if numpy is not None else None
    if _memory is None or _memory.numpy_generator is not generator:
        _memory = _Memory(generator)
    return _memory


def _beside(memory: _Memory) -> dict[str, Any]:
    """What is not copied as memory, and which parts are."""
    parts = memory.parts
    numpy = sys.modules.get("numpy")
    state: dict[str, Any] = {"parts": parts}
    if "python" not in parts:
        state["python"] = random.getstate()
    else:
        state["python_normal"] = random._inst.gauss_next  # type: ignore[attr-defined]
    if "torch" not in parts:
        state["torch"] = torch.get_rng_state().numpy().tobytes()
    if numpy is not None:
        if "numpy" in parts:
            state["numpy_normal"] = memory.numpy_normal(numpy)
        else:
            state["numpy"] = codec.pack(numpy.random.get_state(legacy=False), "numpy.random")  # of another kind
    if torch.cuda.is_initialized():
        state["cuda"] = [torch.cuda.get_rng_state(i).numpy().tobytes() for i in _cuda_devices()]
    return state


def apply(state: dict[str, Any]) -> None:
    """Put every stream back to `state`."""
    if probe.broken("rng"):
        return
    raw = _split(state)
    if "python" in raw:
        random.setstate((random.Random.VERSION, generators.python_words(raw["python"]), state["python_normal"]))
    else:
        random.setstate(state["python"])
    torch.set_rng_state(_tensor(generators.legacy_state(raw["torch"]) if "torch" in raw else state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in raw:
        words = numpy.frombuffer(raw["numpy"], dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", words[:-1], int(words[-1]), *state["numpy_normal"]))
    elif numpy is not None and "numpy" in state:
        numpy.random.set_state(codec.decode(state["numpy"]))
    if state.get("cuda"):
        for ordinal, device_state in zip(_cuda_devices(), state["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(device_state), ordinal)
    if _memory is not None:
        _memory.forget()


def _split(state: dict[str, Any]) -> dict[str, bytes]:
    """The raw bytes of each part."""
    raw, at = {}, 0
    for name in state["parts"]:
        raw[name] = state["raw"][at : at + _RAW_BYTES[name]]
        at += _RAW_BYTES[name]
    return raw


def _pieces(ranges: list[generators.Range], wanted: list[tuple[int, int]]) -> Iterator[generators.Range]:
    """Where `wanted` (offset, length) of what the ranges hold, one behind the other, lies in memory."""
    for offset, length in wanted:
        at = 0
        for address, size in ranges:
            first, end = max(offset, at), min(offset + length, at + size)
            if first < end:
                yield address + first - at, end - first
            at += size


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
