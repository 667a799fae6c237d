"""The first code of a worker: it takes its cell on the board, then runs the user's script as `__main__`.

It runs in a child of the fork server, or in a fresh interpreter that reads its spec from the descriptor FTRUN_SPEC.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun import native
from ftrun.core import environment, paths
from ftrun.core.shared import fresh
from ftrun.core.shared.board import Busy, F, Flag, Head, Phase
from ftrun.core.shared.notes import ParkedNote
from ftrun.core.shared.world import World
from ftrun.core.system import files, shown_command
from ftrun.core.system.when_imported import when_imported
from ftrun.core.text import tell
from ftrun.worker.link.callers import caller
from ftrun.worker.link.control_thread import ControlThread
from ftrun.worker.link.exception_report import report_exception
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import LOOK_RARELY, Context
from ftrun.worker.process import debugger, exec_program, numa, preloaded, run_script, standby
from ftrun.worker.torch_compat.torch_private import end_as_python_does, use_temporary_folder

_LONGEST_FOLDER = 107 - len("/listener-12345678")  # bytes: an address of a Unix socket has 107
_BETWEEN_LOOPS = "the world was stopped while it was in a collective between two loops"
_PARK_DEADLINE = 10 * 365 * 86400.0  # a spare may wait for as long as the run lasts; the launcher ends it


def main(spec: dict[str, Any]) -> None:
    """Run a worker to its end, and exit with the script's exit code; never returns."""
    status = 1
    try:
        status = _run(spec)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
        # daemon threads may sit in a dead group: leave without joining them
        os._exit(status)


def main_of_program(started: list[str]) -> None:
    """Run `main` in a fresh interpreter. `started`: the modules that it began with."""
    spec = fresh.spec()
    spec["started"] = started
    main(spec)


def _run(spec: dict[str, Any]) -> int:
    native.set_name(f"ftrun spare {spec['cell']}" if spec["rank"] is None else f"ftrun rank {spec['rank']}")
    context = Context(
        Path(spec["run_dir"]),
        int(spec["cell"]),
        float(spec.get("stop_timeout", 10.0)),
        str(spec.get("nonfinite", "redo")),
        int(spec.get("check_every", 0)),
    )
    context.snapshot_every = int(spec.get("snapshot_every", 0))
    context.patient = spec.get("debug_rank") is not None
    context.one_console = bool(spec.get("one_console", False))
    if context.board[Head.ENDING]:
        return 1  # the signal may have come before this process could handle it: the fork server ignores it
    Context.current = context
    os.environ.update(spec["env"])
    os.environ[paths.ENV_RUN_DIR] = spec["run_dir"]
    os.environ[paths.ENV_CELL] = str(spec["cell"])
    for key in (*environment.RANK_KEYS, paths.ENV_ERROR_FILE):
        os.environ.pop(key, None)
    began_with = dict(os.environ)  # before a spare's environment detects copies of it
    _own_temporary_folder(context)
    cell = context.cell
    cell[F.PID] = os.getpid()
    cell[F.PROGRESS] = time.monotonic_ns()
    cell[F.BUSY] = Busy.FIRST
    if spec["kind"] != "program":  # exec gives the lock up, which the launcher would take for a death
        native.beat_start(
            cell.field_address(F.LIFE),
            cell.field_address(F.BEAT),
            float(spec["beat"]),
            int(spec["launcher_pid"]),
            float(spec["orphan_grace"]),
        )
        if cell.has(Flag.ANEW):
            context.milestone(Flag.HELD_ANEW)
    if spec["rank"] is not None:
        cell[F.RANK] = int(spec["rank"]) + 1
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    # a child of the script (a DataLoader worker) must not collect our groups: their threads do not exist there
    os.register_at_fork(after_in_child=gc.freeze)
    context.on_rank = _settler(context, spec)
    context.milestone(Flag.ALIVE)
    _reseed(cell.index, spec["rank"])
    if spec["rank"] is None:
        if "stdin" in spec:
            os.set_inheritable(spec["stdin"], False)
        debugger.pass_over()
        standby.watch(lambda: _wait_for_rank(context, spec))
    else:
        _take_rank(context, context.await_world(lambda w: w.rank_of(cell.index) is not None, 0, 60.0), spec)
    cell.add_flag(Flag.SCRIPT)
    if spec["kind"] == "program":
        return exec_program.become(exec_program.substituted(spec["argv"], context.local_rank))
    ControlThread(context).start()
    _tell_of_first_update(context)
    threading.excepthook = _thread_ended(context, threading.excepthook)
    if "started" in spec:
        preloaded.make_room(run_script.folder_of(spec["kind"], spec["argv"][0]), spec["started"])
    else:
        here = os.getcwd()
        preloaded.Hidden(spec["env"], lambda why: _begin_anew(context, spec, why, here, began_with))
    return _script(context, spec)


def _begin_anew(context: Context, spec: dict[str, Any], why: str, folder: str, variables: dict[str, str]) -> None:
    """Make this process a fresh interpreter that runs the script from its first line."""
    if preloaded.mark(context.run_dir):
        tell(
            f"{why}, which a forked worker has done already; so workers of this run start as fresh interpreters, this one again from "
            "the script's first line (--worker-start exec does so from the beginning)"
        )
    if context.cell.rank is not None:
        spec["rank"] = context.cell.rank
        spec.pop("stdin", None)
    elif "stdin" in spec:
        os.set_inheritable(spec["stdin"], True)
    os.chdir(folder)
    context.cell.add_flag(Flag.ANEW)
    native.beat_stop()
    fresh.become(spec, variables)


