"""Print the journal: for people one timed sentence for each fact, for programs its own lines, unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ftrun.control.phases import OVER
from ftrun.core.amounts import count
from ftrun.core.journal import Tail, whole
from ftrun.core.shape import typed
from ftrun.core.shared import kept, left_out, mesh
from ftrun.core.shared.moment import Moment
from ftrun.core.shared.notes import KeptNote
from ftrun.core.symptoms import cause_of
from ftrun.core.text import ranks as named
from ftrun.view.find import Found
from ftrun.view.journal import parse
from ftrun.view.screen import outcome
from ftrun.view.status.sentences import cause
from ftrun.view.timeline import nodes

_CAME_TO = {
    "Grouped": "made its process group",
    "Stepped": "took its first optimizer step",
    "LoopDone": "finished its loop",
}
_LOOK = 0.2  # seconds between two looks at a journal that is followed


def _failure(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    root = raw["root"]
    yield "a worker failed elsewhere" if root is None else f"root cause: rank {root['rank']}, {root['kind'] or root['cause']}"


def _summary(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    known = "" if raw["exact"] else "not known to be "
    yield f"{count(raw['incidents'], 'incident')}, {count(raw['redone'], 'step')} done again; {known}as in an uninterrupted run"


def _protection(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield "protected" if raw["protected"] else "not protected: the script does not call ftrun.protect"


def _kept(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    told, others = typed(KeptNote, raw), raw["not_kept"]
    if told is not None and told.values:
        yield f"kept with each step, as of step {told.step}: {kept.in_words(told)}"
    if others:
        yield f"changed by the loop, and not kept: {left_out.shown([*others], others)}"


def _told(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield f"{named(raw['ranks']) if raw['ranks'] else 'nobody'} told to end ({raw['signal']})"


def _exit(who: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield f"{who(raw['worker'])} has left: {cause_of(raw['code'])} (pid {raw['pid']})"


def _service(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield f"our {raw['service']} process is ready (pid {raw['pid']})"


def _service_exit(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield f"our {raw['service']} process ended: {cause_of(raw['code'])} (pid {raw['pid']})"


def _checks(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    steps, last = raw["steps"], raw["last"]
    few, many = min(steps.values()), max(steps.values())
    each = str(few) if few == many else f"{few} to {many}"
    compared = raw["replicas"]
    replicas = "no replicas to compare" if compared is None else f"replicas compared last at the gate of step {compared}"
    yield f"checks: each rank's last worker looked at {each} steps as a whole, the last of them step {max(last.values())}; {replicas}"


def _of_node(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    if raw["own"] is None:  # else the incident itself has its sentence
        where = "this node" if raw["here"] else f"node {raw['node']} ({raw['host']})"
        yield f"{where} recovered: {nodes.sentence(raw)}"


def _drained(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield f"this node, number {raw['node']}, gives its place to {raw['taker']}"


def _drain_asked(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    what = "this node is to be drained" if raw["rank"] is None else f"rank {raw['rank']} is to leave its worker"
    yield f"{what}, as asked on node {raw['by']}"


def _drain_outcome(_: Callable[[int], str], raw: dict[str, Any]) -> Iterator[str]:
    yield "moved, as asked" if raw["moved"] else f"not moved: {raw.get('why', '')}"


_NOTES = {
    "node-incident": _of_node,
    "drained": _drained,
    "drain-asked": _drain_asked,
    "drain-outcome": _drain_outcome,
    "checks": _checks,
    "failure": _failure,
    "kept": _kept,
    "summary": _summary,
    "protection": _protection,
    "told-to-end": _told,
    "exit": _exit,
    "service": _service,
    "service-exit": _service_exit,
}


def stream(found: Found, follow: bool, as_json: bool) -> Iterator[str]:
    """Yield the journal's lines, with `follow` until the run ends. Damaged lines are left out.

    Raises:
        OSError: The journal cannot be read.
    """
    sentences, tail = _Sentences(), Tail(found.journal)
    try:
        while True:
            ended = found.live is None or not found.live.alive()
            for line in tail.read():
                raw = whole(line) if as_json else parse(line)
                if raw is not None:
                    yield from [line.decode()] if as_json else sentences.of(raw)
                if raw is not None and raw.get("note") == "end":
                    return
            if not follow or ended:
                return
            time.sleep(_LOOK)
    finally:
        tail.close()


class _Sentences:
    """Turns journal lines into sentences; remembers the phase, the time offset and the holder of each rank."""

    def __init__(self) -> None:
        self._offset = 0.0  # unix time minus monotonic time
        self._holders: dict[int, int] = {}
        self._first = 0  # this node's first rank in the world
        self._phase = ""

    def of(self, raw: dict[str, Any]) -> list[str]:
        if "config" in raw:
            self._offset = raw["wall"] - raw["t"]
        said = list(self._sentences(raw))
        at = time.time() if "t" not in raw else raw["t"] + self._offset
        stamp = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
        return [f"{stamp}  {sentence}" for sentence in said]

    def _sentences(self, raw: dict[str, Any]) -> Iterator[str]:
        if "config" in raw:
            settings = raw["config"].get("settings", {})
            workers = f"{count(raw['config']['nproc'], 'worker')} and {count(raw['config']['spares'], 'spare')}"
            yield f"begins: {' '.join(settings.get('argv', ()))} with {workers}"
        elif "event" in raw:
            yield from self._event(raw["event"])
        elif "phase" in raw:
            yield from self._answer(raw)
        elif "note" in raw:
            yield from self._note(raw)

    def _who(self, worker: int) -> str:
        rank = next((r for r, cell in self._holders.items() if cell == worker), None)
        return f"worker {worker}" if rank is None else f"rank {rank} (worker {worker})"

    def _event(self, event: dict[str, Any]) -> Iterator[str]:
        kind, who = event["kind"], self._who(event["worker"]) if "worker" in event else ""
        if kind == "Died":
            if self._phase in OVER and event["cause"].startswith("SIG"):
                yield f"{who} was ended ({event['cause']})"
                return
            where = Moment.told(event).words()
            yield f"{who} died{f' {where}' if where else ''}: {event['cause']}"
        elif kind == "Dying":
            yield f"{who} is about to end"
        elif kind == "Raised":
            yield f"{who} raised {event['signature']} in step {event['step']}"
        elif kind == "Unconnected":
            yield f"{who} could not be connected with the others: {event.get('evidence', '')}"
        elif kind == "Doubted":
            yield f"{who} found why a repaired run may not be called exact: {event['why']}"
        elif kind == "Parked":
            yield f"{who} is ready as a spare"
        elif kind == "Stage":
            yield f"{who} {event['stage'].replace('_', ' ')}, generation {event['generation']}"
        elif kind in ("Started", "Protected", "Finished"):
            yield f"{who} {kind.lower()}"
        elif kind in _CAME_TO:
            yield f"{who} {_CAME_TO[kind]}"
        elif kind == "GateClosed":
            yield f"gate closed after step {event['last']}, generation {event['generation']}"
        elif kind == "WorldStops":
            yield f"stops with another node: {event['cause']}"
        elif kind == "Seated":
            yield f"this spare node takes the place of one that {'gave it up' if event.get('drained') else 'was lost'}"
        elif kind == "WorldDecided":
            yield f"all nodes go on with step {event['resume']}, generation {event['generation']}"
        elif kind == "WorldRestored":
            yield f"every rank of every node is restored, generation {event['generation']}"
        elif kind == "Expired":
            return  # an expired deadline is news only to the controller
        else:
            facts = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("kind", "t") and v not in ("", None))
            yield f"{kind.lower()}: {facts}" if facts else kind.lower()

    def _answer(self, raw: dict[str, Any]) -> Iterator[str]:
        for action in raw.get("actions", ()):
            if action["kind"] == "Publish":
                self._holders = dict(enumerate(action["workers"], self._first))
                replaced = [self._first + local for local in action["replaced"]]
                new = ", ".join(f"rank {r} to worker {self._holders[r]}" for r in replaced)
                yield f"world {action['generation']}: step {action['resume']}" + (f", {new}" if new else "")
            elif action["kind"] == "End":
                yield f"ends with exit code {action['code']} ({action['reason']})"
        phase = raw["phase"]
        if phase != self._phase:
            self._phase = phase
            yield f"{phase} (generation {raw['generation']})"

    def _note(self, raw: dict[str, Any]) -> Iterator[str]:
        note = raw["note"]
        if note == "world":
            self._first = int(raw.get("first_rank", 0))
        if note == "incident":
            who = "; ".join(cause(v) for v in raw["victims"]) or raw.get("stuck", "")
            yield f"recovered: {who}; {outcome(raw)}"
        elif note == "fault":
            fired = raw["fired"]
            yield f"injected fault: {fired['kind']} of rank {fired['rank']} {Moment.told(fired).words()}".rstrip()
        elif note == "stall":
            held = f": waited for {named(raw['culprits'])}" if raw["culprits"] else ""
            yield f"nothing moved for {raw['seconds']:.1f} s{held}" + (f", {raw['where']}" if raw["where"] else "")
        elif note == "mesh":
            yield f"mesh: {mesh.shape(raw['dims'])}"
        elif note in _NOTES:
            yield from _NOTES[note](self._who, raw)
        elif note == "end":
            yield "end"
        else:
            facts = ", ".join(f"{k} {v}" for k, v in raw.items() if k not in ("note", "t"))
            yield f"{note}: {facts}"
