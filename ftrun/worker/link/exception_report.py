"""Report a script's exception: on stderr, in a note for the launcher, and in the file that torchrun's tools read.

This runs in the failing worker while it still can, and never raises because of a full or missing disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import zlib
from pathlib import Path

from ftrun.core import codes, paths, symptoms
from ftrun.core.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    DeviceError,
    FtrunError,
    NonFiniteError,
    PlatformError,
    UsageError,
)
from ftrun.core.shared.board import Head
from ftrun.core.shared.moment import CALL, Moment
from ftrun.core.shared.notes import FailureNote
from ftrun.core.system import files
from ftrun.core.system.procfs import has_stdin
from ftrun.worker.link.callers import is_script, line_of
from ftrun.worker.link.run_link import Context

_STARTERS = ("<frozen runpy>", os.sep + "runpy.py")
_RUNNERS = tuple(os.path.join(paths.OWN_FILES, "worker", "process", name) for name in ("main.py", "run_script.py"))
_LONGEST = 1 << 19  # characters of a message or traceback for the launcher: a note has room for both
_REFUSED = "F301"  # the code of a UsageError without a code of its own
_NO_STDIN = "ftrun: this worker has no stdin: ftrun's own is closed or /dev/null, or --debug-rank gives it to another rank"
_HERE = os.path.join(os.getcwd(), "")  # before the script may change it: all ranks must name a line in the same way


def final_code(error: BaseException) -> int:
    """Return the exit code of a run that an error of ftrun's ends at once, since it would recur; 0 = another try may help."""
    if isinstance(error, UsageError):
        return EXIT_USAGE
    if isinstance(error, NonFiniteError) and error.final:
        return EXIT_FAILED
    return EXIT_FAILED if isinstance(error, (DeviceError, PlatformError)) else 0


def report_exception(context: Context, error: BaseException, kind: str) -> None:
    """Print a user's exception on stderr, and leave it in a note for the launcher."""
    every = traceback.extract_tb(error.__traceback__)
    user = [f for f in every if is_script(f.filename)]
    where = line_of((f.filename, f.lineno) for f in reversed(every))
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    if sys.argv and not os.path.isabs(sys.argv[0]):
        where = where.removeprefix(_HERE)  # as the script was called
    cell = context.cell
    moment = Moment.of(cell)
    text = _text(error, user)
    name, message = type(error).__name__, symptoms.message(error)
    now = time.time()
    context.note(
        FailureNote(
            cell.index,
            context.generation,
            symptoms.of_exception(error).fault.value,
            symptoms.exception_evidence(name, message, where),
            signature=f"{name} at {where}",
            type=name,
            message=message[:_LONGEST],
            traceback=text[-_LONGEST:],
            where=where,
            outside=context.position.outside,
            explain=error.explain if isinstance(error, FtrunError) else "",
            final=final_code(error),
            time=now,
        )
    )
    if kind == "uncaught" and not isinstance(error, KeyboardInterrupt):
        _leave_error_file(f"{name}: {message}", text, now)
    if getattr(error, "_ftrun_reported", False):
        return
    try:
        error._ftrun_reported = True  # type: ignore[attr-defined]
    except AttributeError:
        pass  # exceptions with __slots__ are printed twice
    where = moment.words() if moment.phase == CALL or not moment.in_step else f"step {moment.step}"
    who = f"ftrun: rank {cell.rank}" + (f", {where}" if where and moment.step is not None else "")
    said = f"{name}: {message}" if message else name
    if isinstance(error, EOFError) and not has_stdin():
        text += f"{_NO_STDIN}\n"
    first = _shown_by(context, f"{name}: {message}\n{text}" if _says_all(error) else text)
    before = "before" if first == str(cell.rank) else f"rank {first}"
    if first is None:
        code = error.explain if isinstance(error, FtrunError) else ""
        more = codes.read_on(code or (_REFUSED if isinstance(error, UsageError) else ""))
        shown = f"{who}: {said}{more}\n{text}"
    elif _says_all(error):
        shown = f"{who}: {name}, the same as {before}\n"
    else:
        shown = f"{who}: {said} (with the same traceback as {before})\n"
    print(shown, end="", file=sys.stderr, flush=True)


def give_up(context: Context, step: int) -> None:
    """End this process: the script caught an exception that left a step's body, and the rank cannot go on with the others."""
    print(
        f"ftrun: rank {context.cell.rank}, step {step}: the script goes on after an exception that left the body of the "
        "step, and its rank cannot; its worker ends (catch inside `with step:` what is to be lived with)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_FAILED)


def _says_all(error: BaseException) -> bool:
    """Is this an error of ftrun's about the script? Frames inside of torch and ftrun then explain nothing."""
    return isinstance(error, (UsageError, NonFiniteError)) and error.__cause__ is None


def _text(error: BaseException, user: list[traceback.FrameSummary]) -> str:
    """Return the text to print below an exception's message."""
    if _says_all(error) and user:
        return "".join(traceback.format_list(user))
    told = traceback.TracebackException.from_exception(error)
    _leave_out_our_frames(told)
    return "".join(told.format())


def _leave_out_our_frames(told: traceback.TracebackException | None) -> None:
    """Leave out ftrun's frames of an exception and of its causes; if it has no others, leave out only those that load the script.

    A syntax error of the script then has no frames at all, as when Python runs the script.
    """
    if told is None:
        return
    others = [f for f in told.stack if not f.filename.endswith(_STARTERS) and f.filename not in _RUNNERS]
    theirs = [f for f in others if not f.filename.startswith(paths.OWN_FILES)]
    told.stack = traceback.StackSummary.from_list(theirs or others) if others else None  # type: ignore[assignment]
    for earlier in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        _leave_out_our_frames(earlier)


def _shown_by(context: Context, text: str) -> str | None:
    """Return the rank that has printed this traceback on the same console in this attempt; None if this rank must print it."""
    whose = "all" if context.one_console else str(context.cell.rank)
    check = zlib.crc32(text.encode(errors="replace"))
    mark = context.run_dir / f".shown-{context.board[Head.ATTEMPT]}-{whose}-{check:08x}"
    try:
        os.symlink(str(context.cell.rank), mark)  # made whole or not at all, by one rank only
    except FileExistsError:
        return os.readlink(mark)
    except OSError:
        pass
    return None


def _leave_error_file(message: str, text: str, now: float) -> None:
    """Write torchrun's error.json, unless the script's `@record` has written it."""
    path = os.environ.get(paths.ENV_ERROR_FILE)
    if not path or os.path.exists(path):
        return
    with contextlib.suppress(OSError):
        files.make_folder(Path(path).parent)
        files.replace(Path(path), json.dumps(paths.error_record(message, text, now)), private=True)
