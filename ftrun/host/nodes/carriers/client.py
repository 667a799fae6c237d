"""Keeps records with a server over TCP, and chooses the agent that serves.

The agent that owns the endpoint's address serves; the others connect, and try until their deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from ftrun.core.errors import UsageError
from ftrun.host.nodes.carriers.addresses import is_loopback, outbound_address
from ftrun.host.nodes.carriers.carrier import CarrierLost, Record
from ftrun.host.nodes.carriers.server import Server
from ftrun.host.nodes.messages import VERSION, pack, take

_FIRST_PAUSE = 0.05
_LAST_PAUSE = 1.0
_ATTEMPT = 5.0  # seconds for one attempt to connect
_PARTING = 5.0  # seconds that a server gives its clients to leave
_QUIET = 5.0  # seconds without a server that need no words: nodes do not start at once
_VACATED = 10.0  # seconds in which the server of an earlier run has certainly left the port


def listen(host: str, port: int, certain: bool) -> socket.socket | None:
    """Return a socket that listens on `host`:`port`, or None if this machine does not have the address or the port is taken.

    Args:
        certain: This node must serve, whatever the address looks like from inside.

    Raises:
        UsageError: With `certain`, if no socket can listen.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(address[0])) and not is_loopback(host):
            # many systems list their own name as a loopback address; for others it is a real one
            return socket.create_server(("", port), backlog=1024)
        return socket.create_server((str(address[0]), port), family=family, backlog=1024)
    except OSError as error:
        if not certain:
            return None
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {host}, where this node should serve the rendezvous, is in use by another process; "
                "choose another port on every node"
            ) from None
    # behind an address translation the machine does not know the address by which others reach it
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise UsageError(f"cannot serve the rendezvous on port {port}: {os.strerror(error.errno or 0)}") from None


class Client:
    """A carrier with a server over TCP. `local_addr` is this machine's address on the way to the server."""

    def __init__(self, sock: socket.socket, host: str, where: str, patience: float, server: Server | None) -> None:
        self._sock = sock
        self._where = where
        self._server = server
        self.serves = server is not None
        self._incoming = bytearray()
        self._records: dict[str, Record] = {}
        self._version = 0
        self.local_addr = str(sock.getsockname()[0])
        if is_loopback(self.local_addr) and not is_loopback(host):
            self.local_addr = outbound_address()
        sock.settimeout(patience)

    def greet(self, run_id: str) -> bool:
        """Join the server's run. Return False if it has ended.

        Raises:
            CarrierLost: The server serves another run, or another version.
            OSError: It does not answer.
        """
        try:
            answer = self._ask({"op": "hello", "version": VERSION, "run": run_id})
        except CarrierLost:
            raise ConnectionAbortedError("what listens there does not answer as ftrun does") from None
        if answer.get("over"):
            return False
        if answer.get("ok") is not True:
            raise CarrierLost(
                f"{self._where} serves another run than {run_id!r}, or another version of ftrun; give all nodes of a run the same "
                "id and the same ftrun, and each run an endpoint of its own"
            )
        return True

    def view(self) -> Mapping[str, Record]:
        more = True
        while more:
            answer = self._ask({"op": "changes", "since": self._version})
            self._version, more = answer["version"], answer["more"]
            self._records.update(answer["records"])
        return self._records

    def put(self, name: str, record: Record) -> None:
        self._ask({"op": "put", "name": name, "record": record})

    def create(self, name: str, record: Record) -> bool:
        return bool(self._ask({"op": "create", "name": name, "record": record})["ok"])

    def hang_up(self) -> None:
        self._sock.close()

    def close(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.stop(_PARTING)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._sock.sendall(pack(message))
            while (answer := take(self._incoming)) is None:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "connection closed")
                self._incoming += data
            return answer
        except (OSError, ValueError) as error:
            why = "no answer" if isinstance(error, TimeoutError) else str(getattr(error, "strerror", "") or error)
            raise CarrierLost(
                f"the rendezvous server on {self._where} is gone ({why}): the agent that served it ended or its "
                "machine cannot be reached"
            ) from None


def connect(
    host: str,
    port: int,
    run_id: str,
    *,
    serve: bool | None,
    join_timeout: float,
    patience: float,
    stopped: Callable[[], bool],
    on_trouble: Callable[[str], None],
) -> Client | None:
    """Connect to the server on `host`:`port`, and start it first if this machine is to serve. Return None when `stopped`.

    Args:
        serve: True = this node serves, False = another one does, None = the node that owns the address.
        join_timeout: Seconds until a server must have answered.
        patience: Seconds for each of its answers.
        stopped: Whether to give up.
        on_trouble: Called once with the reason if no server answers for some seconds.

    Raises:
        CarrierLost: No server answered in time, or it serves another run.
        UsageError: This node must serve, and cannot.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    began = time.monotonic()
    pause = _FIRST_PAUSE
    waited = False
    server: Server | None = None
    client: Client | None = None
    try:
        while not stopped():
            if server is None and serve is not False:
                server = _try_to_serve(host, port, run_id, serve is True, began + min(_VACATED, join_timeout))
            try:
                client = _dial(host, port, where, patience, server)
                if client.greet(run_id):
                    return client
                reason = "an earlier run is just ending there"
            except OSError as error:
                reason = error.strerror or str(error)
            if client is not None:
                client.hang_up()
            left = began + join_timeout - time.monotonic()
            if left <= 0:
                raise CarrierLost(
                    f"no rendezvous server on {where} within {join_timeout:g} s ({reason}): "
                    "is ftrun running on that node, and can this one reach the port?"
                )
            if not waited and join_timeout - left > _QUIET:
                waited = True
                on_trouble(f"no rendezvous server on {where} yet ({reason}); trying for {join_timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE)
    except BaseException:
        if client is not None:
            client.hang_up()
        if server is not None:
            server.stop(0.0)
        raise
    if server is not None:
        server.stop(0.0)
    return None


def _try_to_serve(host: str, port: int, run_id: str, certain: bool, patient_until: float) -> Server | None:
    """Start the server if this node can. An earlier run may hold the port until `patient_until`; after that raise UsageError."""
    try:
        listener = listen(host, port, certain)
    except UsageError:
        if time.monotonic() > patient_until:
            raise
        return None
    return Server(listener, run_id) if listener is not None else None


def _dial(host: str, port: int, where: str, patience: float, server: Server | None) -> Client:
    """Connect to the server. Raises OSError if that fails."""
    try:
        sock = socket.create_connection((host, port), timeout=_ATTEMPT)
    except OSError:
        if server is None:
            raise
        # behind an address translation the machine may not reach itself by its public address
        sock = socket.create_connection(("localhost", port), timeout=_ATTEMPT)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Client(sock, host, where, patience, server)
