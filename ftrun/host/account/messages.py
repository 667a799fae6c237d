"""Words every sentence that ftrun tells a person during a run. This file decides nothing and prints nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftrun.control import blame
from ftrun.control.events import Say
from ftrun.core import codes
from ftrun.core.account import Victim
from ftrun.core.amounts import count, duration, milliseconds, place, seconds, size
from ftrun.core.ended import can_be_named
from ftrun.core.faults import Fault
from ftrun.core.shared.board import Inexact
from ftrun.core.shared.kept import in_words
from ftrun.core.shared.left_out import shown
from ftrun.core.shared.moment import Moment
from ftrun.core.shared.notes import DoubtNote, KeptNote
from ftrun.core.text import ranks
from ftrun.faults.trigger import UNFELT

_INEXACT = {
    Inexact.UPDATE_USED_RNG: "random numbers were drawn from optimizer.step() on, and a replaced rank may lack some",
    Inexact.DREW_BETWEEN: "random numbers were drawn between two bodies, and a replaced rank may lack some",
    Inexact.WAS_CORRUPT: (
        "a rank's weights were corrupt, and steps since the last check of the replicas used them; see --check-every"
    ),
    Inexact.DDP_LAYOUT: "DDP's bucket layout could not be kept",
    Inexact.REPLICAS_DIFFER: "ranks that should hold the same differ",
    Inexact.OTHER_INPUTS: "a step that was done again got other inputs than the first time",
    Inexact.INPUTS_UNKNOWN: (
        "a rank's inputs do not come from what is kept: in a step that was begun twice after a repair they were others the second time"
    ),
    Inexact.INPUTS_UNASKED: (
        "a rank died before it called its model in the last step of a loop, and nobody knows whether its inputs come from what is kept"
    ),
    Inexact.BUFFERS_UNKNOWN: "buffers that the update wrote were taken from a rank that may have had others",
    Inexact.STATE_UNKNOWN: "what the update changed in an object was taken from a rank that may have had another value",
    Inexact.OWN_STATE_LOST: "a rank's own random streams and place in the data were lost with the fd store, and taken from a peer",
    Inexact.UPDATE_DOUBTED: (
        "a dead rank's update was made in its place, and later the script wrote weights or gradients after optimizer.step() in a way "
        "that shows only by its effect: the dead rank may have done so, too"
    ),
    Inexact.BUFFERS_FROM_PEER: "a rank's buffers were lost with its memory and taken from a peer, which may have had others",
}
_DIFFERS = Inexact.WAS_CORRUPT | Inexact.REPLICAS_DIFFER | Inexact.OTHER_INPUTS | Inexact.OWN_STATE_LOST
_SEEN_LATER = Inexact.WAS_CORRUPT | Inexact.REPLICAS_DIFFER | Inexact.UPDATE_DOUBTED  # than where it came about
_NOT_KEPT = "not kept, and what it feeds may differ: {}"

WORDS = {
    "failed_again": "rank {rank} failed a second time in the same way ({detail}); the run ends",
    "too_many_replacements": (
        "rank {rank} died too often ({detail}); this ftrun ends so that it can be requeued "
        "(a larger --max-replacements allows more)"
    ),
    "cannot_recover": "rank {rank} cannot be replaced in place: {detail}",
    "unrestorable": "the state of rank {rank} cannot be restored: {detail}",
    "rolling_back": "rank {rank} has no newer state to go on with ({detail}); every rank goes back to the host snapshot",
    "restarting": "rank {rank} failed ({detail}); all workers start again, attempt {attempt}",
    "failed": "rank {rank} failed: {detail}",
    "world_stopped": "rank {rank} failed ({detail}); stopping this node's workers and telling the other nodes",
    "peer_failed": "{detail}; stopping this node's workers",
    "peer_stops": "{detail}; this node stops with it, and they go on together",
    "evicted": "{detail}; stopping this node's workers",
    "seated": "this node takes the place of one that was {detail}; its ranks are restored from the other nodes",
    "world_ended": "the run ends: {detail}",
    "drained": "{detail}; this node's workers end, and the run goes on without it",
    "spare_died": "spare {worker} ended ({detail})",
    "spares_given_up": "{detail} spares in a row ended before they were ready; going on without spares",
    "unconnected": "rank {rank} could not be connected with the others ({detail}); making all connections again",
    "stalled_again": (
        "rank {rank} {detail}; that was so before in this repair, and another worker is no help: the run ends"
    ),
    "stuck": "every rank waits for the others in {detail}; making all connections again",
    "stuck_again": "every rank waits for the others in {detail}, also after all connections were made again; the run ends",
    "stopped_by_policy": "{who}{detail}; the policy says that a person must look, the run ends",
    "device_reported": "{detail}; nothing is done about it",
    "device_suspect": "{detail}; the device is suspect and is probed",
    "device_quarantined": "{detail}; the device is in quarantine, no worker gets it",
    "links_reset": "{detail}; making all connections again",
    "node_failed": "{detail}: this machine must be looked after; this ftrun ends so that it can be requeued elsewhere",
    "devices_exhausted": (
        "no healthy device is left for every rank, in quarantine: {detail}; this ftrun ends so that it can be requeued "
        "(a spare device, --nproc-per-node below their number, or --on-exhausted wait keeps it going)"
    ),
    "device_waited_for": "waiting for a healthy device for every rank, in quarantine: {detail}",
    "device_back": "{detail} is out of quarantine",
    "noticed": "{who}{detail}",
    "service_died": "our {detail} process died (a helper of ftrun's, no worker); starting another one",
    "service_given_up": "our {detail} process died too often; the run ends",
}

VERBS: dict[str, str] = {
    Fault.FROZEN: "froze",
    Fault.HANG: "hung",
    Fault.GIL: "hung",
    Fault.COLLECTIVE: "hung",
    Fault.CORRUPT: "became corrupt",
    Fault.GAVE_WAY: "gave way to a replacement",
    Fault.CUT_OFF: "was ended",
}
_CAUSE_SAYS_ALL = ("", Fault.EXIT, Fault.SIGNAL, Fault.EXCEPTION)

# these end the run; a run survives the rest of WORDS
_ENDS = {"failed", "stalled_again", "failed_again", "too_many_replacements", "stuck_again", "service_given_up", "world_ended"} | {
    "stopped_by_policy",
    "inexact",
    "node_failed",
    "devices_exhausted",
}
_PAGES = {
    "stalled_again": "F360",
    "too_many_replacements": "F401",
    "devices_exhausted": "F402",
    "node_failed": "F402",
    "failed_again": "F403",
    "cannot_recover": "F404",
    "unrestorable": "F404",
}  # the code of the page that explains each


def level(what: str) -> str:
    """Return the log level of a message: info, warning or error."""
    if what in _ENDS:
        return "error"
    return "warning" if what in WORDS or what in ("died", "raised", "raised_again") else "info"


_NO_LOGS = "its logs are gone with the run, see --log-dir"


def started(run_id: str, workers: int, spares: int, device: str, logs: str) -> str:
    plus = f" + {count(spares, 'spare')}" if spares else ""
    return f"run {run_id}, {count(workers, 'worker')}{plus}, {device}, logs in {logs}"


def kept(told: KeptNote, others: int) -> str:
    """Word the line at the start of training. `others`: how many values the loop changes and nobody keeps; a worker has named them."""
    return f"kept with each step: {in_words(told)}" + (f"; not kept: {others}" if others else "")


PROTECTED = "protected: a rank that dies is replaced in place, and its step repeated"
_GROUP = '`init_process_group("ftrun")`'
_LOOP = "`job = ftrun.protect(model, optimizer)`, `for step in job.steps(n):`, `with step:`"


def unprotected(grouped: bool, max_restarts: int) -> str:
    """Word the line when a script trains unprotected. `grouped`: it made a group of ours."""
    cost = "after a death all workers start again from the beginning" if max_restarts else "a death ends the run"
    lines = f"three more lines change that: {_LOOP}" if grouped else f"four lines change that: {_GROUP}, {_LOOP}"
    return f"not protected: {cost}; {lines}"


def cannot_listen(order: Mapping[str, Any]) -> str:
    if not order["port"]:
        return f"cannot listen on {order['host']} ({order['error']}); is --local-addr an address of this machine?"
    return (
        f"port {order['port']} of {order['host']}, asked for by --master-port, cannot be had ({order['error']}); "
        "choose another one, or leave it out to get a free port"
    )


def threads_limited() -> str:
    return "OMP_NUM_THREADS set to 1 for each worker, so that they do not compete for cores; set it yourself for more"


def cannot_fork(why: str) -> str:
    return (
        f"{why}; so each worker starts as a fresh interpreter instead of a fork, which takes some seconds longer "
        "(as with --worker-start exec, which also leaves this line out)"
    )


def removed_logs(names: list[str], folder: str, most: float) -> str:
    which = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"removed the logs of {count(len(names), 'run')} that ended more than 30 days ago, since {folder} held more than "
        f"{most:g} GB (--keep-logs GB|all): {which}"
    )


def failed(victim: Victim, survivors: int, recovering: bool) -> str:
    """Word the line at the moment of a failure."""
    words = victim.moment.words()
    where = f" {words}" if words else ""
    seen = "" if victim.seen_ms is None else f", seen after {milliseconds(victim.seen_ms)} ms"
    went_on = f"; stopping {count(survivors, 'healthy worker')}" if recovering else ""
    if victim.fault == Fault.DRAIN:
        before = replace(victim.moment, phase="idle") if victim.moment.in_step else victim.moment
        return f"rank {victim.rank} leaves its worker {before.words()}, as asked for{went_on}"
    verb = VERBS.get(victim.fault, "died")
    how = victim.cause if victim.fault in _CAUSE_SAYS_ALL or not victim.evidence else victim.evidence
    return f"rank {victim.rank} {verb}{where} ({how}{seen}){went_on}"


def injected(kind: str, rank: int, phase: str, step: int, epoch: int | None) -> str:
    """Word the line when a fault was injected into the live run."""
    if rank < 0:
        where = "ftrun itself" if kind == "launcher-kill" else "everything on this node"
    else:
        where = f"rank {rank} {Moment(phase, step if step >= 0 else None, epoch).words()}".rstrip()
    return f"injected fault: {kind} strikes {where}"


def unfelt(rank: int, step: int, epoch: int | None) -> str:
    """Word the line when an injected NaN had no effect."""
    return f"injected fault: nan struck rank {rank} in forward of {place(step, epoch, 0)}; {UNFELT}"


def random_faults(rate: float, seed: int) -> str:
    if not rate:
        return "no more random faults"
    return f"random faults: {100 * rate:g} in 100 steps on average, drawn from seed {seed}"


def raised(rank: int, signature: str, step: int | None) -> str:
    where = "" if step is None else f" in step {step}"
    return f"rank {rank} raised {signature}{where}; everyone does the step again"


def poisoned(evidence: str, again: bool) -> str:
    """Word the line for gradients that were not finite; `again`: also after a retry."""
    what = evidence.removeprefix("NonFiniteError: ")
    if again:
        return _explained(f"{what}, also after a retry; the run ends (--nonfinite ignore would make such updates)", "F405")
    return f"{what}; everyone does the step again"


def raised_again(rank: int, signature: str, step: int | None) -> str:
    where = "" if step is None else f" in step {step}"
    return _explained(f"rank {rank} raised {signature}{where} again after a retry; the run ends", "F403")


def replaced(rank: int, cell: int, was_spare: bool, what: str, again: bool, source: Mapping[str, Any] | None) -> str:
    """Word the line once a new worker holds a rank. `what`: the step with which all ranks continue."""
    who = f"spare {cell}" if was_spare else f"new worker {cell}"
    then = f"{what} again" if again else f"going on with {what}"
    return f"{who} takes over rank {rank}; {then}{_from(source)}"


def _from(source: Mapping[str, Any] | None) -> str:
    if source is None:
        return ""
    moved = size(int(source["bytes"]))
    words = {
        "adopt": f"; state adopted in place, {moved} moved",
        "peer": f"; state copied from a peer, {moved}",
        "remote": f"; state copied from another node, {moved}",
        "sealed": f"; state adopted in place, {moved} moved, and its update made from the gradients that it had sealed",
        "snapshot": f"; state loaded from the host snapshot, {moved}",
    }
    return words.get(str(source["name"]), "")


def recovered(facts: Mapping[str, Any]) -> str:
    ms = facts["ms"]
    shown = ("detect", "stop", "clean", "reset", "restore")
    first = ms["resume"] + ms["first_step"]
    parts = ", ".join(f"{name} {milliseconds(ms[name])}" for name in shown)
    if facts.get("rollback"):
        cost = f"{count(facts['redone'], 'step')} done again from the host snapshot of step {facts['resume']}"
    else:
        cost = "0 committed steps lost"
    step = Moment(**facts["going_on"]).part
    return f"recovered in {milliseconds(facts['total_ms'])} ms: {parts}, {step} {milliseconds(first)}; {cost}"


def thrown_away(steps: int, ms: float) -> str:
    """Word what a restart from the beginning costs beside its time."""
    return f"{count(steps, 'step')} done again since all workers started again: {ms / 1000:.2f} s of work"


def said(say: Say) -> str | None:
    """Return the sentence for a Say that needs no more than its own facts; None when another function words it, or nothing does."""
    if say.what == "signalled":
        name = signal.Signals(int(say.detail)).name
        return f"got {name}; ending the workers"
    words = WORDS.get(say.what)
    if not words:
        return None
    who = "" if say.rank is None else f"rank {say.rank}: "
    sentence = words.format(rank=say.rank, worker=say.worker, detail=say.detail, attempt=say.attempt, who=who)
    return _explained(sentence, _PAGES.get(say.what, ""))


def _explained(sentence: str, code: str) -> str:
    """Append the code of the page that explains the sentence."""
    return sentence + codes.read_on(code)


def early(how: str, age: float) -> str:
    """Word how far a worker came that failed at its start; `how`: as blame.how_far returns it."""
    what = "before its script's first line" if how == blame.BEFORE_SCRIPT else how
    return f"{what} ({seconds(age)} after it began)"


def another() -> str:
    """Word that a spare ended and the next one starts."""
    return "; no rank was lost, and another spare starts"


def printed_in(folder: Path | None) -> str:
    """Tell where the output of a spare is, which the console never got. None: it printed nothing."""
    return "" if folder is None else f"; what it printed: {os.path.relpath(folder)}"


def signalled_again(signum: int) -> str:
    return f"got {signal.Signals(signum).name} while the workers end; killed them at once"


def last_words(path: Path) -> str:
    """Quote the last line that one of our helpers printed, and name the file."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"its last words: {last.strip()} (all of them: {path})"


