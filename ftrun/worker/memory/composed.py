"""Composed tensors, such as 8-bit optimizer state: ftrun keeps their parts and composes them again.

Source: the protocol of wrapper subclasses in torch/utils/_python_dispatch.py (`__tensor_flatten__`, `__tensor_unflatten__`).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ftrun.core.errors import UsageError

_DTYPE = "dtype "


def is_plain(tensor: torch.Tensor) -> bool:
    """Are its values in its own memory?"""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a tensor is composed of, by name; a plain tensor is its own part, named ""."""
    if is_plain(tensor):
        return {"": tensor}
    whole: Any = tensor
    return {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}


def recipe_of(tensor: torch.Tensor, what: str) -> list[Any] | None:
    """Return the recipe by which `made` composes the tensor from its parts, for the manifest; None for a plain tensor.

    Raises:
        UsageError: If ftrun cannot keep this kind of tensor.
    """
    if is_plain(tensor):
        return None
    whole: Any = tensor
    kind = type(tensor)
    words = f"{what} is a {kind.__module__}.{kind.__qualname__}, a kind of tensor that ftrun cannot keep"
    if not hasattr(kind, "__tensor_flatten__"):
        raise UsageError(f"{words}: it does not say what it is made of (__tensor_flatten__)")
    names, context = whole.__tensor_flatten__()
    if not all(is_plain(getattr(whole, name)) for name in names):
        raise UsageError(f"{words}: it is made of tensors that are made of others")
    if "<locals>" in kind.__qualname__:
        raise UsageError(f"{words}: its class is inside a function, where a replacement cannot find it")
    return [kind.__module__, kind.__qualname__, _packed(context, words), list(tensor.shape), list(tensor.stride())]


def made(parts: dict[str, torch.Tensor], recipe: list[Any] | None) -> torch.Tensor:
    """Compose a tensor over `parts` by the recipe of `recipe_of`; without a recipe return the only part.

    Raises:
        UsageError: If its class copies the parts instead of using their memory.
    """
    if recipe is None:
        return parts[""]
    module, name, context, shape, stride = recipe
    kind: Any = importlib.import_module(module)
    for word in name.split("."):
        kind = getattr(kind, word)
    whole: torch.Tensor = kind.__tensor_unflatten__(parts, _unpacked(context), torch.Size(shape), tuple(stride))
    if any(one.data_ptr() != parts[part].data_ptr() for part, one in parts_of(whole).items()):
        raise UsageError(f"{module}.{name} copies what it is made of, so ftrun cannot keep it in memory that outlives the worker")
    return whole


def _packed(value: Any, words: str) -> Any:
    """Return the value in a form that JSON can hold."""
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        inner = [_packed(one, words) for one in value]
        return inner if isinstance(value, list) else {"tuple": inner}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(f"{words}: it holds a {type(value).__qualname__}")


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(one) for one in value]
    if isinstance(value, dict):
        return tuple(map(_unpacked, value["tuple"])) if "tuple" in value else getattr(torch, value[_DTYPE])
    return value
