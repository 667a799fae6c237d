"""Counts what goes over the cables of a hub of machines on this machine: each message with its time, its two ends and its size.

    python -m tests.bench.tap FILE PORT...     in the namespace of the hub (tests/e2e/lan.py); writes FILE at the end of its input

A message is a packet that carries data, of TCP or UDP over IPv4: bare acknowledgements are none. The kernel hands over in one piece what a
sender gave it, if that is small; large pieces are cut. Times are those of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.e2e.lan import Lan

_SOL_PACKET, _STATISTICS, _IGNORE_OUTGOING, _RCVBUFFORCE, _ALL = 263, 6, 23, 33, 0x0003
_IP = b"\x08\x00"
_HEADS = 128  # bytes of a frame that hold its headers
_ROOM = 32 << 20  # bytes of a port's queue: gradients come in bursts
TCP, UDP = 6, 17

End = tuple[str, int]  # address and port


@dataclass(frozen=True)
class Message:
    """`ns`: when it left its sender's cable."""

    ns: int
    protocol: int
    by: End
    to: End
    size: int  # bytes of data


class Tap:
    """Counts from its making until `messages` is called. `nodes`: how many machines the hub has."""

    def __init__(self, lan: Lan, nodes: int, file: Path) -> None:
        self._file = file
        command = [sys.executable, "-m", "tests.bench.tap", str(file), *(lan.port(node) for node in range(nodes))]
        self._process = subprocess.Popen(lan.on_hub(command), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def messages(self) -> list[Message]:
        """End, and return all messages, in the order in which they came.

        Raises:
            AssertionError: If some were lost: the tap was too slow.
        """
        self._process.communicate()
        found = json.loads(self._file.read_text())
        assert self._process.returncode == 0 and found["dropped"] == 0, found["dropped"]
        return [Message(ns, protocol, (by, mine), (to, its), size) for ns, protocol, by, mine, to, its, size in found["messages"]]


def owners(lan: Lan, node: int) -> dict[tuple[End, End], int]:
    """Return which process of a machine holds each of its TCP connections, which are named by this end and the other one."""
    shown = subprocess.run(lan.command(node, ["ss", "-Htnp"]), check=True, capture_output=True, text=True).stdout
    found = {}
    for line in shown.splitlines():
        pid = re.search(r"pid=([0-9]+)", line)
        if pid is not None:
            _, _, _, mine, other, *_ = line.split()
            found[_end(mine), _end(other)] = int(pid[1])
    return found


def _end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return address.strip("[]").removeprefix("::ffff:"), int(port)


def _message(frame: bytes) -> tuple[int, str, int, str, int, int] | None:
    """Read protocol, ends and size of a frame of IPv4; None: it is none, or carries no data."""
    if frame[12:14] != _IP:
        return None
    head = 14 + 4 * (frame[14] & 15)
    protocol, length = frame[23], 14 + int.from_bytes(frame[16:18], "big")
    if protocol == TCP:
        data = length - head - 4 * (frame[head + 12] >> 4)
    elif protocol == UDP:
        data = length - head - 8
    else:
        return None
    by, to = socket.inet_ntoa(frame[26:30]), socket.inet_ntoa(frame[30:34])
    from_port, to_port = struct.unpack_from(">HH", frame, head)
    return (protocol, by, from_port, to, to_port, data) if data > 0 else None


def _open(port: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))  # of one protocol the bridge would leave us nothing
    sock.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _ROOM)
    sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)  # what goes to a machine came from another one's port
    sock.bind((port, 0))
    sock.setblocking(False)
    return sock


def main(file: Path, ports: list[str]) -> int:
    select = selectors.DefaultSelector()
    taps = [_open(port) for port in ports]
    for one in (*taps, sys.stdin):
        select.register(one, selectors.EVENT_READ)
    print("ready", flush=True)
    found: list[tuple[int, int, str, int, str, int, int]] = []
    while True:
        ready = [key.fileobj for key, _ in select.select()]
        for one in ready:
            if isinstance(one, socket.socket):
                message = _message(one.recv(_HEADS))
                if message is not None:
                    found.append((time.monotonic_ns(), *message))
        if ready == [sys.stdin]:  # all that came before is read
            break
    dropped = sum(struct.unpack("II", one.getsockopt(_SOL_PACKET, _STATISTICS, 8))[1] for one in taps)
    file.write_text(json.dumps({"dropped": dropped, "messages": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
