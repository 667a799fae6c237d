"""Addresses of endpoints and of this machine."""

from __future__ import annotations

import contextlib
import socket

from ftrun.core.errors import UsageError


def split_endpoint(endpoint: str, port: int) -> tuple[str, int]:
    """Host and port of `host[:port]` or `[v6 address][:port]`; `port` when none is given.

    Raises:
        UsageError
    """
    host, after = endpoint, ""
    if endpoint.startswith("["):
        host, _, after = endpoint[1:].partition("]")
        after = after.removeprefix(":")
    elif endpoint.count(":") == 1:
        host, _, after = endpoint.partition(":")
    if not host or (after and not (after.isdigit() and 0 < int(after) < 65536)):
        raise UsageError(f"rendezvous endpoint {endpoint!r} must be HOST or HOST:PORT")
    return host, int(after) if after else port


def is_loopback(host: str) -> bool:
    """Is this a name or an address of this machine for itself?"""
    return host in ("localhost", "::1") or host.startswith("127.")


def outbound_address() -> str:
    """This machine's address towards other machines; loopback when it has none. Sends nothing."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
