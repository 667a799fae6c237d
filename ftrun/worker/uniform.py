"""`Tensor.uniform_` on the CPU with vector instructions, while a script builds its model: same numbers, an eighth of the time.

torch draws one number at a time; layers that initialize themselves with `uniform_` (Linear, convolutions, recurrent ones)
spend most of their making there, and a replacement that builds its model does so while everybody waits. What is drawn, and
where the random stream stands afterwards, are those of torch to the bit: tried out before use, and left to torch where they
differ. Every tensor, generator or mode out of the ordinary is left to torch, too.

Another thread that draws from the same generator in the same moment may be given the same numbers; torch lets it wait, but
which thread draws what is as uncertain there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ftrun import native

_AT_LEAST = 16_384  # numbers; fewer take torch less than the looks around and at the generator take here
_RANGES = ((0.0, 1.0), (-0.3, 0.3), (-1 / 3, 1 / 7), (1e-9, 1e9), (1.0, 1.0000004))  # the last one has 4 numbers
_LENGTHS = (1, 3, 624, 1250)  # within a block of the generator's 624 words, and over its end

_torchs: Any = torch.Tensor.uniform_


def try_out() -> None:
    """Compare with torch now; the answer is kept, also by processes that are forked later."""
    _rounding()


def take_over() -> None:
    """From now on `Tensor.uniform_` is the fast one, until `hand_back`; no effect where it would not be exact."""
    if _rounding() is not None and torch.Tensor.uniform_ is _torchs:
        torch.Tensor.uniform_ = _uniform


def hand_back() -> None:
    """`Tensor.uniform_` is torch's again, unless the script has put another one there."""
    if torch.Tensor.__dict__.get("uniform_") is _uniform:
        del torch.Tensor.uniform_


def _uniform(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # the arguments as torch.nn.init gives them
    if len(args) == 2 and kwargs.keys() <= {"generator"} and all(type(a) in (int, float) for a in args):
        generator = kwargs.get("generator") or torch.default_generator
        if type(generator) is torch.Generator and generator.device.type == "cpu" and _is_ordinary(tensor):
            _torchs(tensor.view(-1)[:0], *args, **kwargs)  # looks at the arguments, and counts the tensor's versions
            _draw(tensor, *args, generator)
            return tensor
    return _torchs(tensor, *args, **kwargs)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return (
        not _is_watched()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype is torch.float32
        and torch._C._dispatch_keys(tensor) == _ordinary_keys()
        and tensor.is_contiguous()
        and tensor.numel() >= _AT_LEAST
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


@functools.cache
def _ordinary_keys() -> Any:
    return torch._C._dispatch_keys(torch.empty(0, device="cpu"))


def _is_watched() -> bool:
    """Does anything look at, or change, what torch does?"""
    return (
        torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
    )


def _draw(tensor: torch.Tensor, low: float, high: float, generator: torch.Generator) -> None:
    state = generator.get_state()
    native.uniform(state.data_ptr(), tensor.data_ptr(), tensor.numel(), low, high, _rounding() == "fused")
    generator.set_state(state)


@functools.cache
def _rounding() -> str | None:
    """How torch rounds here, which its build and the processor decide; None when neither way gives what torch draws."""
    return next((how for how in ("fused", "each") if _agrees(how == "fused")), None)


def _agrees(fused: bool) -> bool:
    theirs, ours = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    try:
        _is_watched() or _ordinary_keys()  # these are not torch's public interface: are they there?
        for low, high in _RANGES:
            for length in _LENGTHS:
                wanted = torch.empty(length).uniform_(low, high, generator=theirs)
                found, state = torch.empty(length), ours.get_state()
                native.uniform(state.data_ptr(), found.data_ptr(), length, low, high, fused)
                ours.set_state(state)
                if not torch.equal(wanted, found) or not torch.equal(theirs.get_state(), state):
                    return False
    except (AttributeError, OSError):  # another torch, or a processor that cannot
        return False
    return True
