"""How the kernels come to a device: by their PTX, or compiled by NVRTC where the driver does not take that."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.native import cuda
from tests.native import fake

ROOT = fake.ROOT
PTX = (ROOT / "native/kernels/ftrun.ptx").read_text()
ENTRIES = re.findall(r"^\.visible \.entry (\w+)\(", PTX, re.MULTILINE)

COMPUTES = """
base, fd = memory(5 * UNIT)
random.seed(1)
ctypes.memmove(base, random.randbytes(5 * UNIT), 5 * UNIT)
for size in (0, 77, 5 * UNIT - 8):
    assert cuda.checksum(0, 0, base + 3, size, 9, 10) == native.checksum(base + 3, size, 9)
"""
WHICH = (
    COMPUTES
    + """
maps = open("/proc/self/maps").read()
print(json.dumps([cuda.load_kernels(0), "libnvrtc" in maps]))
"""
)
FAILS = """
try: cuda.load_kernels(0)
except cuda.CudaError as error: print(json.dumps([error.errno == errno.ENOEXEC, error.strerror]))
"""


@pytest.fixture
def control(tmp_path: Path) -> fake.Control:
    return fake.Control(tmp_path / "cuda.txt")


def child(control: fake.Control, code: str) -> Any:
    """As `fake.child`, where no NVRTC but the fake one can be found (unless the machine's own loader knows one)."""
    return fake.child(control, code, bare=True)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader finds the fake NVRTC by itself."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(fake.nvrtc()))


@pytest.fixture
def nowhere() -> None:
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        pytest.skip(f"this machine has a real {name}")


@pytest.mark.usefixtures("loader")
def test_nvrtc_is_not_touched_where_the_ptx_loads(control: fake.Control) -> None:
    assert child(control, WHICH) == [False, False]


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize("refusal", [{"capability": 75}, {"ptx": 222}, {"ptx": 221, "capability": 80}])
def test_refused_ptx_is_compiled_for_the_device(control: fake.Control, refusal: dict[str, int]) -> None:
    """An old device, an old driver, a driver without its compiler: what is loaded then computes the same."""
    control.set(**refusal)
    assert child(control, WHICH) == [True, True]


@pytest.mark.usefixtures("nowhere")
def test_it_is_found_where_pip_puts_it(control: fake.Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch's other packages, by whatever call needs a kernel first."""
    lib = tmp_path / "site" / "nvidia" / "cuda_nvrtc" / "lib"
    lib.mkdir(parents=True)
    shutil.copy(fake.nvrtc() / "libnvrtc.so.12", lib)
    control.set(capability=75)
    code = f"sys.path.append({os.fspath(tmp_path / 'site')!r})\n"
    assert child(control, code + WHICH) == [True, True]
    found = child(control, code + "print(json.dumps(cuda.compile_kernels((7, 5)).compiler))")
    assert found == f"NVRTC 12.9 ({lib}/libnvrtc.so.12)"


@pytest.mark.usefixtures("nowhere")
def test_without_nvrtc_the_error_has_both_reasons(control: fake.Control) -> None:
    control.set(capability=75)
    fits, said = child(control, FAILS)
    assert fits and "Fake GPU 0 (device 0, compute capability 7.5)" in said
    assert "CUDA_ERROR_INVALID_PTX (218" in said and "NVRTC was not found (libnvrtc.so.13, libnvrtc.so.12)" in said


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(
    ("trouble", "want"),
    [
        ({"nvrtc_error": 'identifier "uint64_t" is undefined'}, 'error: identifier "uint64_t" is undefined'),
        ({"nvrtc_oldest": 100}, "for sm_75: NVRTC_ERROR_INVALID_OPTION: nvrtc: error: invalid value for --gpu-arch"),
    ],
)
def test_what_the_compiler_says_is_told(control: fake.Control, trouble: dict[str, object], want: str) -> None:
    control.set(capability=75, **trouble)
    fits, said = child(control, FAILS)
    assert fits and "CUDA_ERROR_INVALID_PTX" in said and "NVRTC 12.9 (libnvrtc.so.12)" in said and want in said


def test_a_file_that_is_no_library_is_named(
    control: fake.Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    (lib / "libnvrtc.so.13").write_text("not ELF")
    control.set(ptx=222)
    code = f"sys.path.append({os.fspath(tmp_path)!r})\n"
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(fake.nvrtc()))
    assert child(control, code + WHICH) == [True, True], "the next one is taken"
    control.set(nvrtc_error="x")
    _, said = child(control, code + FAILS)
    assert f"{lib}/libnvrtc.so.13: " in said and "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in said


@pytest.mark.usefixtures("loader")
def test_another_error_of_the_driver_is_not_taken_for_a_refusal(control: fake.Control) -> None:
    control.set(capability=75, refuse="cuModuleLoadData")
    code = """
        try: cuda.load_kernels(0)
        except cuda.CudaError as error: print(json.dumps([error.errno, error.strerror, "libnvrtc" in open("/proc/self/maps").read()]))
        """
    number, said, touched = child(control, code)
    assert number == 1 and "CUDA_ERROR_NOT_PERMITTED" in said and not touched


@pytest.mark.usefixtures("nowhere")
def test_doctor_says_it_before_the_run(control: fake.Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"  # doctor asks in a child of its own, which is not to find installed packages either
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    code = (
        f"sys.executable = {os.fspath(bare)!r}\nfrom ftrun.doctor import sharing\n"
        "print(json.dumps([[f.state, f.text, f.fix] for f in sharing.check()]))"
    )
    control.set(devices=1, capability=75)
    ((state, text, fix),) = child(control, code)
    assert state == "warning" and "compute capability 7.5" in text and "NVRTC was not found" in text
    assert "pip install nvidia-cuda-nvrtc" in fix
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(fake.nvrtc()))
    ((state, text, _),) = child(control, code)
    assert state == "ok" and "kernels: NVRTC 12.9 (libnvrtc.so.12)" in text
    control.set(capability=90)
    ((state, text, _),) = child(control, code)
    assert state == "ok" and "kernels: PTX" in text


def test_the_oldest_capability_is_that_of_the_ptx() -> None:
    (target,) = re.findall(r"^\.target sm_(\d+)$", PTX, re.MULTILINE)
    assert "{}{}".format(*cuda.PTX_CAPABILITY) == target


# -- the real one, which needs no GPU: pip install nvidia-cuda-nvrtc (59 MB, so no part of the dev extra) ------------------


def _real() -> Iterator[str]:
    for folder in cuda.nvrtc_folders():
        yield from map(os.fspath, Path(folder).glob("libnvrtc.so.1[23]"))


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_the_real_nvrtc_compiles_every_kernel(capability: tuple[int, int]) -> None:
    if not list(_real()):
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")
    code = (
        "import sys; from ftrun.native import cuda; one = cuda.compile_kernels(({}, {})); "
        "print(one.compiler, file=sys.stderr); sys.stdout.buffer.write(one.image)"
    )
    # in a child: a library of 140 MB is not for the process of all other tests
    made = subprocess.run([sys.executable, "-c", code.format(*capability)], cwd=ROOT, capture_output=True, timeout=60)
    assert made.returncode == 0, made.stderr.decode()
    assert made.stderr.startswith(b"NVRTC 1") and made.stdout.startswith(b"\x7fELF")
    assert len(ENTRIES) == 3
    for name in ENTRIES:
        assert f".text.{name}\0".encode() in made.stdout, name


def test_prototypes_match_nvrtc_h(tmp_path: Path) -> None:
    headers = [p for entry in sys.path for p in Path(entry or ".").glob("nvidia/*/include/nvrtc.h")]
    if not headers:
        pytest.skip("no nvrtc.h here: pip install nvidia-cuda-nvrtc")
    source = tmp_path / "drift.cpp"
    source.write_text(
        """
        #include <nvrtc.h>
        #include <nvrtc_abi.hpp>
        #include <type_traits>
        using namespace ftrun::nvrtc;
        template <typename R, typename... A, typename S, typename... B>
        constexpr bool fits(R (*)(A...), S (*)(B...)) {
            if constexpr (sizeof...(A) != sizeof...(B)) return false;
            else return sizeof(R) == sizeof(S) &&
                        ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);
        }
        #define CHECK(name, result, arguments) static_assert(fits(&::name, static_cast<result(*) arguments>(nullptr)), #name);
        FTRUN_NVRTC_CALLS(CHECK)
        static_assert(kSuccess == NVRTC_SUCCESS && kInvalidOption == NVRTC_ERROR_INVALID_OPTION);
        static_assert(kCompilation == NVRTC_ERROR_COMPILATION);
        int main() {}
        """
    )
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    folders = ["-I", os.fspath(headers[0].parent), "-I", os.fspath(ROOT / "native/src")]
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", *folders, os.fspath(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
