"""Starts the exporter of a run's metrics on request (`--metrics-file`, `--metrics-port`), a process that only reads.

The launcher binds the port before it starts any process, so that a taken port is an error at once. The port stays the launcher's:
while a new exporter replaces a dead one, a request for the metrics waits.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ftrun.core.errors import UsageError
from ftrun.host.base.settings import Settings
from ftrun.host.services.services import Services

_LAST_LOOK = 5.0  # seconds that the exporter gets to write the end of the run
_STARTS = 5  # starts of the exporter in one run, at most


class Monitoring:
    """Exports the metrics of a run; does nothing unless an option asks for them.

    Raises:
        UsageError: The port or file cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = settings.metrics_file or ""
        self._listener: socket.socket | None = None
        self._starts = _STARTS
        if self._file:
            require_writable(Path(self._file), "--metrics-file")
        if settings.metrics_port is not None:
            self._listener = bound(settings.metrics_port, "--metrics-port")
        # the message for the user, "" without an HTTP endpoint
        self.where = f"metrics at {address(self._listener)}" if self._listener else ""

    def start(self, services: Services) -> str:
        """Start the exporter if an option asks for it; return a sentence about the error, "" = none."""
        if not self._file and self._listener is None:
            return ""
        if not self._starts:
            return "our exporter of metrics ended too often; there are none any more"
        self._starts -= 1
        try:
            services.start_metrics(self._file, None if self._listener is None else self._listener.fileno())
        except OSError as error:
            return f"no metrics: {error.strerror}"
        return ""

    def close(self, services: Services) -> None:
        """Let the exporter read the complete journal once more, then end it."""
        services.end_metrics(_LAST_LOOK)
        if self._listener is not None:
            self._listener.close()


def bound(port: int, option: str) -> socket.socket:
    """Return a listening socket on loopback.

    Raises:
        UsageError: The port cannot be bound; the message names `option`.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=16)
    except OSError as error:
        raise UsageError(
            f"{option} {port} cannot be had ({os.strerror(error.errno or 0)}); choose another one, 0 takes any free port",
            explain="F106",
        ) from None
    listener.set_inheritable(False)
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL of the metrics for Prometheus."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


def require_writable(path: Path, option: str) -> None:
    """Raise UsageError, which names `option`, when a file cannot be written there."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{option}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")
