"""SGD whose momentum is kept in 8 bits: a tensor that is made of two others, as the optimizers of quantization libraries have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_VIEWS = ("aten::detach", "aten::alias", "aten::view", "aten::_to_copy", "aten::clone")


class Packed(Tensor):
    """Values of one tensor as int8 `codes` times one float32 `scale`."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["codes", "scale"], (self.dtype,)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Packed:
        assert isinstance(context, tuple)
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call._schema.name not in _VIEWS:
            raise NotImplementedError(call)
        one = args[0]
        return cls(one.codes, one.scale, one.dtype)

    def values(self) -> Tensor:  # type: ignore[override]
        return self.codes.to(self.dtype) * self.scale

    def put(self, values: Tensor) -> None:
        if values.numel():
            self.scale.copy_(values.abs().max() / 127 + 1e-12)
        self.codes.copy_((values / self.scale).round())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts_of(tensor: Tensor) -> list[Tensor]:
    return [tensor.codes, tensor.scale] if isinstance(tensor, Packed) else [tensor]


class PackedSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, mine = self.state[param], local(param)
                if "momentum" not in state:
                    packed: Any = Packed(torch.zeros_like(mine, dtype=torch.int8), torch.ones(1), mine.dtype)
                    if isinstance(param, DTensor):
                        shape = {"shape": param.shape, "stride": param.stride()}
                        packed = DTensor.from_local(packed, param.device_mesh, param.placements, run_check=False, **shape)
                    state["momentum"] = packed
                momentum: Any = local(state["momentum"])
                new = 0.9 * momentum.values() + local(param.grad)
                momentum.put(new)
                mine.sub_(group["lr"] * new)
