"""Grace waits: a rank that only lost a peer is not heard before the rank that failed. All of them, in seconds; data only.

An effect is often noticed before its cause. Each line says who waits, and what ends the wait sooner. The launcher's waits are
shorter than those of the ranks, so that a stop comes before any of them speaks.
"""

EXIT_CODE = 1.0  # the launcher, for the exit code of a process that ends, before it reports the death; until the code shows
PEERS_DEATH = 0.1  # the launcher, before it reports a rank that lost a peer; until no other rank is left (while one ends, EXIT_CODE)
COLLECTIVE = 30.0  # a rank of a loop whose collective failed; until its world is stopped, or the run ends
OUTSIDE = 3.0  # the same outside of a loop, where a script may want to handle the error: `symptoms.TABLE` says after which ones
CONNECTING = 2.0  # a rank that cannot be connected; until its world is stopped
HUNG_UP = 0.5  # ... and so much more when its peer hung up, which may have a reason of its own to tell
EXCHANGED = 1.0  # a rank whose gradients are not finite after the exchange, for the one that brought them; until its world is stopped
REPORTED = 2.0  # at the end of a run: a cause may be dated so much later than its effect (a `finally` closes groups first)
