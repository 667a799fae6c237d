"""Events, which the controller hears, and actions, which it orders: plain data, JSON both ways for the journal.

A *worker* is named by its board cell. Times (`t`, `now`) are seconds on any monotonic clock; the machine only
subtracts them. No clock, no I/O, no torch here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


class Message:
    """Base of events and actions: `to_json` and `from_json` are inverse."""

    KINDS: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.KINDS[cls.__name__] = cls

    def to_json(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Message:
        """Raises KeyError for an unknown kind, TypeError for fields that do not fit."""
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k != "kind"}
        return Message.KINDS[raw["kind"]](**fields)


class Event(Message):
    """Something that happened."""


class Action(Message):
    """Something the agent must do now; doing it twice is harmless."""


# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin(Event):
    """The run's services are up."""

    t: float


@dataclass(frozen=True)
class Started(Event):
    """A forked worker holds its liveness locks (Flag.ALIVE). `rank` is None for a spare."""

    t: float
    worker: int


@dataclass(frozen=True)
class Parked(Event):
    """A spare waits for a rank (Flag.PARKED)."""

    t: float
    worker: int


@dataclass(frozen=True)
class Grouped(Event):
    """A worker made an "ftrun" process group (Flag.GROUP): the script wants recovery, not only restarts."""

    t: float
    worker: int


@dataclass(frozen=True)
class Protected(Event):
    """protect() returned in a worker and its first loop begins (Flag.PROTECTED): its rank can be replaced."""

    t: float
    worker: int


@dataclass(frozen=True)
class Stepped(Event):
    """An optimizer of a worker took its first step: a restart from the beginning would throw work away."""

    t: float
    worker: int


@dataclass(frozen=True)
class LoopDone(Event):
    """A worker passed the virtual gate at the end of its loop; `done` False: it began another loop."""

    t: float
    worker: int
    done: bool = True


@dataclass(frozen=True)
class Dying(Event):
    """The process of a rank in its loop is about to end; its exit code is not known yet. Its Died follows."""

    t: float
    worker: int


@dataclass(frozen=True)
class Died(Event):
    """A worker's process is gone or was condemned. `code`: exit code, or 128 + signal, or None when it cannot be learnt.

    `cause` is for people ("SIGKILL", "exit 3", "frozen", ...). `signature` names an uncaught Python exception
    ("ValueError at train.py:31"), "" when there was none. `loop_done` as on the board. `final`: the exit code with
    which the run ends when the worker left with one of ftrun's own errors, which would only recur; else 0. `early`: it came no
    further than its start (see blame.how_far); `age`: seconds it had lived. `fault`: a value of ftrun.core.faults.Fault,
    "" = a process that is gone; `evidence`: one sentence that says how ftrun knows. `outside`: the exception came from code
    of the script that a replacement would never run ("after the update", "after the body", "after the loop"), "" = it did not.
    `step` is an index, which each epoch may begin anew; `gate` the gate number that belongs to it.
    """

    t: float
    worker: int
    cause: str
    code: int | None = None
    step: int | None = None
    phase: str = ""
    signature: str = ""
    loop_done: bool = False
    final: int = 0
    early: str = ""
    age: float = 0.0
    fault: str = ""
    evidence: str = ""
    outside: str = ""
    gate: int | None = None

    @property
    def at(self) -> int | None:
        """Return its place in the run: a gate number does not recur in each epoch, as a step index does."""
        return self.step if self.gate is None else self.gate


@dataclass(frozen=True)
class Raised(Event):
    """A body raised a user exception before the gate; the process lives and waits. `step` is its index, `gate` the gate number.

    `generation`: the one in which it raised (F.RAISED); None = the newest one the worker ran in. `fault`, `evidence` as in Died.
    """

    t: float
    worker: int
    step: int
    signature: str
    generation: int | None = None
    fault: str = ""
    evidence: str = ""
    gate: int | None = None


@dataclass(frozen=True)
class Finished(Event):
    """A worker ended with exit code 0 after its script's end (Flag.EXITING). `through`: it had come to the end of a loop."""

    t: float
    worker: int
    through: bool = True


@dataclass(frozen=True)
class GateClosed(Event):
    """The gate was swapped closed into `generation`; `last` is the last opened gate of all nodes."""

    t: float
    generation: int
    last: int


@dataclass(frozen=True)
class Stage(Event):
    """A worker reached `stage` ("stopped", "cleaned", "reset", "restored", "resumed", "first_done") of `generation`."""

    t: float
    worker: int
    generation: int
    stage: str


