"""What outlives a rank's process, and how a survivor and a replacement come back to one step.

Doors:
    assembly: `Kit`, put together
    kit: what a recovery and the step loop work on
    ledger: a rank's slots
    recovery_points: the slots themselves
    survivor: leaving a stopped world and joining the next
    replacement: taking over a rank
    sources: what a dead rank's collectives gave
    handover: memory at the fd store
    pipelines: schedules of a pipeline
    fully_sharded: resets of FSDP2
"""
