"""Builds the environment variables that torchrun gives a worker: the variables of the run, and those of a rank."""

from __future__ import annotations

from ftrun.core.errors import UsageError
from ftrun.core.system.visible import VARIABLE, entries

RANK_KEYS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")


def run_variables(
    *,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    run_id: str,
    attempt: int,
    max_restarts: int,
    role: str,
    signals: tuple[str, ...],
    nccl_handling: str,
    nodes: int = 1,
) -> dict[str, str]:
    """Return the variables that are equal for all workers of this node. `signals`: names of the signals that end the run."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": role,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": nccl_handling,
    }


def rank_variables(rank: int, local_rank: int, group_rank: int = 0) -> dict[str, str]:
    """Return the variables of a rank; a spare gets them when it takes over the rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(group_rank), "ROLE_RANK": str(rank)}


def virtual_variables(visible: str | None, local_rank: int) -> dict[str, str]:
    """Return the variables that --virtual-local-rank changes: the worker sees only its GPU, as device 0.

    `visible` is CUDA_VISIBLE_DEVICES of the launcher, None = unset.

    Raises:
        UsageError: It names no device for `local_rank`.
    """
    device = str(local_rank)
    if visible is not None:
        devices = entries(visible)
        if local_rank >= len(devices):
            raise UsageError(
                f"--virtual-local-rank: local rank {local_rank} has no GPU of its own, since CUDA_VISIBLE_DEVICES={visible} "
                f"names {len(devices)}; lower --nproc-per-node"
            )
        device = devices[local_rank]
    return {"LOCAL_RANK": "0", VARIABLE: device}
