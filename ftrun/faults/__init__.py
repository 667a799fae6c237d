"""Fault injection: plans, requests on a live run, and the trigger inside a worker. Never imports torch."""
