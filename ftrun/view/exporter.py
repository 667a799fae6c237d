"""Export a run's metrics to Prometheus: a text file that is replaced whole, and a small HTTP server on loopback.

The launcher starts the exporter as a process of its own, or a person runs `ftrun metrics`. It only reads the run directory,
and no process waits for it. It ends after the launcher with a last look, so that the file holds the run's exit code.
"""

from __future__ import annotations

import contextlib
import http.server
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ftrun import native
from ftrun.core.errors import FtrunError
from ftrun.core.runs import RunInfo, read_run
from ftrun.core.shared import wire
from ftrun.core.system import files
from ftrun.core.text import tell
from ftrun.core.waiting import wait_for
from ftrun.view import metrics
from ftrun.view.snapshot import RunWatcher

INTERVAL = 5.0  # seconds between two writes of the file
_PATIENCE = 5.0  # timeout of an HTTP client, seconds
_BEGIN = 10.0  # seconds that a run may need to create its board


class Exporter:
    """Renders one run's metrics on request.

    Raises:
        OSError: The board cannot be opened.
        PlatformError: The board has another version or layout.
    """

    def __init__(self, run: RunInfo) -> None:
        self._watcher = RunWatcher(run)
        self._lock = threading.Lock()
        self._text = ""

    def close(self) -> None:
        self._watcher.close()

    def look(self) -> str:
        """Return the current metrics as text.

        Raises:
            FtrunError: The board cannot be read.
        """
        run = self._watcher.run
        with self._lock:
            try:
                picture = self._watcher.look(None if run.raw.get("world_size", 0) <= metrics.RANKS_MOST else 16)
            except OSError:
                raise FtrunError(f"run {run.run_id} starts or ends just now", explain="F103") from None
            self._text = metrics.render(picture, self._watcher.history.account, time.monotonic())
            return self._text

    def text(self) -> str:
        """Return the current metrics, or the last readable ones."""
        with contextlib.suppress(FtrunError):
            self.look()
        return self._text


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _PATIENCE
    exporter: Exporter

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404, "only /metrics is here")
            return
        body = self.exporter.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", metrics.CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: a line for each scrape is noise."""


def serve(exporter: Exporter, listener: socket.socket) -> http.server.ThreadingHTTPServer:
    """Serve a listening socket from background threads until the process ends."""
    handler = type("Handler", (_Handler,), {"exporter": exporter})
    server = http.server.ThreadingHTTPServer(listener.getsockname()[:2], handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, name="ftrun-metrics", daemon=True).start()
    return server


def keep(exporter: Exporter, run: RunInfo, path: Path | None, interval: float, launcher: socket.socket | None) -> None:
    """Write the file every `interval` seconds until the run or its `launcher` ends, and once more then."""
    told = False
    while True:
        ended = _wait(launcher, run, interval if path is not None else 60.0) if exporter.text() else True
        if path is not None:
            try:
                files.replace(path, exporter.text())
                told = False
            except OSError as error:
                if not told:
                    tell(f"metrics cannot be written to {path}: {error.strerror}")
                told = True
        if ended:
            return


def _wait(launcher: socket.socket | None, run: RunInfo, seconds: float) -> bool:
    """Wait up to `seconds`; return True once the run, or its launcher, has ended."""
    if launcher is None:
        return wait_for(lambda: not run.alive(), seconds, min(0.5, seconds))
    deadline = time.monotonic() + seconds
    while select.select([launcher], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            if wire.receive(launcher) is None:
                return True
            wire.send(launcher, {"op": "alive"})  # the launcher asks nothing else
        except OSError:
            return True
    return False


def main() -> None:
    """Run the exporter process of a launcher.

    Arguments: RUN_DIR, FILE or "", "listen" or "". Descriptors: 3 is the launcher, 4 the listening socket.
    """
    run_dir, file, listen = sys.argv[1:4]
    launcher = socket.socket(fileno=3)
    # a terminal's Ctrl-C is for the launcher; the exporter ends after the launcher
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    native.set_name("ftrun metrics")
    run = read_run(Path(run_dir))
    exporter = _begin(run)
    if run is None or exporter is None:
        return
    if listen:
        serve(exporter, socket.socket(fileno=4))
    with contextlib.suppress(OSError):  # the launcher died already; `keep` notices
        wire.send(launcher, {"op": "ready"})
    keep(exporter, run, Path(file) if file else None, INTERVAL, launcher)


def _begin(run: RunInfo | None) -> Exporter | None:
    deadline = time.monotonic() + _BEGIN
    while run is not None and time.monotonic() < deadline:
        try:
            return Exporter(run)
        except (OSError, FtrunError):
            time.sleep(0.05)
    return None
