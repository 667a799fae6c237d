"""The store's process: a TCPStore in which the workers of a world meet. Forked from the fork server, it outlives every worker."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from typing import Any, NoReturn

from ftrun.core.shared import wire
from ftrun.helpers import forkable

_EVERYWHERE = "0.0.0.0"


_VACATED = 5.0  # seconds in which a store that was ended has certainly left its port


def _listen(host: str, port: int, only: bool) -> socket.socket:
    """Raises OSError."""
    # bound by us: torch would listen on every interface
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + _VACATED
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and host != _EVERYWHERE:
                # others reach us by an address that this machine does not know
                host, family = _EVERYWHERE, socket.AF_INET
            elif error.errno != errno.EADDRINUSE or not port:
                raise
            elif not only:
                port = 0  # somebody else has it by now
            elif time.monotonic() > deadline:
                raise
            else:
                time.sleep(0.05)  # the store before this one is just ending


def _answer(own: socket.socket, store: Any) -> None:
    """Say that the store is alive when asked, once its own thread has answered too. Returns when nobody will ask again."""
    try:
        wire.send(own, {"op": "ready"})
        while wire.receive(own) is not None:
            store.check(["alive"])
            wire.send(own, {"op": "alive"})
    except OSError:
        pass


def serve(launcher: socket.socket, own: int, order: dict[str, Any]) -> NoReturn:
    """Serve a store on the host and port that the launcher ordered, until the launcher closes `own`, the store's own socket to it."""
    try:
        forkable.leave()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from ftrun import native

        native.set_name("ftrun store")
        answer = {"pid": os.getpid(), "host": order["host"], "order": order["order"]}
        try:
            listener = _listen(order["host"], order["port"], order["only"])
        except OSError as error:
            wire.send(
                launcher,
                {"op": "store-failed", **answer, "port": order["port"], "error": os.strerror(error.errno or 0)},
            )
            os._exit(1)
        bound, port = listener.getsockname()[:2]
        here = "127.0.0.1" if bound == _EVERYWHERE else bound
        # whoever connects from now on waits until the store answers
        wire.send(launcher, {"op": "store", **answer, "port": port})
        from datetime import timedelta

        from torch.distributed import TCPStore

        store = TCPStore(here, port, None, True, timedelta(seconds=300), False, master_listen_fd=listener.detach())
        launcher.close()
        _answer(socket.socket(fileno=own), store)
        del store
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)
