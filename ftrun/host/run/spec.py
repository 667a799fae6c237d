"""Builds the spec of a worker, which the fork server passes on to `ftrun.worker.process.main`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ftrun.core import environment, paths
from ftrun.host.base.settings import Settings
from ftrun.host.nodes.membership.table import NodePlace
from ftrun.host.workers.pool import Worker

_ORPHAN_GRACE = 2.0


class Specs:
    """Builds the specs of one run's workers. `logs`: the absolute log folder; `run_id`: the value of TORCHELASTIC_RUN_ID."""

    def __init__(self, settings: Settings, run_dir: Path, logs: str, run_id: str) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._logs = logs
        self._run_id = run_id

    def of(self, worker: Worker, store: tuple[str, int], attempt: int, place: NodePlace | None) -> dict[str, Any]:
        """Return the spec of `worker`. `store`: host and port of the workers' store; `place`: this node's, None for the only node."""
        settings, output = self._settings, self._settings.output
        return {
            "run_dir": str(self._run_dir),
            "cell": worker.index,
            "rank": worker.rank,
            "env": self._variables(store, attempt, place),
            "argv": list(settings.argv),
            "kind": settings.kind,
            "numa": settings.numa_binding,
            "virtual": settings.virtual_local_rank,
            "logs": self._logs,
            "beat": settings.heartbeat_interval,
            "launcher_pid": os.getpid(),
            "orphan_grace": _ORPHAN_GRACE,
            "stop_timeout": settings.stop_timeout,
            "snapshot_every": settings.snapshot_every,
            "nonfinite": settings.nonfinite,
            "check_every": settings.check_every,
            "one_console": not (output.redirects or output.tee or output.filter),
            "debug_rank": settings.debug_rank,
        }

    def _variables(self, store: tuple[str, int], attempt: int, place: NodePlace | None) -> dict[str, str]:
        settings = self._settings
        env = environment.run_variables(
            world_size=place.world_size if place else settings.nproc,
            local_world_size=settings.nproc,
            master_addr=store[0],
            master_port=store[1],
            run_id=self._run_id,
            attempt=attempt,
            max_restarts=settings.max_restarts,
            role=settings.role,
            signals=tuple(signal.Signals(number).name for number in settings.signals),
            # in the script's own process groups only torch itself wakes a rank that waits for a lost peer
            nccl_handling=os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            nodes=place.nodes if place else 1,
        )
        if settings.fault_plan is not None:
            env[paths.ENV_FAULT_PLAN] = str(self._run_dir / paths.FAULT_PLAN)
        if settings.random_faults:
            env[paths.ENV_RANDOM_FAULTS] = settings.random_faults
        return env
