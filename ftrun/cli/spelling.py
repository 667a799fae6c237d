"""Turns what a person types into what the parser knows: abbreviations, both spellings, `-r3`, and where the script begins.

Follows argparse, which reads torchrun's command line: an abbreviation that torchrun understands means here what it means
there, whatever options ftrun has besides; and what an older torchrun understood keeps its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ftrun.cli.options import OPTIONS, Option
from ftrun.core.errors import UsageError

HELP = Option("help", "Show this message and exit.", OPTIONS[-1].group, short="-h", variable="", takes=())
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def spelled_out(argv: list[str], options: Iterable[Option] = OPTIONS) -> list[str]:
    """The same command line with whole names and `--name=value`, and `--` before the script if there is one.

    A `--` before the script is dropped, else one right after it.

    Raises:
        UsageError: For unknown or ambiguous options and for values that are missing or too many.
    """
    table = Spellings(options)
    done: list[str] = []
    rest = list(argv)
    while rest and _is_option(rest[0]):
        token = rest.pop(0)
        if token.startswith("--"):
            spelling, equals, value = token.partition("=")
            _take(table.find(spelling), f"--{spelling[2:]}", value if equals else None, rest, done)
        else:
            _cluster(table, token, rest, done)
    dashes = rest[:1] == ["--"]
    if dashes:
        del rest[0]
    if not rest:
        return done
    script, *arguments = rest
    if arguments[:1] == ["--"] and not dashes:
        del arguments[0]
    return [*done, "--", script, *arguments]


class Spellings:
    """The options of one command by every name that they have."""

    def __init__(self, options: Iterable[Option]) -> None:
        every = (*options, HELP)
        self.long: dict[str, Option] = {spelling: option for option in every for spelling in option.spellings}
        self.short: dict[str, Option] = {option.short: option for option in every if option.short}

    def find(self, typed: str) -> Option:
        """The option that is meant.

        Raises:
            UsageError
        """
        if typed in self.long:
            return self.long[typed]
        meant = {option.name: option for spelling, option in self.long.items() if spelling.startswith(typed)}
        theirs = [option for option in meant.values() if option.torchrun]
        oldest = [option for option in theirs if option.since == (0, 0)]
        for found in (oldest, theirs, [*meant.values()]):
            if len(found) == 1:
                return found[0]
        if meant:
            raise UsageError(f"{typed} could be {_listed(sorted(meant))}")
        raise UsageError(self.unknown(typed))

    def unknown(self, typed: str) -> str:
        hyphens = f"--{typed.lstrip('-').replace('_', '-')}"
        close = nearest(hyphens, (name for name in self.long if "_" not in name))
        hint = f"; did you mean {close}?" if close else "; all options: ftrun run --help"
        return f"there is no option {typed}{hint}"


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known word most like `word`, None when none is; `alike` from 0, any will do, to 1, the same."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=alike)), None)


def _is_option(token: str) -> bool:
    # as argparse: a negative number and text with a blank are values
    return len(token) > 1 and token[0] == "-" and token != "--" and not _NEGATIVE.fullmatch(token)


def _looks_like_value(token: str) -> bool:
    return token != "--" and (not _is_option(token) or " " in token)


def _take(option: Option, typed: str, value: str | None, rest: list[str], done: list[str]) -> None:
    name = f"--{option.name}"
    if option.is_flag:
        if value is not None:
            raise UsageError(f"{name} takes no value, and got {value!r}")
        done.append(name)
        return
    if value is None:
        if not rest or not _looks_like_value(rest[0]):
            raise UsageError(f"{typed} needs a value ({option.metavar})")
        value = rest.pop(0)
    done.append(f"{name}={value}")


def _cluster(table: Spellings, token: str, rest: list[str], done: list[str]) -> None:
    """`-m`, `-r 3`, `-r3`, `-r=3`, `-mr3`."""
    typed, tail = token[:2], token[2:]
    option = table.short.get(typed)
    if option is None:
        raise UsageError(table.unknown(token))
    if not option.is_flag:
        _take(option, typed, tail.removeprefix("=") if tail else None, rest, done)
        return
    if tail.startswith("="):
        raise UsageError(f"{typed} takes no value, and got {tail[1:]!r}")
    _take(option, typed, None, rest, done)
    if tail:
        if f"-{tail[0]}" not in table.short:
            raise UsageError(table.unknown(token))
        _cluster(table, f"-{tail}", rest, done)


def _listed(names: list[str]) -> str:
    words = [f"--{name}" for name in names]
    return f"{', '.join(words[:-1])} or {words[-1]}"
