"""The store's process: serves the TCPStore in which the workers of a world meet. The fork server forks it; it outlives every worker."""

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


_VACATED = 5.0  # seconds within which an ended store has certainly released its port


def _listen(host: str, port: int, only: bool) -> socket.socket:
    """Listen on host and port, or on any port if the port is taken and not `only`; raise OSError if no port can be bound."""
    # bind here, because torch would listen on every interface
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + _VACATED
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and host != _EVERYWHERE:
                # other nodes reach this one by an address that this machine does not have (NAT)
                host, family = _EVERYWHERE, socket.AF_INET
            elif error.errno != errno.EADDRINUSE or not port:
                raise
            elif not only:
                port = 0  # another process took it meanwhile
            elif time.monotonic() > deadline:
                raise
            else:
                time.sleep(0.05)  # the earlier store is just ending


def _answer(own: socket.socket, store: Any) -> None:
    """Answer each liveness question after the store's own thread has answered a query. Return when the launcher closes the socket."""
    try:
        wire.send(own, {"op": "ready"})
        while wire.receive(own) is not None:
            store.check(["alive"])
            wire.send(own, {"op": "alive"})
    except OSError:
        pass


def serve(launcher: socket.socket, own: int, order: dict[str, Any]) -> NoReturn:
    """Serve a store on the ordered host and port, until the launcher closes `own`, the store's own socket to it."""
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
        # a client that connects from now on waits until the store answers
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
