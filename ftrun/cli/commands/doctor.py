"""`ftrun doctor`: is this machine fit for ftrun. Exit code 0 when nothing is broken, 1 when something is, 2 usage."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import typer

from ftrun.cli.main import WIDTH, app
from ftrun.core.text import coloured, printable

_NAME = 16  # columns of a finding's name
_COLOURS = {"ok": "32", "warning": "33", "broken": "31;1"}


@app.command(
    "doctor",
    help="Look at everything that ftrun needs of this machine, and say how to mend what is wrong.",
    epilog="Exit codes: 0 nothing is broken (there may be warnings), 1 something is, 2 usage.\n\n"
    "Example: ftrun doctor --rdzv-endpoint /shared/rendezvous",
)
def doctor(
    endpoint: str = typer.Option(
        None,
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="WHERE",
        help="Where nodes are to meet: a folder, or HOST[:PORT].",
    ),
    as_json: bool = typer.Option(False, "--json", help="JSON instead of text."),
) -> int:
    from ftrun.cli.checks import endpoint as check_endpoint
    from ftrun.doctor import findings as found
    from ftrun.doctor.examination import examine
    from ftrun.doctor.network import is_folder

    if endpoint is not None and not is_folder(endpoint):
        check_endpoint("--rdzv-endpoint", endpoint)
    findings = []
    area = ""
    for finding in examine(endpoint):
        findings.append(finding)
        if not as_json:
            if finding.area != area:
                area = finding.area
                print(area)
            print("\n".join(_lines(finding)), flush=True)
    state = found.worst(findings)
    if as_json:
        print(json.dumps(found.as_json(findings), indent=2))
    else:
        counts = {s: sum(f.state == s for f in findings) for s in _COLOURS}
        print(f"{counts['ok']} ok, {counts['warning']} to look at, {counts['broken']} broken")
    return 1 if state == found.BROKEN else 0


def _lines(finding: Any) -> list[str]:
    mark = f"{finding.state:<8}"
    if coloured(1):
        mark = f"\x1b[{_COLOURS[finding.state]}m{mark}\x1b[0m"
    lines = [f"  {mark} {finding.name:<{_NAME}} {printable(finding.text)}"]
    if finding.fix and finding.state != "ok":
        pad = " " * (_NAME + 12)
        lines += textwrap.wrap(
            f"fix: {printable(finding.fix)}", WIDTH, initial_indent=pad, subsequent_indent=pad + "     "
        )
    return lines
