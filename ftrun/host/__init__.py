"""The launcher process and its services. Never imports torch; only the nursery's own process does."""
