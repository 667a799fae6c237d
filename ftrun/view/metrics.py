"""Render a run's metrics in Prometheus' text format. Counters come from the journal, gauges from the board. No I/O.

Names and units follow the Prometheus conventions: base units (seconds, bytes, ratios from 0 to 1), `_total` for
counters, one help and type line for each name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftrun.core.account import PARTS, Account
from ftrun.core.text import page
from ftrun.view.state import DEGRADED, ENDED, HEALTHY, RECOVERING, STALLED, STARTING, UNPROTECTED

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = (STARTING, HEALTHY, UNPROTECTED, DEGRADED, STALLED, RECOVERING, ENDED)
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
RANKS_MOST = 256  # with more ranks than this, no metric has a rank label: too many series for a server

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = Mapping[str, object]


@dataclass
class _Family:
    name: str
    kind: str
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, suffix: str = "", **labels: object) -> None:
        if value is not None:
            self.samples.append((suffix, labels, float(value)))


def render(picture: Mapping[str, Any], account: Account, now: float) -> str:
    """Return all metrics of a run. `picture` is the newest of `snapshot`; `now` is in monotonic seconds."""
    base = {"run": picture["run"]}
    families = [*_run(picture, account, now), *_incidents(account, now), *_ranks(picture), *_devices(picture)]
    return "".join(_text(family, base) for family in families if family.samples)


def _text(family: _Family, base: Labels) -> str:
    lines = [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
    for suffix, labels, value in family.samples:
        shown = ",".join(f'{key}="{_escaped(str(v))}"' for key, v in {**base, **labels}.items())
        lines.append(f"{family.name}{suffix}{{{shown}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return page(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def parsed(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    """Yield the samples (name, labels, value) of a text made by `render`."""
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match:
            labels = {key: json.loads(f'"{value}"') for key, value in _LABEL.findall(match[2])}
            yield match[1], labels, float(match[3])


# -- the run -------------------------------------------------------------------------------------------------------------


def _run(picture: Mapping[str, Any], account: Account, now: float) -> Iterable[_Family]:
    state = _Family("ftrun_run_state", "gauge", "1 for the state that the run is in, 0 for the others.")
    for name in _STATES:
        state.add(picture["state"] == name, state=name)
    yield state
    yield _one("ftrun_start_time_seconds", "gauge", "Unix time at which the run began.", account.wall or None)
    uptime = account.ended - account.began if account.ended is not None else picture["seconds"]
    yield _one("ftrun_uptime_seconds", "gauge", "How long the run has been going.", uptime)
    yield _one("ftrun_generation", "gauge", "Number of the world that runs.", picture["generation"])
    yield _one("ftrun_steps_total", "counter", "Steps whose update is part of the model.", max(0, picture["step"]))
    yield _one("ftrun_steps_per_second", "gauge", "Pace of the last steps.", picture["steps_per_second"])
    ratio = account.effective(now)
    help_ = "Effective training time: the part of the run's time spent not starting, standing still or being repaired."
    yield _one("ftrun_effective_training_time_ratio", "gauge", help_, ratio)
    yield _one("ftrun_exit_code", "gauge", "Exit code of the run, once it ended.", account.exit_code)
    yield _one("ftrun_ranks", "gauge", "Ranks of this node.", picture["world_size"])
    yield _one("ftrun_ranks_healthy", "gauge", "Ranks whose process lives and beats, and that hold nobody up.", picture["healthy"])
    yield _one("ftrun_spares_wanted", "gauge", "Warm spare workers asked for.", picture["spares_wanted"])
    yield _one("ftrun_spares_ready", "gauge", "Warm spare workers that are ready.", picture["spares_ready"])
    forgotten = picture["left_out"] and account.incidents
    exact = not picture["inexact"] and not account.restarts and not forgotten
    yield _one(
        "ftrun_result_exact", "gauge", "1 while the result will be that of an uninterrupted run, bit for bit.", exact
    )


def _one(name: str, kind: str, help_: str, value: float | None) -> _Family:
    family = _Family(name, kind, help_)
    family.add(value)
    return family


# -- incidents -----------------------------------------------------------------------------------------------------------


def _incidents(account: Account, now: float) -> Iterable[_Family]:
    total = _Family("ftrun_incidents_total", "counter", "Failures that are over, by cause and by how they ended.")
    for (cause, outcome), number in sorted(Counter(_kind(i) for i in account.incidents).items()):
        total.add(number, cause=cause, outcome=outcome)
    if not total.samples:
        total.add(0, cause="none", outcome="recovered")
    yield total
    yield _histogram(account)
    parts = _Family("ftrun_incident_part_seconds_total", "counter", "Seconds that repairs took, by part.")
    for part in PARTS:
        parts.add(sum(float(i["ms"].get(part, 0.0)) for i in account.incidents) / 1000, part=part)
    yield parts
    lost = account.lost(account.ended if account.ended is not None else now)
    yield _one("ftrun_lost_seconds_total", "counter", "Seconds in which the run was being repaired.", lost)
    yield _one("ftrun_steps_redone_total", "counter", "Steps that were begun again after a failure.", account.redone)
    yield _one("ftrun_replacements_total", "counter", "Workers that took over a rank.", len(account.replaced))
    yield _one("ftrun_restarts_total", "counter", "Restarts of all workers.", account.restarts)
    moved = _Family("ftrun_restored_bytes_total", "counter", "Bytes moved to restore the state of ranks, by source.")
    sums: Counter[str] = Counter()
    for incident in account.incidents:
        for rank, source in incident.get("sources", {}).items():
            if any(str(v["rank"]) == rank for v in incident["victims"]):
                sums[source["name"]] += int(source["bytes"])
    for name, number in sorted(sums.items()):
        moved.add(number, source=name)
    yield moved


def _kind(incident: Mapping[str, Any]) -> tuple[str, str]:
    """Return cause and outcome as label values, of low cardinality: all exceptions share one cause."""
    victims = incident.get("victims") or [{}]
    first = victims[0]
    cause = str(first.get("cause") or "")
    if not cause.startswith("SIG"):
        other = "exception" if " at " in cause else cause.partition(" ")[0] or "unknown"
        cause = str(first.get("fault") or incident.get("fault") or ("link" if incident.get("stuck") else other))
    return cause, "restarted" if incident.get("restart") else "recovered"


def _histogram(account: Account) -> _Family:
    family = _Family(
        "ftrun_incident_duration_seconds", "histogram", "From the failure to the first new step of every rank."
    )
    seconds = [float(i.get("total_ms", 0.0)) / 1000 for i in account.incidents]
    for bucket in _BUCKETS:
        family.add(sum(s <= bucket for s in seconds), "_bucket", le=f"{bucket:g}")
    family.add(len(seconds), "_bucket", le="+Inf")
    family.add(sum(seconds), "_sum")
    family.add(len(seconds), "_count")
    return family


# -- ranks and devices -----------------------------------------------------------------------------------------------------


def _ranks(picture: Mapping[str, Any]) -> Iterable[_Family]:
    ranks = [w for w in picture["workers"] if w["rank"] is not None]
    step = _Family("ftrun_rank_step", "gauge", "Step that a rank is in.")
    beat = _Family("ftrun_rank_heartbeat_age_seconds", "gauge", "Seconds since a rank's last sign of life.")
    waits = _Family(
        "ftrun_rank_collective_wait_seconds", "gauge", "Seconds that a rank has been in the collective it is in."
    )
    if picture["world_size"] <= RANKS_MOST:
        for worker in ranks:
            step.add(worker["step"], rank=worker["rank"])
            beat.add(worker["beat_age"], rank=worker["rank"])
            waits.add(worker["collective_age"] or 0.0, rank=worker["rank"])
    yield from (step, beat, waits)
    yield _one("ftrun_heartbeat_age_seconds_max", "gauge", "Oldest sign of life of all ranks.", picture["beat_age_max"])


def _devices(picture: Mapping[str, Any]) -> Iterable[_Family]:
    busy = _Family("ftrun_device_utilization_ratio", "gauge", "Part of the time in which a device computed.")
    heat = _Family("ftrun_device_temperature_celsius", "gauge", "Temperature of a device.")
    used = _Family("ftrun_device_memory_used_bytes", "gauge", "Memory of a device in use.")
    size = _Family("ftrun_device_memory_bytes", "gauge", "Memory of a device.")
    out = _Family("ftrun_device_quarantined", "gauge", "1 when a device is no longer used.")
    for device in picture["devices"]:
        labels = {"device": device.get("index"), "uuid": device.get("uuid", "")}
        share = device.get("utilisation")
        busy.add(None if share is None else float(share) / 100, **labels)
        heat.add(device.get("temperature"), **labels)
        used.add(device.get("memory_used"), **labels)
        size.add(device.get("memory_total"), **labels)
        out.add(device.get("quarantined") is not None, **labels)
    yield from (busy, heat, used, size, out)
