"""Repair: state that outlives a rank's process, and the way of survivors and replacements back to one step.

Doors:
    assembly: `Kit`, put together
    kit: the parts that recovery and step loop share
    ledger: a rank's slots
    recovery_points: the slots themselves
    survivor: leaving a stopped world and joining the next
    replacement: taking over a rank
    sources: results of a dead rank's collectives
    mirrors: slots kept on the next node
    handover: memory at the fd store
    pipelines: schedules of a pipeline
    fully_sharded: resets of FSDP2
"""
