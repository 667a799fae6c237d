"""Writes what pages of docs/ say of options, faults and Xids from the tables of the program: `python -m tests.docs.generate`.

What deaths in sharded models came to is printed from what the tests left.

docs/reference/cli.md is written whole; elsewhere a part between `<!-- generated: NAME -->` and `<!-- end of generated -->` is.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import typer

from ftrun.cli.commands.verify import ACCEPTED
from ftrun.cli.main import app, load_commands
from ftrun.cli.options import GROUPS, OPTIONS, VERIFY, Option
from ftrun.control import policy
from ftrun.control.device import xid
from ftrun.core.codes import CODES
from ftrun.faults.kinds import KINDS, PHASES
from tests.docs.blocks import DOCS
from tests.e2e import layouts

CLI = DOCS / "reference" / "cli.md"
_MARKS = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->)", re.S)
_HEAD = """# Command line

Written by `python -m tests.docs.generate` from the commands themselves; `ftrun COMMAND --help` says the same. Commands about a run
take its name; `--json` is for programs. stdout carries data, stderr messages.

`ftrun [OPTIONS] train.py [ARGS]...` is short for `ftrun run [OPTIONS] train.py [ARGS]...`; everything after the script belongs to it.
"""


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    names = head.split(" | ")
    lines = [f"| {head} |", f"|{'---|' * len(names)}", *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# -- the command line ----------------------------------------------------------------------------------------------------


def cli() -> str:
    """The page of all commands, `run` first, the others by name."""
    load_commands()
    group: Any = typer.main.get_command(app)
    names = ["run", *(name for name in sorted(group.commands) if name != "run" and not group.commands[name].hidden)]
    return _HEAD + "".join(_command(name, group.commands[name], group) for name in names)


def _command(name: str, command: Any, group: Any) -> str:
    context = typer.Context(command, info_name=f"ftrun {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"\n## ftrun {name}\n\n`ftrun {name} {usage}`\n\n{_text(command.help)}\n"]
    arguments = [(p.metavar or p.name, p.help) for p in command.params if p.param_type_name == "argument" and p.help]
    if arguments:
        parts.append("\n" + _table("argument | meaning", ((_code(metavar), text) for metavar, text in arguments)))
    if name == "run":
        for title in GROUPS:
            rows = [option for option in OPTIONS if option.group == title]
            parts.append(f"\n### {title}\n\n" + _table("option | default | variable | meaning", map(_run_row, rows)))
    elif name == "verify":
        parts.append(f"\nThe options of `ftrun run`, but for those that do not go with it, and:\n\n{_verify()}")
    else:
        rows = [
            _row(param) for param in command.params if param.param_type_name == "option" and "--help" not in param.opts
        ]
        parts.append("\n" + _table("option | default | meaning", rows) if rows else "")
    parts.append(f"\n{_text(command.epilog)}\n" if command.epilog and name != "run" else "")
    return "".join(parts)


def _text(words: str | None) -> str:
    """The help of a command as Markdown: its paragraphs, each on one line."""
    paragraphs = re.split(r"\n\s*\n", (words or "").replace("\b", "").strip())
    return "\n\n".join(" ".join(paragraph.split()).replace("<", "&lt;") for paragraph in paragraphs)


def _run_row(option: Option) -> tuple[str, ...]:
    names = ", ".join(filter(None, (option.short, f"--{option.name}")))
    default = option.default if option.metavar and option.default else ""
    return _code(f"{names} {option.metavar}".rstrip()), _code(default), _code(option.variable), option.help


def _verify() -> str:
    own = [option for option in ACCEPTED if option.group == VERIFY]
    return _table("option | meaning", ((_code(f"--{o.name} {o.metavar}".rstrip()), o.help) for o in own))


def _row(param: Any) -> tuple[str, ...]:
    names = ", ".join(opt for opt in sorted(param.opts, key=len) if "_" not in opt)
    metavar = "" if param.is_flag else (param.metavar or param.type.name.upper())
    default = param.default
    shown = "" if param.is_flag or default is None or callable(default) or param.required else str(default)
    return (
        _code(f"{names} {metavar}".rstrip()),
        _code(shown),
        (param.help or "") + (" Required." if param.required else ""),
    )


# -- faults --------------------------------------------------------------------------------------------------------------


def kinds() -> str:
    rows = []
    for kind in KINDS.values():
        name = f"{kind.name}:{kind.argument}" if kind.argument else kind.name
        where = "any phase" if kind.phases == PHASES else ", ".join(kind.phases)
        rows.append((_code(name), kind.what, where, "yes" if kind.lasts else ""))
    return _table("kind | what it does | where it can strike | `--for`", rows)


def faults() -> str:
    rows = []
    for fault, row in policy.TABLE.items():
        others = ", ".join(_code(str(choice)) for choice in row.choices if choice != row.response)
        answer = "see below" if fault.value == "xid" else _code(str(row.response))
        rows.append((_code(fault.value), answer, "`[policy.xid]`" if fault.value == "xid" else others))
    return _table("fault | answer | what you may choose instead", rows)


def xids() -> str:
    known = [xid.row(number) for number in range(1, 256)]
    rows = []
    for kind in xid.Class:
        numbers = [row.number for row in known if row.kind is kind]
        where = "all others" if kind is xid.Class.UNKNOWN else _ranges(numbers)
        rows.append((kind.value, _code(str(xid.ACTIONS[kind])), where))
    return _table("class | answer | Xids", rows)


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1–3, 7"."""
    found = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        these = [number for _, number in run]
        found.append(str(these[0]) if len(these) == 1 else f"{these[0]}–{these[-1]}")
    return ", ".join(found)


# -- troubleshooting -----------------------------------------------------------------------------------------------------


def errors() -> str:
    """Codes in their order, with the message that a page begins with, cut to one line."""
    rows = []
    for code in CODES:
        text = (DOCS / "errors" / f"{code.page}.md").read_text()
        title = text.partition("\n")[0].removeprefix(f"# {code.name}: ")
        message = re.search(r"```text\n(.*?)\n```", text, re.S)
        said = textwrap.shorten(message[1], 88, placeholder=" …") if message else ""
        rows.append((_code(code.name), f"`` {said} ``", f"[{title}]({code.page}.md)"))
    return _table("code | message | page", rows)


PARTS = {"errors": errors, "kinds": kinds, "layouts": layouts.table, "policy": faults, "xids": xids}


def with_parts(text: str) -> str:
    """A page with its generated parts as they are now."""
    return _MARKS.sub(lambda found: f"{found[1]}{PARTS[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    CLI.write_text(cli())
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        if with_parts(text) != text:
            page.write_text(with_parts(text))
