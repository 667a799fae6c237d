"""Gathers the failures of a run, and reports them at the end of one that failed: the root cause first.

It gathers them during the run from the machine's events and orders and from the workers' notes. It forgets a failure once the
machine has repaired it (replaced a rank, restarted the world). `ftrun.control.blame` decides; this file does not.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftrun.control import blame
from ftrun.control.blame import Failure
from ftrun.control.events import Action, Died, Event, Finished, Publish, Raised, Say, Stalled, Terminate, WorldEnded
from ftrun.core import codes, paths, symptoms
from ftrun.core.account import Account
from ftrun.core.amounts import seconds, times
from ftrun.core.errors import EXIT_OK, EXIT_SIGNAL
from ftrun.core.shared.moment import Moment
from ftrun.core.shared.notes import FailureNote
from ftrun.core.system import files
from ftrun.core.text import ranks
from ftrun.host.account import messages
from ftrun.host.base.context import LaunchContext
from ftrun.host.output.logformat import on_console
from ftrun.host.workers.pool import Worker

_INDENT = "  "
_SAY_ALL = ("UsageError", "NonFiniteError")  # long sentences of ours about the script: once is enough

# Why ftrun gave up, by the last message of the machine.
_GAVE_UP = {
    "failed_again": "the same failure came a second time",
    "raised_again": "the same exception came a second time",
    "too_many_replacements": "the rank died {detail}",
    "cannot_recover": "{detail}",
    "stalled_again": "its repair stood still a second time",
    "inexact": "that repair cannot be called exact (--inexact stop)",
    "unrestorable": "its state could not be restored ({detail})",
}


@dataclass
class FailureFacts:
    """Facts of a failure that the report needs and the judgement does not. `code` None = not known."""

    pid: int
    code: int | None
    step: int | None
    phase: str
    epoch: int | None
    end: int
    traceback: str = ""
    explain: str = ""
    early: str = ""
    age: float = 0.0
    final: bool = False
    fault: str = ""
    evidence: str = ""


class Failures:
    """Gathers and reports the failures of one run. `workers` are the worker pool's."""

    def __init__(self, context: LaunchContext, workers: Mapping[int, Worker]) -> None:
        self._context = context
        self._workers = workers
        self._attempt = 0
        self._open: dict[int, Failure] = {}  # by cell: not repaired (yet)
        self._facts: dict[int, FailureFacts] = {}
        self._local: dict[int, int] = {}  # cell -> local rank
        self._account = Account()  # once the run is over
        self._verdict: Say | None = None
        self._elsewhere = False  # another node's failure ended the run
        self._signum = 0  # the signal that told the remaining workers to end
        self._killed: list[int] = []  # ranks that did not obey it

    # -- during the run ----------------------------------------------------------------------------------------------

    def saw(self, event: Event, actions: tuple[Action, ...]) -> None:
        """Take in that the machine heard `event` and ordered `actions`."""
        if isinstance(event, Died):
            self._died(event)
        elif isinstance(event, (Finished, Stalled)):
            for said in (a for a in actions if isinstance(a, Say) and a.what == "died"):
                self._died(Died(event.t, said.worker or 0, said.detail, 0 if isinstance(event, Finished) else None))
        elif isinstance(event, Raised):
            self._raised(event)
        elif isinstance(event, WorldEnded):
            self._elsewhere = event.elsewhere
        last: Say | None = None
        for action in actions:
            if isinstance(action, Say):
                last = action
                if action.what == "recovered":
                    self._open.clear()
            elif isinstance(action, Publish):
                self._published(action)
            elif isinstance(action, Terminate) and self._verdict is None:
                self._verdict = last

    def _published(self, world: Publish) -> None:
        if world.fresh:
            self._open.clear()
            self._attempt = world.attempt
        self._local.update({cell: local for local, cell in enumerate(world.workers)})

    def _died(self, event: Died) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or worker.rank is None:
            return
        known = self._facts.get(event.worker)
        if event.worker in self._open and known is not None:
            if event.code is not None and event.code < EXIT_SIGNAL:
                known.code = event.code  # it raised before; a signal is ours
            return
        if worker.ours and not worker.cause:
            return  # its rank was lost already, or the world starts again
        error = worker.error if event.signature else _recorded(self._error_file(worker.index), worker.index)
        self._add(worker, error, event.cause, event.code)
        facts = self._facts[event.worker]
        facts.early, facts.age, facts.final = event.early, event.age, bool(event.final)
        facts.fault, facts.evidence = event.fault, event.evidence

    def _raised(self, event: Raised) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None and worker.rank is not None:
            self._add(worker, worker.error, "exception", None)
            self._facts[worker.index].fault, self._facts[worker.index].evidence = event.fault, event.evidence

    def _add(self, worker: Worker, error: FailureNote | None, cause: str, code: int | None) -> None:
        assert worker.rank is not None
        error = error or FailureNote(worker.index, 0)
        self._open[worker.index] = Failure(
            worker.index,
            worker.rank,
            error.time or time.time(),
            cause,
            error.type,
            error.message,
            error.where,
        )
        where = vars(Moment.of(worker.cell))
        self._facts[worker.index] = FailureFacts(worker.pid, code, **where, traceback=error.traceback, explain=error.explain)

    # -- at its end --------------------------------------------------------------------------------------------------

    def finish(self, code: int, account: Account, told_at: float, signum: int, killed: list[int]) -> dict[str, Any] | None:
        """Report the failure that ended the run of this `account` with `code`.

        `told_at`: unix time at which signal `signum` told the remaining workers to end, 0 = none did; `killed`: ranks that did
        not obey. Returns the facts for the journal, None when no worker's failure ended the run.
        """
        if code == EXIT_OK or code > EXIT_SIGNAL:
            return None
        self._account = account
        verdict = self._judge(told_at)
        if verdict is None:
            return None
        self._leave_error_files(verdict.own)
        stopped = self._stopped(verdict)
        self._signum, self._killed = signum, killed
        lines = [] if verdict.root is None else self._root_lines(verdict.root)
        if verdict.same:
            lines.append(f"{_INDENT}{ranks([f.rank for f in verdict.same])} failed in the same way")
        if verdict.root is not None:
            lines.append(_INDENT + self._what_was_done(verdict.root))
        for other in verdict.others:
            lines += self._other_lines(other)
        if verdict.bereft:
            those = ranks([f.rank for f in verdict.bereft])
            lines.append(f"{those} failed only because of it: {_last_line(verdict.bereft[0])}")
        if stopped:
            lines.append(self._stopped_line(stopped))
        for line in lines:
            self._context.listener.log(line, "error")
        return {
            "root": None if verdict.root is None else self._to_json(verdict.root),
            "same": [f.rank for f in verdict.same],
            "others": [self._to_json(f) for f in verdict.others],
            "bereft": [f.rank for f in verdict.bereft],
            "stopped": stopped,
            "restarts": account.restarts,
            "replaced": dict(Counter(str(local) for local, _ in account.replaced)),
        }

    def _judge(self, told_at: float) -> blame.Verdict | None:
        for cell, failure in self._open.items():
            if failure.cause == "died":  # reported before its exit code was known
                self._facts[cell].code = code = self._workers[cell].code
                self._open[cell] = replace(failure, cause=symptoms.cause_of(code))
        # we caused what happened after we told everybody to end
        own = [f for f in self._open.values() if not told_at or f.at <= told_at]
        if self._elsewhere:
            return blame.caused_elsewhere(own)
        said = self._verdict
        if said is not None and said.what == "unrestorable" and own:
            return blame.judge(own)  # the worker that found no source did nothing wrong
        if said is not None and said.worker is not None and said.rank is not None:
            if all(f.cell != said.worker for f in own):
                worker = self._workers.get(said.worker)
                if worker is not None and worker.rank is not None:
                    if said.worker not in self._open:  # condemned by the machine itself: a deadline passed
                        self._add(worker, None, said.detail, None)
                    own.append(self._open[said.worker])
            decisive = None if said.what == "failed" else said.worker
            return blame.judge(own, decisive)
        return blame.judge(own) if said is not None and said.what not in ("service_given_up", "signalled") else None

    def _root_lines(self, root: Failure) -> list[str]:
        facts = self._facts[root.cell]
        shown = bool(facts.traceback) and on_console(self._context.settings.output, self._local_rank(root), "stderr")
        lines = [f"root cause: {_headline(root, facts)}"]
        if root.kind:
            if shown and root.kind in _SAY_ALL:
                lines.append(f"{_INDENT}what is wrong, and the lines that led there, are above")
            else:
                more = codes.read_on(facts.explain)
                lines.append(f"{_INDENT}{_last_line(root)}{' (traceback above)' if shown else ''}{more}")
            if facts.traceback and not shown:
                lines += [_INDENT + line for line in facts.traceback.rstrip("\n").split("\n")]
        where = _where(facts)
        if where:
            lines.append(_INDENT + where)
        return [*lines, _INDENT + self._who(root, facts), *self._log_line(root)]

    def _other_lines(self, other: Failure) -> list[str]:
        facts = self._facts[other.cell]
        what = f": {_last_line(other)}" if other.kind else ""
        lines = [f"also failed: {_headline(other, facts)}{what}", _INDENT + self._who(other, facts)]
        return [*lines, *self._log_line(other)]

    def _who(self, failure: Failure, facts: FailureFacts) -> str:
        return f"local_rank {self._local_rank(failure)}, host {os.uname().nodename}, pid {facts.pid}, {self._ended(failure, facts)}"

    def _ended(self, failure: Failure, facts: FailureFacts) -> str:
        """Word the end of a process: `exit code 3`, `signal SIGKILL (exit code 137)`."""
        if facts.code is None:
            told = signal.SIGKILL if failure.rank in self._killed or not self._signum else self._signum
            return f"ended by ftrun after that ({signal.Signals(told).name})"
        name = symptoms.cause_of(facts.code)
        return f"exit code {facts.code}" if name.startswith("exit ") else f"signal {name} (exit code {facts.code})"

    def _log_line(self, failure: Failure) -> list[str]:
        return [f"{_INDENT}log: {_together(self._logs(failure))}"] if self._context.logs_kept else []

    def _logs(self, failure: Failure) -> list[str]:
        """Return the files of its rank that are not empty, else the folder."""
        folder = self._error_file(failure.cell).parent
        found = [
            path for path in sorted(folder.glob("*.*")) if path.suffix in (".log", ".json") and path.stat().st_size
        ]
        return [str(path) for path in found or [folder]]

    def _local_rank(self, failure: Failure) -> int:
        return self._local.get(failure.cell, failure.rank)

    def _error_file(self, cell: int) -> Path:
        return paths.error_file(self._context.logs.absolute(), self._attempt, self._local.get(cell, 0))

    def _what_was_done(self, root: Failure) -> str:
        done = []
        cells = sum(local == self._local_rank(root) for local, _ in self._account.replaced)
        if cells:
            done.append(f"replaced rank {root.rank} {times(cells)}")
        if self._verdict is not None and self._verdict.what == "raised_again":
            done.append("had every rank do the step again")
        if self._account.restarts:
            done.append(f"started all workers again {times(self._account.restarts)}")
        why = self._why()
        return f"ftrun {' and '.join(done)}, then gave up: {why}" if done else f"ftrun did not retry: {why}"

    def _why(self) -> str:
        said = self._verdict
        what = said.what if said is not None else "failed"
        if said is not None and what in _GAVE_UP:
            return _GAVE_UP[what].format(detail=said.detail)
        if said is not None and said.worker in self._facts and self._facts[said.worker].final:
            return "the script or the machine must change first"
        if self._context.settings.max_restarts:
            return f"no restart is left (--max-restarts {self._context.settings.max_restarts})"
        return "no restart is allowed (--max-restarts 0)"

    def _stopped(self, verdict: blame.Verdict) -> list[int]:
        """Return the ranks that ran until we ended them."""
        failed = {f.rank for f in (*verdict.own, *verdict.bereft)}
        present = [self._workers[cell] for cell in self._account.holders if cell in self._workers]
        return sorted({w.rank for w in present if w.rank is not None and w.code != 0} - failed)

    def _stopped_line(self, stopped: list[int]) -> str:
        stubborn = [rank for rank in self._killed if rank in stopped]
        how = signal.Signals(self._signum).name
        rest = f"; {ranks(stubborn)} did not obey and had to be killed" if stubborn else ""
        return f"no failure: {ranks(stopped)} ended by ftrun ({how}){rest}"

    def _leave_error_files(self, failures: tuple[Failure, ...]) -> None:
        """Write the error file for an exception in a step body, whose process ended while it waited for the verdict."""
        for failure in failures:
            facts, path = self._facts[failure.cell], self._error_file(failure.cell)
            if not facts.traceback or path.exists():
                continue
            record = paths.error_record(f"{failure.kind}: {failure.message}", facts.traceback, failure.at)
            try:
                files.make_folder(path.parent)
                files.write_private(path, json.dumps(record))
            except OSError:
                return

    def _to_json(self, failure: Failure) -> dict[str, Any]:
        facts = self._facts[failure.cell]
        return {**vars(failure), **vars(facts), "host": os.uname().nodename, "logs": self._logs(failure)}


