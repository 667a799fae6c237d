"""The README's script is the example's, and it runs under ftrun with a rank killed, under torchrun, and by itself."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "four_lines.py"


def lines(text: str) -> list[str]:
    """Code lines without comments and trailing blanks."""
    return [code for line in text.splitlines() if (code := line.partition("  #")[0].rstrip())]


def test_readme_shows_the_example() -> None:
    shown = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert lines(shown) == lines(EXAMPLE.read_text().partition('"""\n')[2])


@pytest.mark.parametrize(
    "how", [pytest.param("ftrun", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.slow), "python"]
)
def test_four_lines(folder: Path, how: str) -> None:
    script = folder / "four_lines.py"
    script.write_text(EXAMPLE.read_text().replace("job.steps(5000)", "job.steps(1000)"))
    plan = folder / "plan.toml"
    plan.write_text(kill(1, "backward", 300))
    command = {
        "ftrun": [harness.tool("ftrun"), "--nproc-per-node", "2", "--fault-plan", str(plan), str(script)],
        "torchrun": [harness.tool("torchrun"), "--standalone", "--nproc-per-node", "2", str(script)],
        "python": [sys.executable, str(script)],
    }[how]
    running = harness.start(folder, command)
    if running.wait(60) and how == "torchrun" and "every weight is 1" in running.output:
        # torch sometimes aborts while its processes end, after the work is done
        warnings.warn(f"torchrun failed, once more:\n{running.output}", stacklevel=1)
        running = harness.start(folder / "again", command)
    assert running.wait(60) == 0, running.output
    assert "every weight is 1" in running.output
    if how == "ftrun":
        assert "rank 1 died in backward of step 300" in running.output
        assert "bit-identical to an uninterrupted run: yes" in running.output
