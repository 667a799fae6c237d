"""Screenshots of `ftrun status` in a terminal and of `ftrun timeline` in a browser, from real runs: `make images`."""
