"""Hands a run's figures to Prometheus: a text file that is replaced whole, and a small HTTP server on loopback.

Started by the launcher as a process of its own, or by hand with `ftrun metrics`: it reads the run directory and nothing
waits for it. It ends when the launcher does, after a last look, so that the file holds how the run ended.
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

INTERVAL = 5.0  # seconds between two writings of the file
_PATIENCE = 5.0  # seconds that a reader of the HTTP server may be slow
_BEGIN = 10.0  # seconds that a run may need to make its board


class Exporter:
    """Looks at one run on request.

    Raises:
        OSError
        PlatformError: When there is nothing to look at.
    """

    def __init__(self, run: RunInfo) -> None:
        self._watcher = RunWatcher(run)
        self._lock = threading.Lock()
        self._text = ""

    def close(self) -> None:
        self._watcher.close()

    def look(self) -> str:
        """The figures now.

        Raises:
            FtrunError: When they cannot be read.
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
        """The figures now, or the last ones that could be read."""
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
        """Nobody wants a line for each scrape."""


def serve(exporter: Exporter, listener: socket.socket) -> http.server.ThreadingHTTPServer:
    """Answer on a listening socket, in threads of their own, until the process ends."""
    handler = type("Handler", (_Handler,), {"exporter": exporter})
    server = http.server.ThreadingHTTPServer(listener.getsockname()[:2], handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, name="ftrun-metrics", daemon=True).start()
    return server


def keep(exporter: Exporter, run: RunInfo, path: Path | None, interval: float, launcher: socket.socket | None) -> None:
    """Write the file again and again until the run has ended, or its `launcher` has; once more at the end."""
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
    """True when it is over."""
    if launcher is None:
        return wait_for(lambda: not run.alive(), seconds, min(0.5, seconds))
    deadline = time.monotonic() + seconds
    while select.select([launcher], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            if wire.receive(launcher) is None:
                return True
            wire.send(launcher, {"op": "alive"})  # nothing else is asked
        except OSError:
            return True
    return False


def main() -> None:
    """Of the process that the launcher starts: RUN_DIR FILE-or-empty "listen"-or-empty. Descriptors 3: launcher, 4: what to listen on."""
    run_dir, file, listen = sys.argv[1:4]
    launcher = socket.socket(fileno=3)
    # a terminal's Ctrl-C is for the launcher; our end is that of the launcher
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    native.set_name("ftrun metrics")
    run = read_run(Path(run_dir))
    exporter = _begin(run)
    if run is None or exporter is None:
        return
    if listen:
        serve(exporter, socket.socket(fileno=4))
    with contextlib.suppress(OSError):  # it died already, which is heard next
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
