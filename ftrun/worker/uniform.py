"""Large layers that initialize themselves with uniform numbers on the CPU, made faster: same numbers, less time.

torch draws one number at a time; Linear, convolutional and recurrent layers and attention spend most of their making there,
and a replacement that builds its model does so while everybody waits. What is drawn here in vector instructions, and where
the random stream stands afterwards, are those of torch to the bit: tried out before use, left to torch where they differ.

Until `protect` (or the first compilation) those layers' own initialization runs with another `Tensor.uniform_`; nothing else
ever sees that one. It stands aside for every tensor, generator or mode out of the ordinary, and in a script that has threads
of its own, which might draw from the same generator. Threads of C++ that draw in the same moment are not seen.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import activation, conv, linear, rnn

from ftrun import native
from ftrun.worker import compiled

_LAYERS: list[tuple[type, str]] = [
    (linear.Linear, "reset_parameters"),
    (linear.Bilinear, "reset_parameters"),
    (conv._ConvNd, "reset_parameters"),
    (rnn.RNNBase, "reset_parameters"),
    (rnn.RNNCellBase, "reset_parameters"),
    (activation.MultiheadAttention, "_reset_parameters"),
]
_AT_LEAST = 16_384  # numbers; fewer take torch less than the looks around and at the generator take here
_RANGES = ((0.0, 1.0), (-0.3, 0.3), (-1 / 3, 1 / 7), (1e-9, 1e9), (1.0, 1.0000004))  # the last one has 4 numbers
_LENGTHS = (1, 3, 624, 1250)  # within a block of the generator's 624 words, and over its end

_torchs: Any = torch.Tensor.uniform_
_default = torch.default_generator
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_standing_in: dict[tuple[Any, str], Any] = {}  # for the initialization that it wraps


def try_out() -> None:
    """Compare with torch now; the answer is kept, also by processes that are forked later."""
    _rounding()


def take_over() -> bool:
    """From now on layers initialize themselves fast, until `hand_back`. False, and no effect, where it would not be exact."""
    if _standing_in:
        return True
    if _rounding() is None or not _watches_compilers():
        return False
    for kind, name in _LAYERS:
        if name in kind.__dict__:
            _standing_in[kind, name] = _hastened(kind.__dict__[name])
            setattr(kind, name, _standing_in[kind, name])
    return True


def hand_back() -> None:
    """Layers initialize themselves as torch does, or as the script has changed it."""
    for (kind, name), ours in _standing_in.items():
        if kind.__dict__.get(name) is ours:
            setattr(kind, name, ours.__wrapped__)
    _standing_in.clear()


@functools.cache
def _watches_compilers() -> bool:
    """They look into the methods of layers: the first compilation ends it all."""
    if "torch._dynamo.callback" not in sys.modules:  # its import takes a second; the nursery has made it
        return False
    compiled.watch(hand_back)
    return True


def _hastened(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        # whoever watches is not to see a question of ours either; the last look takes as long as making a small layer
        if (
            not _standing_in
            or "uniform_" in torch.Tensor.__dict__
            or _is_watched()
            or not _is_large(layer)
            or not _is_alone()
        ):
            return original(layer, *args, **kwargs)
        torch.Tensor.uniform_ = _uniform
        try:
            return original(layer, *args, **kwargs)
        finally:
            del torch.Tensor.uniform_

    return initialize


def _is_large(layer: torch.nn.Module) -> bool:
    return any(type(p) in _PLAIN and p.numel() >= _AT_LEAST for p in layer._parameters.values() if p is not None)


def _is_alone() -> bool:
    """No other thread of Python runs than ours, which draw nothing."""
    ours = {t.ident for t in threading.enumerate() if t.name.startswith("ftrun-")}
    return _threads() <= {threading.get_ident(), *ours}


def _threads() -> set[int]:
    return set(sys._current_frames())


def _is_watched() -> bool:
    """Does anything look at, or change, what torch does?"""
    return (
        torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
        or torch.autograd._profiler_enabled()
        or "aten/uniform_/CPU" in torch.library._impls
    )


def _uniform(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # the arguments as torch.nn.init gives them
    if len(args) == 2 and kwargs.keys() <= {"generator"} and all(type(a) in (int, float) for a in args):
        generator = kwargs.get("generator") or _default
        if type(generator) is torch.Generator and generator.device.type == "cpu" and _is_ordinary(tensor):
            _torchs(tensor.view(-1)[:0], *args, **kwargs)  # looks at the arguments, and counts the tensor's versions
            if _draw(tensor, *args, generator):
                return tensor
    return _torchs(tensor, *args, **kwargs)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.numel() >= _AT_LEAST
        and tensor.dtype is torch.float32
        and torch._C._dispatch_keys(tensor) == _ordinary_keys()
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


@functools.cache
def _ordinary_keys() -> Any:
    return torch._C._dispatch_keys(torch.empty(0, dtype=torch.float32, device="cpu"))


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
            drawn = torch.equal(before, generator.get_state())
            if drawn:
                generator.set_state(after)
    return True


@functools.cache
def _rounding() -> str | None:
    """How torch rounds here, which its build and the processor decide; None when neither way gives what torch draws."""
    try:
        _is_watched(), _ordinary_keys()  # not torch's public interface: are they all there?
    except AttributeError:
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
