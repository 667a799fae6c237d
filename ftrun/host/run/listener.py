"""The launcher's listener: it queues events for the agent, writes facts to the journal, and prints messages for the user."""

from __future__ import annotations

from collections import deque

from ftrun.control.events import Event
from ftrun.host.output.logs import Logs
from ftrun.host.rundir.journal import Journal


class RunListener:
    """Implements ftrun.host.base.context.Listener for one run."""

    def __init__(self, journal: Journal, logs: Logs) -> None:
        self.queue: deque[Event] = deque()
        self.on_event = self.queue.append
        self.note = journal.note
        self.log = logs.log
