"""Keeps records in etcd, through the JSON gateway that every etcd from 3.4 on serves on its client port. Standard library only.

The keys of a run begin with `ftrun/RUN/SESSION/`; sessions are numbered as in a shared folder.

Theory of operation. Every request may be sent twice, since an answer can be lost together with the etcd member that gave it. A put is the
same when it is done again. A creation is a transaction that writes only where no key is; if it finds a key, it also reads it. A value names
the agent that wrote it, so that one which is ours means that our own first try made it. A look asks only for keys that changed since the
revision of the look before, with a linearizable read: through another member it never sees an older state. A request goes to the member
that answered last, then to the others in turn.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.core.errors import UsageError
from ftrun.core.shape import loads
from ftrun.host.nodes.carriers.addresses import outbound_address, split_endpoint
from ftrun.host.nodes.carriers.carrier import OVER, CarrierLost, Denied, Record, session
from ftrun.host.nodes.carriers.web import Line, client_tls

if TYPE_CHECKING:
    import ssl

PORT = 2379
# settings of --rdzv-conf; each is also read from ETCDCTL_..., as etcdctl does
SETTINGS = ("protocol", "cacert", "cert", "key", "user", "password", "insecure-skip-tls-verify")
_ATTEMPT = 5.0  # seconds at most for one request to one member
# codes of gRPC in the gateway's answers
_INVALID, _DENIED, _PRECONDITION, _UNAUTHENTICATED = 3, 7, 9, 16
_YES = ("true", "1", "yes")


@dataclass(frozen=True)
class EtcdTerms:
    """Says how to reach etcd. `tls` None: plain HTTP. `user` empty: no authentication. `where`: its name in messages."""

    members: tuple[tuple[str, int], ...]
    where: str
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""


def terms(endpoint: str, conf: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> EtcdTerms:
    """Read where etcd is, and how to reach it.

    Args:
        endpoint: HOST[:PORT], or several with commas between; "http://" or "https://" may stand before each.
        conf: Settings of --rdzv-conf; those of others are ignored.
        environ: For settings that `conf` lacks, by etcdctl's names.

    Raises:
        UsageError: If they name no member, contradict each other, or name files that cannot be read.
    """

    def of(name: str) -> str:
        return conf.get(name) or environ.get("ETCDCTL_" + name.upper().replace("-", "_"), "")

    members, schemes = [], set()
    for one in filter(None, map(str.strip, endpoint.split(","))):
        scheme, _, place = one.rpartition("://")
        schemes.add(scheme or of("protocol") or ("https" if of("cacert") or of("cert") else "http"))
        members.append(split_endpoint(place.rstrip("/"), PORT))
    if not members:
        raise UsageError("--rdzv-backend etcd needs --rdzv-endpoint HOST[:PORT][,HOST[:PORT]...], the members of an etcd")
    if len(schemes) > 1 or not schemes <= {"http", "https"}:
        raise UsageError(f"the etcd endpoint {endpoint} must be all http or all https, not {', '.join(sorted(schemes))}")
    user, _, password = of("user").partition(":")
    unverified = of("insecure-skip-tls-verify").lower() in _YES
    tls = client_tls("etcd", of("cacert"), of("cert"), of("key"), unverified) if "https" in schemes else None
    if tls is None and (of("cacert") or of("cert")):
        raise UsageError(f"the etcd endpoint {endpoint} is http, but cacert or cert is set; leave them out, or use https")
    return EtcdTerms(tuple(members), f"etcd at {endpoint}", tls, user, of("password") or password)


class _Refused(Exception):
    """etcd answered a request with an error. `code`: of gRPC, 0 = none."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Gateway:
    """Sends requests to the JSON gateway of a member that answers. `patience`: seconds for one request, over all members."""

    def __init__(self, etcd: EtcdTerms, patience: float) -> None:
        self._etcd = etcd
        self._timeout = min(_ATTEMPT, max(0.5, patience / (2 * len(etcd.members) + 1)))
        self._at = 0  # number of the member that is asked first
        self._line: Line | None = None
        self._token = ""

    def ask(self, path: str, body: Mapping[str, Any]) -> Record:
        """Send a request, and return the answer.

        Raises:
            OSError: If no member answers, or none can at the moment.
            Denied: If etcd does not know the user, or what answers is no etcd.
        """
        trouble: Exception = OSError("no member")
        for number in range(len(self._etcd.members) + 1):
            if number > 1:  # the first is asked twice: the member may have closed an old connection
                self._at = (self._at + 1) % len(self._etcd.members)
            try:
                return self._authorized(path, body)
            except _Refused as error:
                if error.code in (_INVALID, _DENIED, _UNAUTHENTICATED):
                    who = f"user {self._etcd.user}" if self._etcd.user else "a request without a user (--rdzv-conf user=NAME:PASSWORD)"
                    raise Denied(f"{self._etcd.where} refuses {who}: {error}") from None
                trouble = error  # this member has no leader, no room, or is just starting
            except (OSError, ValueError) as error:
                trouble = error
            self.close()
        why = getattr(trouble, "strerror", "") or str(trouble) or type(trouble).__name__
        raise OSError(f"{self._etcd.where} does not answer: {why}") from None

    def _authorized(self, path: str, body: Mapping[str, Any]) -> Record:
        if self._etcd.user and not self._token:
            self._log_in()
        try:
            return self._post(path, body)
        except _Refused as error:
            expired = error.code == _UNAUTHENTICATED or "invalid auth token" in str(error)
            if not self._etcd.user or not expired:
                raise
        self._log_in()  # the token was too old, or that member did not know it
        return self._post(path, body)

    def _log_in(self) -> None:
        self._token = ""
        try:
            self._token = str(self._post("auth/authenticate", {"name": self._etcd.user, "password": self._etcd.password})["token"])
        except _Refused as error:
            if error.code != _PRECONDITION:  # this etcd asks nobody who it is
                raise
            self._token = ""

    def _post(self, path: str, body: Mapping[str, Any]) -> Record:
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        line = self._line or Line(*self._etcd.members[self._at], self._etcd.tls, self._timeout)
        self._line = line
        status, data = line.ask("POST", f"/v3/{path}", json.dumps(body).encode(), headers)
        try:
            raw = loads(data)
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            if status >= 500:
                raise OSError(f"HTTP {status} from {line.where}")  # a proxy before an etcd that is down
            raise Denied(
                f"what listens on {line.where} does not answer as etcd 3.4 or later does (HTTP {status}); is --rdzv-endpoint the client "
                "port of etcd, and is its gRPC gateway on?"
            )
        if status != 200:
            raise _Refused(int(raw.get("code") or 0), str(raw.get("message") or raw.get("error") or f"HTTP {status}"))
        return raw

    def local_addr(self) -> str:
        """Return this machine's address on the way to etcd; towards other machines if etcd runs on this one."""
        return self._line.local_addr() if self._line is not None else outbound_address()

    def close(self) -> None:
        """Hang up."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


class Etcd:
    """A carrier in etcd. Each method may also raise Denied, if etcd refuses the request."""

    serves = False

    def __init__(self, gateway: Gateway, run_id: str) -> None:
        self._gateway = gateway
        self._run = f"ftrun/{run_id}/"
        self._prefix = self._session()
        self._writer = os.urandom(8).hex()
        self._records: dict[str, Record] = {}
        self._revision = 0  # of the last look
        self.local_addr = gateway.local_addr()

    def _session(self) -> str:
        """Choose the prefix of this session's keys, and delete what older ones left."""
        answer = self._gateway.ask("kv/range", {**_under(self._run), "keys_only": True})
        names = [_text(kv["key"]).removeprefix(self._run) for kv in answer.get("kvs", ())]
        numbers = {int(first) for name in names if (first := name.partition("/")[0]).isdigit()}
        number, outdated = session(numbers, lambda one: f"{one}/{OVER}" in names)
        for old in outdated:
            self._gateway.ask("kv/deleterange", _under(f"{self._run}{old}/"))
        return f"{self._run}{number}/"

    def view(self) -> Mapping[str, Record]:
        answer = self._gateway.ask("kv/range", {**_under(self._prefix), "min_mod_revision": str(self._revision + 1)})
        revision = int(answer["header"]["revision"])
        if revision < self._revision:
            raise CarrierLost(f"etcd went back from revision {self._revision} to {revision}: it was set up anew, or its data restored")
        for kv in answer.get("kvs", ()):
            record = _record(kv)
            if record is not None:
                self._records[_text(kv["key"]).removeprefix(self._prefix)] = record
        self._revision = revision
        return self._records

    def put(self, name: str, record: Record) -> None:
        self._gateway.ask("kv/put", {"key": _bytes(self._prefix + name), "value": self._value(record)})

    def create(self, name: str, record: Record) -> bool:
        key, value = _bytes(self._prefix + name), self._value(record)
        answer = self._gateway.ask(
            "kv/txn",
            {
                "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": key, "value": value}}],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        if answer.get("succeeded"):
            return True
        there = [kv.get("value") for one in answer.get("responses", ()) for kv in one.get("response_range", {}).get("kvs", ())]
        return there == [value]

    def _value(self, record: Record) -> str:
        return _bytes(json.dumps({"writer": self._writer, "record": record}))

    def close(self) -> None:
        self._gateway.close()


def _under(prefix: str) -> dict[str, str]:
    """Return the range of all keys that begin with `prefix`."""
    return {"key": _bytes(prefix), "range_end": _bytes(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


def _bytes(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(data: str) -> str:
    return base64.b64decode(data).decode(errors="replace")


def _record(kv: Mapping[str, Any]) -> Record | None:
    try:
        raw = loads(base64.b64decode(kv["value"]))
        record = raw["record"]
    except (ValueError, KeyError, TypeError):
        return None  # somebody else wrote under our prefix
    return record if isinstance(record, dict) else None
