"""A connection over HTTP or HTTPS to one server, for carriers whose records a server keeps. Standard library only."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ftrun.core.errors import UsageError
from ftrun.host.nodes.carriers.addresses import is_loopback, outbound_address

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPConnection


class Line:
    """A connection that is made when it is needed, and kept. `tls` None: plain HTTP; `timeout`: seconds for each request."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, timeout: float) -> None:
        self.where = f"{host}:{port}"
        self._host, self._port, self._tls, self._timeout = host, port, tls, timeout
        self._connection: HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer.

        Raises:
            OSError: There is none.
        """
        from http.client import HTTPException

        try:
            connection = self._connected()
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        except HTTPException as error:
            self.close()
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        except OSError:
            self.close()
            raise

    def _connected(self) -> HTTPConnection:
        if self._connection is None:
            from http.client import HTTPConnection, HTTPSConnection

            made = (
                HTTPConnection(self._host, self._port, timeout=self._timeout)
                if self._tls is None
                else HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)
            )
            made.connect()
            self._connection = made
        return self._connection

    def local_addr(self) -> str:
        """Return this machine's address on the way to the server; towards other machines if the server is on this one."""
        if self._connection is not None and self._connection.sock is not None:
            addr = str(self._connection.sock.getsockname()[0])
            if not is_loopback(addr):
                return addr
        return outbound_address()

    def close(self) -> None:
        """Hang up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def client_tls(what: str, cacert: str, cert: str = "", key: str = "", unverified: bool = False) -> ssl.SSLContext:
    """Make the context for connections to `what`, from the files of its authority and of this client's certificate.

    Raises:
        UsageError: A file cannot be read, or is none.
    """
    import ssl

    try:
        context = ssl.create_default_context(cafile=cacert or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(name for name in (cacert, cert, key) if name)
        raise UsageError(f"cannot use the certificates for {what} ({names}): {error.strerror or error}") from None
    if unverified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
