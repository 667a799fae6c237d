"""Backend "ftrun": a process group whose inner group (Gloo for CPU tensors, NCCL for CUDA) is replaced in place.

Theory of operation. torch, DDP and FSDP2 hold a `SwapGroup` for as long as the process lives. It keeps its place in the script and
its ranks; its inner group belongs to one generation. All groups of a worker are in its `Registry`, in the order of their making.

    connected   `inner` is of this world; each collective gets a Work of ours (`Pending`, or `Direct` between two ranks)
    aborted     the control thread closed its connections; the main thread is on its way out of the body
    draining    we gave its collectives up, but the inner group may still write into gradients and buffers
    retired     replaced; a thread destroys it later, since a destructor may join a thread that waits for a stuck peer
    connecting  `Connecting` meets the others of the new world; a replacement does so ahead, while it restores its state

What each side sees. The script sees a collective that takes its time, or an Interrupt. The launcher sees, on the board, in which
collective of which group a rank waits, and whether one of them failed (`OnBoard`); it judges hangs by that (`ftrun.control.hangs`).
A peer's death reaches this rank as an error of the inner group, before anybody has stopped the world. The group holds the error back
for the stop that should explain it (30 s in a loop, 3 s outside), and raises it only if none comes.

Why the works are ours. Nothing in torch wakes a thread that waits in Gloo: `abort()`, `shutdown()` and `destroy_process_group()`
return at once, and the collective waits out its timeout. Shutting down the connected sockets (selected by inode and duplicated, since
descriptors are reused) wakes it in less than a millisecond, but in 3 to 11 % of kills some rank stayed in `waitSend` or in DDP's
reducer. So we complete pending works 4 ms after a stop, with tensors of the right type: a wrong one crashes the reducer. Their contents
are garbage, and the closed gate keeps them out of the weights.

Why a drain. The redone step uses the same gradients, which an abandoned collective may still write into. A rank that cannot prove
within half the stop timeout that all threads of its old groups sleep or ended makes way for a replacement with tensors of its own.

Tried and rejected:
- Gloo's `_reconfigure` (torch 2.15): no fence. A rank that was stopped meanwhile finished its old all-reduce after SIGCONT, and wrote into
  the tensors of three survivors.
- The listening socket shut down as well: that kills the process.
- The connections shut down before Gloo closes its side: Gloo queues and forgets messages sent in between, and their thread stays.
- Addresses through the TCPStore: under one prefix for all generations it hands out dead addresses, and it may die in the repair.
  Ranks of one machine meet in files now (only NCCL still asks the store), once in place of three barriers.
- A Python thread state kept for each thread of Gloo's: a collective saved 100 us of mapping, but states outlived their threads.
- A lock around the set of pending works: single calls into C are enough, and a lock would cost as much again in every step.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ftrun.core import grace, symptoms
from ftrun.core.errors import UsageError, WorkerError
from ftrun.core.faults import Fault
from ftrun.core.shared.board import F, Head, Phase
from ftrun.core.shared.notes import GroupNote
from ftrun.core.shared.world import World
from ftrun.core.text import ranks as named
from ftrun.worker.comm.backend import Inner
from ftrun.worker.comm.collective_replay import Recorder, tensors_of
from ftrun.worker.comm.collectives import COLLECTIVES, DIRECT, averaging_integers, fill_local
from ftrun.worker.comm.connect import AheadOf, Connecting
from ftrun.worker.comm.on_board import OnBoard
from ftrun.worker.comm.work import Direct, FinishedWork, Pending
from ftrun.worker.link.callers import called_by, caller
from ftrun.worker.link.observer import Observers
from ftrun.worker.link.position import Interrupt, Where
from ftrun.worker.link.run_link import Context
from ftrun.worker.torch_compat import torch_private

_DRAIN = 0.5  # share of the stop timeout in which the collectives of a stopped world must end
_ENDING = 0.25  # seconds that a collective between two loops gets to end when the world stops: all may have come to it
_FOR_NODES = timedelta(minutes=30)  # torch's for Gloo
_FEW = 4  # groups whose old connections may stay open beside the new ones: each takes descriptors and threads


class SwapGroup(ProcessGroup):
    """One process group of the script: the default group or a subgroup. `ranks` are global, `rank` is in this group."""

    def __init__(self, registry: Registry, key: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self.registry = registry
        self.context = registry.context
        self.key = key
        self.ranks = tuple(ranks)
        self.my_rank = rank
        self.timeout = timeout
        self.inner: Inner | None = None
        self.ahead: Connecting | None = None  # the connection that a replacement makes while it restores its state
        self._name, self._desc = key, key
        self.pending: set[Pending] = set()
        self._draining: list[Pending] = []
        self._directs: weakref.WeakSet[Direct] = weakref.WeakSet()  # point-to-point works, also complete ones
        self._waiting: set[Direct] = set()  # works for which a thread waits
        self._holding: weakref.WeakKeyDictionary[Pending, threading.Timer] = weakref.WeakKeyDictionary()  # failed, held back
        self._lock = threading.Lock()
        # number of this group on the board: 0 is the world, if the board has all of it
        world = registry.context.world
        whole = world is not None and world.span is None and len(ranks) == world.size
        self.mark = 0 if whole else zlib.crc32(key.encode()) or 1

    # -- names that torch sets and reads -----------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner.devices if self.inner else [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getBackendName(self) -> str:
        return "ftrun"

    def name(self) -> str:
        return "ftrun"

    def _inner_group(self) -> Any:
        if self.inner is None:
            raise UsageError("this process group is being rebuilt; its backend cannot be used directly")
        return self.inner.group

    def _get_backend(self, device: torch.device) -> Any:
        return torch_private.backend_of(self._inner_group(), device)

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """Destroy this group for the script. A member that is still connecting is not cut off in the middle."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.forget()
        inner, self.inner = self.inner, None
        self.registry.drop(self)
        if inner is not None:
            self.release(inner.generation + 1)
            threading.Thread(target=inner.leave, name="ftrun-retire", daemon=True).start()

    # -- collectives -------------------------------------------------------------------------------------------------

    def _collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        registry, context, in_body = self.registry, self.context, self.registry.position.where is Where.BODY
        first: Any = args[0] if args and name != "send" else ()
        outputs = [first] if type(first) is torch.Tensor else tensors_of(first)
        if registry.local:
            fill_local(name, args)
            return FinishedWork(outputs)
        replay = not in_body and registry.admit(name)
        if registry.recorder.replaying:
            if not replay:
                fill_local(name, args)
                return FinishedWork(outputs)
            try:
                registry.recorder.replay(name, outputs)
            except WorkerError as error:
                registry.unrestorable(error)
                raise
            return FinishedWork(outputs)
        if context.gate_word[0] >= context.stopped_from:  # `stop_pending`, inlined
            raise Interrupt
        if registry.broken is not None:
            registry.check()
        inner = self.inner
        if inner is None:
            raise self._why_not(name)
        if in_body:
            if registry.first_exchange is not None and registry.shown.words[F.PHASE] == Phase.BACKWARD:
                registry.first_exchange()
            registry.observers.collective_started(name, args, outputs)
        direct = name in DIRECT
        entry = registry.recorder.reserve(name) if replay else None
        if not direct:  # a direct work waits in `wait` only: after a send a rank may be busy with something else
            registry.shown.beginning = True
            registry.shown.entered(name, self.mark)
        try:
            if not outputs or outputs[0].is_floating_point():
                divide, work = None, getattr(inner.group, name)(*args, **kwargs)
            else:
                with averaging_integers(outputs, len(self.ranks), self.my_rank, args, kwargs) as divide:
                    work = getattr(inner.group, name)(*args, **kwargs)
        except BaseException as error:
            if entry is not None:
                entry.fail(error)
            try:
                self.await_stop(error)  # meanwhile the board says that it waits, as when the failure comes later
            finally:
                registry.shown.begun()
            raise
        if direct:
            peer = self.ranks[args[1]] if name != "recv_anysource" else self.ranks[self.my_rank]
            on_gpu = any([t.is_cuda for t in tensors_of(args[0])])
            received = Direct(self, inner, work, name, peer, outputs, on_gpu, entry)
            self._directs.add(received)
            return received
        pending = Pending(self, inner, work, outputs, divide, entry)
        registry.shown.beginning = False
        if pending not in self.pending:  # its end came while it began
            registry.shown.left()
        if context.gate_word[0] >= context.stopped_from or registry.over:  # looked at again, now that it is pending
            self.release(inner.generation + 1)  # the control thread may have been here before this one began
        return pending

    def _why_not(self, name: str) -> Exception:
        if self not in self.registry.groups:
            return RuntimeError(f"{name}: this process group was destroyed")
        return WorkerError(
            f"{name}: this rank took over after its predecessor had left the loop, and its peers are past this "
            "collective; communicate inside the loop"
        )

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Call Gloo's barrier that names the missing ranks.

        Before torch 2.15 `dist.monitored_barrier` takes only backends called "gloo", and refuses this group: call the method of the
        group.

        Raises:
            RuntimeError: If a rank is missing.
        """
        if self.registry.local or self.registry.recorder.replaying:
            return
        self.registry.admit("monitored_barrier")
        self.context.check_stop_in_collective()
        self.registry.shown.entered("monitored_barrier", self.mark)
        try:
            self._inner_group().monitored_barrier(self.timeout if timeout is None else timeout, wait_all_ranks)
        except RuntimeError as error:
            self.await_stop(error)
            raise
        finally:
            self.registry.shown.left()

    def _start_coalescing(self, device: torch.device) -> None:
        raise UsageError(
            'backend "ftrun" does not coalesce the calls for a device: leave `device` out of _coalescing_manager'
        )

    def hold(self, error: BaseException | None) -> float:
        """Return the seconds to wait for a stop of the world before `error` is raised.

        In a loop any error of torch's may come from a peer's death; outside, only a closed connection and an error of NCCL may, so
        the script gets the error of a timeout or of wrong arguments at once there.
        """
        if not isinstance(error, RuntimeError) or self.context.board[Head.ENDING]:
            return 0.0  # no stop explains anything once the run ends
        return grace.COLLECTIVE if self.registry.looping else symptoms.of_exception(error).wait

    def await_stop(self, error: BaseException) -> None:
        """Wait for the stop that explains an inner error, then raise Interrupt; return if none comes."""
        if symptoms.of_exception(error).fault is Fault.LINK:
            self.registry.shown.failed(self.context.generation)
        deadline = time.monotonic() + self.hold(error)
        while not self.context.stop_pending():
            seen = self.context.board.worker_bell.count()
            left = deadline - time.monotonic()
            if left <= 0 or self.context.board[Head.ENDING]:
                return
            self.context.board.worker_bell.wait(seen, min(left, 0.1))
        self.context.check_stop_in_collective()

    def began_waiting(self, name: str, peer: int) -> None:
        self.registry.shown.entered(name, self.mark, peer)

    def waited(self, since: int, over: bool = False) -> None:
        """Count the main thread's wait since `since`, ns. `over`: it waited for a collective of this world that is complete.

        Raises:
            Interrupt: If the world was stopped, unless the stop came too late for this step.
        """
        registry, context = self.registry, self.context
        where = registry.position.where
        registry.shown.waited += time.monotonic_ns() - since
        if where is Where.BETWEEN:
            registry.keep_results()  # a death before the next loop does not lose them
        if over and (where is Where.PASSED or where is Where.BETWEEN):
            return  # a rank that passed its gate is not interrupted; between two loops it stops at the next loop
        if context.gate_word[0] >= context.stopped_from:
            raise Interrupt

    def stopped_waiting(self) -> None:
        self.registry.shown.left()

    @contextlib.contextmanager
    def letting_go(self, work: Direct) -> Iterator[None]:
        self._waiting.add(work)
        try:
            if self.context.stop_pending() or self.inner is not work.of or self.registry.over:
                work.let_go()  # the control thread may have been here before this one began
            yield
        finally:
            self._waiting.discard(work)

    def shown(self, error: Exception) -> None:
        self.registry.told(error)

    def cut_off(self) -> Exception:
        return self.registry.broken or RuntimeError("the process group was destroyed before this collective was complete")

    # any thread changes the set, by single calls into C; a lock would cost as much again in every step

    def ended(self, work: Pending) -> bool:
        """Note that the work is complete; return False if it was before."""
        try:
            self.pending.remove(work)
        except KeyError:
            return False
        self.registry.shown.left(pended=True)
        return True

    def failed(self, work: Pending) -> None:
        """Hold back the failure of an inner collective until a stop completes the work; give up if none comes."""
        if self.context.stop_pending() or work not in self.pending:  # or a stop completed it before it failed
            work.complete()
            return
        seconds = self.hold(work.error)
        if not seconds:
            self._give_up(work)
            return
        self.registry.shown.failed(work.generation)
        timer = threading.Timer(seconds, self._give_up, (work,))
        timer.daemon = True
        self._holding[work] = timer  # `release` cancels it, so that explained failures leave no threads behind
        timer.start()
        if work not in self.pending:  # the stop came in between
            timer.cancel()

    def _give_up(self, work: Pending) -> None:
        """Let this rank's next call, the gate at the latest, raise an error that no stop explained."""
        alive = self.inner is work.of  # the script has not destroyed this group meanwhile
        if alive and not self.context.stop_pending() and work.generation == self.context.generation:
            self.registry.broken, self.registry.broken_in = work.error, self
        work.complete()

    # -- stop and reset ----------------------------------------------------------------------------------------------

    def abort(self, generation: int | None = None) -> None:
        """Wake every thread that waits in an inner group of a world before `generation`. Any thread may call it, even late.

        Torch calls it without a generation, for a script that gives the group up.
        """
        if generation is None:
            self.shutdown()
            return
        inner = self.inner
        if inner is not None and inner.generation < generation:
            inner.abort()

    def release(self, generation: int) -> None:
        """Complete every pending Work of a world before `generation`. Any thread may call it, even late."""
        pending = [work for work in self.unfinished() if work.generation < generation]
        with self._lock:
            self._draining.extend(pending)
        for work in pending:
            timer = self._holding.pop(work, None)
            if timer is not None:
                timer.cancel()
            work.complete()
        for direct in list(self._waiting):
            if direct.of.generation < generation:
                direct.let_go()

    def unfinished(self) -> list[Pending]:
        return list(self.pending)

    def drained(self) -> bool:
        """Are all abandoned inner collectives over? Until then they may write into their tensors."""
        with self._lock:
            directs = [direct for direct in self._directs if direct.writes()]
            inners = {work.of for work in self._draining} | {direct.of for direct in directs}
            still = [inner for inner in inners if inner.still]
            self._draining = [w for w in self._draining if not (w.inner_is_completed() or w.of in still)]
            if self._draining or not all(direct.of in still for direct in directs):
                return False
            self._directs.clear()
            return True

    def retire(self) -> None:
        """Abort the inner group, and leave it to the registry, which destroys it later."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.abort()
            self.release(inner.generation + 1)
            self.registry.retired.append(inner)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: SwapGroup, *args: Any, **kwargs: Any) -> Any:
        return self._collective(name, args, kwargs)

    method.__name__ = name
    return method


for _name in COLLECTIVES:
    if hasattr(ProcessGroup, _name):
        setattr(SwapGroup, _name, _forward(_name))


class Registry:
    """All groups of this worker, in the order in which the script made them, and the rules for calls in them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.position = context.position
        self.groups: list[SwapGroup] = []
        self.recorder = Recorder()
        self.local = False  # collectives return at once (priming)
        self.calling = 0  # depth of calls that may communicate outside a body
        self.broken: Exception | None = None  # a collective failed and no stop explained it
        self.broken_in: SwapGroup | None = None  # the group of that collective
        self.over = False  # the run ends and a rank has left: no collective can be completed
        self.shown = OnBoard(context.cell.words())
        self.first_exchange: Callable[[], None] | None = (
            None  # called before the first exchange of gradients in a body
        )
        self.observers = Observers()  # replaced by those of the protected state, once there is one
        self.unrestorable: Callable[[Exception], None] = lambda error: None  # reports that this rank cannot be replaced
        self.keep_results: Callable[[], None] = lambda: None  # stores the recorder's results where they outlive the process
        self.retired: list[Inner] = []  # inner groups to destroy when there is time
        self._made: dict[tuple[int, ...], int] = {}
        self._told_of_others = False  # `refuse_others` has printed its warning
        self.nodes: SwapGroup | None = None  # of several nodes: one rank of each, among them this one
        self._spoke = 0  # how many such groups it has made
        self._destroyed = 0  # how often the script has destroyed all its groups
        context.wakers.append(self)

    @property
    def looping(self) -> bool:
        """Was the first step handed out? From then on a failed collective concerns the whole world."""
        return self.position.where is not Where.BEFORE

    def create(self, rank: int, ranks: Sequence[int], timeout: timedelta) -> SwapGroup:
        """Make a group of global `ranks` and, unless this worker is still restoring, its connections."""
        if self.looping:
            raise UsageError("make process groups before the first step: a replacement could not take part in this one", explain="F303")
        members = tuple(ranks)
        count = self._made.get(members, 0)
        self._made[members] = count + 1
        key = f"{self._destroyed}:{'.'.join(map(str, members))}#{count}"
        world = self._world()
        group = SwapGroup(self, key, rank, members, timeout)
        made = [group, *self._among_nodes(world, timeout)]
        self.groups += made
        self.shown.pending = [one.pending for one in self.groups]
        if group.mark and members[rank] == next(one for one in members if one in world.here):  # the launcher only knows the mark
            self.context.note(GroupNote(group.mark, members), needed=True)
        if not self.recorder.replaying:
            try:
                for one in made:
                    self.connect(one, world)
            except Exception:
                for one in reversed(made):
                    self.drop(one)  # torch does not know it, so that nobody else would
                raise
        elif not world.tail and [one.key for one in self.groups] == self.recorder.groups:
            self._connect_ahead(world)
        return group

    def _among_nodes(self, world: World, timeout: timedelta) -> list[SwapGroup]:
        """Make, beside this rank's first group, the group in which it speaks for its node, if it is the one that does."""
        if self.nodes is not None or world.span is None or self.context.rank not in world.span.firsts:
            return []
        firsts = world.span.firsts
        self.nodes = SwapGroup(self, f"nodes#{self._spoke}", firsts.index(self.context.rank), firsts, timeout)
        self._spoke += 1
        return [self.nodes]

    def speak(self) -> None:
        """Let this rank speak for its node, also in a script that makes no group; see `_among_nodes`."""
        world = self._world()
        made = self._among_nodes(world, _FOR_NODES)
        self.groups += made
        self.shown.pending = [one.pending for one in self.groups]
        for one in made if not self.recorder.replaying else ():
            self.connect(one, world)

    def _connect_ahead(self, world: World) -> None:
        """Meet the others in all groups that the replaced rank had, in their order, while the script goes on.

        So they need not wait for the rest of the script and for this rank's state. This waits until the last group is made: in the
        second group the others would wait only as long as a collective may take.
        """
        before = None
        for group in self.groups:
            ahead = AheadOf(before, last=group is self.groups[-1])
            before = group.ahead = self._connecting(group, world, ahead)

    def _world(self) -> World:
        if self.context.world is None:
            raise UsageError("init_process_group before this worker has a rank")
        return self.context.world

    def connect(self, group: SwapGroup, world: World, meanwhile: Callable[[], None] | None = None) -> None:
        """Build the inner group for `world`. Raises Interrupt if a later generation stops it."""
        ahead, group.ahead = group.ahead, None
        if ahead is not None and ahead.generation != world.generation:
            ahead.forget()
            ahead = None
        group.inner = (ahead or self._connecting(group, world)).result(meanwhile)

    def _connecting(self, group: SwapGroup, world: World, ahead: AheadOf | None = None) -> Connecting:
        return Connecting(self.context, world, group.key, group.ranks, group.my_rank, group.timeout, ahead, on_cpu=group is self.nodes)

    def rebuild(self, world: World, meanwhile: Callable[[], None] | None = None) -> None:
        """Retire every inner group and build it again for `world`, in the order of creation.

        `meanwhile` runs while the first one connects.
        """
        self.broken = self.broken_in = None
        self.destroy_retired()  # groups of the last repair; those of this one can wait until its first step is done
        for group in self.groups:
            group.retire()
        if len(self.groups) > _FEW:
            self.destroy_retired()
        for group in self.groups:  # one after the other, in the same order on every rank: each waits for all of its members
            self.connect(group, world, meanwhile)
            meanwhile = None
        if meanwhile is not None:
            meanwhile()

    def destroy_retired(self) -> None:
        """Destroy retired groups in the background, since a destructor may wait for a stuck peer."""
        while self.retired:
            threading.Thread(target=self.retired.pop().close, name="ftrun-retire", daemon=True).start()

    def drop(self, group: SwapGroup) -> None:
        """Remove a group that the script has destroyed; a failure in it concerns no other group."""
        if group not in self.groups:
            return
        self.groups.remove(group)
        self.shown.pending = [one.pending for one in self.groups]
        if self.broken_in is group:
            self.broken = self.broken_in = None
        if group is self.nodes:
            self.nodes = None
        elif not self.groups or self.groups == [self.nodes]:  # ranks that did not make the same groups before a failure are in step again
            self._destroyed += 1
            self._made.clear()

    def abort(self, generation: int) -> None:
        # let collectives between two loops end: nobody could give this rank or its replacement their results later
        deadline = time.monotonic() + _ENDING
        while self.position.where is Where.BETWEEN and time.monotonic() < deadline:
            if not any([work.generation < generation for group in self.groups for work in group.unfinished()]):
                break
            time.sleep(0.001)
        for group in list(self.groups):
            group.abort(generation)

    def release(self, generation: int) -> None:
        for group in list(self.groups):
            group.release(generation)

    def cut_short(self, why: str) -> None:
        """End every wait in a collective, since the run ends; these collectives and all later ones fail."""
        self.over = True
        self.broken, self.broken_in = WorkerError(f"{why}: this collective cannot be completed"), None
        for group in list(self.groups):
            inner = group.inner
            if inner is not None:
                inner.abort()
                group.release(inner.generation + 1)

    def drain(self, generation: int) -> None:
        """Wait until no collective of the old world writes into its tensors any more: the redone step uses them again.

        A rank that cannot prove it in time ends itself, and its replacement begins with tensors of its own.
        """
        self.abort(generation)
        self.release(generation)
        seconds = _DRAIN * self.context.stop_timeout
        deadline = time.monotonic() + seconds
        while not all([group.drained() for group in self.groups]):
            if time.monotonic() > deadline:
                self.context.make_way(
                    f"a collective of the world that was stopped did not end within {seconds:g} s and might still write into gradients"
                )
            time.sleep(0.0005)

    def check(self) -> None:
        """Raise the error of a collective that failed without a stop."""
        if self.broken is not None and not self.context.stop_pending():
            raise self.broken

    def told(self, error: Exception) -> None:
        """Note that `error` is raised in the script. In a loop the gate stays shut all the same, since the step is not complete."""
        if error is self.broken and not self.looping:
            self.broken = self.broken_in = None

    def settle(self) -> None:
        """Wait until every collective of this world is over, as an arrival at the gate requires."""
        for group in self.groups:
            for work in group.unfinished():
                work.settle()

    def refuse_others(self, go_on: bool = False) -> None:
        """Raise UsageError if the script has a process group of another backend; with `go_on` print that once instead."""
        try:
            others = torch_private.groups_of_others(dist)
        except (AttributeError, ValueError):
            return  # another torch, or all groups were destroyed meanwhile
        for backend, ranks in others:
            why = (
                f'this script also made a process group of backend "{backend}", of {named(ranks)}: a replacement would wait there for '
                'ranks that do not come again; make it by new_group() without a backend: "ftrun" takes tensors on the CPU and on GPUs'
            )
            if not go_on:
                raise UsageError(why, explain="F361")
            if not self._told_of_others and self.context.rank == 0:
                print(f"ftrun: {why}", file=sys.stderr, flush=True)
            self._told_of_others = True

    # -- rules -------------------------------------------------------------------------------------------------------

    def admit(self, name: str) -> bool:
        """Check that this collective may be called now. Return True if it is recorded: before the first step and between loops.

        Raises:
            UsageError: If it may not; the message has the script's file and line.
        """
        where = self.position.where
        # a fault during one between two loops is not repaired in place, unless it is in a job.call
        if where in (Where.BEFORE, Where.BETWEEN, Where.CALL):
            return not called_by(torch.nn.parallel.DistributedDataParallel.__init__.__code__)
        if where is Where.PASSED:
            raise UsageError(
                f"{name} after the gate, at {caller()}: communicate before optimizer.step(): move this line there, or log a value by "
                "job.log(loss=loss) there; evaluate in job.call(fn) between the loop's `for` and `with step:`. A rank that dies in its "
                "update has nothing to give here. Two optimizers with a backward between them are two `with step`",
                explain="F305",
            )
        if where in (Where.LOOP, Where.LEFT, Where.HANDED_OUT) and not self.calling:
            raise UsageError(
                f"{name} outside `with step`, at {caller()}: communicate in the body before optimizer.step(), "
                "or in job.call(fn) between the loop's `for` and `with step:`",
                explain="F304",
            )
        return False
