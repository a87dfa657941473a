"""Work inside a rank of a pool while its model is saved and restored."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.selfcheck.pooled_model import HELD
from rl_core.selfcheck.rank_pool import Rank

FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "empty_like",
    "zeros_like",
    "_to_copy",
    "clone",
    "new_empty",
    "new_zeros",
)


class Created(TorchDispatchMode):
    """Counts the bytes of floating tensors that are made, by allocation or as copies."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        # plans of what to read travel as bytes, and tensors on meta have none
        counts = isinstance(made, Tensor) and made.is_floating_point() and not made.is_meta
        if counts and function.overloadpacket.__name__ in FACTORIES:
            self.num_bytes += made.nbytes
        return made


def load_counted(rank: Rank, path: str) -> tuple[int, int, int]:
    """Load, and say how many bytes of tensors that made, how many the optimizer's state has, and the parameters."""
    worker = rank.held[HELD]
    with Created() as created:
        worker.load(path)
    state = sum(tensor.nbytes for tensor in worker._optimizer.state_tensors())
    return created.num_bytes, state, sum(parameter.nbytes for parameter in worker._model.reading.parameters())


class History(nn.Module):
    """Keeps what Transformer Engine's layers keep under FP8: numbers that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.zeros(4)

    def get_extra_state(self) -> Tensor:
        return self.numbers

    def set_extra_state(self, state: Tensor) -> None:
        self.numbers = state


def add_history(rank: Rank) -> None:
    """Give the first layers a history."""
    rank.held[HELD]._model.reading.chunks[0].add_module("history", History())


def history(rank: Rank, value: float | None = None) -> list[float]:
    """The history, set to a value where one is given."""
    module = rank.held[HELD]._model.reading.chunks[0].history
    if value is not None:
        module.numbers = torch.full((4,), value + rank.rendezvous.rank)
    return list(module.numbers.tolist())