def _together(files: list[str]) -> str:
    """Join files of one folder into a pattern that a shell expands."""
    folder, names = os.path.dirname(files[0]), [os.path.basename(file) for file in files]
    return files[0] if len(files) == 1 else f"{folder}{os.sep}{{{','.join(names)}}}"


def _recorded(path: Path, cell: int) -> FailureNote | None:
    """Read the error file of `@record`, for a program that does not run in our worker entry. None when there is none."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return FailureNote(cell, 0, type="error", message=message)
        kind, _, text = str(message["message"]).partition(": ")
        extra = message["extraInfo"]
        # its time is in whole seconds: that of the death, which follows at once, is more exact
        return FailureNote(cell, 0, type=kind, message=text, traceback=str(extra["py_callstack"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _headline(failure: Failure, facts: FailureFacts) -> str:
    """Word who failed, how, and when."""
    if failure.kind:
        how = f"raised {failure.kind}{f' at {failure.where}' if failure.where else ''}"
    elif facts.code is None:  # condemned
        how = f"{messages.VERBS.get(facts.fault, 'failed')} ({facts.evidence or failure.cause})"
    else:
        name = symptoms.cause_of(facts.code)
        how = f"left with exit code {facts.code}" if name.startswith("exit ") else f"died of {name}"
    return f"rank {failure.rank} {how}, {_clock(failure.at)}"


def _last_line(failure: Failure) -> str:
    """Return the exception as Python names it, only its first line."""
    first = failure.message.strip().split("\n")[0]
    return f"{failure.kind}: {first}" if first else failure.kind


def _where(facts: FailureFacts) -> str:
    if facts.early == blame.BEFORE_SCRIPT:
        return f"it never came up: it died {blame.BEFORE_SCRIPT}'s first line, {seconds(facts.age)} after its start"
    if facts.early == blame.AT_START and not facts.final:
        return f"{blame.AT_START}: {seconds(facts.age)} after it began"
    return Moment.told(vars(facts)).words()


def _clock(at: float) -> str:
    """Format local time, to the millisecond."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
