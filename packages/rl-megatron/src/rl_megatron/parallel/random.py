"""Random generators of a rank: torch's, and those that Megatron keeps for regions of the model."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel


def seed_all(seed: int) -> None:
    """Seed all generators: ranks that hold parts of one model on one shard's rows agree if they must."""
    place = 100 * parallel_state.get_pipeline_model_parallel_rank()
    place += 10_000 * parallel_state.get_data_parallel_rank()
    torch.manual_seed(seed + place)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + place, force_reset_rng=True)