def _tell_of_first_update(context: Context) -> None:
    """Tell the launcher of the first step of an optimizer, whether the script protects its model or not; never imports torch.

    From then on a restart from the beginning throws work away, and the launcher knows whether the model is protected.
    """
    told = False

    def stepped(*_: Any) -> None:
        nonlocal told
        if not told and context.is_main_process():
            told = True
            context.milestone(Flag.STEPPED)

    # the hook stays: torch raises if a hook removes itself while another one follows
    when_imported("torch.optim.optimizer", lambda optimizer: optimizer.register_optimizer_step_post_hook(stepped))


def _own_temporary_folder(context: Context) -> None:
    """Give this worker a temporary folder for multiprocessing's sockets, if their names fit into an address."""
    folder = paths.temporary_folder(context.run_dir, context.cell.index)
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        with contextlib.suppress(OSError):  # no room: multiprocessing uses its own folder
            folder.mkdir(mode=0o700, exist_ok=True)  # it exists if the process began anew
            use_temporary_folder(str(folder))


def _reseed(cell: int, rank: int | None) -> None:
    """Seed the random streams anew, which forked workers share with their parent; in a fresh process each begins anywhere.

    `ftrun verify` seeds two runs alike, since it could not compare a script that seeds nothing.
    """
    seed = None if paths.ENV_DIGESTS not in os.environ else cell if rank is None else rank
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        generator = sys.modules[
            "torch"
        ].default_generator  # the CPU's alone: CUDA's begins with the same number everywhere
        generator.seed() if seed is None else generator.manual_seed(seed)


def _wait_for_rank(context: Context, spec: dict[str, Any]) -> None:
    context.note(ParkedNote(context.cell.index, caller()))
    context.milestone(Flag.PARKED)
    mine = context.cell.index
    world = context.await_world(lambda w: w.rank_of(mine) is not None, 0, _PARK_DEADLINE, _meanwhile(context))
    _take_rank(context, world, spec)
    if "stdin" in spec:
        if spec.get("debug_rank") in (None, context.rank):
            os.dup2(spec["stdin"], 0)
        os.close(spec["stdin"])


def _meanwhile(context: Context) -> Callable[[], float]:
    """Warm up a parked spare, and return the function that it calls now and then; a program without torch has nothing to do."""
    if "torch" not in sys.modules:
        return lambda: LOOK_RARELY
    from ftrun.worker.process import warmup

    warmup.up()
    return warmup.Ahead(context).look


def _take_rank(context: Context, world: World, spec: dict[str, Any]) -> None:
    place = next(p for p in world.places if p.cell == context.cell.index)
    native.set_name(f"ftrun rank {place.rank}")
    context.cell[F.RANK] = place.rank + 1
    context.cell[F.GENERATION] = world.generation
    context.world = world
    context.restoring = place.rank in world.replaced
    os.environ.update(environment.rank_variables(place.rank, place.local_rank, world.group_rank))
    os.environ["MASTER_ADDR"] = world.store_host
    os.environ["MASTER_PORT"] = str(world.store_port)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(world.attempt)
    error_file = paths.error_file(Path(spec["logs"]), world.attempt, place.local_rank)
    os.environ[paths.ENV_ERROR_FILE] = str(error_file)
    with contextlib.suppress(OSError):  # a spare may be here before its logs exist; a full disk was reported already
        files.make_folder(error_file.parent)
        error_file.unlink(missing_ok=True)  # a predecessor's failure, if any, is settled
    context.local_rank = place.local_rank
    debugger.settle(context, spec.get("debug_rank"))
    if context.on_rank is not None:
        context.on_rank()


def _settler(context: Context, spec: dict[str, Any]) -> Callable[[], None]:
    """Return the function that sets up devices and processors once the local rank is known."""
    unchanged = os.environ.get("CUDA_VISIBLE_DEVICES")  # before the script of a spare may set it

    def settle() -> None:
        visible = unchanged
        if context.world is not None and context.world.devices:  # a device is in quarantine
            visible = os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.world.devices)
        if spec["numa"]:
            numa.bind(spec["numa"], context.local_rank, int(os.environ["LOCAL_WORLD_SIZE"]), visible)
        if spec["virtual"]:
            os.environ.update(environment.virtual_variables(visible, context.local_rank))

    return settle


def _script(context: Context, spec: dict[str, Any]) -> int:
    target, *arguments = spec["argv"]
    try:
        if exec_program.asks_for_rank(spec["argv"]):
            standby.ask_now()
            target, *arguments = exec_program.substituted(spec["argv"], context.local_rank)
        sys.argv = [target, *arguments]
        sys.orig_argv = shown_command.command(spec["kind"], sys.argv)
        shown_command.show(sys.orig_argv)
        (run_script.run_module if spec["kind"] == "module" else run_script.run_script)(target)
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            _ended(context)
            return 0
        if isinstance(stop.code, int):
            return stop.code & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except Interrupt:
        context.make_way(_BETWEEN_LOOPS)
    except BaseException as error:
        report_exception(context, error, "uncaught")
        return 1
    _ended(context)
    return 0


def _thread_ended(context: Context, otherwise: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a thread hook: an exception that ends the thread that trains ends its worker, as one in the main thread does."""

    def hook(args: Any) -> None:
        error = args.exc_value
        if isinstance(error, Interrupt):
            context.make_way(_BETWEEN_LOOPS)
        trains = context.position.thread is threading.current_thread()
        if not trains or (isinstance(error, SystemExit) and error.code in (None, 0)):
            otherwise(args)
            return
        status = 1
        if isinstance(error, SystemExit):
            status = error.code & 0xFF if isinstance(error.code, int) else 1
        elif error is not None:
            report_exception(context, error, "uncaught")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    return hook


def _ended(context: Context) -> None:
    end_as_python_does()  # os._exit leaves the interpreter
    context.phase(Phase.DONE)
    context.milestone(Flag.EXITING)
