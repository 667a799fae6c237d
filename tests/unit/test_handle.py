"""The handle that travels beside a segment's descriptor."""

from __future__ import annotations

import pytest

from ftrun.core.shared.handle import BYTES, Handle, Kind


def test_a_handle_comes_back_as_it_was() -> None:
    handle = Handle(Kind.CUDA, 40 << 30, bytes(range(16)), generation=7)
    assert len(handle.pack()) == BYTES == 64
    assert Handle.unpack(handle.pack()) == handle


@pytest.mark.parametrize("data", [b"", b"x" * 64, Handle(Kind.HOST, 1).pack()[:-1], b"ftsg\x02" + bytes(59)])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Handle.unpack(data)


def test_an_unknown_kind_is_refused() -> None:
    data = bytearray(Handle(Kind.HOST, 1).pack())
    data[6] = 9
    with pytest.raises(ValueError):
        Handle.unpack(bytes(data))