def summary(
    run: str,
    incidents: int,
    drawn: bool,
    restarts: int,
    redone: int | None,
    seconds: float,
    inexact: Inexact,
    left_out: list[str],
    doubts: Sequence[DoubtNote] = (),
) -> list[str]:
    """Return the lines at the end of a run that had incidents.

    Args:
        run: The argument with which a command displays them; "" = nothing is kept.
        incidents: Their number.
        drawn: One of them came to its end, so that `ftrun timeline` can draw it.
        restarts: Number of times that all workers started again.
        redone: Steps done again; None: nobody could count them.
        seconds: Lost time.
        inexact: The reasons for which the result may not be called exact.
        left_out: Names of the values that the loop changes and nobody keeps.
        doubts: The places where those reasons arose, as far as workers noted them.
    """
    cost = f"{count(redone or 0, 'step')} done again, {seconds:.2f} s lost"
    if redone is None:
        cost = (
            f"{seconds:.2f} s lost, and what the script did again (it calls no ftrun.protect: nobody counts its steps)"
        )
    them = "it" if incidents == 1 else "them"
    see = f"to see {them}: ftrun {'timeline' if drawn else 'events'} {run}" if run else f"nothing is left to draw {them} from ({_NO_LOGS})"
    lines = [f"{count(incidents, 'incident')}, {cost}; {see}"]
    lines.append(_result(restarts, inexact, left_out, doubts))
    return lines