@dataclass(frozen=True)
class Unrestorable(Event):
    """A replaced rank found no valid source for its state as of the resume step (the ladder's rungs 1 to 3 are out).

    `snapshot`: gate number of the newest step of which every rank has a host snapshot, -1 = there is none. `requeue`: nothing is wrong
    with the script or the machine, so the run may be started again.
    """

    t: float
    worker: int
    generation: int
    why: str
    snapshot: int = -1
    requeue: bool = False


@dataclass(frozen=True)
class Unconnected(Event):
    """A rank of a repair's world could not be connected with the others, though no death explains it; it waits.

    `fault`, `evidence` as in Died.
    """

    t: float
    worker: int
    generation: int
    fault: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Stalled(Event):
    """The workers that the repair waits for made no progress for `seconds`, past the limit; `where`: the script's line, "" = not known."""

    t: float
    generation: int
    workers: tuple[int, ...]
    seconds: float
    where: str = ""


@dataclass(frozen=True)
class Stuck(Event):
    """Every rank waits for the others, inside collectives, longer than the hang timeout: nobody is to blame.

    `step` is the gate number that does not open; `what` names the collective for people. `fault`, `evidence` as in Died.
    """

    t: float
    step: int
    generation: int
    what: str
    fault: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Doubted(Event):
    """A worker has a reason not to call the result of a repaired run exact; `why` is for the journal."""

    t: float
    worker: int
    why: str


@dataclass(frozen=True)
class Noticed(Event):
    """A report of trouble that stops nobody (a straggler, a full disk). `worker` None: it concerns no single worker.

    `fault`, `evidence` as in Died.
    """

    t: float
    worker: int | None
    fault: str
    evidence: str


@dataclass(frozen=True)
class Expired(Event):
    """A deadline set by the action Deadline passed."""

    t: float
    name: str
    generation: int


@dataclass(frozen=True)
class Signalled(Event):
    """The launcher got a signal that ends the run."""

    t: float
    signum: int


@dataclass(frozen=True)
class ServiceDied(Event):
    """One of our own processes died: "fork server", "store" or "fd store"."""

    t: float
    service: str


@dataclass(frozen=True)
class ServiceReady(Event):
    """A restarted service answers again."""

    t: float
    service: str


@dataclass(frozen=True)
class Devices(Event):
    """The devices that this run may use, by UUID and in the order of LOCAL_RANK, and which of them are in quarantine."""

    t: float
    devices: tuple[str, ...]
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceFault(Event):
    """The driver reported a fault (core.faults: "xid", "gpu-lost", "ecc") of `devices`.

    `siblings`: the others on the same GPU (MIG), which a reset would hit too. `workers`: those that use the devices.
    `code`: the Xid; `recovery`: field 230, -1 = not known. `step`: the gate number that every rank works on.
    """

    t: float
    fault: str
    devices: tuple[str, ...]
    workers: tuple[int, ...] = ()
    siblings: tuple[str, ...] = ()
    code: int = 0
    recovery: int = -1
    step: int | None = None


@dataclass(frozen=True)
class Probed(Event):
    """The answer to Probe. `workers`: those that use the device now; `detail`: the test that failed."""

    t: float
    device: str
    ok: bool
    workers: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class DeviceOut(Event):
    """Another run, or a person, quarantined a device: its worker keeps it, nobody else gets it."""

    t: float
    device: str
    reason: str


@dataclass(frozen=True)
class DeviceBack(Event):
    """A person took a device out of quarantine."""

    t: float
    device: str


@dataclass(frozen=True)
class PeerFailed(Event):
    """The world of several nodes is over for a reason outside this node: all nodes start again together.

    `cause` is for people. `node` and `rank` (of the world) name who failed, where that is known. `evicted`: the world goes on without this
    node, whose place another one has.
    """

    t: float
    cause: str
    node: int | None = None
    rank: int | None = None
    evicted: bool = False


@dataclass(frozen=True)
class WorldStops(Event):
    """Another node stops the world of several nodes, to repair it in place. `cause` is for people.

    `incident`: the number that the repair has on every node. `node_lost`: another node takes a lost one's place.
    """

    t: float
    cause: str
    incident: int = 0
    node_lost: bool = False


@dataclass(frozen=True)
class Seated(Event):
    """This node, a spare one so far, takes the place of a node that was lost, or `drained`, in the repair `incident` of its world."""

    t: float
    incident: int = 0
    drained: bool = False


@dataclass(frozen=True)
class WorldDecided(Event):
    """Every node has stopped for `generation`, and all go on with gate number `resume`; `rollback`: from the host snapshot of it."""

    t: float
    generation: int
    resume: int
    rollback: bool = False


@dataclass(frozen=True)
class WorldRestored(Event):
    """Every rank of every node is restored in `generation`.

    `missed`: gate number + 1 of the step at which ranks of some node took over without the script's work since the body before, 0 = none
    did; `made`: one made an update in place of its predecessor.
    """

    t: float
    generation: int
    missed: int = 0
    made: bool = False


