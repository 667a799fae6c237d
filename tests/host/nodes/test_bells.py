"""Bells between agents: who hears them, and what does no harm."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from ftrun.host.nodes.membership.bells import Bells

HERE = "127.0.0.1"


class Agent:
    def __init__(self, secret: str = "of the round") -> None:
        self.heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.bells = Bells(HERE, lambda: self.heard.put(1))
        self.bells.use(secret)

    def hears(self, seconds: float = 5.0) -> bool:
        try:
            return bool(self.heard.get(timeout=seconds))
        except queue.Empty:
            return False


@pytest.fixture
def two() -> Iterator[tuple[Agent, Agent]]:
    agents = Agent(), Agent()
    yield agents
    for agent in agents:
        agent.bells.close()


def test_an_agent_hears_another_one(two: tuple[Agent, Agent]) -> None:
    one, other = two
    one.bells.ring([(HERE, other.bells.port), (HERE, 0)])
    assert other.hears() and not one.hears(0.05)


def test_a_stranger_and_an_agent_of_another_round_are_not_heard(two: tuple[Agent, Agent]) -> None:
    one, other = two
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for word in (b"", b"look", b"x" * 32, b"y" * 2000):
            stranger.sendto(word, (HERE, other.bells.port))
    one.bells.use("of another round")
    one.bells.ring([(HERE, other.bells.port)])
    one.bells.use("of the round")
    one.bells.ring([(HERE, other.bells.port)])
    assert other.hears() and not other.hears(0.05), "once"


def test_without_a_secret_nobody_rings(two: tuple[Agent, Agent]) -> None:
    one, other = two
    for agent in two:
        agent.bells.use("")
    one.bells.ring([(HERE, other.bells.port)])
    assert not other.hears(0.1)


def test_an_address_that_is_not_this_machines_gives_an_agent_without_a_bell() -> None:
    bells = Bells("192.0.2.1", lambda: None)
    assert bells.port == 0
    bells.use("of the round")
    bells.ring([(HERE, 9)])
    bells.close()
