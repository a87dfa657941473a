"""Megatron's buffers that reduce gradients and share parameters over the data-parallel ranks."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from rl_megatron.config import DistributedDataParallelConfig as ReductionConfig
from rl_megatron.model.model import ReadingModel


def wrap_chunks(model: ReadingModel, reduction: ReductionConfig) -> list[DistributedDataParallel]:
    """Each chunk with a gradient buffer; its parameters move into a buffer too, and keep their identity.

    Gradients are summed and scattered: each rank of the data- and context-parallel group is left with the whole of its
    share.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduction.grad_reduce_in_fp32,
        overlap_grad_reduce=reduction.overlap_grad_reduce,
        use_distributed_optimizer=True,
    )
    chunks = [
        DistributedDataParallel(model.config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    if reduction.overlap_grad_reduce:
        # gradients of all but the last microbatch are only added up
        each = [chunk.no_sync for chunk in chunks]
        model.config.no_sync_func = each if len(each) > 1 else each[0]
    return chunks
