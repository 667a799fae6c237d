"""The launcher process and its services. Never imports torch; only the fork server's own process does."""
