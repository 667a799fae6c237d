"""A folder that must be empty of processes at the end of a test; what needs other packages runs where it is asked for."""

from tests.compat.conftest import pytest_collection_modifyitems
from tests.e2e.conftest import folder

__all__ = ["folder", "pytest_collection_modifyitems"]
