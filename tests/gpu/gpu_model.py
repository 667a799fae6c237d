"""Lets a training script put its model on the fake GPU of tests/native/fake_cuda, with torch that has no CUDA.

Tensors are made over memory that the driver allocated, which the CPU can read, so torch's kernels run on them; the optimizer
queues its update on the device's stream, where it takes as long as the control file's `rate` says and stops with the process.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref

import torch

_driver = ctypes.CDLL("libcuda.so.1")
_driver.cuInit(0)


class Gpu:
    """One fake device, its context current in this thread. `gives_back`: the memory of tensors that are gone."""

    def __init__(self, ordinal: int, gives_back: bool = False) -> None:
        self.ordinal = ordinal
        self._gives_back = gives_back
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxPushCurrent", context)

    def _call(self, name: str, *args: object) -> None:
        result = getattr(_driver, name)(*args)
        if result:
            raise RuntimeError(f"{name}: CUDA error {result}")

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in device memory."""
        size = max(tensor.numel() * tensor.element_size(), 1)
        address = ctypes.c_uint64()
        self._call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        memory = (ctypes.c_ubyte * size).from_address(address.value)
        if self._gives_back:
            weakref.finalize(memory, self._call, "cuMemFree", address)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: tensor.numel() * tensor.element_size()]
        made = flat.view(tensor.dtype).view(tensor.shape)
        made.copy_(tensor)
        return made

    def take(self, module: torch.nn.Module) -> torch.nn.Module:
        """module.to(device)."""
        for param in module.parameters():
            param.data = self.like(param.data)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = self.like(buffer)
        return module

    def order(self, module: torch.nn.Module) -> None:
        """What a stream does by itself: torch's kernels of a forward run after the work that was queued before."""
        module.register_forward_pre_hook(lambda *_: self.synchronize())

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a kernel on the device's legacy stream that writes `source`, the result of a computation, to `to`."""
        size = ctypes.c_size_t(source.numel() * source.element_size())
        to_, from_ = ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(source.data_ptr())
        self._call("fake_update", to_, from_, size, ctypes.c_void_p(0))

    def synchronize(self) -> None:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuEventRecord", event, ctypes.c_void_p(0))
        while (result := _driver.cuEventQuery(event)) == 600:
            os.sched_yield()
        _driver.cuEventDestroy(event)
        if result:
            raise RuntimeError(f"the device failed: CUDA error {result}")

    def stream(self) -> int:
        """Another stream."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), 1)
        return int(made.value or 0)

    def endless(self) -> None:
        """On a stream of its own, a kernel that waits for a peer: it ends when the control file says `release 1`."""
        self._call("fake_endless", ctypes.c_void_p(self.stream()))

    def writes(self, tensor: torch.Tensor, seconds: float) -> None:
        """On a stream of its own, a kernel that writes rubbish into a tensor for some seconds, whatever the process does."""
        size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
        to, stream = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_void_p(self.stream())
        self._call("fake_writes", to, size, ctypes.c_double(seconds), stream)
        while not tensor.any():  # so that whoever is killed next dies in the middle of it
            time.sleep(0.001)

    def fail(self) -> None:
        """A kernel read a wild address: every later call on the device fails in this process."""
        _driver.fake_illegal_address(self.ordinal)


class QueuedSGD(torch.optim.Optimizer):
    """SGD with momentum (in device memory) and a step count (in host memory); step() returns before the update is done."""

    def __init__(self, params: object, gpu: Gpu, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._gpu = gpu
        self._in_flight: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        self._gpu.synchronize()  # the new values are computed here, so the old ones must be there
        self._in_flight.clear()
        made = False
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    made = True
                    state["momentum"] = self._gpu.like(torch.zeros_like(param))
                    state["step"] = torch.zeros(())
                state["step"] += 1
                momentum = state["momentum"] * group["momentum"] + param.grad
                value = param - group["lr"] / (1 + 0.01 * state["step"]) * momentum
                self._gpu.copy(state["momentum"], momentum)
                self._gpu.copy(param.data, value)
                self._in_flight += [momentum, value]
        if made:
            self._gpu.synchronize()  # ftrun moves new state with torch's kernels, which a stream would keep in order
