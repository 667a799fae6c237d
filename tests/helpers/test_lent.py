"""What a transfer lends to the fd store: a new fd store gets it too, and it is gone when it was taken back."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ftrun.worker.link.fd_store import Lent
from tests.helpers.test_fd_store import Kept


def test_a_new_fd_store_gets_what_is_lent_now(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = Kept(tmp_path / "one")
    lent = Lent(first.client)
    fds = {name: os.memfd_create(name) for name in ("ring", "buffers")}
    try:
        assert all(lent.hand_on(1, name, 0, fd) for name, fd in fds.items())
        lent.take_back(1, "ring")
        assert first.client.get(1, "ring") is None
    finally:
        first.close()
    begin = time.monotonic()
    assert not lent.again(), "there is no fd store"
    assert time.monotonic() - begin < 5
    second = Kept(tmp_path / "two")
    try:
        (tmp_path / "two" / "fd-store.sock").rename(tmp_path / "one" / "fd-store.sock")
        assert lent.again()
        found = first.client.get(1, "buffers")
        assert found is not None and os.path.sameopenfile(found, fds["buffers"])
        os.close(found)
        assert first.client.get(1, "ring") is None
        lent.take_back(1, "buffers")
        assert first.client.get(1, "buffers") is None
    finally:
        second.close()
    for fd in fds.values():
        os.close(fd)
