"""Counts the costs of everything that is computed under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ledger.collectives import collective_of
from ledger.costs import Collective, Costs, Traffic
from ledger.memory import LiveBytes
from ledger.operations import NOTHING, costs_of, tensors_in
from ledger.programs import is_own, run_on_gpus
from ledger.waits import TO_DEVICE, crosses, waits_of

WHOLE = "Global"
"""Name of the total: the costs of all modules and of the code outside of any."""

NO_WAITS: Mapping[str, int] = {}


class CostCounter(TorchDispatchMode):
    """Counts kernels, memory traffic, waits of the host, collectives and memory of a computation, whether its tensors
    have data or not.

    The usage loop::

        with CostCounter("meta") as counter:
            model(tokens).sum().backward()
        counter.costs.other.bytes

    Operations of autograd functions and those that the backward pass runs count as well. An operator of this project is
    counted by what its code on GPUs does (`ledger.programs`). Costs of an operator from elsewhere must be registered
    (`ledger.operations.register_cost`).

    Args:
        device: Type of the device whose costs are counted: `meta`, or `cpu` for fake tensors on it. Work of other
            devices is the host's and costs nothing here.
        by_module: True to count by module too.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str = "meta", *, by_module: bool = False) -> None:
        super().__init__()
        self._device = device
        self._memory = LiveBytes()
        self._tallies: dict[str, _Tally] = {WHOLE: _Tally()}
        self._modules = ModTracker() if by_module else None
        self._entered = ExitStack()
        self._describes = False

    @property
    def costs(self) -> Costs:
        """All costs so far."""
        return self._tallies[WHOLE].costs(self._memory.peak)

    @property
    def live_bytes(self) -> int:
        """Memory of the tensors that were made so far and are still there."""
        return self._memory.now

    @property
    def modules(self) -> Mapping[str, Costs]:
        """Costs so far of each module by its name, including the modules in it and without memory. The name of
        the outermost module is the name of its class."""
        return {name: tally.costs(0) for name, tally in self._tallies.items() if name != WHOLE}

    def __enter__(self) -> CostCounter:
        if self._modules is not None:
            self._entered.enter_context(self._modules)
        describe = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
            self._describes = True
            try:
                return describe(propagator, schema)
            finally:
                self._describes = False

        # The first call of an operation on DTensors also runs on whole tensors without data, to describe the result.
        self._entered.enter_context(patch.object(ShardingPropagator, describe.__name__, unseen))
        if self._device == "meta":
            self._entered.enter_context(_FromLists(self._tallies[WHOLE]))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they compute on their parts, which comes back here
        kwargs = kwargs or {}
        if self._describes:
            return function(*args, **kwargs)
        if is_own(function):
            self._add(Costs(operators=1))
            with _entered_again(self):
                return run_on_gpus(function, args, kwargs, self._add)
        out = function(*args, **kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(out)
        if any(self._is_here(tensor) for tensor in (*given, *made)):
            self._count(function, args, kwargs, out)
            self._memory.add(filter(self._is_here, made), given)
        return out

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device

    def _count(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        moved = collective_of(function, args, out)
        waits = waits_of(function, args, kwargs, out, self._device)
        is_work = moved is None and not crosses(function, args, out)
        costs = costs_of(function, args, kwargs, out) if is_work else NOTHING
        if costs is NOTHING and not waits and moved is None:
            return
        self._add(costs, waits, moved)

    def _add(
        self, costs: Costs, waits: Mapping[str, int] = NO_WAITS, moved: tuple[Collective, Traffic] | None = None
    ) -> None:
        for name in {WHOLE} if self._modules is None else self._modules.parents:
            self._tallies.setdefault(name, _Tally()).add(costs, waits, moved)


@contextmanager
def _entered_again(mode: TorchDispatchMode) -> Iterator[None]:
    """Have a mode see the operations that it runs itself."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


class _Tally:
    """Sums of costs."""

    def __init__(self) -> None:
        self._work = Costs()
        self._waits: Counter[str] = Counter()
        self._collectives: dict[Collective, Traffic] = {}

    def add(self, costs: Costs, waits: Mapping[str, int], moved: tuple[Collective, Traffic] | None) -> None:
        self._work = self._work + costs
        self._waits.update(waits)
        if moved is not None:
            kind, traffic = moved
            self._collectives[kind] = self._collectives.get(kind, Traffic()) + traffic

    def costs(self, peak_bytes: int) -> Costs:
        work = self._work
        return replace(work, waits=dict(self._waits), collectives=dict(self._collectives), peak_bytes=peak_bytes)


class _FromLists(TorchFunctionMode):
    """Counts tensors on `meta` that are made of Python numbers, which torch makes there without a copy."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            data = args[0] if args else kwargs["data"]
            if torch.device(kwargs["device"]).type == "meta" and not isinstance(data, (Tensor, np.ndarray)):
                self._tally.add(NOTHING, {TO_DEVICE: 1}, None)
        return function(*args, **kwargs)
