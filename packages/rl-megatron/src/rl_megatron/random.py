"""Random generators of a rank: torch's, and those that Megatron keeps for regions of the model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def seed_all(seed: int) -> None:
    """Seed all generators: ranks that hold parts of one model on one shard's rows agree where they must."""
    place = 100 * parallel_state.get_pipeline_model_parallel_rank()
    place += 10_000 * parallel_state.get_data_parallel_rank()
    torch.manual_seed(seed + place)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + place, force_reset_rng=True)


def random_state() -> dict[str, Any]:
    """The state of all generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "regions": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on from a state of `random_state`."""
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["regions"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
