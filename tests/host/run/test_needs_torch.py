"""What is started without torch: only what cannot want it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrun.host.run.needs_torch import wants_torch

NOT = ["pass", "import os, json\nfrom pathlib import Path\nprint(os.getpid())", "import collections.abc"]
MAYBE = [
    "import torch",
    "from transformers import Trainer",
    "import os\ndef f():\n    import numpy",
    "from . import x",
    "import importlib",
    "__import__(name)",
    "exec(open('x').read())",
    "import mine",
    "import json",  # there is a json.py beside it
    "this is no Python",
]


@pytest.mark.parametrize("source", NOT)
def test_the_library_alone_needs_none(tmp_path: Path, source: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    assert not wants_torch("script", [str(script), "torch"])


@pytest.mark.parametrize("source", MAYBE)
def test_anything_else_may(tmp_path: Path, source: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    if source == "import json":
        (tmp_path / "json.py").touch()
    assert wants_torch("script", [str(script)])


def test_by_kind(tmp_path: Path) -> None:
    assert not wants_torch("program", ["bash", "-c", "python train.py"])
    assert wants_torch("module", ["json.tool"])
    assert wants_torch("script", [str(tmp_path)])