@dataclass(frozen=True)
class WorldEnded(Event):
    """The run is over on every node (`code` 0: well), or the other nodes cannot be reached. `detail` is for people.

    `elsewhere`: the reason is not on this node. `drained`: it goes on without this node, which gives its place to a spare one.
    """

    t: float
    code: int
    detail: str
    elsewhere: bool = False
    drained: bool = False


# ---- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spawn(Action):
    """Fork a worker into board cell `worker`; `rank` None makes it a spare."""

    worker: int
    rank: int | None


@dataclass(frozen=True)
class CloseGate(Action):
    """Swap the gate word closed into exactly `generation` (the word may lag by more than one), ring the workers.

    Answer with GateClosed, also when the word was closed into `generation` before.
    """

    generation: int


@dataclass(frozen=True)
class Fence(Action):
    """End worker's whole process group (SIGKILL) and mark its cell FENCED when it runs no more code."""

    worker: int


@dataclass(frozen=True)
class Dismiss(Action):
    """Tell a healthy worker to end (SIGTERM to its process group): its world starts anew. Its Died or Finished follows."""

    worker: int


@dataclass(frozen=True)
class Publish(Action):
    """Write the world file of `generation` and ring. `workers[r]` holds rank r; `lost[k]` died holding `replaced[k]`.

    `resume` is a gate number, or -1 in a tail world: after the loop. `devices`: what the workers may see, in the order
    of LOCAL_RANK; () = what the launcher sees. `rollback`: every
    rank goes back to the host snapshot of that step, and the gate word with them.
    """

    generation: int
    resume: int
    workers: tuple[int, ...]
    replaced: tuple[int, ...]
    lost: tuple[int, ...]
    tail: bool = False
    fresh: bool = False
    attempt: int = 0
    devices: tuple[str, ...] = ()
    rollback: bool = False


@dataclass(frozen=True)
class TellStopped(Action):
    """Tell the other nodes that each living rank of this one has stopped or finished its update: the answer is WorldDecided.

    `last`: the last gate that this node's word opened; `replaced`: its ranks that get another worker. `cells`: the incarnations that have
    the host snapshots of its ranks (NOWHERE: another node), () = its ranks cannot go back to one; `back`: one of them needs to.
    """

    generation: int
    last: int
    replaced: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()
    back: bool = False


@dataclass(frozen=True)
class DecideGate(Action):
    """Write what all nodes agreed on into this node's word, closed for `generation`: ranks that wait at gate `resume` - 1 pass."""

    generation: int
    resume: int


@dataclass(frozen=True)
class TellRestored(Action):
    """Tell the other nodes that every rank of this one is restored: the answer is WorldRestored."""

    generation: int


@dataclass(frozen=True)
class OpenGate(Action):
    """Swap `closed` off for `generation`; do nothing when a later generation closed the gate."""

    generation: int


@dataclass(frozen=True)
class ResetGate(Action):
    """Start a world anew: gate word (generation, open, -1). Only after every worker of the old world is fenced."""

    generation: int


@dataclass(frozen=True)
class Deadline(Action):
    """Answer with Expired(name, generation) in `seconds`, unless the same name is set again or the run ends."""

    name: str
    generation: int
    seconds: float


@dataclass(frozen=True)
class StartService(Action):
    """Start "fork server", "store" or "fd store" again, answer with ServiceReady."""

    service: str


@dataclass(frozen=True)
class Quarantine(Action):
    """Give `device` to no worker any more, and remember that beyond this launcher's life."""

    device: str
    reason: str


@dataclass(frozen=True)
class Probe(Action):
    """Ask the driver whether `device` is well, answer with Probed, also when the driver does not answer."""

    device: str


@dataclass(frozen=True)
class Say(Action):
    """Tell the person. `what` is a fixed key (the agent has the words), `facts` fill it in.

    `attempt`: of a restart, "2 of 3" and the like.
    """

    what: str
    worker: int | None = None
    rank: int | None = None
    detail: str = ""
    attempt: str = ""


@dataclass(frozen=True)
class NodeDone(Action):
    """Every worker of this node ended well: tell the other nodes; the answer is WorldEnded or PeerFailed."""


@dataclass(frozen=True)
class Terminate(Action):
    """End every worker: a signal to each process group, SIGKILL after the shutdown timeout; spares at once.

    `failed`: a rank failed, so those that fail with it get a moment to report; else the signal comes at once.
    """

    reason: str
    failed: bool = True


@dataclass(frozen=True)
class End(Action):
    """The run is over with this exit code. `worn_out`: only this machine is at its end, or drained; the program could go on elsewhere."""

    code: int
    reason: str
    worn_out: bool = False
