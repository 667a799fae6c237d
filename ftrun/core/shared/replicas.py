"""Which replicas are corrupt, from their checksums: workers (which hold the gate) and launcher judge by the same rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def corrupt(sums: Sequence[int], trusted: Sequence[bool]) -> tuple[int, ...]:
    """Indices that differ from a strict majority; () when all agree or nobody can tell.

    `trusted[i]`: replica i knows that all were equal before. Ranks that never held the same weights are no replicas.
    """
    if len(set(sums)) <= 1:
        return ()
    value, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums) or not any(trusted):
        return ()
    return tuple(i for i, found in enumerate(sums) if found != value)


def undecided(sums: Sequence[int], trusted: Sequence[bool]) -> bool:
    """Do replicas that were equal differ now, without a majority that says who is wrong?"""
    return len(set(sums)) > 1 and any(trusted) and not corrupt(sums, trusted)
