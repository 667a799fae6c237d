"""The launcher's own listener: events wait for the loop, facts go to the journal, sentences to the person."""

from __future__ import annotations

from collections import deque

from ftrun.control.events import Event
from ftrun.host.output.logs import Logs
from ftrun.host.rundir.journal import Journal


class RunListener:
    """One per run; see ftrun.host.base.context.Listener."""

    def __init__(self, journal: Journal, logs: Logs) -> None:
        self.queue: deque[Event] = deque()
        self.on_event = self.queue.append
        self.note = journal.note
        self.log = logs.log
