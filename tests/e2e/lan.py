"""Machines on this machine: network namespaces with an address each, joined by a bridge in a namespace of its own.

Or by a switch of ours, whose cables can be bad (tests/e2e/switch.py): this kernel may have no means to lose packets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ftrun.core.system import files
from tests.conftest import ROOT


def _possible() -> bool:
    """May this process make network namespaces?"""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"ft{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


class Lan:
    """`nodes` machines with the addresses 10.77.0.1, 10.77.0.2, ... `rules`: a file for the rules of a switch, None = a bridge."""

    def __init__(self, nodes: int, rules: Path | None = None) -> None:
        self._rules = rules
        self._switch: subprocess.Popen[bytes] | None = None
        self._bad: dict[str, tuple[float, float]] = {}
        self._hub = f"ft{os.getpid()}h"
        self._names = [f"ft{os.getpid()}n{number}" for number in range(nodes)]

    def begin(self) -> None:
        _ip("netns", "add", self._hub)
        if self._rules is None:
            self._in(self._hub, "link", "add", "br0", "type", "bridge")
            self._in(self._hub, "link", "set", "br0", "up")
        for number, name in enumerate(self._names):
            _ip("netns", "add", name)
            self._in(name, "link", "set", "lo", "up")
            self._in(self._hub, "link", "add", self.port(number), "type", "veth", "peer", "name", "eth0", "netns", name)
            self._in(self._hub, "link", "set", self.port(number), *([] if self._rules else ["master", "br0"]), "up")
            self._in(name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._in(name, "link", "set", "eth0", "up")
        if self._rules is not None:
            self.lose(0, 0.0, 0.0)
            ports = [self.port(number) for number in range(len(self._names))]
            command = [sys.executable, "-m", "tests.e2e.switch", str(self._rules), *ports]
            self._switch = subprocess.Popen(self.on_hub(command), cwd=ROOT)

    def lose(self, node: int, to: float, by: float) -> None:
        """Let the switch lose a share of the packets to a node, and of those that it sends."""
        assert self._rules is not None
        self._bad[self.port(node)] = to, by
        files.replace(self._rules, json.dumps(self._bad), private=True)

    def end(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        for name in (*self._names, self._hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def meeting(self) -> tuple[str, ...]:
        """The options with which all meet on the first machine."""
        return ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:29499")

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """The same command, on that machine."""
        return ["ip", "netns", "exec", self._names[node], *command]

    def on_hub(self, command: Sequence[str]) -> list[str]:
        """The same command, where the cables of all machines end, each in its `port`."""
        return ["ip", "netns", "exec", self._hub, *command]

    def port(self, node: int) -> str:
        return f"p{node}"

    def plug(self, node: int, into: bool) -> None:
        """Plug the cable of a node in or out, at the bridge: the node itself sees no change."""
        self._in(self._hub, "link", "set", self.port(node), "master" if into else "nomaster", *(["br0"] if into else []))

    def destroy(self, node: int) -> None:
        """Lose a machine: nobody hears of the end of its processes, neither from them nor from its kernel."""
        self.plug(node, into=False)
        found = subprocess.run(["ip", "netns", "pids", self._names[node]], check=True, capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def slow(self, node: int, begin: bool) -> None:
        """Let at most 6 kB a second through to a node, or all again."""
        limit = ["root", "tbf", "rate", "50kbit", "burst", "5kb", "latency", "5s"] if begin else ["root"]
        device = ["dev", self.port(node)]
        command = ["tc", "qdisc", "add" if begin else "del", *device, *limit]
        subprocess.run(self.on_hub(command), check=True, capture_output=True, text=True)

    def _in(self, namespace: str, *words: str) -> None:
        _ip("-n", namespace, *words)


@contextlib.contextmanager
def lan(nodes: int, rules: Path | None = None) -> Iterator[Lan]:
    """Such machines, until the body ends."""
    made = Lan(nodes, rules)
    try:
        made.begin()
        yield made
    finally:
        made.end()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


needs_lan = pytest.mark.skipif(not _possible(), reason="namespaces need root and the command ip")
