"""What a run looks like from outside: read from its run directory, never written to."""
