"""Mappings, population, copies and checksums against plain references."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun import native
from tests.native.conftest import PAGE, Children

MIB = 1 << 20
MASK = (1 << 64) - 1
SIZES = [0, 1, 7, 8, 63, 64, 65, 127, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 5]
RANDOM = np.random.default_rng(0).integers(0, 256, 10 * MIB, dtype=np.uint8)


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("ftrun-test")
    yield fd
    os.close(fd)


def test_a_mapping_longer_than_its_file_grows_with_it(memfd: int) -> None:
    os.ftruncate(memfd, PAGE)
    room = 1 << 36  # far more than the machine has
    address = native.map_fd(memfd, room)
    native.store64(address, 1)
    os.ftruncate(memfd, 64 * PAGE)
    native.store64(address + 63 * PAGE, 2)
    assert os.pread(memfd, 8, 63 * PAGE) == (2).to_bytes(8, "little")
    native.unmap(address, room)


def test_touching_beyond_the_file_is_a_bus_error(memfd: int, children: Children) -> None:
    os.ftruncate(memfd, PAGE)
    address = native.map_fd(memfd, 4 * PAGE)
    assert children.wait(children.fork(lambda: native.load64(address + 2 * PAGE))) == -signal.SIGBUS
    native.unmap(address, 4 * PAGE)


def test_a_read_only_mapping_sees_what_another_writes(memfd: int) -> None:
    os.ftruncate(memfd, PAGE)
    address = native.map_fd(memfd, PAGE, write=False)
    os.pwrite(memfd, (77).to_bytes(8, "little"), 16)
    assert native.load64(address + 16) == 77
    native.populate(address, PAGE, False)
    with pytest.raises(OSError) as caught:
        native.populate(address, PAGE, True)
    assert caught.value.errno == errno.EACCES
    native.unmap(address, PAGE)


@pytest.mark.parametrize(("fd", "length", "code"), [(-1, PAGE, errno.EBADF), (None, 0, errno.EINVAL)])
def test_map_tells_what_is_wrong(memfd: int, fd: int | None, length: int, code: int) -> None:
    with pytest.raises(OSError) as caught:
        native.map_fd(memfd if fd is None else fd, length)
    assert caught.value.errno == code


@pytest.mark.parametrize("write", [False, True])
def test_populate_brings_pages_in_and_keeps_their_content(memfd: int, write: bool) -> None:
    length = 64 * PAGE
    os.ftruncate(memfd, length)
    os.pwrite(memfd, RANDOM[:length].tobytes(), 0)
    address = native.map_fd(memfd, length)
    native.populate(address + 5, length - 5, write)
    assert resident_kib(address) == length // 1024
    assert os.pread(memfd, length, 0) == RANDOM[:length].tobytes()
    native.unmap(address, length)


def resident_kib(address: int) -> int:
    """Memory of one mapping that is in this process's page table."""
    with open("/proc/self/smaps") as smaps:
        inside = False
        for line in smaps:
            if line.split("-")[0] == f"{address:x}".zfill(len(line.split("-")[0])):
                inside = True
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1])
    raise AssertionError("the mapping is not there")


def test_populate_beyond_the_file_is_an_error(memfd: int) -> None:
    os.ftruncate(memfd, PAGE)
    address = native.map_fd(memfd, 4 * PAGE)
    with pytest.raises(OSError) as caught:
        native.populate(address, 4 * PAGE, True)
    assert caught.value.errno == errno.EFAULT
    native.unmap(address, 4 * PAGE)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_copy_moves_every_byte_and_no_other(size: int, threads: int) -> None:
    for source_at, target_at in ((0, 0), (1, 0), (3, 5), (8, 1)):
        target = np.full(size + 16, 0xA5, dtype=np.uint8)
        native.copy(target.ctypes.data + target_at, RANDOM.ctypes.data + source_at, size, threads)
        assert np.array_equal(target[target_at : target_at + size], RANDOM[source_at : source_at + size])
        assert (target[:target_at] == 0xA5).all()
        assert (target[target_at + size :] == 0xA5).all()


# ---- the checksum, written again from the description in native/src/memory/checksum.cpp ----

MULTIPLY, SPREAD, PIECE = 0x9FB21C651E98DF25, 0xD6E8FEB86659FD93, MIB


def mixed(lane: int, word: int) -> int:
    product = ((lane ^ word) * MULTIPLY) & MASK
    return ((product << 29) | (product >> 35)) & MASK


def finished(value: int) -> int:
    value ^= value >> 32
    value = (value * SPREAD) & MASK
    value ^= value >> 29
    value = (value * MULTIPLY) & MASK
    return value ^ (value >> 32)


