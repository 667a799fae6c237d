"""What is done ahead of its need is done without harm, or not at all."""

from __future__ import annotations

import subprocess
import sys

LIMITED = """
import os, resource, threading
from ftrun.worker import warm
os.setuid(65_534)  # root has no limit
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
warm.for_new_groups(1)
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("went on")
"""


def test_a_process_that_may_start_no_more_threads_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
