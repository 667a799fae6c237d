"""An etcd to test with: Debian's, where it is installed or `make engines` has fetched it, and one in this process that can misbehave."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.harness import free_port

FETCHED = ROOT / "build" / "etcd" / "usr" / "bin" / "etcd"


def installed() -> str | None:
    """Return the path of an etcd, None without one."""
    return shutil.which("etcd") or (str(FETCHED) if FETCHED.exists() else None)


needs_etcd = pytest.mark.skipif(installed() is None, reason="no etcd here; `make engines` fetches one")


class RealEtcd:
    """Members of one etcd, as processes. `tls`: options of the server for its clients' side."""

    def __init__(self, folder: Path, members: int = 1, scheme: str = "http", tls: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._scheme = scheme
        self._tls = tls
        self.ports = [free_port() for _ in range(members)]
        self._peers = [free_port() for _ in range(members)]
        self.members: list[subprocess.Popen[bytes] | None] = [None] * members
        for number in range(members):
            self.start(number)
        for port in self.ports:
            _answers(port)

    @property
    def endpoint(self) -> str:
        return ",".join(f"{self._scheme}://127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        program = installed()
        assert program is not None
        client = f"{self._scheme}://127.0.0.1:{self.ports[number]}"
        peer = f"http://127.0.0.1:{self._peers[number]}"
        cluster = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        words = [
            *("--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--heartbeat-interval", "50", "--election-timeout", "500"),
        ]
        log = (self._folder / f"m{number}.log").open("ab")
        self.members[number] = subprocess.Popen([program, *words, *self._tls], stdout=log, stderr=log)
        log.close()

    def kill(self, number: int) -> None:
        member, self.members[number] = self.members[number], None
        if member is not None:
            member.kill()
            member.wait(10.0)

    def close(self) -> None:
        for number in range(len(self.members)):
            self.kill(number)


def _answers(port: int) -> None:
    deadline = time.monotonic() + 20.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class OwnEtcd:
    """As much of etcd's gateway as a carrier asks for, in this process. `before`: called with each request; what it returns is sent."""

    def __init__(self, password: str = "") -> None:
        self.password = password
        self.keys: dict[str, tuple[str, int, int]] = {}  # base64 of the key -> value, revisions of its creation and last change
        self.revision = 1
        self.token = "first"
        self.before: Callable[[str, dict[str, Any]], tuple[int, bytes] | None] = lambda path, body: None
        self.lost: set[str] = set()  # paths whose next answer is lost
        self._lock = threading.Lock()
        own = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.removeprefix("/v3/")
                with own._lock:
                    status, data = own.before(path, body) or own._answer(path, body, self.headers.get("Authorization"))
                if path in own.lost:
                    own.lost.discard(path)
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, body: dict[str, Any], token: str | None) -> tuple[int, bytes]:
        if path == "auth/authenticate":
            if not self.password:
                return refusal(9, "etcdserver: authentication is not enabled", 412)
            if body["password"] != self.password:
                return refusal(3, "etcdserver: authentication failed, invalid user ID or password", 400)
            return 200, json.dumps({"token": self.token}).encode()
        if self.password and token != self.token:
            return refusal(16, "etcdserver: invalid auth token", 401)
        done = getattr(self, "_" + path.rpartition("/")[2])(body)
        return 200, json.dumps({"header": {"revision": str(self.revision)}, **done}).encode()

    def _range(self, body: dict[str, Any]) -> dict[str, Any]:
        low, high = base64.b64decode(body["key"]), base64.b64decode(body.get("range_end", ""))
        least = int(body.get("min_mod_revision", 0))
        found = []
        for key, (value, created, changed) in sorted(self.keys.items(), key=lambda kv: base64.b64decode(kv[0])):
            raw = base64.b64decode(key)
            if (low <= raw < high if high else raw == low) and changed >= least:
                entry = {"key": key, "create_revision": str(created), "mod_revision": str(changed)}
                found.append(entry if body.get("keys_only") else {**entry, "value": value})
        return {"kvs": found} if found else {}

    def _put(self, body: dict[str, Any]) -> dict[str, Any]:
        self.revision += 1
        created = self.keys.get(body["key"], ("", self.revision, 0))[1]
        self.keys[body["key"]] = (body["value"], created, self.revision)
        return {}

    def _deleterange(self, body: dict[str, Any]) -> dict[str, Any]:
        for entry in self._range(body).get("kvs", ()):
            del self.keys[entry["key"]]
        return {}

    def _txn(self, body: dict[str, Any]) -> dict[str, Any]:
        (compare,) = body["compare"]
        assert compare == {"key": compare["key"], "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        if compare["key"] not in self.keys:
            self._put(body["success"][0]["request_put"])
            return {"succeeded": True}
        return {"responses": [{"response_range": self._range(body["failure"][0]["request_range"])}]}


def refusal(code: int, text: str, status: int) -> tuple[int, bytes]:
    """An answer as etcd refuses."""
    return status, json.dumps({"error": text, "message": text, "code": code}).encode()