def piece_reference(data: bytes, seed: int) -> int:
    lanes = [finished((seed + (i + 1) * SPREAD) & MASK) for i in range(8)]
    keys = [finished(lane ^ MULTIPLY) for lane in lanes]
    words = np.frombuffer(data + bytes(-len(data) % 64), dtype="<u8").tolist()
    for block in range(len(words) // 8):
        for i in range(8):
            keyed = words[8 * block + i] ^ (keys[i] + block * SPREAD) & MASK
            lanes[i] = (lanes[i] + (keyed & 0xFFFFFFFF) * (keyed >> 32) + words[8 * block + (i ^ 1)]) & MASK
        if block % 16 == 15 and 64 * (block + 1) <= len(data):
            lanes = [((lane ^ lane >> 29) * MULTIPLY) & MASK for lane in lanes]
    result = finished((seed & MASK) ^ len(data))
    for lane in lanes:
        result = mixed(result, finished(lane))
    return finished(result)


def reference(data: bytes, seed: int) -> int:
    total = finished((seed + MULTIPLY) & MASK)
    for at in range(max(1, -(-len(data) // PIECE))):
        total = mixed(total, piece_reference(data[at * PIECE : (at + 1) * PIECE], seed + at))
    return finished(total ^ len(data))


def sum_of(data: Any, seed: int = 0, threads: int = 0) -> int:
    return native.checksum(data.ctypes.data, data.nbytes, seed, threads)


@given(st.binary(max_size=400), st.integers(0, MASK), st.integers(0, 15))
@settings(max_examples=200, deadline=None)
def test_checksum_is_the_reference(data: bytes, seed: int, offset: int) -> None:
    placed = np.frombuffer(bytes(offset) + data + b"\xff" * 9, dtype=np.uint8)
    assert native.checksum(placed.ctypes.data + offset, len(data), seed) == reference(data, seed)


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 777])
def test_checksum_of_several_pieces_is_the_reference(size: int) -> None:
    expected = reference(RANDOM[3 : 3 + size].tobytes(), 11)
    for threads in (0, 1, 2, 5):
        assert sum_of(RANDOM[3 : 3 + size], 11, threads) == expected


@pytest.mark.parametrize("size", [1, 8, 64, 1000, 4 * MIB + 100])
def test_checksum_notices_any_single_bit(size: int) -> None:
    data = RANDOM[:size].copy()
    before = sum_of(data)
    random = np.random.default_rng(size)
    for at in {0, size - 1, *random.integers(0, size, 20).tolist()}:
        bit = np.uint8(1 << int(random.integers(0, 8)))
        data[at] ^= bit
        assert sum_of(data) != before
        data[at] ^= bit
    assert sum_of(data) == before


def test_checksum_notices_what_weak_sums_miss() -> None:
    words = RANDOM[: 64 * 1024].copy().view("<u8")
    before = sum_of(words)
    swapped = words.copy()
    swapped[[8, 16]] = swapped[[16, 8]]  # two words of the same lane
    signs = words.copy()
    signs[[8, 16]] ^= np.uint64(1 << 63)  # two sign bits of the same lane
    far = words.copy()
    far[[8, 4096]] ^= np.uint64(1 << 63)
    zeros = [np.zeros(8192, dtype="<u8") for _ in range(2)]
    zeros[1][[8, 16]] = 1 << 63
    longer = np.concatenate([words, np.zeros(1, dtype="<u8")])
    assert before not in (sum_of(swapped), sum_of(signs), sum_of(far), sum_of(longer), sum_of(words, seed=1))
    assert sum_of(zeros[0]) != sum_of(zeros[1])
    assert len({sum_of(np.zeros(n, dtype=np.uint8)) for n in range(200)}) == 200


# ---- the process ----


def test_name_and_subreaper(children: Children) -> None:
    def body() -> None:
        native.set_name("ftrun-name-that-is-too-long")
        with open("/proc/self/comm") as comm:
            assert comm.read() == "ftrun-name-that\n"
        native.set_subreaper()
        reader, writer = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.read(reader, 1)  # until the process above has read who our parent is
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        os.write(writer, b"x")
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7  # the grandchild became ours

    assert children.wait(children.fork(body)) == 0


def test_unmap_frees_the_range(memfd: int, children: Children) -> None:
    os.ftruncate(memfd, mmap.PAGESIZE)
    address = native.map_fd(memfd, mmap.PAGESIZE)
    native.unmap(address, mmap.PAGESIZE)
    assert children.wait(children.fork(lambda: native.load64(address))) == -signal.SIGSEGV


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_is_sealed_with_length_sum_and_tag() -> None:
    slot = ctypes.create_string_buffer(native.SLOT_HEADER + 64)
    address = ctypes.addressof(slot) + -ctypes.addressof(slot) % 8
    native.slot_write(address, b"content", 7, 9)
    assert [native.load64(address + 8 * i) for i in range(3)] == [
        9,
        7,
        native.checksum(address + native.SLOT_HEADER, 7),
    ]
    assert ctypes.string_at(address + native.SLOT_HEADER, 7) == b"content"


def test_a_sample_notices_what_changes_most_of_a_range() -> None:
    data = RANDOM[: 4 * MIB].view(np.float32).copy()
    before = [native.sample(data.ctypes.data, data.nbytes, 64, turn) for turn in range(3)]
    assert len(set(before)) == 3, "others at each turn"
    assert before == [native.sample(data.ctypes.data, data.nbytes, 64, turn) for turn in range(3)]
    data[len(data) // 3 :] = 0.5
    assert all(native.sample(data.ctypes.data, data.nbytes, 64, turn) != sum_then for turn, sum_then in enumerate(before))


def test_a_sample_of_a_short_range_is_of_all_its_bytes() -> None:
    for size in (1, 1000, 64 * 64):
        data = RANDOM[:size].copy()
        before = native.sample(data.ctypes.data, data.nbytes, 64, 5)
        data[size // 2] ^= 1
        assert native.sample(data.ctypes.data, data.nbytes, 64, 5) != before


@given(st.integers(4096, 20_000), st.integers(0, MASK))
@settings(max_examples=50, deadline=None)
def test_every_turn_of_a_sample_reads_inside_the_range(size: int, turn: int) -> None:
    data = RANDOM[: size + 64].copy()
    before = native.sample(data.ctypes.data, size, 64, turn)
    data[size:] ^= 255
    assert native.sample(data.ctypes.data, size, 64, turn) == before
