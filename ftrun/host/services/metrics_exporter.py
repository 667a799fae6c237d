"""Metrics of a run on request (`--metrics-file`, `--metrics-port`): starts the exporter, a process that only reads.

The port is bound here, before anything else is started, so that a taken one is an error at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.core.errors import UsageError
from ftrun.host.base.settings import Settings

if TYPE_CHECKING:
    import subprocess

_EXPORTER = "from ftrun.view import exporter; exporter.main()"
_LAST_LOOK = 5.0  # seconds the exporter gets to write how the run ended


class Monitoring:
    """Nothing when no metrics were asked for. Errors: UsageError for a port or file that cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self._file = settings.metrics_file or ""
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if self._file:
            require_writable(Path(self._file), "--metrics-file")
        if settings.metrics_port is not None:
            self._listener = bound(settings.metrics_port, "--metrics-port")
        # the sentence for the person, "" without an HTTP endpoint
        self.where = f"metrics at {address(self._listener)}" if self._listener else ""

    def start(self, run_dir: Path, env: Mapping[str, str], log: Path) -> str:
        """Start the exporter, if there is something to export. Gives why it could not be, "" when all is well."""
        if not self._file and self._listener is None:
            return ""
        import subprocess

        from ftrun.host.services import spawn

        fd = "" if self._listener is None else str(self._listener.fileno())
        command = spawn.command(_EXPORTER, str(run_dir), self._file, fd)
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    env=dict(env),
                    pass_fds=() if self._listener is None else (self._listener.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            return f"no metrics: {error.strerror}"
        if self._listener is not None:
            self._listener.close()
        return ""

    def close(self) -> None:
        """The journal is complete: let the exporter have its last look, then make sure that it is gone."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        import subprocess

        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_LAST_LOOK)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bound(port: int, option: str) -> socket.socket:
    """A listening socket on loopback. Errors: UsageError naming the option."""
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=16)
    except OSError as error:
        raise UsageError(
            f"{option} {port} cannot be had ({os.strerror(error.errno or 0)}); choose another one, 0 takes any free port"
        ) from None
    listener.set_inheritable(False)
    return listener


def address(listener: socket.socket) -> str:
    """Where Prometheus finds the figures."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


def require_writable(path: Path, option: str) -> None:
    """Errors: UsageError naming the option, when a file cannot be put there."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{option}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")
