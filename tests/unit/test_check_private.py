"""The check of private names finds what it is there to find, and lets ftrun's own be."""

from __future__ import annotations

import ast

import pytest

from tests.lint import check_private

OURS = frozenset({"_reset_state", "_own"})
THEIRS = frozenset({"_reset_state", "_version"})
WORKER, HOST = "ftrun/worker/thing.py", "ftrun/host/thing.py"


@pytest.mark.parametrize(
    "source",
    [
        "tensor._version",
        "self.ddp.reducer._rebuild_buckets()",
        "module._buffers['x'] = 1",
        "self.ddp._reset_state()",  # a name of ours, too
        "import torch._dynamo",
        "from torch._C._distributed_c10d import Work",
        "from torch import _C",
        "from torch._dynamo.callback import callback_handler as handler",
        "getattr(reducer, '_autograd_hook', None)",
        "setattr(x, '_hidden', 1)",
        "hasattr(x, '_hidden')",
        "flags = operator.attrgetter('public', '_hidden')",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "NEEDED = ('torch', 'torch._dynamo')",
        "import ctypes\nctypes.pythonapi.PyGILState_Ensure()",
        "import sys\nsys._getframe(1)",
        "os.environ.__class__ = Other",
        "import threading\nthreading._shutdown()",
    ],
)
def test_refused(source: str) -> None:
    found = check_private.complaints(WORKER, source, OURS, THEIRS)
    assert len(found) == 1 and found[0].startswith(f"{WORKER}:"), found


@pytest.mark.parametrize(
    "source",
    [
        "self._anything = self._other",
        "super()._anything()",
        "cls._anything",
        "other._own",
        "self._reset_state()",
        "gate.unpack(raw)._replace(closed=1)",
        "os._exit(0)",
        "hasattr(dataset, '__getitems__')",
        "from __future__ import annotations",
        "from ftrun.worker.helper import _own",
        "error._ftrun_reported = True",
        "from torch.distributed import Work",
    ],
)
def test_allowed(source: str) -> None:
    assert check_private.complaints(WORKER, source, OURS, THEIRS) == []


def test_a_name_of_ours_may_be_one_of_torchs_where_torch_is_not() -> None:
    assert check_private.complaints(HOST, "agent._reset_state", OURS, THEIRS) == []


def test_the_module_for_them_may_use_them() -> None:
    assert check_private.complaints(check_private.HOME, "tensor._version", OURS, THEIRS) == []


def test_names_are_defined_by_modules_classes_and_self() -> None:
    source = (
        "_a = 1\nclass _B:\n    _c: int\n    __slots__ = ('_d',)\n    def _e(self):\n        self._f, _local = 1, 2\n"
    )
    assert set(check_private.defined(ast.parse(source))) >= {"_a", "_B", "_c", "_d", "_e", "_f"}
    assert "_local" not in set(check_private.defined(ast.parse(source)))


def test_the_registrys_names_are_read_from_its_source() -> None:
    source = (check_private.ROOT / check_private.HOME).read_text()
    assert {"_reset_state", "_get_backend", "_comm_hooks"} <= check_private.declared(ast.parse(source))
