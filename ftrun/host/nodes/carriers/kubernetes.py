"""Keeps records in the Kubernetes API: each is a Lease of the namespace, with the record in an annotation. Standard library only.

Theory of operation. A record's object has a name that follows from run, session and record (a digest: records have names that no object
may have). A creation is a POST, which the API server grants once; a record that its writer replaces is patched, and created if it is not
there. Every request may be sent twice, since an answer can be lost: a patch is the same when it is done again, and a POST that finds
the object reads who wrote it. A look lists the run's objects by their label, with a read that goes to the quorum of the store behind the
API server. No field of the Lease itself is used: its holder and times would be judged by clocks of several machines.

The pod's service account needs a role with get, list, create, patch and delete on leases in coordination.k8s.io
(docs/how-to/several-nodes.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.core.errors import UsageError
from ftrun.core.shape import loads
from ftrun.host.nodes.carriers.addresses import split_endpoint
from ftrun.host.nodes.carriers.carrier import OVER, Denied, Record, session
from ftrun.host.nodes.carriers.web import Line, client_tls

if TYPE_CHECKING:
    import ssl

SETTINGS = ("namespace", "token", "cacert", "insecure-skip-tls-verify")  # of --rdzv-conf
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a pod finds its namespace, token and authority
_GROUP = "coordination.k8s.io/v1"
_RUN, _NAME, _RECORD = "ftrun.dev/run", "ftrun.dev/name", "ftrun.dev/record"
_ATTEMPT = 5.0  # seconds at most for one request
_YES = ("true", "1", "yes")
_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409


@dataclass(frozen=True)
class KubernetesTerms:
    """Says how to reach the API. `tls` None: plain HTTP, as to `kubectl proxy`. `token`: the file of the token, None = no token."""

    host: str
    port: int
    namespace: str
    tls: ssl.SSLContext | None = None
    token: Path | None = None

    @property
    def where(self) -> str:
        return f"the Kubernetes API at {self.host}:{self.port} (namespace {self.namespace})"


def terms(
    endpoint: str, conf: Mapping[str, str], environ: Mapping[str, str] = os.environ, account: Path = _ACCOUNT
) -> KubernetesTerms:
    """Read where the API is, and how to reach it.

    Args:
        endpoint: [https://]HOST[:PORT], or http:// for `kubectl proxy`; empty: that of the cluster in which this pod runs.
        conf: Settings of --rdzv-conf; those of others are ignored.
        environ: Where a pod finds the API of its cluster.
        account: The folder of the pod's service account.

    Raises:
        UsageError: If this is no pod, or files cannot be read.
    """
    scheme, _, place = endpoint.rpartition("://")
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not place and not host:
        raise UsageError(
            "--rdzv-backend kubernetes finds the API by itself in a pod only; outside name it: --rdzv-endpoint http://127.0.0.1:8001 after "
            "`kubectl proxy`, and --rdzv-conf namespace=NAME"
        )
    if scheme not in ("", "http", "https"):
        raise UsageError(f"the Kubernetes endpoint {endpoint} must be http or https, not {scheme}")
    plain = scheme == "http"
    found = split_endpoint(place.rstrip("/"), 80 if plain else 443) if place else (host, int(port))
    namespace = conf.get("namespace") or _first_line(account / "namespace")
    if not namespace:
        raise UsageError("--rdzv-backend kubernetes needs --rdzv-conf namespace=NAME outside a pod")
    if not re.fullmatch(r"[a-z0-9-]{1,63}", namespace):
        raise UsageError(f"{namespace!r} is no name of a namespace of Kubernetes: small letters, digits and '-'")
    token = Path(conf["token"]) if conf.get("token") else account / "token"
    if conf.get("token") and not _first_line(token):
        raise UsageError(f"there is no token in {token} (--rdzv-conf token=FILE)")
    authority = conf.get("cacert") or (str(account / "ca.crt") if (account / "ca.crt").exists() else "")
    unverified = conf.get("insecure-skip-tls-verify", "").lower() in _YES
    tls = None if plain else client_tls("the Kubernetes API", authority, unverified=unverified)
    return KubernetesTerms(*found, namespace, tls, token if _first_line(token) else None)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class Api:
    """Sends requests about the leases of a namespace. `patience`: seconds for one request."""

    def __init__(self, found: KubernetesTerms, patience: float) -> None:
        self._terms = found
        self._line = Line(found.host, found.port, found.tls, min(_ATTEMPT, max(0.5, patience / 3)))
        self._token = ""  # as it was last read
        self._path = f"/apis/{_GROUP}/namespaces/{found.namespace}/leases"

    def ask(self, method: str, name: str = "", body: Mapping[str, Any] | None = None, query: str = "") -> tuple[int, Record]:
        """Send a request; return status and answer of one that was granted, or found no object or one of that name.

        Raises:
            OSError: If the API does not answer, or cannot at the moment.
            Denied: If it refuses this service account, or what answers is no such API.
        """
        path = self._path + (f"/{name}" if name else "") + query
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": kind, "Accept": "application/json"}
        if self._terms.token is not None:  # it is renewed every hour
            self._token = _first_line(self._terms.token) or self._token
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            try:
                status, answer = self._line.ask(method, path, data, headers)
            except OSError:  # the server may have closed an old connection
                status, answer = self._line.ask(method, path, data, headers)
        except OSError as error:
            raise OSError(f"{self._terms.where} does not answer: {error.strerror or error}") from None
        return status, self._judged(method, bool(name), status, answer)

    def _judged(self, method: str, named: bool, status: int, answer: bytes) -> Record:
        try:
            raw = loads(answer)
        except ValueError:
            raw = None
        why = str(raw.get("message", "")) if isinstance(raw, dict) else ""
        if status in (401, 403):
            raise Denied(
                f"{self._terms.where} refuses {method} on leases: {why or f'HTTP {status}'}; the service account needs a role with get, "
                f"list, create, patch and delete on leases in {_GROUP.partition('/')[0]}"
            )
        if status >= 500 or status in (408, 429) or (status == _CONFLICT and method == "PATCH"):
            raise OSError(f"{self._terms.where} does not answer: {why or f'HTTP {status}'}")
        if status == 422:
            raise Denied(f"{self._terms.where} refuses a record of this run: {why}")
        granted = status in (_OK, _CREATED) or (status == _NOT_FOUND and named) or (status == _CONFLICT and method == "POST")
        if not isinstance(raw, dict) or not granted:
            raise Denied(f"what answers as {self._terms.where} has no {_GROUP}: {why or f'HTTP {status}'}")
        return raw

    def local_addr(self) -> str:
        """Return this pod's address on the way to the API."""
        return self._line.local_addr()

    def close(self) -> None:
        self._line.close()


class Kubernetes:
    """A carrier in the Kubernetes API. Each method may also raise Denied, if the API refuses the request."""

    serves = False

    def __init__(self, api: Api, run_id: str) -> None:
        self._api = api
        self._run = run_id
        self._label = hashlib.sha256(run_id.encode()).hexdigest()[:40]  # a label may have 63 characters, and not all of a run's
        self._writer = os.urandom(8).hex()
        self._session = self._choose()
        self.local_addr = api.local_addr()

    def _choose(self) -> int:
        """Choose the number of this session, and delete what older ones left."""
        there = [(number, name) for number, name, _ in self._objects()]
        number, outdated = session({one for one, _ in there}, lambda one: (one, OVER) in there)
        for old, name in there:
            if old in outdated:
                self._api.ask("DELETE", self._object(old, name))
        return number

    def _objects(self) -> list[tuple[int, str, Record]]:
        """Return session, name and record of all objects of this run."""
        _, found = self._api.ask("GET", query=f"?labelSelector={_RUN.replace('/', '%2F')}%3D{self._label}")
        objects = []
        for item in found.get("items") or ():
            notes = item.get("metadata", {}).get("annotations") or {}
            number, _, name = str(notes.get(_NAME, "")).partition("/")
            record = _record(notes)
            if number.isdigit() and name and record is not None:
                objects.append((int(number), name, record))
        return objects

    def view(self) -> Mapping[str, Record]:
        return {name: found["record"] for number, name, found in self._objects() if number == self._session}

    def put(self, name: str, record: Record) -> None:
        change = {"metadata": {"annotations": {_RECORD: self._value(record)}}}
        status, _ = self._api.ask("PATCH", self._object(self._session, name), change)
        if status == _NOT_FOUND:
            self._api.ask("POST", body=self._lease(name, record))  # if it is there by now, the answer to our own first try was lost

    def create(self, name: str, record: Record) -> bool:
        status, _ = self._api.ask("POST", body=self._lease(name, record))
        if status != _CONFLICT:
            return True
        _, there = self._api.ask("GET", self._object(self._session, name))
        found = _record(there.get("metadata", {}).get("annotations") or {})
        return found is not None and found == {"writer": self._writer, "record": record}  # the answer to our own first try was lost

    def _object(self, number: int, name: str) -> str:
        return "ftrun-" + hashlib.sha256(f"{self._run}/{number}/{name}".encode()).hexdigest()[:40]

    def _lease(self, name: str, record: Record) -> Record:
        notes = {_NAME: f"{self._session}/{name}", _RECORD: self._value(record)}
        about = {"name": self._object(self._session, name), "labels": {_RUN: self._label}, "annotations": notes}
        return {"apiVersion": _GROUP, "kind": "Lease", "metadata": about}

    def _value(self, record: Record) -> str:
        return json.dumps({"writer": self._writer, "record": record}, ensure_ascii=False)  # annotations have room for 256 KiB

    def close(self) -> None:
        self._api.close()


def _record(notes: Mapping[str, Any]) -> Record | None:
    try:
        raw = loads(str(notes[_RECORD]).encode())
    except (ValueError, KeyError):
        return None  # somebody else's object
    return raw if isinstance(raw, dict) and isinstance(raw.get("record"), dict) else None
