"""Follows the rules of a rendezvous in a thread, so that a slow folder or server never holds up the agent's loop.

Orders go in through a queue; the thread calls `on_news` with each piece of news.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ftrun.core.errors import EXIT_FAILED, EXIT_USAGE, FtrunError, UsageError
from ftrun.core.shared import lease
from ftrun.host.nodes.carriers.carrier import Carrier, CarrierLost, Denied, Record
from ftrun.host.nodes.membership.bells import Bells
from ftrun.host.nodes.membership.guardian import Guardian
from ftrun.host.nodes.membership.member import Member, News
from ftrun.host.nodes.membership.terms import Me, MemberTerms

_IN_REPAIR = 0.02  # seconds between two looks while the nodes repair their world, or a tenth of the usual pause if that is longer
_EACH_PEER = 0.01  # seconds added to the pause between two looks for each other agent
_PARTING = 8.0  # seconds that `close` waits for the thread

# Opens the carrier, and says where the others reach this machine; None when stopped meanwhile (the first argument). The second one is
# called with the reason if that takes long.
Opener = Callable[[Callable[[], bool], Callable[[str], None]], tuple[Carrier, Me] | None]


def until_next_look(pause: float, peers: int, repairing: bool, keep_alive: float) -> float:
    """Return how many seconds an agent waits that nobody rings: the longer, the more agents look at the same records."""
    usual = min(pause + _EACH_PEER * peers, keep_alive / 4)
    return max(_IN_REPAIR, usual / 10) if repairing else usual


class Session:
    """Plays one agent's part in a rendezvous.

    Args:
        opener: Opens the carrier.
        terms: What the options set.
        pause: Seconds between two looks, with few nodes.
        on_news: Called with each piece of news.
        on_beat: Called after each beat that the others can see, with when it began, by the clock of `ftrun.core.shared.lease`.
    """

    def __init__(
        self, opener: Opener, terms: MemberTerms, pause: float, on_news: Callable[[News], None], on_beat: Callable[[int], None]
    ) -> None:
        self._opener = opener
        self._terms = terms
        self._pause = pause
        self._on_news = on_news
        self._on_beat = on_beat
        self._orders: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._shown: dict[str, Record] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ftrun-nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- orders, from the agent's thread -----------------------------------------------------------------------------

    def next_round(self, failure: Record | None) -> None:
        self._orders.put(("next_round", (failure,)))

    def store_up(self, host: str, port: int) -> None:
        self._orders.put(("store_up", (host, port)))

    def finished(self, doubts: Record) -> None:
        self._orders.put(("finished", (doubts,)))

    def asks(self, request: Record) -> None:
        self._orders.put(("asks", (request,)))

    def claims(self, number: int) -> None:
        self._orders.put(("claims", (number,)))

    def withdraws(self, record: Record, drained: bool) -> None:
        self._orders.put(("withdraws", (record, drained)))

    def gives_up(self, number: int) -> None:
        self._orders.put(("gives_up", (number,)))

    def stops(self, number: int, incident: int, why: Record) -> None:
        self._orders.put(("stops", (number, incident, why)))

    def stopped(
        self, number: int, incident: int, last: int, replaced: Sequence[int], kept: Sequence[int], back: bool, copies: Sequence[int]
    ) -> None:
        self._orders.put(("stopped", (number, incident, last, replaced, kept, back, copies)))

    def serves(self, port: int) -> None:
        self._orders.put(("serves", (port,)))

    def shows(self, subject: str, facts: Record) -> None:
        """Show the others something, with the next beat: nobody waits for it."""
        self._shown[subject] = facts

    def restored(self, number: int, incident: int, missed: int, made: bool) -> None:
        self._orders.put(("restored", (number, incident, missed, made)))

    def end(self, record: Record) -> None:
        self._orders.put(("end", (record,)))

    def close(self) -> None:
        """Leave. An agent that serves the others waits until they have left, some seconds at most."""
        self._closing = True
        self._orders.put(("leave", ()))
        if self._thread.is_alive():
            self._thread.join(_PARTING)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            opened = self._opener(lambda: self._closing, self._waits)
        except Exception as error:
            self._lost(error)
            return
        if opened is None:
            return
        carrier, me = opened
        bells = Bells(me.addr, lambda: self._orders.put(("rung", ())))
        guardian = Guardian(lambda who: self._orders.put(("ended", (who,))))
        try:
            self._follow(carrier, me, bells, guardian)
        except (
            Exception
        ) as error:  # a record that nobody understands, too: without this thread the agent would wait for ever
            self._lost(error)
        finally:
            guardian.close()
            bells.close()
            carrier.close()

    def _waits(self, why: str) -> None:
        self._on_news(News("unreached", -1, {"detail": why}))

    def _lost(self, error: Exception) -> None:
        if not self._closing:
            code = EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
            expected = isinstance(error, (FtrunError, OSError))
            text = str(error) if expected else f"the rendezvous failed: {type(error).__name__}: {error}"
            self._on_news(News("lost", -1, {"code": code, "detail": text}))

    def _follow(self, carrier: Carrier, me: Me, bells: Bells, guardian: Guardian) -> None:
        member = Member(carrier, me, self._terms, self._shown, self._on_news, time.monotonic, bells)
        trouble = 0.0  # when the carrier first failed, 0 = it works
        worked = False  # ever
        order: tuple[str, tuple[Any, ...]] | None = None
        while True:
            try:
                order = order or self._next_order(0.0)
                while order is not None:
                    name, args = order
                    getattr(member, name)(*args)
                    if name == "leave":
                        return
                    order = self._next_order(0.0)
                member.tick()
                begun = lease.now()
                if member.beat():
                    self._on_beat(begun)
                guardian.listen(member.neighbour)
                trouble, worked = 0.0, True
            except (OSError, Denied) as error:
                if isinstance(error, Denied) and not worked:
                    raise
                # an order that failed is tried again
                now = time.monotonic()
                trouble = trouble or now
                if now - trouble > self._terms.keep_alive or self._closing:
                    raise CarrierLost(f"the rendezvous cannot be reached: {getattr(error, 'strerror', '') or error}") from None
            if member.over and not self._closing:
                member.leave()
                return
            if order is None:
                order = self._next_order(until_next_look(self._pause, member.peers, member.repairing, self._terms.keep_alive))
            else:
                time.sleep(self._pause)

    def _next_order(self, seconds: float) -> tuple[str, tuple[Any, ...]] | None:
        try:
            return self._orders.get(timeout=seconds) if seconds else self._orders.get_nowait()
        except queue.Empty:
            return None
