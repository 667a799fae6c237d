"""As much of the Kubernetes API as a carrier asks for, in this process: leases of one namespace."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "training"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
MOST = 256 << 10  # bytes of an object's annotations


class OwnKubernetes:
    """`before`: called with method and path of each request; what it returns is sent. `lost`: methods whose next answer is lost."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.leases: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[str, str], tuple[int, bytes] | None] = lambda method, path: None
        self.lost: set[str] = set()
        self._version = 0
        self._lock = threading.Lock()
        own = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                kind = self.headers.get("Content-Type", "")
                with own._lock:
                    own.asked.append((self.command, self.path))
                    answer = own.before(self.command, self.path)
                    if answer is None and own.token and self.headers.get("Authorization") != f"Bearer {own.token}":
                        answer = refusal(401, "Unauthorized")
                    status, data = answer or own._answer(self.command, self.path, json.loads(body or b"{}"), kind)
                if self.command in own.lost:
                    own.lost.discard(self.command)
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _do

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, method: str, url: str, body: dict[str, Any], kind: str) -> tuple[int, bytes]:
        parts = urlsplit(url)
        if not parts.path.startswith(LEASES):
            return refusal(404, "the server could not find the requested resource")
        name = parts.path[len(LEASES) :].strip("/")
        if method == "POST":
            return self._create(body)
        if method == "GET" and not name:
            (selector,) = parse_qs(parts.query)["labelSelector"]
            key, _, value = selector.partition("=")
            items = [lease for lease in self.leases.values() if lease["metadata"]["labels"].get(key) == value]
            return 200, json.dumps({"kind": "LeaseList", "items": items}).encode()
        if name not in self.leases:
            return refusal(404, f'leases.coordination.k8s.io "{name}" not found')
        if method == "DELETE":
            del self.leases[name]
            return 200, json.dumps({"kind": "Status", "status": "Success"}).encode()
        if method == "PATCH":
            assert kind == "application/merge-patch+json", kind
            self.leases[name]["metadata"]["annotations"].update(body["metadata"]["annotations"])
            self._changed(self.leases[name])
        return 200, json.dumps(self.leases[name]).encode()

    def _create(self, body: dict[str, Any]) -> tuple[int, bytes]:
        name = body["metadata"]["name"]
        if name in self.leases:
            return refusal(409, f'leases.coordination.k8s.io "{name}" already exists')
        if sum(len(key) + len(value.encode()) for key, value in body["metadata"]["annotations"].items()) > MOST:
            return refusal(422, "metadata.annotations: Too long: must have at most 262144 bytes")
        self.leases[name] = body
        self._changed(body)
        return 201, json.dumps(body).encode()

    def _changed(self, lease: dict[str, Any]) -> None:
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)


def refusal(code: int, text: str) -> tuple[int, bytes]:
    """An answer as the API refuses."""
    return code, json.dumps({"kind": "Status", "status": "Failure", "message": text, "code": code}).encode()
