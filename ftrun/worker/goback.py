"""A survivor goes back to the host snapshot with everybody else: the same reload as a replaced rank's, over a used state."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ftrun.core.errors import DeviceError, WorkerError
from ftrun.native.cuda import CudaError
from ftrun.native.transfer import TransferError
from ftrun.worker import snapshot
from ftrun.worker.runtime.run_link import Interrupt

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine

_STOP = 60.0  # seconds in which the launcher stops a world whose reload failed


def survivor(engine: Engine) -> None:
    """Bring this rank back to the step at which its world resumes.

    Raises Interrupt when the world is stopped meanwhile. Errors: WorkerError when it cannot be done here, which ends this
    process: a replacement then does it.
    """
    context = engine.context
    world = context.world
    assert world is not None
    if world.resume < engine.base:
        raise WorkerError(f"the host snapshot of step {world.resume} is older than the loop that this rank is in")
    try:
        manifest, restart, moved = snapshot.reload(engine, engine.state.arena)
    except TransferError as error:
        if error.errno != errno.EBADMSG and (error.failed >= 0 or error.errno in (errno.ECANCELED, errno.ETIMEDOUT)):
            # whose fault it was ends or reports it, and the world is stopped for that; of damaged bytes their source knows nothing
            context.wait_until(lambda: False, _STOP)
        raise WorkerError(f"the reload from the host snapshot failed: {error}") from error
    except (snapshot.BadSnapshot, DeviceError, CudaError) as error:
        why = error.strerror if isinstance(error, CudaError) else error
        raise WorkerError(f"cannot go back to the host snapshot: {why}") from error
    engine.state.reattach(engine.state.arena, manifest)
    engine.use_snapshot(manifest, restart, moved)
    engine.go_on_with(world.resume, restart)


__all__ = ["Interrupt", "survivor"]