def _result(restarts: int, inexact: Inexact, left_out: list[str], doubts: Sequence[DoubtNote]) -> str:
    """Word whether the result is exact. What differs comes before what may differ."""
    seen = _in_order(inexact)
    differs = any(flag & _DIFFERS for flag in seen)
    why = [_reason(flag, doubts) for flag in seen]
    if left_out:
        why.append(_NOT_KEPT.format(shown(left_out)))
    if restarts:  # the reasons may belong to an earlier attempt
        differs, why = False, [f"the script was started anew {count(restarts, 'time')}"]
    if differs:
        return _explained(f"result bit-identical to an uninterrupted run: no ({'; '.join(why)})", "F407")
    if why:
        return _explained(f"result bit-identical to an uninterrupted run: not known ({'; '.join(why)})", "F406")
    return "result bit-identical to an uninterrupted run: yes"


def _in_order(inexact: Inexact) -> list[Inexact]:
    return sorted((flag for flag in Inexact if flag & inexact), key=lambda flag: not flag & _DIFFERS)


def _reason(why: Inexact, doubts: Sequence[DoubtNote]) -> str:
    """Word one reason: `since step 6: buffers that ...: buffer.0.seen`."""
    about = [doubt for doubt in doubts if doubt.why is why]
    placed = [doubt.moment for doubt in about if doubt.moment.step is not None]
    first = min(placed, key=lambda moment: (moment.epoch or 0, moment.step), default=None)
    names = sorted({name for doubt in about for name in doubt.names})
    place = "" if first is None else f"{'seen at' if why & _SEEN_LATER else 'since'} {first.what()}: "
    return place + _INEXACT[why] + (f": {shown(names)}" if names else "")


