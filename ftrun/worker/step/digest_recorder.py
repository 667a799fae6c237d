"""Record digests of what a rank computes, step by step, in a file: the worker's half of `ftrun verify`.

FTRUN_DIGESTS names a folder and switches this on. Every incarnation of a rank writes a
file of its own, so that a line torn by a kill is always the last. `ftrun/verify/digests.py` reads them.

    {"names": [...], "point": "start", "parts": {...}}     names of the values in later lines of that point; `parts`: which part of a
                                                           sharded tensor this rank digests, see state/shard_places.py
    {"point": "start", "loop": 1, "step": 4, "attempt": 0, "values": [...]}

`start`: the state as of the start of a step (a step done again, or begun by a replacement, must find the same), `gate`: the
gradients of a step that passed its gate, `end`: the script's own values at the end of a loop, and `exit`: the state when the script
ends. The recorder does not change the results.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ftrun.core.errors import DeviceError, FtrunError
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.position import Where
from ftrun.worker.link.run_link import Context
from ftrun.worker.link.trees import content, leaves
from ftrun.worker.memory import serialization
from ftrun.worker.memory.composed import parts_of
from ftrun.worker.repair.ledger import Ledger
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.state.shard_places import shard_place
from ftrun.worker.step import value_digest
from ftrun.worker.step.left_out import LeftOut
from ftrun.worker.torch_compat.sharded_private import local_of

Digests = list[tuple[str, int]]  # name, as KIND:WHAT, and 64 bits

_PROGRESS = struct.Struct("<qq")  # steps begun, steps of the loop; one entry a rank


class DigestRecorder(StepObserver):
    """Records the digests of one incarnation of a rank."""

    def __init__(
        self, context: Context, state: ProtectedState, ledger: Ledger, left_out: LeftOut, folder: Path
    ) -> None:
        self._context = context
        self._position = context.position
        self._state = state
        self._ledger = ledger
        self._left_out = left_out
        self._folder = folder
        self._file = -1
        self._names: dict[str, list[str]] = {}
        self._parts: dict[str, Any] = {}  # name of a sharded tensor -> this rank's part
        self._loop = 0
        self._first = 0
        self._length = 0
        self._outputs: dict[str, int] = {}
        self._local: dict[str, int] = {}
        self._step = -1
        self._at_loop_end = False
        for i, module in enumerate(state.modules):
            module.register_forward_hook(self._forward_hook(f"output:model {i}"))
        for name, param, _ in state.params:
            if param.requires_grad:
                param.register_hook(self._gradient_hook(f"local:{_plain(name)}"))
        atexit.register(self._exit)

    # -- points ------------------------------------------------------------------------------------------------------

    def loop_started(self, first: int, length: int) -> None:
        self._loop += 1
        self._first, self._length = first, length

    def handed_out(self, number: int) -> None:
        """Record the state at the start of a step.

        Raises:
            DeviceError: If the file cannot be written.
        """
        step = self._step = self._position.index_of(number)
        self._outputs.clear()
        self._local.clear()
        self._write("start", step, [*self._values(), *self._loader(), *self._live()])
        self._show_progress(step)

    def gate_passed(self, number: int) -> None:
        """Record the model's outputs, this rank's own gradients, and the reduced gradients."""
        grads = [
            self._digested(f"gradient:{_plain(name)}", param.grad)
            for name, param, _ in self._state.params
            if param.grad is not None
        ]
        self._write(
            "gate", self._position.index_of(number), [*self._outputs.items(), *sorted(self._local.items()), *grads]
        )

    def loop_ending(self, number: int) -> None:
        self._at_loop_end = True

    def arrived(self, number: int) -> None:
        """Record the script's variables at a loop's last gate, for which `Variables` captured all of them."""
        if self._at_loop_end and self._position.where is Where.LOOP:  # false if a stop came before the loop's end
            self._at_loop_end = False
            self._write("end", self._position.index_of(number), list(self._variables()))

    def _exit(self) -> None:
        """Record the state when the script ends."""
        if self._file >= 0 and self._context.is_main_process():
            self._write("exit", self._step, list(self._values()))

    # -- what is looked at -------------------------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[str, int]]:
        state = self._state
        state.settle_buffers()
        for name, param, _ in state.params:
            yield self._digested(f"weight:{_plain(name)}", param)
        for name, module, attribute in [*state.buffers, *state.loose.now()]:
            buffer = getattr(module, attribute, None)
            if buffer is not None:
                yield f"buffer:{_plain(name)}", tensor_digest(buffer)
        names = {id(param): _plain(name) for name, param, _ in state.params}
        for i, optimizer in enumerate(state.optimizers):
            mine = f" of optimizer {i}" if len(state.optimizers) > 1 else ""
            for group in optimizer.param_groups:
                for param in group["params"]:
                    for key, value in sorted(optimizer.state.get(param, {}).items(), key=lambda item: str(item[0])):
                        if isinstance(value, torch.Tensor):
                            yield self._digested(
                                f"optimizer:{key}{mine}, {names.get(id(param), 'a later parameter')}", value
                            )
        for name, packed in state.python.capture().items():
            yield f"python:{name}", _digest(packed)
        yield from _streams()

    def _loader(self) -> Iterator[tuple[str, int]]:
        loader = self._ledger.loader
        if loader is None:
            return
        yield "position:loader", loader.index
        value = 0
        for leaf in leaves(loader.batch):
            if isinstance(leaf, torch.Tensor):
                value = tensor_digest(leaf, value)
            elif isinstance(leaf, str | bytes | int | float):
                value = _digest(f"{value} {leaf!r}".encode())
        yield "batch:loader", value

    def _live(self) -> Iterator[tuple[str, int]]:
        """Yield digests of values that the script holds and ftrun does not keep."""
        for name, value in self._left_out.look(across=True).items():
            if value is not None:
                yield f"live:{name}", _digest(value if isinstance(value, bytes) else repr(value).encode())

    def _variables(self) -> Iterator[tuple[str, int]]:
        """Yield digests of all variables, kept or not, since the other run may keep them; or the name, if no copy is comparable."""
        names: set[str] = set()
        for place, copy, is_kept in list(self._ledger.variables.values()):
            name = place.shown if place.shown not in names else f"{place.shown} ({place.key})"
            names.add(name)
            found = None if copy is None else value_digest.digest(copy)
            if found is not None:
                yield f"{'value' if is_kept else 'other'}:{name}", found
            elif is_kept:
                yield f"uncompared:{name}", 0

    def _digested(self, name: str, tensor: torch.Tensor, seed: int = 0) -> tuple[str, int]:
        """Return a name with the digest of this rank's part of a tensor, and remember which part that is."""
        if name not in self._parts:
            self._parts[name] = shard_place(tensor)
        return name, tensor_digest(tensor, seed)

    def _computing(self) -> bool:
        return self._position.where is Where.BODY

    def _forward_hook(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self._computing():
                for leaf in leaves(output):
                    if isinstance(leaf, torch.Tensor):
                        self._outputs[name] = tensor_digest(leaf, self._outputs.get(name, 0))

        return hook

    def _gradient_hook(self, name: str) -> Any:
        def hook(grad: torch.Tensor) -> None:
            if self._computing():
                _, self._local[name] = self._digested(name, grad, self._local.get(name, 0))

        return hook

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, point: str, step: int, digests: Digests) -> None:
        names = [name for name, _ in digests]
        lines: list[dict[str, Any]] = []
        if self._names.get(point) != names:
            self._names[point] = names
            parts = {name: part for name in names if (part := self._parts.get(name)) is not None}
            lines.append({"names": names, "point": point, **({"parts": parts} if parts else {})})
        place = {"point": point, "loop": self._loop, "step": step, "attempt": self._position.attempt}
        lines.append({**place, "values": [value for _, value in digests]})
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            if self._file < 0:
                self._file = os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            raise DeviceError(f"cannot record digests in {self._folder}: {error.strerror}; see --log-dir") from None

    def _path(self) -> Path:
        cell = self._context.cell
        return self._folder / f"rank-{cell.rank}-{cell.index}.jsonl"

    def _show_progress(self, step: int) -> None:
        """Write the progress for a progress bar; nothing else reads it."""
        try:
            file = os.open(self._folder / "progress", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        with os.fdopen(file, "wb", buffering=0) as opened:
            os.pwrite(
                opened.fileno(),
                _PROGRESS.pack(step - self._first, self._length),
                self._context.rank * _PROGRESS.size,
            )


def tensor_digest(tensor: torch.Tensor, seed: int = 0) -> int:
    """Return 64 bits that digest a tensor's bytes, on any device; `seed` chains several."""
    try:
        for part in parts_of(local_of(tensor.detach())).values():
            value = content(part, seed)
            assert value is not None
            seed = value
        return seed
    except (NotImplementedError, RuntimeError) as error:
        raise FtrunError(f"ftrun verify cannot read a {type(tensor).__name__} on {tensor.device}: {error}") from error


def _streams() -> Iterator[tuple[str, int]]:
    """Yield digests of every random stream, read by other means than recovery uses, so that they check it."""
    yield "random:python", _digest(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "random:numpy", _digest(serialization.pack(list(numpy.random.get_state()), "numpy"))
    yield "random:torch", tensor_digest(torch.get_rng_state())
    if torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            yield f"random:cuda {i}", tensor_digest(torch.cuda.get_rng_state(i))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _plain(name: str) -> str:
    """Return the script's own name for `param.0.module.first.weight`."""
    kind, _, rest = name.partition(".")
    owner, _, path = rest.partition(".")
    if kind == "buffer":
        path = path.replace("..", ".").lstrip(".")
    path = path.removeprefix("module.")
    return path if owner == "0" else f"{path} ({owner})"
