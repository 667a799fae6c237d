"""Several real launchers make one world: who is who in it, for each way to meet."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.harness import free_port
from tests.host.nodes.agents import Agents


def check_world(agents: Agents, sizes: list[int], restarts: int = 0) -> dict[int, dict[str, Any]]:
    """Every rank met every other one, and has the variables that torchrun would give. `sizes`: workers by node."""
    ranks, world = agents.ranks(), sum(sizes)
    assert list(ranks) == list(range(world))
    first = 0
    places = []
    for node, size in enumerate(sizes):
        places += [(node, local, size, first + local) for local in range(size)]
        first += size
    for node, local, size, rank in places:
        seen = ranks[rank]
        env = seen["env"]
        assert seen["size"] == world and seen["sum"] == sum(range(world))
        assert env["RANK"] == env["ROLE_RANK"] == str(rank)
        assert env["LOCAL_RANK"] == str(local) and env["LOCAL_WORLD_SIZE"] == str(size)
        assert env["WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == str(world)
        assert env["GROUP_RANK"] == str(node) and env["GROUP_WORLD_SIZE"] == str(len(sizes))
        assert env["TORCHELASTIC_RUN_ID"] == "many" and env["TORCHELASTIC_RESTART_COUNT"] == str(restarts)
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert len({(r["env"]["MASTER_ADDR"], r["env"]["MASTER_PORT"]) for r in ranks.values()}) == 1
    return ranks


def test_shared_folder(agents: Agents) -> None:
    nodes = {"least": 2, "most": 2, "backend": "file", "endpoint": str(agents.meeting), "local_addr": "127.0.0.1"}
    script = agents.script()
    for _ in range(2):
        agents.start(script, nodes, nproc=4)
    agents.wait(0, 0)
    check_world(agents, [4, 4])
    texts = sorted(next(t for t in run.stderr.splitlines() if "world of" in t) for run in agents.runs)
    assert "world of 8 workers on 2 nodes; this is node 0 with ranks 0 to 3" in texts[0]
    assert "this is node 1 with ranks 4 to 7" in texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)])
def test_server(agents: Agents, sizes: tuple[int, int]) -> None:
    nodes = {"least": 2, "most": 2, "backend": "c10d", "endpoint": f"127.0.0.1:{free_port()}"}
    script = agents.script()
    for size in sizes:
        agents.start(script, nodes, nproc=size)
    agents.wait(0, 0)
    env = agents.ranks()[0]["env"]
    order = list(sizes) if env["LOCAL_WORLD_SIZE"] == str(sizes[0]) else list(reversed(sizes))
    check_world(agents, order)


def test_node_ranks(agents: Agents) -> None:
    nodes = {"least": 3, "most": 3, "backend": "static", "master_addr": "127.0.0.1", "master_port": free_port()}
    script = agents.script()
    sizes = {2: 2, 0: 1, 1: 1}
    for rank, size in sizes.items():
        agents.start(script, {**nodes, "rank": rank}, nproc=size)
    agents.wait(0, 0, 0)
    check_world(agents, [1, 1, 2])


@pytest.mark.slow
def test_run_directories_and_logs_are_each_agents_own(agents: Agents) -> None:
    nodes = {"least": 2, "most": 2, "backend": "c10d", "endpoint": f"127.0.0.1:{free_port()}"}
    for _ in range(2):
        agents.start(agents.script("print('hello from', rank, flush=True)"), nodes, nproc=1)
    agents.wait(0, 0)
    for run in agents.runs:
        world = next(line for line in run.journal() if line.get("note") == "world")
        rank = world["first_rank"]
        assert run.stdout == f"[rank {rank}] hello from {rank}\n"
        assert world["restarts"] == 0 and len(world["table"]["members"]) == 2
