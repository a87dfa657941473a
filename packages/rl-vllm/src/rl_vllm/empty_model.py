"""The engine's model without weights and without an engine, to find out what it would load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch
from vllm import AsyncEngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

# importing it corrects vLLM's models as in the engine's processes
import rl_vllm.engine_worker  # noqa: F401
from rl_core.weights import Manifest
from rl_vllm.weights.load_plan import LoadPlan, plan_load


def plan_without_weights(arguments: AsyncEngineArgs, manifest: Manifest) -> LoadPlan:
    """Plan the load of a manifest into the model that an engine of one rank would serve.

    Args:
        arguments: Arguments of the engine.
        manifest: Tensors to load.
    """
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), _one_rank():
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
        return plan_load(model, manifest)


@contextmanager
def _one_rank() -> Iterator[None]:
    """Give layers the process groups that they ask for when they are built."""
    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        init_distributed_environment(1, 0, local_rank=0, backend="gloo", distributed_init_method=meeting)
        ensure_model_parallel_initialized(1, 1, backend="gloo")
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
