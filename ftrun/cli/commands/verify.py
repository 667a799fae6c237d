"""`ftrun verify`: a script without faults, then with them, and every tensor compared. 0 equal, 1 different, 2 usage, 78 bad plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ftrun.cli.main import WIDTH, app, given_options, signature
from ftrun.cli.options import GROUPS, OPTIONS, VERIFY, Option
from ftrun.core.errors import EXIT_SIGNAL, UsageError
from ftrun.core.text import printable, tell

_OURS = (
    Option("faults", "The faults: a TOML plan, as for --fault-plan.", VERIFY, metavar="FILE", variable="", takes=()),
    Option("kill-every-phase", "Kill a rank in each phase of a step and of a recovery.", VERIFY, variable="", takes=()),
    Option("json", "The result as JSON.", VERIFY, variable="", takes=()),
)
_NOT_HERE = ("fault-plan", "dry-run", "json", "version", "print-completion")
_LAUNCH = tuple(option for option in OPTIONS if option.name not in _NOT_HERE)
ACCEPTED = (*_OURS, *_LAUNCH)
_EPILOG = (
    "The script must call ftrun.protect and give the same result twice (random streams that it does not seed are seeded by "
    "rank here). It runs two times or more: in its arguments ${verify} stands "
    "for the name of the run (clean, faults, again), to keep what it writes apart. "
    "Exit codes: 0 equal, 1 different, 2 usage, 78 bad plan.\n\n"
    "Example: ftrun verify --kill-every-phase --nproc-per-node 4 train.py --steps 20"
)


class VerifyCommand(TyperCommand):
    """Reads the options of a run as `ftrun run` does, with those of the comparison beside them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from ftrun.cli.spelling import spelled_out

        return super().parse_args(ctx, spelled_out(args, ACCEPTED))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "--faults FILE|--kill-every-phase", "SCRIPT", "[ARGS]..."]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from ftrun.cli.help import write_group

        write_group(formatter, VERIFY, _OURS)
        for group in GROUPS:
            write_group(formatter, group, _LAUNCH)


def verify(script: str, args: list[str] | None, **given: str | bool | None) -> int:
    """`given`: the options on the command line, None or False for the rest."""
    from ftrun.cli import resolve
    from ftrun.cli.config import read
    from ftrun.host.run.launcher import require_usable
    from ftrun.verify.trials import Interrupted
    from ftrun.verify.verification import Verification

    said = given_options(_LAUNCH, given)
    plan, every = given["faults"], bool(given["kill_every_phase"])
    if (plan is not None) == every:
        raise UsageError("say which faults: either --faults FILE or --kill-every-phase")
    config = read(said.get("config") or os.environ.get("FTRUN_CONFIG") or None)
    faulted = {**said, "fault-plan": str(plan)} if plan is not None else said
    values = resolve.Values(faulted, os.environ, config)
    settings = resolve.settings(values, script, tuple(args or ()))
    if settings.nodes.most > 1:
        raise UsageError("ftrun verify runs on one node: leave out --nnodes")
    if settings.kind == "program":
        raise UsageError("ftrun verify needs a Python script that calls ftrun.protect, and --no-python runs anything")
    require_usable()
    flags = {option.name for option in _LAUNCH if option.is_flag}
    options = [f"--{name}" if name in flags else f"--{name}={text}" for name, text in said.items()]
    if every and not values.given("max-replacements"):
        options.append("--max-replacements=1000")
    try:
        result = Verification(settings, options, Path(str(plan)).absolute() if plan is not None else None).run()
    except Interrupted as interrupted:
        tell("verify: ended by a signal; nothing was compared")
        return EXIT_SIGNAL + interrupted.signum
    print(json.dumps(result.as_json(), indent=2) if given["json"] else "\n".join(map(printable, result.lines())))
    return result.code


verify.__signature__ = signature(ACCEPTED)  # type: ignore[attr-defined]
verify.__annotations__ = {}
app.command(
    "verify",
    cls=VerifyCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": WIDTH},
    help="Run a script without faults and with faults, and compare every tensor, step by step and at the end.",
    epilog=_EPILOG,
)(verify)
