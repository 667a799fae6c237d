"""The check of test switches finds one."""

from __future__ import annotations

from tests.lint import check_switches


def test_a_switch_is_found() -> None:
    assert [*check_switches.switches('import os\nif os.environ.get("FTRUN_TEST_BREAK"):\n    pass  # test-only\n')] == [
        (2, "FTRUN_TEST_BREAK"), (3, "test-only")
    ]  # fmt: skip
    assert not [*check_switches.switches('os.environ.get("FTRUN_DIGESTS")  # what a test compares')]
