"""Tell whose code runs: the frames that led to ftrun, and which files are the script's. Imports no torch, for a spare has none yet."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType

from ftrun.core.paths import OWN_FILES

_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COMMANDS = sysconfig.get_path("scripts") + os.sep


# Each step calls the first two functions, so they walk without a generator.


def outside() -> FrameType | None:
    """Return the frame that called ftrun."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    return frame


def inside_compiled() -> bool:
    """Does this call come from below a function that torch.compile, or torch's switch for it, has wrapped?"""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.endswith("torch/_dynamo/eval_frame.py"):
        frame = frame.f_back
    return frame is not None


def frames(start: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frame that called ftrun, or `start`, and its callers, the innermost first."""
    frame = start or outside()
    while frame is not None:
        yield frame
        frame = frame.f_back


def script_frames(start: FrameType | None = None) -> list[FrameType]:
    """Return the script's among the `frames`."""
    return [frame for frame in frames(start) if is_script(frame.f_code.co_filename)]


def called_by(code: CodeType) -> bool:
    """Does this call come from that function, at whatever depth?"""
    return any(frame.f_code is code for frame in frames())


def caller() -> str:
    """Return the file and line of the script that led here."""
    return line_of((frame.f_code.co_filename, frame.f_lineno) for frame in frames())


def line_of(lines: Iterable[tuple[str, int | None]]) -> str:
    """Return `file:line` of the script's first among the lines, which begin with the innermost.

    If none is the script's, return that of a library other than ftrun and torch; if there is none, the innermost; "?" without lines.
    """
    lines = [*lines]
    for counts in (is_script, _is_of_a_library, bool):
        for file, line in lines:
            if counts(file):
                return f"{file}:{line}"
    return "?"


def _is_of_a_library(file: str) -> bool:
    return not file.startswith((OWN_FILES, _folder_of_torch(), "<frozen", os.__file__))


def _folder_of_torch() -> str:
    """Return torch's folder, which need not lie among the other libraries."""
    return os.path.join(next(iter(getattr(sys.modules.get("torch"), "__path__", ())), os.devnull), "")


_program: tuple[object, dict[str, bool]] = (None, {})  # the module __main__, and the answers for files while it is that


def is_script(file: str) -> bool:
    """Is this a file of the user's, as opposed to torch's, ftrun's, the interpreter's own and libraries?

    The top package of the program is the user's wherever it lies. A file in a folder of installed packages is a library's,
    even if PYTHONPATH names that folder.
    """
    global _program
    main = sys.modules.get("__main__")
    if _program[0] is not main:
        _program = main, {}
    found = _program[1].get(file)
    if found is None:
        found = _program[1][file] = _is_of_the_program(file, main)
    return found


def _is_of_the_program(file: str, main: types.ModuleType | None) -> bool:
    if file.startswith((OWN_FILES, _folder_of_torch(), "<frozen")):
        return False
    if file == getattr(main, "__file__", None) or file.startswith(tuple(_folders_of(main))):
        return True
    return not file.startswith(_LIBRARIES) and not any(
        isinstance(folder, str) and file.startswith(folder + os.sep) and _has_packages(folder) for folder in sys.path[1:]
    )


def _folders_of(main: types.ModuleType | None) -> Iterator[str]:
    """Yield the folders of the program's top package: of `-m`, of a command that pip made, of a script among installed files."""
    file = getattr(main, "__file__", None) or ""
    packages = {(getattr(main, "__package__", None) or "").partition(".")[0]} - {""}
    if file.startswith(_COMMANDS):
        packages |= {one.__module__.partition(".")[0] for one in vars(main).values() if isinstance(one, types.FunctionType)}
        packages -= {"__main__", *sys.stdlib_module_names}
    for name in packages:
        yield from (folder + os.sep for folder in getattr(sys.modules.get(name), "__path__", ()))
    beside = os.path.dirname(file) + os.sep
    if file.startswith(_LIBRARIES) and beside not in _LIBRARIES:
        yield beside


@functools.cache
def _has_packages(folder: str) -> bool:
    """Were packages installed to this folder?"""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # an archive
        return False


def module_of(kind: type) -> str:
    """Return the `__module__` of a class; "" for a Cython class, in which it is a descriptor for its objects."""
    name = kind.__module__
    return name if isinstance(name, str) else ""
