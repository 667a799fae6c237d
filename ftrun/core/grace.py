"""Grace waits, in seconds: hold back the report of a lost peer until the peer's own failure is reported. Data only.

The launcher and the ranks often see an effect before its cause. Each comment names who waits and the event that ends the wait early. The
launcher's waits are shorter than the ranks' waits, so that a stop reaches a rank before the rank reports its failure.
"""

EXIT_CODE = 1.0  # the launcher waits for a dying process's exit code before it reports the death; ends when it has the code
PEERS_DEATH = 0.1  # the launcher waits before it reports a rank that lost a peer; ends when no other rank is left (one is dying: EXIT_CODE)
COLLECTIVE = 30.0  # a rank waits in its loop after a failed collective; ends when its world is stopped, or the run ends
OUTSIDE = 3.0  # the same outside a loop, where the script may handle the error: `symptoms.TABLE` names the errors
CONNECTING = 2.0  # a rank that cannot connect waits; ends when its world is stopped
HUNG_UP = 0.5  # it waits this much longer if its peer hung up, since the peer may report a cause of its own
EXCHANGED = 1.0  # a rank with non-finite gradients after the exchange waits for their origin's report; ends when its world is stopped
REPORTED = 2.0  # at the end of a run: a cause's time may be this much later than its effect's (a `finally` closes groups first)
