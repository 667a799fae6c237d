"""Tell which ranks hold the same parts of the state: proved by DDP or by a placement, or declared by the script.

A declaration is no proof, so `step/replica_check.py` checks it. Once ranks that should hold the same differ, declarations do not count
any more, nor do placements, which a script may claim as well. Then no rank gets another rank's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from ftrun.worker.memory.arena import Entry, Manifest
from ftrun.worker.state import shards
from ftrun.worker.state.python_state import params_of
from ftrun.worker.torch_compat.torch_private import params_of_reducer

Param = tuple[str, torch.nn.Parameter, bool]  # name, parameter, and does DDP leave it alone?
_NOBODY: frozenset[int] = frozenset()


class Holders:
    """The holders of one rank's parameters, and of the optimizer state for them. Ranks are global."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        params: list[Param],
        declared: tuple[int, ...],
    ) -> None:
        self.differ: Callable[[], bool] = lambda: False  # did a check find that ranks that should hold the same differ?
        self._modules = modules
        self._optimizers = optimizers
        self._params = params
        self._declared = frozenset(declared)
        wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._exchanged = {id(p) for module in wrapped for p in params_of_reducer(module)[0]}
        self.by_word = len(self._declared) > 1 and any(self._of_ddp(name) is None for name, _, _ in params)

    @property
    def rest_on_word(self) -> bool:
        """Does some of what replicas hold rest on the script's declaration alone?"""
        return self.by_word and not self.differ()

    def _of_ddp(self, name: str) -> DistributedDataParallel | None:
        module = self._modules[int(name.split(".")[1])] if not name.startswith("param.optimizer") else None
        return module if isinstance(module, DistributedDataParallel) else None

    def _of(self, name: str, param: torch.nn.Parameter, private: bool, proved: bool = False) -> frozenset[int]:
        """Return the ranks that hold the same values of a parameter, this one included; none if no other is known to.

        `proved`: leave out what the script only declared.
        """
        if private:
            return _NOBODY
        ddp = self._of_ddp(name)
        if ddp is None:
            return _NOBODY if self.differ() else (_NOBODY if proved else self._declared) | shards.holders(param)
        if param.requires_grad and id(param) not in self._exchanged:
            return _NOBODY  # it was frozen when DDP was made, so its gradients are not exchanged
        return frozenset(ddp.process_group.ranks)

    def of_everything(self) -> frozenset[int]:
        """Return the ranks that hold everything that this one does, itself included.

        The set is empty if no other rank is known to hold some parameter.
        """
        return frozenset.intersection(*(self._of(*param) for param in self._params))

    def comparable(self) -> frozenset[int]:
        """Return the ranks that hold every parameter that this rank shares with any other."""
        held = [ranks for param in self._params if len(ranks := self._of(*param)) > 1]
        return frozenset.intersection(*held) if held else _NOBODY

    def alone(self) -> str:
        """Return the name of a parameter that no other rank is known to hold; "" if there is none."""
        names = (param[0] for param in self._params if len(self._of(*param)) < 2)
        return next(names, "").split(".", 2)[-1]

    def modules_alone(self) -> list[int]:
        """Return the numbers of the models with an unsharded parameter that no other rank is known to hold."""
        names = [param[0] for param in self._params if len(self._of(*param)) < 2 and not shards.is_spread(param[1])]
        return sorted({int(name.split(".")[1]) for name in names if not name.startswith("param.optimizer")})

    def entries(self, manifest: Manifest, ranks: frozenset[int], proved: bool = False) -> Iterator[Entry]:
        """Yield the entries of the parameters, with their optimizer state, that all of `ranks` hold bit for bit equal.

        `proved`: leave out what the script only declared.
        """
        names = {id(p[1]): p[0] for p in self._params if ranks <= self._of(*p, proved)}
        wanted = set(names.values())
        for i, optimizer in enumerate(self._optimizers):
            indices = (index for index, p in enumerate(params_of(optimizer)) if id(p) in names)
            wanted.update(f"optim.{i}.{index}" for index in indices)
        for entry in manifest.entries:
            kind, _, rest = entry.name.partition(".")
            name = f"{kind}.{'.'.join(rest.split('.')[:2])}" if kind == "optim" else entry.name
            if entry.zone == "committed" and not entry.private and name in wanted:
                yield entry
