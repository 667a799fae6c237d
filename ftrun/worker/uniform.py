"""Uniform numbers on the CPU in vector instructions, while a script builds its model: same numbers, an eighth of the time.

torch draws one number at a time; layers that initialize themselves with `uniform_` (Linear, convolutions, recurrent ones)
spend most of their making there, and a replacement that builds its model does so while everybody waits. What is drawn, and
where the random stream stands afterwards, are those of torch to the bit: tried out before use, and left to torch where they
differ.

The kernel of `aten::uniform_` for the CPU is replaced, below everything that looks at what torch does (autograd, compilers,
modes, profilers); torch.library.get_kernel describes the way. Few numbers, other formats and scripts with threads of their
own, which might draw from the same generator, are left to torch's kernel.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from typing import Any

import torch

from ftrun import native

_AT_LEAST = 16_384  # numbers; fewer take torch less than the looks around and at the generator take here
_MOST = torch.finfo(torch.float32).max
_RANGES = ((0.0, 1.0), (-0.3, 0.3), (-1 / 3, 1 / 7), (1e-9, 1e9), (1.0, 1.0000004))  # the last one has 4 numbers
_LENGTHS = (1, 3, 624, 1250)  # within a block of the generator's 624 words, and over its end


def try_out() -> None:
    """Compare with torch now; the answer is kept, also by processes that are forked later."""
    _rounding()


def take_over() -> bool:
    """From now on the fast kernel is used, until `hand_back`. False, and no effect, where it would not be exact."""
    if _Kernel.current is None and _rounding() is not None:
        _Kernel.current = _Kernel()
    return _Kernel.current is not None


def hand_back() -> None:
    """The kernel is torch's again, unless the script has put another one there."""
    kernel, _Kernel.current = _Kernel.current, None
    if kernel is not None:
        kernel.library._destroy()


class _Kernel:
    current: _Kernel | None = None

    def __init__(self) -> None:
        self._stock: Any = torch.library.get_kernel("aten::uniform_", "CPU")
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that a kernel is replaced
            self.library.impl("uniform_", torch.compiler.disable(self._uniform), "CPU", with_keyset=True)
        getattr(torch.library, "_impls", set()).discard("aten/uniform_/CPU")  # or torch 2.11 refuses the script's own

    def _uniform(
        self, keys: Any, tensor: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
    ) -> torch.Tensor:
        source = torch.default_generator if generator is None else generator
        if (
            _is_ordinary(tensor)
            and _is_range(low, high)
            and _is_ours_alone(source)
            and _draw(tensor, low, high, source)
        ):
            return tensor
        self._stock.call_boxed(keys, tensor, low, high, generator=generator)
        return tensor


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return (
        tensor.numel() >= _AT_LEAST
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.is_contiguous()
    )


def _is_range(low: float, high: float) -> bool:
    return -_MOST <= low <= high <= _MOST and high - low <= _MOST


def _is_ours_alone(generator: Any) -> bool:
    if type(generator) is not torch.Generator or generator.device.type != "cpu":
        return False
    return all(t is threading.main_thread() or t.name.startswith("ftrun-") for t in threading.enumerate())


def _draw(tensor: torch.Tensor, low: float, high: float, generator: torch.Generator) -> bool:
    """Again when the generator moves meanwhile: a signal's handler may draw, too. False if it is in an unlikely state."""
    drawn = False
    while not drawn:
        before, after = generator.get_state(), generator.get_state()
        try:
            native.uniform(after.data_ptr(), tensor.data_ptr(), tensor.numel(), low, high, _rounding() == "fused")
        except OSError:
            return False
        finally:  # a handler may raise, too
            drawn = _bytes(before) == _bytes(generator.get_state())
            if drawn:
                generator.set_state(after)
    return True


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


@functools.cache
def _rounding() -> str | None:
    """How torch rounds here, which its build and the processor decide; None when neither way gives what torch draws."""
    if not hasattr(torch.library, "get_kernel"):
        return None
    return next((how for how in ("fused", "each") if _agrees(how == "fused")), None)


def _agrees(fused: bool) -> bool:
    theirs, ours = torch.Generator("cpu").manual_seed(7), torch.Generator("cpu").manual_seed(7)
    for low, high in _RANGES:
        for length in _LENGTHS:
            wanted, found = (torch.empty(length, dtype=torch.float32, device="cpu") for _ in range(2))
            wanted.uniform_(low, high, generator=theirs)
            state = ours.get_state()
            try:
                native.uniform(state.data_ptr(), found.data_ptr(), length, low, high, fused)
            except OSError:  # another torch, or a processor that cannot
                return False
            ours.set_state(state)
            if not torch.equal(wanted, found) or not torch.equal(theirs.get_state(), state):
                return False
    return True