def inexact(
    repaired: Sequence[int],
    flags: Inexact,
    doubts: Sequence[DoubtNote],
    left_out: Mapping[int, Mapping[str, str]],
    rank_of: Callable[[int], int | None],
) -> str:
    """Word the line when a repair is inexact and ends the run. `repaired`: replaced ranks; `left_out`: by cell, names and reasons."""

    def whose(cells: Iterable[int]) -> str:
        those = [rank for cell in cells if (rank := rank_of(cell)) is not None]
        return f", on {ranks(those)}" if those else ""

    why = [_reason(flag, doubts) + whose(doubt.cell for doubt in doubts if doubt.why is flag) for flag in _in_order(flags)]
    reasons = {name: because for found in left_out.values() for name, because in found.items()}
    if reasons:
        why.append(_NOT_KEPT.format(shown(sorted(reasons), reasons)) + whose(left_out))
    of = f" of {ranks(repaired)}" if repaired else ""
    return _explained(
        f"the repair{of} cannot be called exact: {'; '.join(why)}; the run ends (--inexact stop): start it again, from its last checkpoint",
        "F408",
    )


def done(steps: int, took: float, equal: bool, logs: Path | None) -> str:
    """Word the closing line of a run without incidents.

    `took` in seconds; `equal`: the replicas were equal after the last step; `logs`: None when they end with the run.
    """
    what = f": {count(steps, 'step')} in {duration(took)}" if steps else f" in {duration(took)}"
    kept = _NO_LOGS if logs is None else f"logs in {folder_shown(logs)}"
    return f"done{what}{', all replicas equal after the last step' if equal else ''}, {kept}"


def folder_shown(folder: Path) -> str:
    """Return the folder as typed; a relative one gets `./` in front, so that nobody takes it for a word."""
    return str(folder) if folder.is_absolute() else f"{os.curdir}{os.sep}{folder}"


def run_shown(logs: Path | None) -> str:
    """Return the RUN argument that names an ended run from any folder: its name or its log folder; "" when that is gone."""
    if logs is None:
        return ""
    return logs.name if can_be_named() else os.path.abspath(logs)
