"""Megatron's buffers that reduce gradients and share parameters over the data-parallel ranks."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from rl_megatron.model import ReadingModel


def wrap_chunks(model: ReadingModel) -> list[DistributedDataParallel]:
    """Each chunk with a gradient buffer; its parameters move into a buffer too, and keep their identity.

    Gradients are summed in float32 and scattered: each rank of the data- and context-parallel group is left with the
    whole of its share.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return [
        DistributedDataParallel(model.config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
