"""Figures for Prometheus, read by Prometheus' own parser: of a recorded run, of a real one as a file and over HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ftrun.core.runs import find_run
from ftrun.core.shared.board import F
from ftrun.view import metrics
from ftrun.view.exporter import Exporter, serve
from tests.conftest import Ftrun, wait_for
from tests.view import boards
from tests.view.conftest import Looking

TRAIN = """
import sys, time, torch, torch.distributed as dist
import ftrun
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
dist.init_process_group("ftrun")
ddp = torch.nn.parallel.DistributedDataParallel(model)
job = ftrun.protect(model=ddp, optimizer=opt)
for step in job.steps(int(sys.argv[1])):
    with step:
        time.sleep(0.01)
        ddp(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
"""


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def check_conventions(found: Iterable[Any]) -> None:
    for family in found:
        assert family.name.startswith("ftrun_") and family.documentation.endswith("."), family
        for sample in family.samples:
            assert sample.labels["run"]
            if family.type == "counter":
                assert sample.name.endswith("_total") and sample.value >= 0
        for unit in ("_ms", "_mb", "_percent", "_milliseconds"):
            assert not family.name.endswith(unit)


def test_recorded_run(looking: Looking) -> None:
    boards.put(looking.root)
    done = looking.pipe("metrics")
    assert done.returncode == 0, done.stderr
    found = families(done.stdout)
    check_conventions(found.values())
    text = done.stdout
    assert value(text, "ftrun_incidents_total", cause="SIGKILL", outcome="recovered") == 2
    assert value(text, "ftrun_steps_total") == 57
    assert value(text, "ftrun_restored_bytes_total", source="peer") == 1448704
    assert value(text, "ftrun_ranks") == 4 and value(text, "ftrun_replacements_total") == 2
    assert 0 < value(text, "ftrun_effective_training_time_ratio") < 1
    states = found["ftrun_run_state"].samples
    assert sum(s.value for s in states) == 1 and len(states) == 7
    histogram = {s.labels.get("le"): s.value for s in found["ftrun_incident_duration_seconds"].samples}
    assert histogram["+Inf"] == 2 and histogram["0.05"] == 0
    incidents = [i for i in json.loads(boards.RECORDED.read_text())["journal"] if i.get("note") == "incident"]
    total = sum(i["total_ms"] for i in incidents) / 1000
    assert value(text, "ftrun_incident_duration_seconds_sum") == pytest.approx(total)
    assert value(text, "ftrun_lost_seconds_total") == pytest.approx(total)


def test_strange_names_are_escaped(looking: Looking) -> None:
    boards.put(looking.root)
    device = {"index": 0, "uuid": 'a"b\\c\nd', "utilisation": 50, "temperature": 60, "quarantined": None, "rank": 0}
    (looking.root / "lab" / "devices.json").write_text(json.dumps([device]))
    text = looking.pipe("metrics").stdout
    assert value(text, "ftrun_device_utilization_ratio", uuid='a"b\\c\nd') == 0.5
    listed = json.loads(looking.pipe("metrics", "--json").stdout)
    assert [s["labels"]["uuid"] for s in listed if s["name"] == "ftrun_device_temperature_celsius"] == ['a"b\\c\nd']
    (looking.root / "lab" / "devices.json").write_text(json.dumps([{**device, "uuid": "\x1b[2J\r\x9b"}]))
    assert value(looking.pipe("metrics").stdout, "ftrun_device_utilization_ratio", uuid="\\u001b[2J\\r\\u009b") == 0.5


def test_many_ranks_are_counted_not_listed(looking: Looking) -> None:
    boards.put(looking.root, ranks=512)
    text = looking.pipe("metrics").stdout
    assert value(text, "ftrun_ranks") == 512 and "ftrun_rank_step" not in text and len(text) < 20_000


def test_exit_codes(looking: Looking) -> None:
    assert looking.pipe("metrics").returncode == 4
    boards.put(looking.root)
    assert looking.pipe("metrics", "--file", "no/such/x.prom").returncode == 2
    assert looking.pipe("metrics", "--json", "--port", "0").returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = looking.pipe("metrics", "--port", taken.getsockname()[1])
    assert done.returncode == 2 and "--port" in done.stderr
    assert "Examples: `ftrun metrics" in looking.pipe("metrics", "--help").stdout


def test_http(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only /metrics, only on loopback; a client that says nothing holds up nobody."""
    boards.put(looking.root)
    monkeypatch.setenv("FTRUN_RUNS_ROOT", str(looking.root))
    run = find_run("lab")
    assert run is not None
    listener = socket.create_server(("127.0.0.1", 0))
    server = serve(Exporter(run), listener)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with (
            socket.create_connection(listener.getsockname()),
            urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer,
        ):
            assert answer.headers["Content-Type"] == metrics.CONTENT_TYPE
            check_conventions(families(answer.read().decode()).values())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/etc/passwd", timeout=10)
    finally:
        server.shutdown()
        server.server_close()


def test_file_is_never_half_there(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    board = boards.put(looking.root)
    monkeypatch.setenv("FTRUN_RUNS_ROOT", str(looking.root))
    run = find_run("lab")
    assert run is not None
    from ftrun.core.system import files

    target, exporter, stop = looking.base / "x.prom", Exporter(run), threading.Event()

    def write() -> None:
        while not stop.is_set():
            board.cell(0)[F.STEP] += 1
            files.replace(target, exporter.text())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_for(target.exists, "the file")
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert target.read_text().rstrip().splitlines()[-1].startswith("ftrun_heartbeat_age_seconds_max")
    finally:
        stop.set()
        writer.join()
    assert [p.name for p in looking.base.iterdir() if p.name.startswith(".x.prom")] == []


def test_real_run(ftrun: Ftrun) -> None:
    """A run with both: figures while it trains, and at its end the file says how it ended; nothing is left behind."""
    plan = ftrun.base / "plan.toml"
    plan.write_text('seed = 1\n[[fault]]\nkind = "kill"\nrank = 1\nstep = 5\nat = "backward"\n')
    script, target = ftrun.script(TRAIN), ftrun.base / "run.prom"
    options = ("--nproc-per-node", 2, "--fault-plan", plan, "--metrics-file", target, "--metrics-port", 0)
    run = ftrun.start(*options, "--run-id", "measured", script, 150)
    run.wait_output("metrics at http://127.0.0.1:")
    url = run.stderr.partition("metrics at ")[2].split()[0]
    run.wait_output("recovered in")
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    assert value(text, "ftrun_ranks", run="measured") == 2
    assert value(text, "ftrun_incidents_total", cause="SIGKILL", outcome="recovered") == 1
    assert run.wait() == 0, run.stderr
    text = Path(target).read_text()
    check_conventions(families(text).values())
    assert value(text, "ftrun_run_state", state="ended") == 1 and value(text, "ftrun_exit_code") == 0
    assert value(text, "ftrun_steps_total") == 150 and value(text, "ftrun_steps_redone_total") == 1
    assert ftrun.call("timeline", "./logs/measured").returncode == 0


@pytest.mark.parametrize("option", ["--metrics-file=no/such/x.prom", "--metrics-port=TAKEN"])
def test_real_run_refuses_at_once(ftrun: Ftrun, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = ftrun.call(option.replace("TAKEN", str(taken.getsockname()[1])), ftrun.script("print('ran')"))
    assert done.returncode == 2 and "--metrics-" in done.stderr and "ran" not in done.stdout
