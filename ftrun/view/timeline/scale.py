"""Scale the time axis in three sections, each with its own scale: before the fault, the repair, the first new step.

A repair takes milliseconds and a step may take minutes; on one scale, one of them would be invisible. Every drawing
labels the borders with the real milliseconds.
"""

from __future__ import annotations

from ftrun.view.timeline.axis import Scale
from ftrun.view.timeline.model import Story

_SHARES = (0.36, 0.32, 0.32)


def scale(story: Story, width: float) -> Scale:
    """Return the scale of a drawing `width` wide. Its sections: the step in flight, the repair, the step after it."""
    before = min(story.begins, -1e-6)
    repaired = max(story.resumed, 1e-6)
    done = max(story.done, repaired + 1e-6)
    times, places, place = [before], [0.0], 0.0
    for share, time in zip(_SHARES, (0.0, repaired, done), strict=True):
        place += share * width
        times.append(time)
        places.append(place)
    return Scale(tuple(times), tuple(places))
