"""Where random generators keep their state, read as plain memory: a copy costs a microsecond instead of ten or more.

Nothing here writes to that memory. Each place is compared with the generator's own getter before it is used; where they
differ (another build, another release) there is none, and the caller asks the getter. Layouts: CPython's `_random.Random`,
ATen's `CPUGeneratorImpl` (mt19937 engine, then the two cached normals) and its legacy state, which `set_state` takes.
"""

from __future__ import annotations

import array
import ctypes
import random
import struct

import torch

Range = tuple[int, int]  # address, bytes

_WORDS = 624
PYTHON_BYTES = 4 + 4 * _WORDS  # index, words
# seed, left, seeded; next, words; the cached float and double normal, each with whether it holds
_ENGINE = struct.Struct("<Qi?" + f"I{4 * _WORDS}s" + "4s?3x8s?")
_PIECES = ((0, 13), (16, 2500), (2520, 17))  # offset and length: what lies between means nothing, and changes
_WORDS_AT = 20
# of what was read: where it stands, the first words, and whether normals are cached (their values follow from the rest, and
# mean nothing while there are none)
TELLING = [(0, 13 + 4 + 64), (2517, 1), (2529, 1)]
# seed, left, seeded, next, words; normal x, y (the double), rho and whether it holds; the float and whether it holds
_LEGACY = struct.Struct(f"<QiiQ{8 * _WORDS}s" + "8s8s8si" + "4s?7x")
TORCH_BYTES = _ENGINE.size
_SEEN = 512  # bytes of a generator in which its engine begins; far less than its size


def python_range() -> Range | None:
    """Index and words of Python's global generator."""
    instance = getattr(random, "_inst", None)
    base = random.Random.__base__
    if instance is None or base is None or base.__basicsize__ < object.__basicsize__ + PYTHON_BYTES:
        return None
    address = id(instance) + object.__basicsize__
    return (address, PYTHON_BYTES) if python_words(_read(address, PYTHON_BYTES)) == random.getstate()[1] else None


def python_words(raw: bytes) -> tuple[int, ...]:
    """What `random.setstate` wants: the words, then the index."""
    index, *words = array.array("I", raw)
    return (*words, index)


def torch_ranges() -> list[Range] | None:
    """The engine of torch's default CPU generator, TORCH_BYTES together; `legacy_state` makes of it what torch takes."""
    generator = torch.default_generator
    address = _engine_of(generator) if _understood() else None
    if address is None or not _same(address, generator):
        return None
    return _engine_ranges(address)


def legacy_state(raw: bytes) -> bytes:
    """The state that `torch.set_rng_state` takes, of an engine that was read."""
    seed, left, seeded, following, words, near, has_near, far, has_far = _ENGINE.unpack(raw)
    wide = array.array("Q", array.array("I", words).tolist()).tobytes()
    far = far if has_far else bytes(8)
    near = near if has_near else bytes(4)
    return _LEGACY.pack(seed, left, seeded, following, wide, bytes(8), far, bytes(8), has_far, near, has_near)


def _read(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


def _engine_ranges(address: int) -> list[Range]:
    return [(address + offset, length) for offset, length in _PIECES]


def _engine_of(generator: torch.Generator) -> int | None:
    address = getattr(generator, "_cdata", None)
    legacy = generator.get_state().numpy().tobytes()
    if not isinstance(address, int) or len(legacy) != _LEGACY.size:
        return None
    words = array.array("I", array.array("Q", _LEGACY.unpack(legacy)[4]).tolist()).tobytes()
    at = _read(address, _SEEN).find(words[:64])
    return address + at - _WORDS_AT if at >= _WORDS_AT else None


def _same(address: int, generator: torch.Generator) -> bool:
    raw = b"".join(_read(*piece) for piece in _engine_ranges(address))
    return _LEGACY.unpack(legacy_state(raw)) == _LEGACY.unpack(generator.get_state().numpy().tobytes())


def _understood() -> bool:
    """Is every field where it is expected? Asked of a generator of our own, also one with normals cached."""
    generator = torch.Generator()
    generator.manual_seed(7)
    torch.empty(1, dtype=torch.float64).normal_(generator=generator)
    address = _engine_of(generator)
    if address is None or not _same(address, generator):
        return False
    fields = list(_LEGACY.unpack(generator.get_state().numpy().tobytes()))
    if not fields[8]:  # no double was cached, so nothing was learned of its place
        return False
    fields[9:] = [struct.pack("<f", 0.25), True]
    generator.set_state(torch.frombuffer(bytearray(_LEGACY.pack(*fields)), dtype=torch.uint8))
    return _same(address, generator)
