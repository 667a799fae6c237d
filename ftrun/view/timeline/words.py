"""Describe an incident in plain words for a reader new to ftrun: failed ranks, time, cause, repair, cost."""

from __future__ import annotations

import time
from typing import Any

from ftrun.core.amounts import count, milliseconds, size
from ftrun.core.shared import mesh
from ftrun.core.shared.moment import CALL_AFTER, Moment
from ftrun.view.timeline.model import Story

_CAUSES = {
    "SIGKILL": "its process was killed (SIGKILL, as the kernel does when memory runs out, or a person)",
    "SIGTERM": "its process was asked to end (SIGTERM)",
    "SIGSEGV": "its process crashed (SIGSEGV, a bad memory access)",
    "SIGABRT": "its process aborted itself (SIGABRT)",
    "SIGBUS": "its process crashed (SIGBUS: memory that is not there, or no room in shared memory)",
    "frozen": "its process was stopped and no longer ran (SIGSTOP, or a frozen container)",
    "died": "its process ended",
    "oom": "the system killed its process because memory was short",
    "gil": "Python stood still in its process (the interpreter lock was not given back)",
    "hang": "it ran and got nowhere",
    "collective": "the others waited in a collective that it never entered",
    "nonfinite": "its gradients or its loss were not finite",
    "corrupt": "its copy of the state differed from the majority's",
    "cuda": "its CUDA context failed",
    "xid": "the driver reported an error of its device (Xid)",
    "gpu-lost": "its device no longer answered",
    "ecc": "its device reported an uncorrectable memory error",
    "drain": "a person asked for it to be moved",
    "gave-way": "it ended itself, since only a replacement could go on from there",
    "cut-off": "ftrun ended it before other nodes took its place, since they heard nothing of its node",
}
_MOST = 8  # ranks that a sentence names one by one
_SOURCES = {
    "adopt": "its weights and optimizer state had outlived it in shared memory and were adopted in place",
    "peer": "its weights and optimizer state were copied from another rank",
    "remote": "its weights and optimizer state were copied from a rank on another node",
    "sealed": "its weights and optimizer state were adopted in place, and its update was made from the gradients that it had sealed",
    "snapshot": "the state came from the host snapshot",
}


def title(story: Story) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(story.wall))
    run = f" of run {story.run}" if story.run else ""
    return f"incident {story.number} of {story.total}{run}, {when}"


def facts(story: Story) -> list[tuple[str, str]]:
    """Return (label, sentence) pairs, in the order in which a person asks."""
    rows = [("what failed", what(v)) for v in story.victims[:_MOST]]
    if len(story.victims) > _MOST:
        rows.append(("what failed", f"and {count(len(story.victims) - _MOST, 'more rank')}"))
    if not rows:
        everybody = (
            f"nobody: every rank waited for the others in {story.stuck}" if story.stuck else "no rank; a restart"
        )
        rows.append(("what failed", everybody))
    rows += [("why", why(v)) for v in _different(story)]
    rows += [
        ("why", f"it was injected on purpose: {kind}") for kind in dict.fromkeys(f["kind"] for f in story.injected)
    ]
    rows += [("evidence", str(v["evidence"])) for v in _different(story) if v.get("evidence")]
    if not story.victims and story.evidence:
        rows.append(("evidence", story.evidence))
    seen = [v["seen_ms"] for v in story.victims if v.get("seen_ms") is not None]
    if seen:
        rows.append(("noticed", f"{milliseconds(min(seen))} ms after it happened"))
    rows.append(("what was done", done(story)))
    rows += [("its state", said) for said in _states(story)]
    rows += [("cost", line) for line in cost(story)]
    rows += [("mesh", story.mesh)] if story.mesh else []
    return rows


def once(story: Story) -> list[tuple[str, str]]:
    """Return `facts` with each label only at the first of its sentences."""
    rows = facts(story)
    return [(label if not at or rows[at - 1][0] != label else "", said) for at, (label, said) in enumerate(rows)]


