"""Checks rendezvous and network: hard links in a rendezvous folder, file locks in the run folder, host names, interfaces, ports."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from ftrun.core import paths
from ftrun.core.errors import FtrunError
from ftrun.core.system.procfs import mount
from ftrun.doctor.findings import BROKEN, OK, WARNING, Finding

AREA, RENDEZVOUS = "network", "rendezvous"
_SIOCGIFADDR = 0x8915
_SKEW = 2.0  # the most seconds between this machine's clock and the file server's
_CONNECT = 3.0
_ANOTHER_ROOT = f"set {paths.ENV_RUNS_ROOT} to a private folder, best on a tmpfs"
_PORTS = {29400: "c10d", 29500: "static"}


# ---- rendezvous ----


def is_folder(endpoint: str) -> bool:
    """Does --rdzv-endpoint name a folder, not HOST[:PORT]?"""
    return os.sep in endpoint or os.path.isdir(endpoint)


def rendezvous(endpoint: str | None) -> Iterator[Finding]:
    """Check the folder (or host and port) given with --rdzv-endpoint, else this user's run folder."""
    if endpoint is not None and not is_folder(endpoint):
        yield _reach(endpoint)
        return
    try:
        folder = Path(endpoint) if endpoint is not None else paths.runs_root()
    except FtrunError:
        return  # the memory checks report it
    if not folder.is_dir():
        yield Finding(
            RENDEZVOUS, "folder", BROKEN, f"{folder} is not a directory here", "create it, or mount it on every node"
        )
        return
    yield _locks(folder) if endpoint is None else _links(folder)
    yield _clock(folder)


def _reach(endpoint: str) -> Finding:
    """Check HOST[:PORT] of a c10d rendezvous. Its server starts with the run, so a refused connection is fine."""
    from ftrun.host.nodes.carriers.addresses import split_endpoint

    host, port = split_endpoint(endpoint, 29400)
    try:
        socket.create_connection((host, port), _CONNECT).close()
    except ConnectionRefusedError:
        return Finding(RENDEZVOUS, "endpoint", OK, f"{host}:{port}: the host answers, nobody listens there yet")
    except OSError as error:
        fix = "check the name, and that no firewall drops the port"
        return Finding(RENDEZVOUS, "endpoint", BROKEN, f"{host}:{port}: {error.strerror or error}", fix)
    return Finding(RENDEZVOUS, "endpoint", OK, f"{host}:{port}: somebody listens there")


def _links(folder: Path) -> Finding:
    from ftrun.host.nodes.carriers.folder import makes_links

    kind = mount(folder)
    try:
        if makes_links(folder):
            return Finding(RENDEZVOUS, "hard links", OK, f"{folder} ({kind}): a record is created once")
        why = "none can be made"
    except OSError as error:
        why = str(error.strerror)
    return Finding(RENDEZVOUS, "hard links", BROKEN, f"{folder} ({kind}): {why}", "use another folder, or --rdzv-backend c10d")


def _locks(folder: Path) -> Finding:
    kind = mount(folder)
    path = folder / f".ftrun-doctor.{socket.gethostname()}.{os.getpid()}"
    try:
        excluded, released = _try_lock(path)
    except OSError as error:
        return Finding(RENDEZVOUS, "file locks", BROKEN, f"{folder} ({kind}): {error.strerror}", _ANOTHER_ROOT)
    if not excluded or not released:
        what = "two processes got one lock" if not excluded else "a dead process kept its lock"
        return Finding(RENDEZVOUS, "file locks", BROKEN, f"{folder} ({kind}): {what}", _ANOTHER_ROOT)
    return Finding(RENDEZVOUS, "file locks", OK, f"{folder} ({kind}): hold, and end with their process")


def _try_lock(path: Path) -> tuple[bool, bool]:
    """Return two answers: did a child's lock keep this process out, and could this process take the lock after the child's death?"""
    ready, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(held, b"x")
            time.sleep(60)
        except OSError as error:
            os.write(held, struct.pack("<i", error.errno or 5))
        finally:
            os._exit(0)
    os.close(held)
    try:
        answer = os.read(ready, 4)
        if answer != b"x":
            number = struct.unpack("<i", answer)[0] if len(answer) == 4 else 5
            raise OSError(number, os.strerror(number))
        excluded = not _take(path)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        pid = 0
        return excluded, _take(path)
    finally:
        os.close(ready)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
        path.unlink(missing_ok=True)


