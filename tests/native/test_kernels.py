"""How the kernels come to a device: by their PTX, which every device and driver of a CUDA build of torch takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.native import fake

PTX = (fake.ROOT / "native/kernels/ftrun.ptx").read_text()

COMPUTES = """
base, fd = memory(5 * UNIT)
random.seed(1)
ctypes.memmove(base, random.randbytes(5 * UNIT), 5 * UNIT)
for size in (0, 77, 5 * UNIT - 8):
    assert cuda.checksum(0, 0, base + 3, size, 9, 10) == native.checksum(base + 3, size, 9)
print("true")
"""
FAILS = """
try: cuda.load_kernels(0)
except cuda.CudaError as error: print(json.dumps([error.errno == errno.ENOEXEC, error.strerror]))
"""


@pytest.fixture
def control(tmp_path: Path) -> fake.Control:
    return fake.Control(tmp_path / "cuda.txt")


@pytest.mark.parametrize("capability", [50, 75, 90, 120])
def test_every_capability_takes_the_ptx(control: fake.Control, capability: int) -> None:
    control.set(capability=capability)
    assert fake.child(control, COMPUTES)


def test_a_driver_that_refuses_the_ptx_is_named(control: fake.Control) -> None:
    control.set(ptx=222)
    refused, why = fake.child(control, FAILS)
    assert refused and "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in why


def test_the_ptx_is_for_the_oldest_capability_that_torch_knows() -> None:
    assert re.search(r"^\.version 6\.0\n\.target sm_50$", PTX, re.MULTILINE)
