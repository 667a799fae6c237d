"""Prints the plan of a run for `ftrun --dry-run`, for people or as JSON."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ftrun.cli.options import BY_NAME, NO_EFFECT
from ftrun.cli.policyfile import as_rows
from ftrun.cli.resolve import Values
from ftrun.host.base.settings import Settings

_HIDDEN = ("dry-run", "json", "version", "print-completion")


def as_json(values: Values, settings: Settings) -> str:
    """{"run", "settings": as the launcher gets them, "options": {name: {"value", "from", "effect"}}}."""
    options = {
        name: {"value": _value(values, name), "from": values.source[name], "effect": option.group != NO_EFFECT}
        for name, option in BY_NAME.items()
        if name not in _HIDDEN
    }
    return json.dumps({"run": settings.run_id, "settings": settings.to_json(), "options": options}, indent=2)


def as_text(values: Values, settings: Settings) -> str:
    """One fact a line, then the options that were set."""
    rows = [
        ("run", _name(settings)),
        (settings.kind, shlex.join(settings.argv)),
        ("workers", _workers(settings)),
        ("nodes", _nodes(settings)),
        ("logs", f"{settings.log_dir}/{_name(settings) if settings.run_id else '<run>'}"),
        (
            "restarts",
            f"{settings.max_restarts} of all workers, {settings.max_replacements} replacements per rank and hour",
        ),
        ("ended by", _signals(settings.signals)),
    ]
    if settings.forward:
        rows.append(("forwards", _signals(settings.forward)))
    mine = as_rows(settings.policy)
    if mine:
        rows.append(("policy", ", ".join(f"{what}: {response}" for what, response in mine.items())))
    if settings.fault_plan:
        rows.append(("faults", settings.fault_plan))
    lines = [f"{name:<9} {what}" for name, what in rows]
    said = [name for name in BY_NAME if values.given(name) and name not in _HIDDEN]
    if said:
        lines.append("options")
    for name in said:
        effect = "; no effect in ftrun" if BY_NAME[name].group == NO_EFFECT else ""
        lines.append(f"  {name} = {_shown(_value(values, name))}  ({values.source[name]}{effect})")
    return "\n".join(lines)


def _value(values: Values, name: str) -> Any:
    return values[name] if BY_NAME[name].is_flag else values.text[name]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _workers(settings: Settings) -> str:
    text = f"{settings.nproc} per node, {settings.spares} spare{'' if settings.spares == 1 else 's'}"
    if settings.gpus:
        text += f", on GPUs {settings.gpus}"
    if settings.numa_binding:
        text += f", bound by {settings.numa_binding}"
    return text


def _name(settings: Settings) -> str:
    if settings.nodes.most > 1:
        return f"{settings.run_id or 'none'}-<host>"  # each node has its own
    return settings.run_id or "a random name"


def _nodes(settings: Settings) -> str:
    nodes = settings.nodes
    if nodes.most == 1:
        return "1"
    count = str(nodes.most) if nodes.least == nodes.most else f"{nodes.least} to {nodes.most}"
    if nodes.backend == "static":
        where = f"{nodes.master_addr or '127.0.0.1'}:{nodes.master_port or 29500}"
        return f"{count}, this is node {nodes.rank}, static at {nodes.endpoint or where}"
    spares = f" and {nodes.spares} spare" if nodes.spares else ""
    return f"{count}{spares}, {nodes.backend} at {nodes.endpoint or 'localhost'}"


def _signals(signals: tuple[int, ...]) -> str:
    import signal

    return ", ".join(signal.Signals(number).name for number in signals)
