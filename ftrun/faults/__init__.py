"""Fault injection: the plan file and what fires inside a worker. Never imports torch."""
