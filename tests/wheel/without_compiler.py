"""An ftrun that was installed where there is no C++ compiler: it says so, once, and what can work does.

Run by `make wheel-test` with the Python of an empty environment: `python -I without_compiler.py FOLDER`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ftrun import native

MISSING = "install a C++17 compiler"
SCRIPT = """
import torch, ftrun
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(3):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained", step.index)
"""


def main() -> int:
    folder = Path(sys.argv[1])
    script = folder / "train.py"
    script.write_text(SCRIPT)
    tool = str(Path(sys.executable).with_name("ftrun"))

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)

    assert not native.available(), "this wheel has a native library after all"
    plain = call(sys.executable, str(script))
    assert (plain.returncode, plain.stdout) == (0, "trained 2\n"), plain
    assert call(tool, "--help").returncode == 0
    refused = call(tool, str(script))
    assert refused.returncode == 69, refused
    assert refused.stderr.count(MISSING) == 1 and refused.stdout == "", refused
    assert not list(folder.glob("ftrun-logs/*")), "a run was begun"
    print("without a compiler: ok:", refused.stderr.strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
