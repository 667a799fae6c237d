"""A folder that must be empty of processes at the end of a test, as in tests/e2e."""

from tests.e2e.conftest import folder

__all__ = ["folder"]
