"""Work inside a rank of a pool: steps whose collectives are counted, and steps that fail."""

from collections import Counter

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS, Loss
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import HELD
from rl_core.selfcheck.rank_pool import Rank
from rl_core.selfcheck.torch.losses import token_loss
from rl_dtensor.parallel import fsdp

SMALL = 200
"""Elements up to which an all-reduce is one of counts or norms."""

KINDS = {
    torch.ops.c10d._allgather_base_.default: "gathers",
    torch.ops.c10d._reduce_scatter_base_.default: "scatters",
    torch.ops.c10d.allreduce_.default: "all-reduces",
}


class Collectives(TorchDispatchMode):
    """Counts collectives of parameters and gradients, and the elements that a rank puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = KINDS.get(func)
        if kind is not None:
            put_in = args[0][0] if kind == "all-reduces" else args[1]
            if kind != "all-reduces" or put_in.numel() > SMALL:
                self.found[kind] += 1
                self.found[f"elements of {kind}"] += put_in.numel()
        return func(*args, **(kwargs or {}))


def counted_step(rank: Rank, batch: Batch, loss: Loss) -> Counter:
    """A step of the worker that this process holds, and what it sent."""
    with Collectives() as collectives:
        rank.held[HELD].train_step(batch, loss)
    return collectives.found


def gathers_of_reads(rank: Rank, batch: Batch) -> int:
    """Number of gathers of a pass that reads logprobs."""
    with Collectives() as collectives:
        rank.held[HELD].infer(batch, [LOGPROBS])
    return collectives.found["gathers"]


def gathered_bytes(rank: Rank) -> int:
    """Bytes of gathered parameters that are in memory."""
    units = [
        module
        for chunk in rank.held[HELD]._model.sharded.chunks
        for module in chunk.modules()
        if isinstance(module, FSDPModule)
    ]
    groups = {id(group): group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups}
    parameters = [parameter for group in groups.values() for parameter in group.fsdp_params]
    return sum(out.untyped_storage().nbytes() for each in parameters for out in each.all_gather_outputs)


def limit_units(rank: Rank, num_bytes: int) -> int:
    """Limit the size of units of several layers in this process; the limit before."""
    before, fsdp.UNIT_BYTES = fsdp.UNIT_BYTES, num_bytes
    return before


class FailingLoss(TokenLoss):
    """Fails at the second microbatch of a pass."""

    implementation = "accumulation_cases:fail_at_second"


calls = 0


def fail_at_second(loss, reads, rows):
    global calls
    calls += 1
    if calls == 2:
        calls = 0
        raise ValueError("the second microbatch")
    return token_loss(loss, reads, rows)


def fail(rank: Rank, batch: Batch) -> str:
    """Make a step that fails; its error."""
    try:
        rank.held[HELD].train_step(batch, FailingLoss())
    except ValueError as error:
        return str(error)
    raise AssertionError("the step did not fail")


def placements(rank: Rank, part: str) -> dict[str, tuple[str, int]]:
    """Placements and number of elements of this rank's part of the weights whose names have a part."""
    sharded = rank.held[HELD]._model.sharded
    return {
        name: (str(tensor.placements), tensor.to_local().numel())
        for name, tensor in sharded.weights.held.items()
        if part in name
    }
