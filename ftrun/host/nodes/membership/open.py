"""Makes the terms of a rendezvous, and its carrier, from the options.

Every public function raises UsageError for options that do not fit together, before anything has started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ftrun.core.errors import UsageError
from ftrun.host.base.settings import Nodes, check_run_id
from ftrun.host.nodes.carriers import addresses, client, folder
from ftrun.host.nodes.carriers.carrier import Carrier, found_in_time
from ftrun.host.nodes.membership.session import Opener
from ftrun.host.nodes.membership.terms import Me, MemberTerms

C10D_PORT = 29400
STATIC_PORT = 29500
NO_NAME = "none"  # torchrun's run id when none is given
# seconds between two looks; Kubernetes' API server serves the whole cluster
_PAUSES = {"file": 0.2, "static": 0.1, "c10d": 0.1, "etcd": 0.2, "kubernetes": 1.0}
_LOOKS = 5  # the fewest looks within `keep_alive`
_DAY = 86400.0
_SECONDS = ("join_timeout", "timeout", "last_call_timeout", "keep_alive", "beat")
# settings of torchrun's stores that have no meaning here, so that existing command lines work
_IGNORED = ("read_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt")
_IGNORED_TOO = ("store_type", "use_libuv", "rank")


def _terms(nodes: Nodes, max_restarts: int) -> MemberTerms:
    conf = dict(nodes.conf)
    times = {name: _seconds(name, conf.pop(name)) for name in _SECONDS if name in conf}
    join = conf.pop("join", "late")
    conf.pop("is_host", None)
    of_backend = _settings_of(nodes.backend)
    for name in (*_IGNORED, *_IGNORED_TOO, *of_backend):
        conf.pop(name, None)
    if conf:
        known = ", ".join((*_SECONDS, "join", "is_host", *of_backend))
        raise UsageError(f"unknown rendezvous setting {', '.join(sorted(conf))}; known are {known}")
    if join not in ("late", "never"):
        raise UsageError(f"rendezvous setting join must be late or never, not {join!r}")
    if not 1 <= nodes.least <= nodes.most:
        raise UsageError(f"--nnodes {nodes.least}:{nodes.most}: the smaller number comes first, and 1 is the smallest")
    static = nodes.backend == "static"
    alive = times.get("keep_alive", MemberTerms.keep_alive)
    least = _LOOKS * _PAUSES.get(nodes.backend, 0.0)
    if not least <= alive <= _DAY:
        raise UsageError(
            f"rendezvous setting keep_alive must be from {least:g} to {_DAY:g} seconds with --rdzv-backend {nodes.backend}, not {alive:g}"
        )
    if static and nodes.least != nodes.most:
        raise UsageError(
            f"--nnodes {nodes.least}:{nodes.most} needs --rdzv-backend c10d, file, etcd or kubernetes: node ranks are fixed with static"
        )
    if static and not 0 <= (nodes.rank or 0) < nodes.most:
        raise UsageError(f"--node-rank {nodes.rank} must be from 0 to {nodes.most - 1}")
    if static and nodes.spares:
        raise UsageError("--spare-nodes needs --rdzv-backend c10d, file, etcd or kubernetes: node ranks are fixed with static")
    return MemberTerms(
        least=nodes.least,
        most=nodes.most,
        by_rank=static,
        max_restarts=max_restarts,
        join_timeout=times.get("join_timeout", times.get("timeout", MemberTerms.join_timeout)),
        last_call=times.get("last_call_timeout", MemberTerms.last_call),
        keep_alive=alive,
        beat=min(times.get("beat", MemberTerms.beat), alive / 4),
        grow=join == "late",
        spares=nodes.spares,
        replacements=nodes.max_replacements,
    )


def _settings_of(backend: str) -> tuple[str, ...]:
    # carriers over HTTP are imported where they are used: most runs are on one node
    if backend == "etcd":
        from ftrun.host.nodes.carriers import etcd

        return etcd.SETTINGS
    if backend == "kubernetes":
        from ftrun.host.nodes.carriers import kubernetes

        return kubernetes.SETTINGS
    return ()


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or (seconds == 0 and name != "last_call_timeout"):
        raise UsageError(f"rendezvous setting {name} must be a number of seconds, not {text!r}")
    return seconds


@dataclass(frozen=True)
class Rendezvous:
    """A rendezvous that can begin. `opener` makes its carrier; `pause`: seconds between two looks."""

    run_id: str
    terms: MemberTerms
    opener: Opener
    pause: float


def check(nodes: Nodes, max_restarts: int) -> MemberTerms:
    """Check the options of one of several nodes, and return the terms.

    Raises:
        UsageError
    """
    terms = _terms(nodes, max_restarts)
    if nodes.backend == "file":
        if not nodes.endpoint:
            raise UsageError("--rdzv-backend file needs --rdzv-endpoint FOLDER, a folder that every node sees")
    elif nodes.backend in ("static", "c10d"):
        _server_of(nodes)
    elif nodes.backend in ("etcd", "kubernetes"):
        _finder(nodes, "", terms)
    else:
        raise UsageError(f"--rdzv-backend {nodes.backend} is not supported; use static, c10d, file, etcd or kubernetes")
    return terms


def arrange(nodes: Nodes, run_id: str | None, nproc: int, max_restarts: int, snapshot_every: int = 0) -> Rendezvous | None:
    """Return the rendezvous with the other nodes, or None if the run has no others.

    Raises:
        UsageError
    """
    if nodes.most == 1 or nodes.standalone:
        return None
    name = check_run_id(run_id or NO_NAME)  # it names a folder
    terms = replace(check(nodes, max_restarts), snapshot_every=snapshot_every)
    return Rendezvous(name, terms, _opener(nodes, name, nproc, terms), _PAUSES[nodes.backend])


def _opener(nodes: Nodes, run_id: str, nproc: int, terms: MemberTerms) -> Opener:
    host = os.uname().nodename
    who = f"{host.partition('.')[0]}-{os.getpid()}-{os.urandom(4).hex()}"

    def me(addr: str) -> Me:
        return Me(who, host, nodes.local_addr or addr, nproc, (nodes.rank or 0) if terms.by_rank else nodes.rank)

    if nodes.backend == "file":
        return _folder_opener(nodes, run_id, terms, me)
    if nodes.backend in ("etcd", "kubernetes"):
        find = _finder(nodes, run_id, terms)
        return _opener_of(find, terms, me)
    server, port, serve = _server_of(nodes)

    def open_tcp(stopped: Callable[[], bool], on_trouble: Callable[[str], None]) -> tuple[Carrier, Me] | None:
        found = client.connect(
            server,
            port,
            run_id,
            serve=serve,
            join_timeout=terms.join_timeout,
            patience=terms.keep_alive,
            stopped=stopped,
            on_trouble=on_trouble,
        )
        return None if found is None else (found, me(found.local_addr))

    return open_tcp


def _folder_opener(nodes: Nodes, run_id: str, terms: MemberTerms, me: Callable[[str], Me]) -> Opener:
    own = folder.prepare(nodes.endpoint, run_id, terms.keep_alive)

    def open_folder(stopped: Callable[[], bool], on_trouble: Callable[[str], None]) -> tuple[Carrier, Me] | None:
        return folder.Folder(own, terms.keep_alive), me(addresses.outbound_address())

    return open_folder


class _Found(Carrier, Protocol):
    local_addr: str


def _finder(nodes: Nodes, run_id: str, terms: MemberTerms) -> Callable[[], _Found]:
    """Return what makes the carrier of a run in etcd or Kubernetes. Raises UsageError, before anything is asked."""
    if nodes.backend == "etcd":
        from ftrun.host.nodes.carriers import etcd

        gateway = etcd.Gateway(etcd.terms(nodes.endpoint, nodes.conf), terms.keep_alive)
        return lambda: etcd.Etcd(gateway, run_id)
    from ftrun.host.nodes.carriers import kubernetes

    api = kubernetes.Api(kubernetes.terms(nodes.endpoint, nodes.conf), terms.keep_alive)
    return lambda: kubernetes.Kubernetes(api, run_id)


def _opener_of(find: Callable[[], _Found], terms: MemberTerms, me: Callable[[str], Me]) -> Opener:
    def open_found(stopped: Callable[[], bool], on_trouble: Callable[[str], None]) -> tuple[Carrier, Me] | None:
        found = found_in_time(find, terms.join_timeout, stopped, on_trouble)
        return None if found is None else (found, me(found.local_addr))

    return open_found


def _server_of(nodes: Nodes) -> tuple[str, int, bool | None]:
    """Return host and port of the rendezvous server, and whether this node serves (None: if it owns the address)."""
    if nodes.backend == "static":
        if nodes.endpoint:
            host, port = addresses.split_endpoint(nodes.endpoint, STATIC_PORT)
        else:
            host, port = nodes.master_addr or "127.0.0.1", nodes.master_port or STATIC_PORT
        return host, port, not nodes.rank
    if not nodes.endpoint:
        raise UsageError("--rdzv-backend c10d needs --rdzv-endpoint HOST[:PORT], the same on every node")
    host, port = addresses.split_endpoint(nodes.endpoint, C10D_PORT)
    return host, port, _is_host(nodes.conf)


def _is_host(conf: Mapping[str, str]) -> bool | None:
    text = conf.get("is_host", "").strip().lower()
    if text not in ("", "true", "1", "yes", "t", "y", "false", "0", "no", "f", "n"):
        raise UsageError(f"rendezvous setting is_host must be true or false, not {text!r}")
    return None if not text else text in ("true", "1", "yes", "t", "y")
