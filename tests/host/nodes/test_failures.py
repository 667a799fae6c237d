"""A rank, an agent, a server dies in a world of several real launchers."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.e2e.harness import free_port
from tests.host.nodes.agents import Agents
from tests.host.nodes.test_worlds import check_world

# everyone waits in a collective for a rank that dies
DIES_ONCE = """
if attempt == 0:
    if rank == {rank}: os.kill(os.getpid(), 9)
    dist.all_reduce(total.clone())
"""
DIES_ALWAYS = """
if rank == {rank}: sys.exit(7)
dist.all_reduce(total.clone())
"""
# in a world of 4: tell that it is there, wait for its end. In any other one: go on
HOLDS = """
if dist.get_world_size() == 4:
    up(f"up{rank}")
    time.sleep(120)
"""

# the world's stamp, as this node's launcher has published it
TELLS_STAMP = """
import glob
newest = max(glob.glob(os.environ["FTRUN_RUNS_ROOT"] + "/*/world-*.json"), key=os.path.getmtime)
open(os.path.join(out, f"stamp{rank}"), "w").write(json.load(open(newest))["stamp"])
"""

# one of each pair is enough of a sample
BACKENDS = ["file", pytest.param("c10d", marks=pytest.mark.slow)]


def meeting(agents: Agents, backend: str, **more: Any) -> dict[str, Any]:
    endpoint = str(agents.meeting) if backend == "file" else f"127.0.0.1:{free_port()}"
    return {"least": 2, "most": 2, "backend": backend, "endpoint": endpoint, "local_addr": "127.0.0.1", **more}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dead_worker_restarts_every_node(agents: Agents, backend: str) -> None:
    nodes = meeting(agents, backend)
    for _ in range(2):
        agents.start(agents.script(DIES_ONCE.format(rank=2)), nodes, max_restarts=1)
    agents.wait(0, 0)
    check_world(agents, [2, 2], restarts=1)
    texts = sorted((run.stderr for run in agents.runs), key=lambda text: "this is node 1" in text)
    assert "rank 2 failed (SIGKILL); stopping this node's workers and telling the other nodes" in texts[1]
    assert "; stopping this node's workers" in texts[0]
    for text in texts:
        assert "world of 4 workers on 2 nodes (restart 1 of the run after: rank 2 on node 1 (" in text


@pytest.mark.slow
def test_restarts_are_counted_for_the_whole_world(agents: Agents) -> None:
    # a failure on each node in turn is two of two, and a third is one too many
    body = "if attempt == 0 and rank == 0 or attempt == 1 and rank == 3 or attempt == 2 and rank == 1: sys.exit(5)\n"
    nodes = meeting(agents, "c10d")
    for _ in range(2):
        agents.start(agents.script(body + "dist.all_reduce(total.clone())"), nodes, max_restarts=2)
    agents.wait(1, 1)
    for run in agents.runs:
        # who is named is another test's matter: here every rank fails, and in close succession
        assert "the run ends: rank " in run.stderr and "; all 2 restarts of the run are spent" in run.stderr
        worlds = [line for line in run.journal() if line.get("note") == "world"]
        assert [w["restarts"] for w in worlds] == [0, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cause_is_named_on_every_node(agents: Agents, backend: str) -> None:
    nodes = meeting(agents, backend)
    for _ in range(2):
        agents.start(agents.script(DIES_ALWAYS.format(rank=3)), nodes)
    agents.wait(1, 1)
    for run in agents.runs:
        assert "the run ends: rank 3 on node 1 (" in run.stderr
        assert "failed: exit 7; no restart is allowed (--max-restarts 0)" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agent_that_vanishes_leaves_a_smaller_world(agents: Agents, backend: str) -> None:
    nodes = meeting(agents, backend, least=1, conf={"keep_alive": "2", "last_call_timeout": "30"})
    first = agents.start(agents.script(HOLDS), nodes)
    wait_for(lambda: "1 node here" in first.stderr, "the first agent to wait")
    second = agents.start(agents.script(HOLDS), nodes)
    for rank in range(4):
        agents.wait_for(f"up{rank}")
    second.signal(signal.SIGKILL)
    agents.wait(0, -signal.SIGKILL)
    check_world(agents, [2])
    assert "world of 2 workers on 1 node (after: node 1 (" in first.stderr


@pytest.mark.slow
def test_a_late_agent_makes_the_world_larger(agents: Agents) -> None:
    body = "if dist.get_world_size() == 2:\n    up(f'small{rank}')\n    time.sleep(120)\n" + TELLS_STAMP
    nodes = meeting(agents, "file", least=1, conf={"last_call_timeout": "0.5"})
    first = agents.start(agents.script(body), nodes)
    agents.wait_for("small0")
    agents.start(agents.script(body), nodes)
    agents.wait(0, 0)
    check_world(agents, [2, 2])
    assert " joins; stopping this node's workers" in first.stderr
    stamps = [path.read_text() for path in sorted(agents.out.glob("stamp*"))]
    assert len(stamps) == 4 and len(set(stamps)) == 1, stamps


def test_nobody_else_comes(agents: Agents) -> None:
    nodes = meeting(agents, "file", conf={"join_timeout": "1"})
    run = agents.start(agents.script(), nodes)
    agents.wait(1)
    assert "1 node of 2 here; waiting at most 1 s for the others" in run.stderr
    assert "the run ends: only 1 of 2 nodes came within 1 s" in run.stderr


def test_a_signal_while_waiting(agents: Agents) -> None:
    nodes = meeting(agents, "c10d")
    run = agents.start(agents.script(), nodes)
    run.wait_output("1 node of 2 here")
    run.signal(signal.SIGINT)
    assert run.wait(15.0) == 128 + signal.SIGINT
    # one that finds nobody to connect to has not even come so far
    other = agents.start(agents.script(), {**nodes, "conf": {"is_host": "false"}})
    other.wait_output("ftrun: run many")
    other.signal(signal.SIGTERM)
    assert other.wait(15.0) == 128 + signal.SIGTERM


def test_no_server(agents: Agents) -> None:
    nodes = meeting(agents, "c10d", conf={"join_timeout": "1", "is_host": "false"})
    run = agents.start(agents.script(), nodes)
    agents.wait(1)
    assert "the run ends: no rendezvous server on 127.0.0.1:" in run.stderr


@pytest.mark.slow
def test_the_server_is_killed(agents: Agents) -> None:
    nodes = {"least": 2, "most": 2, "backend": "static", "master_addr": "127.0.0.1", "master_port": free_port()}
    for rank in range(2):
        agents.start(agents.script(HOLDS), {**nodes, "rank": rank}, max_restarts=3)
    for rank in range(4):
        agents.wait_for(f"up{rank}")
    agents.runs[0].signal(signal.SIGKILL)
    agents.wait(-signal.SIGKILL, 1)
    assert "the run ends: the rendezvous server on 127.0.0.1:" in agents.runs[1].stderr


@pytest.mark.slow
def test_a_signal_on_one_node_ends_all(agents: Agents) -> None:
    nodes = meeting(agents, "c10d")
    for _ in range(2):
        agents.start(agents.script(HOLDS), nodes, max_restarts=3)
    for rank in range(4):
        agents.wait_for(f"up{rank}")
    agents.runs[1].signal(signal.SIGTERM)
    agents.wait(1, 128 + signal.SIGTERM)
    assert "was ended: signal 15" in agents.runs[0].stderr


@pytest.mark.slow
def test_a_usage_error_of_a_worker_ends_all_at_once(agents: Agents) -> None:
    body = "if rank == 3:\n    import ftrun\n    raise ftrun.UsageError('wrong')\ndist.all_reduce(total.clone())\n"
    nodes = meeting(agents, "c10d")
    for _ in range(2):
        agents.start(agents.script(body), nodes, max_restarts=3)
    codes = [run.wait() for run in agents.runs]
    assert sorted(codes) == [1, 2], "\n".join(run.stderr for run in agents.runs)
    assert "rank 3 on node 1 (" in agents.runs[codes.index(1)].stderr


@pytest.mark.slow
def test_what_an_earlier_run_left_in_the_folder(agents: Agents) -> None:
    nodes = meeting(agents, "file", conf={"keep_alive": "2"})
    for _ in range(2):
        agents.start(agents.script(HOLDS), nodes)
    for rank in range(4):
        agents.wait_for(f"up{rank}")
    for run in agents.runs:
        run.signal(signal.SIGKILL)
    for run in agents.runs:
        run.wait()
    for _ in range(2):
        agents.start(agents.script(), nodes)
    agents.wait(-9, -9, 0, 0)
    check_world(agents, [2, 2])
    assert any("found what an earlier run many left" in run.stderr for run in agents.runs[2:])
    # the run that ended well leaves nothing to wait for
    for _ in range(2):
        agents.start(agents.script(), nodes)
    agents.wait(-9, -9, 0, 0, 0, 0)
    assert not any("earlier run" in run.stderr for run in agents.runs[4:])


@pytest.mark.slow
def test_the_store_dies(agents: Agents) -> None:
    body = "up(f'there{rank}{os.environ[\"MASTER_PORT\"]}')\nif not os.path.exists(out + '/again'): time.sleep(120)\n"
    nodes = meeting(agents, "c10d")
    for _ in range(2):
        agents.start(agents.script(body), nodes)
    wait_for(lambda: len(list(agents.out.glob("there*"))) == 4, "every rank")
    (agents.out / "again").touch()
    host = next(run for run in agents.runs if "this is node 0" in run.stderr)
    import os

    os.kill(host.pid("ftrun store"), signal.SIGKILL)
    agents.wait(0, 0)
    check_world(agents, [2, 2])


@pytest.mark.slow
def test_the_store_is_where_it_was_asked_for(agents: Agents) -> None:
    port = free_port()
    body = f"assert os.environ['MASTER_PORT'] == '{port}'\nif attempt == 0 and rank == 1: sys.exit(3)\n"
    agents.start(agents.script(body + "dist.barrier()"), {"master_port": port}, max_restarts=1)
    agents.wait(0)


def test_the_stores_port_is_taken(agents: Agents) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = agents.start(agents.script(), {"master_port": port})
        agents.wait(2)
    assert f"port {port} of 127.0.0.1, asked for by --master-port, cannot be had (Address already in use)" in run.stderr
