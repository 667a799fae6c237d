"""Metrics of a run on request (`--metrics-file`, `--metrics-port`): has the exporter started, a process that only reads.

The port is bound here, before anything else is started, so that a taken one is an error at once. It stays ours: while one
exporter takes the place of another, a request for the figures waits.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ftrun.core.errors import UsageError
from ftrun.host.base.settings import Settings
from ftrun.host.services.services import Services

_LAST_LOOK = 5.0  # seconds the exporter gets to write how the run ended
_STARTS = 5  # of the exporter in one run, until it is given up


class Monitoring:
    """Exports the metrics of a run; does nothing when none were asked for.

    Raises:
        UsageError: For a port or file that cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = settings.metrics_file or ""
        self._listener: socket.socket | None = None
        self._starts = _STARTS
        if self._file:
            require_writable(Path(self._file), "--metrics-file")
        if settings.metrics_port is not None:
            self._listener = bound(settings.metrics_port, "--metrics-port")
        # the sentence for the person, "" without an HTTP endpoint
        self.where = f"metrics at {address(self._listener)}" if self._listener else ""

    def start(self, services: Services) -> str:
        """Have the exporter started, if there is something to export. Gives why it could not be, "" when all is well."""
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
        """The journal is complete: let the exporter have its last look."""
        services.end_metrics(_LAST_LOOK)
        if self._listener is not None:
            self._listener.close()


def bound(port: int, option: str) -> socket.socket:
    """A listening socket on loopback.

    Raises:
        UsageError: Naming the option.
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
    """The address at which Prometheus finds the figures."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


def require_writable(path: Path, option: str) -> None:
    """Raises UsageError naming the option, when a file cannot be put there."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{option}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")
