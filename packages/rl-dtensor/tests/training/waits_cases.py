"""Steps inside a rank of a pool in which reads of tensors by the host are counted."""

import traceback
from collections import Counter

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS, Loss
from rl_core.selfcheck.pooled_model import HELD
from rl_core.selfcheck.rank_pool import Rank

_aten = torch.ops.aten
OPERATIONS = (_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default)
BY_MASK = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
METHODS = (Tensor.tolist, Tensor.cpu)


def place() -> str:
    """The innermost line of this repository on the stack."""
    frames = [frame for frame in traceback.extract_stack() if "/src/rl_" in frame.filename]
    return f"{frames[-1].filename.rpartition('/src/')[2]}:{frames[-1].lineno}"


class Operations(TorchDispatchMode):
    """Counts operations whose result, or the size of it, the host needs."""

    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_mask = func in BY_MASK and any(index is not None and index.dtype == torch.bool for index in args[1])
        is_unsized = func is _aten.repeat_interleave.Tensor and not (kwargs or {}).get("output_size")
        if func in OPERATIONS or is_mask or is_unsized:
            self.found[f"{func} {place()}"] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Counts methods that copy values to the host."""

    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS:
            self.found[f"{func.__name__} {place()}"] += 1
        return func(*args, **(kwargs or {}))


def waits(rank: Rank, batch: Batch, loss: Loss | None) -> Counter:
    """Reads by the host in a step of the worker that this process holds, or in a pass that reads logprobs."""
    found: Counter = Counter()
    worker = rank.held[HELD]
    with Operations(found), Methods(found):
        if loss is None:
            worker.infer(batch, [LOGPROBS])
        else:
            worker.train_step(batch, loss)
    return found