def _different(story: Story) -> list[dict[str, object]]:
    found = {str(v["cause"]): v for v in story.victims}
    return list(found.values())


def what(victim: dict[str, Any]) -> str:
    """Name a failed rank and its moment: "rank 2 (replicate 1, shard 0), in the backward pass of step 60"."""
    where = Moment.told(victim).words(long=True)
    return mesh.of_rank(victim["rank"], victim.get("mesh")) + (f", {where}" if where else "")


def why(victim: dict[str, object]) -> str:
    """Return the cause as a sentence; an unknown cause keeps the journal's word."""
    cause, fault = str(victim["cause"]), str(victim.get("fault", ""))
    if cause in _CAUSES or fault in _CAUSES:
        return _CAUSES.get(cause) or _CAUSES[fault]
    if cause.startswith("exit "):
        return f"its process left with exit code {cause[5:]}"
    if cause.startswith("no progress"):
        return f"it hung ({cause})"
    if cause.startswith("SIG"):
        return f"its process was ended by {cause}"
    return cause if " at " not in cause else f"it raised {cause}"


def done(story: Story) -> str:
    if story.restart:
        return "all workers were started anew (a repair in place was not possible)"
    healthy = f"{count(story.survivors, 'healthy rank')} stopped, cleaned up and reset in place, without a restart"
    if story.in_tail:
        healthy = f"nobody was stopped: the new worker did {story.going_on.what()} again"
    if not story.survivors:
        healthy = "no rank was left that could go on"
    new = [lane for lane in story.lanes if lane.role in ("spare", "new worker")]
    if story.victims and not story.sources and not new:
        ranks = count(story.survivors, "rank")
        return f"no worker was replaced: {ranks} left the step, cleaned up and were reset in place, without a restart"
    if not new:
        return healthy
    others = len(story.sources) - len(new)
    took = ", ".join(
        f"{'warm spare' if lane.role == 'spare' else 'new worker'} {lane.cell} took rank {lane.rank}" for lane in new
    )
    return f"{healthy}; {took}" + (f", and {count(others, 'more rank')} got a new worker" if others > 0 else "")


def _states(story: Story) -> list[str]:
    """Return a sentence for each source of state, with all ranks that were restored from it."""
    found: dict[str, list[int]] = {}
    for rank, source in sorted(story.sources.items()):
        found.setdefault(str(source["name"]), []).append(rank)
    told = []
    for name, ranks in found.items():
        moved = sum(int(story.sources[rank]["bytes"]) for rank in ranks)
        words = _SOURCES.get(name, f"source: {name}")
        said = words if len(ranks) == 1 else words.replace("its ", "their ").replace("outlived it", "outlived them")
        told.append(f"{_named(ranks)}: {said} ({size(moved)} moved)")
    return told


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST]))
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def cost(story: Story) -> list[str]:
    """Return the sentences on time, repeated work and lost work."""
    if story.restart:
        thrown = [f"{count(story.redone, 'step')} done again"] if story.redone else []
        return [f"{story.done / 1000:.2f} s until all workers ran again", *thrown]
    if story.rollback:
        back = (
            f"all ranks went back to the host snapshot of step {story.resume}; {count(story.redone, 'step')} done again"
        )
        return [f"{story.done:.0f} ms from the failure until every rank had done a new step", back]
    if story.in_tail:
        return ["no step was done again, and every finished step is kept"]
    first = f"{story.done:.0f} ms from the failure until every rank {story.until}"
    if story.going_on.phase == CALL_AFTER:
        again = f"{story.going_on.what()} was made again, and no step"
    elif story.redone:
        again = (
            f"step {story.resume} was done again"
            if not story.committed
            else f"step {story.step} was finished by the others"
        )
    else:
        again = "no step was done again"
    kept = f"all finished steps are kept (0 to {story.last})" if story.last >= 0 else "no finished step was lost"
    then = f"training went on with step {story.resume}" if story.going_on.in_step else f"the run went on with {story.going_on.what()}"
    return [first, "; ".join([again, kept] if story.going_on.phase == CALL_AFTER else [again, kept, then])]