def _take(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _clock(folder: Path) -> Finding:
    path = folder / f".ftrun-doctor-clock.{socket.gethostname()}.{os.getpid()}"
    try:
        path.touch()
        skew = path.stat().st_mtime - time.time()
        path.unlink()
    except OSError as error:
        return Finding(RENDEZVOUS, "clock", WARNING, f"{folder}: {error.strerror}")
    if abs(skew) > _SKEW:
        return Finding(
            RENDEZVOUS,
            "clock",
            WARNING,
            f"the file server's clock is {skew:+.1f} s from ours",
            "run chrony or ntpd on both",
        )
    return Finding(RENDEZVOUS, "clock", OK, "the folder's and ours agree")


# ---- network ----


def check() -> Iterator[Finding]:
    addresses = dict(_interfaces())
    shown = ", ".join(f"{name} {address}" for name, address in addresses.items()) or "none with an IPv4 address"
    yield Finding(AREA, "interfaces", OK, shown)
    yield _loopback()
    yield _gloo(addresses)
    yield _nccl(addresses)
    yield _ports()


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield name and address of the interfaces that have an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                raw = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(raw[20:24])


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT)
            with socket.create_connection(server.getsockname(), _CONNECT):
                server.accept()[0].close()
    except OSError as error:
        return Finding(AREA, "loopback", BROKEN, f"127.0.0.1: {error}", "bring it up: ip link set lo up")
    return Finding(AREA, "loopback", OK, "ranks of one node meet at 127.0.0.1")


def _gloo(addresses: dict[str, str]) -> Finding:
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        missing = [name for name in named.split(",") if name not in addresses]
        if missing:
            return Finding(
                AREA,
                "Gloo",
                BROKEN,
                f"GLOO_SOCKET_IFNAME names {missing[0]}, which has no address here",
                f"name one of {', '.join(addresses)}",
            )
        return Finding(AREA, "Gloo", OK, f"{named} (GLOO_SOCKET_IFNAME)")
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Finding(AREA, "Gloo", WARNING, f"lo on one node; on several nodes none: {host} does not resolve ({error.args[-1]})",
                       "put the name into /etc/hosts, or set GLOO_SOCKET_IFNAME")  # fmt: skip
    name = next((n for n, a in addresses.items() if a == address), "")
    if address.startswith("127."):
        return Finding(AREA, "Gloo", WARNING, f"lo on one node; on several nodes too: {host} is {address}, where no other node comes",
                       "give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME or --local-addr")  # fmt: skip
    if not name:
        return Finding(AREA, "Gloo", WARNING, f"lo on one node; on several nodes none: {host} is {address}, which is not ours",
                       "mend /etc/hosts, or set GLOO_SOCKET_IFNAME")  # fmt: skip
    return Finding(AREA, "Gloo", OK, f"lo on one node; {name} ({address}) between nodes, as {host} resolves")


def _nccl(addresses: dict[str, str]) -> Finding:
    """Report the interface that NCCL would choose."""
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    verbs = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    chosen = nccl_choice(wanted, list(addresses))
    data = f"data over {', '.join(verbs)}; " if verbs else ""
    if not chosen:
        why = (
            f"NCCL_SOCKET_IFNAME={wanted} fits none of {', '.join(addresses)}"
            if wanted
            else "no interface has an address"
        )
        return Finding(AREA, "NCCL", BROKEN if wanted else WARNING, why, "name an interface that is up")
    return Finding(
        AREA, "NCCL", OK, f"{data}{chosen} ({addresses[chosen]})" + (" (NCCL_SOCKET_IFNAME)" if wanted else "")
    )


def nccl_choice(wanted: str, names: list[str]) -> str:
    """Return the interface that NCCL takes for NCCL_SOCKET_IFNAME=`wanted`, "" if none fits.

    Without a wish NCCL takes an ib interface first, then any other, then docker, then lo.
    """
    if wanted:
        exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
        listed = [part for part in wanted.lstrip("^=").split(",") if part]

        def fits(name: str) -> bool:
            return any(name == part if exact else name.startswith(part) for part in listed) != exclude

        return next(filter(fits, names), "")
    for pattern in (r"ib", r"(?!docker|lo)", r"docker", r"lo"):
        found = next((name for name in names if re.match(pattern, name)), "")
        if found:
            return found
    return ""


def _ports() -> Finding:
    taken = []
    for port, kind in _PORTS.items():
        try:
            socket.create_server(("", port)).close()
        except OSError:
            taken.append(f"{port} ({kind})")
    if taken:
        return Finding(
            AREA,
            "ports",
            WARNING,
            f"in use: {', '.join(taken)}",
            "give another --master-port or --rdzv-endpoint HOST:PORT (several nodes only)",
        )
    return Finding(AREA, "ports", OK, "29400 and 29500, where nodes meet by default, are free")
